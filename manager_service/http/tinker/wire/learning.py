"""Reads a pass over data that a client sent, checks it, and makes it a `Forward`. A helper process does so if the body is large.

    loss_fn               inputs except target_tokens                                      config
    cross_entropy         weights (without: 1)
    importance_sampling   logprobs, advantages
    ppo, cispo            logprobs, advantages                                             clip_low_threshold, clip_high_threshold
    dro                   logprobs, advantages                                             beta
    gspo                  logprobs, advantages, sequence_ratio_mask; optional are          clip_low_threshold, clip_high_threshold
                          clip_low_threshold and clip_high_threshold
    stable_reinforce      logprobs, advantages; where tokens came from is not read         kl_coeff, from 0

What is wrong with a pass is a value, for its operation fails in its turn: a refusal would leave a hole in the run's numbers.

Axes: N positions of a datum.
"""

from collections.abc import Mapping
from typing import Any, cast, get_args

import msgspec
import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from common.errors import InvalidInput
from common.suggestions import did_you_mean
from common.wire.messages import Array, f32, i32
from common.wire.operations import Datum, Forward, LossFn
from manager_service.http.reading.json_values import decode_body
from manager_service.http.tinker.wire import protobuf
from manager_service.http.tinker.wire import tinker_pb2 as pb

DTYPES = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4"}
MAX_TOKEN = 2**31 - 1
MAX_VALUE = 1e9
"""The largest weight, advantage, log-prob and threshold: sums of their squares stay numbers in float32."""

JSON_TYPE = "application/json"
TOO_OLD = "this client sends data as JSON, which this service does not read: install tinker 0.24.1 or newer"
MAX_DATA, MAX_INPUTS, MAX_PARTS = 4096, 64, 262_144
"""Most data of a pass; inputs of a datum, or settings of a loss; pieces of text and their origins in a pass, as many as positions."""
MAX_FAULT = 1000
"""Characters. What is wrong may be a name that its user made very long."""

RATIO_INPUTS = ("logprobs", "advantages")
CLIPS = ("clip_low_threshold", "clip_high_threshold")
NEEDED: Mapping[LossFn, tuple[str, ...]] = {
    "cross_entropy": (),
    "importance_sampling": RATIO_INPUTS,
    "ppo": RATIO_INPUTS,
    "cispo": RATIO_INPUTS,
    "dro": RATIO_INPUTS,
    "gspo": (*RATIO_INPUTS, "sequence_ratio_mask"),
    "stable_reinforce": RATIO_INPUTS,
}
OPTIONAL: Mapping[str, tuple[str, ...]] = {"cross_entropy": ("weights",), "gspo": CLIPS}
CONFIG: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("ppo", "cispo", "gspo"), CLIPS),
    "dro": ("beta",),
    "stable_reinforce": ("kl_coeff",),
}
NOT_OFFERED = {
    "custom": "a custom loss runs in the client: call forward_backward_custom with a function",
}


class Wrong(Exception):
    """The fault of a pass."""


class CheckedPass(msgspec.Struct, frozen=True):
    """A pass over data that can be sent on; with a `fault`, one that fails when its turn comes."""

    model: str
    seq: int
    forward_only: bool
    payload: bytes = b""  # msgpack of Forward
    num_tokens: int = 0  # positions of all data
    longest: int = 0  # positions of the longest datum
    largest: int = 0  # the largest token id
    stands_in: bool = False  # see `STAND_IN`
    fault: str = ""


class PassNumber(msgspec.Struct):
    """The number of a pass over data that an older client sends as JSON."""

    model_id: str
    seq_id: int = 0


def read_pass(body: bytes, *, content_type: str, encoding: str, max_bytes: int) -> CheckedPass:
    """A pass over data. Raises InvalidInput for a body that cannot be read; what else is wrong is in `fault`."""
    unpacked = unpack(body, encoding, max_bytes=max_bytes)
    kind = content_type.partition(";")[0].strip().lower()
    if kind == JSON_TYPE:
        return _too_old(unpacked)
    if kind != protobuf.CONTENT_TYPE:
        raise InvalidInput(f"Content-Type {kind!r} is not known here: use {protobuf.CONTENT_TYPE}")
    try:
        outline = pb.PassOutline.FromString(unpacked)
        if fault := _too_many(outline):
            return CheckedPass(outline.model_id, outline.seq_id, outline.forward_only, fault=fault)
        return check_pass(pb.ForwardBackwardRequest.FromString(unpacked))
    except DecodeError as error:
        raise InvalidInput(f"the body is no ForwardBackwardRequest: {error}") from error


def _too_many(given: pb.PassOutline) -> str:
    """Says what there is too much of; empty if a pass may become objects."""
    if len(given.data) > MAX_DATA:
        return (
            f"{len(given.data):,} data in one operation are too many: at most {MAX_DATA:,}; send them in several calls"
        )
    if len(given.loss_fn_config) + len(given.loss_fn_config_v2) > MAX_INPUTS:
        return f"loss_fn_config: at most {MAX_INPUTS} values"
    num_parts = 0
    for i, encoded in enumerate(given.data):
        datum = pb.DatumOutline.FromString(encoded)
        if len(datum.loss_fn_inputs) > MAX_INPUTS:
            return f"data[{i}]: {len(datum.loss_fn_inputs):,} loss_fn_inputs are too many: at most {MAX_INPUTS}"
        num_parts += len(datum.model_input) + len(datum.model_input_spans) + len(datum.loss_fn_input_spans)
        if num_parts > MAX_PARTS:
            return f"model_input: more than {MAX_PARTS:,} chunks and spans in one operation; send the data in several calls"
    return ""


def _too_old(body: bytes) -> CheckedPass:
    """Keeps the number, so that the operations behind it do not wait for it."""
    given = decode_body(body, PassNumber)
    return CheckedPass(given.model_id, given.seq_id, forward_only=False, fault=TOO_OLD)


def unpack(body: bytes, encoding: str, *, max_bytes: int) -> bytes:
    """A body without its Content-Encoding. Raises InvalidInput."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise InvalidInput(f"Content-Encoding {encoding!r} is not known here: use zstd or none")
    try:
        announced = zstandard.frame_content_size(body)  # -1: not announced; then max_output_size holds
        if announced > max_bytes:
            raise InvalidInput(f"the body has {announced} bytes unpacked: at most {max_bytes}", code="too_large")
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=max_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidInput(f"the body is no zstd frame of at most {max_bytes} bytes unpacked: {error}") from error


def check_pass(given: pb.ForwardBackwardRequest) -> CheckedPass:
    about: tuple[str, int, bool] = given.model_id, given.seq_id, given.forward_only
    try:
        loss = _loss(given.loss_fn)
        settings = _settings(loss, given)
        if not given.data:
            raise Wrong("there are no data")
        data = tuple(_datum(loss, datum, f"data[{i}]") for i, datum in enumerate(given.data))
    except Wrong as wrong:
        return CheckedPass(*about, fault=str(wrong)[:MAX_FAULT])
    return CheckedPass(
        *about,
        payload=msgspec.msgpack.encode(Forward(data, loss, **settings)),
        num_tokens=sum(len(datum.tokens) for datum in data),
        longest=max(len(datum.tokens) for datum in data),
        largest=max(int(array.numpy().max()) for datum in data for array in (datum.tokens, datum.targets)),
        stands_in=loss == "stable_reinforce",
    )


def _loss(name: str) -> LossFn:
    if name in NOT_OFFERED:
        raise Wrong(f"loss_fn {name!r} is not offered: {NOT_OFFERED[name]}")
    known = get_args(LossFn)
    if name not in known:
        raise Wrong(f"unknown loss_fn {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    return cast(LossFn, name)


def _settings(loss: LossFn, given: pb.ForwardBackwardRequest) -> dict[str, Any]:
    """Fields of Forward. A value that is no number is wrong."""
    config: dict[str, float | str] = dict(given.loss_fn_config)
    if given.loss_fn_config_v2:
        values = given.loss_fn_config_v2.items()
        config = {name: each.text if each.WhichOneof("value") == "text" else each.number for name, each in values}
    known = CONFIG.get(loss, ())
    fields = {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high", "beta": "beta", "kl_coeff": "beta"}
    settings: dict[str, Any] = {}
    for name, value in config.items():
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise Wrong(f"loss_fn_config: {loss} has no {name!r}{did_you_mean(name, known)}; {takes}")
        if isinstance(value, str) or not abs(value) <= MAX_VALUE:
            raise Wrong(f"loss_fn_config: {name} must be a number, not {value!r}")
        if name == "kl_coeff" and value < 0:
            raise Wrong(f"loss_fn_config: kl_coeff must be at least 0, not {value:g}")
        settings[fields[name]] = float(value)
    return settings


def _datum(loss: LossFn, given: pb.Datum, where: str) -> Datum:
    kinds = [str(chunk.WhichOneof("chunk")) for chunk in given.model_input]
    for kind in kinds:
        if kind != "encoded_text":
            raise Wrong(f"{where}: this service takes only text, not chunks of kind {kind!r}")
    chunks = b"".join(chunk.encoded_text.tokens for chunk in given.model_input)
    tokens = _ids(_values(chunks, "<i4", f"{where}: model_input"), f"{where}: model_input")
    inputs = dict(given.loss_fn_inputs)
    if "target_tokens" not in inputs:
        raise Wrong(f"{where}: loss_fn_inputs lacks 'target_tokens'")
    _check_names(loss, inputs, where)
    targets = _ids(
        _flat(inputs.pop("target_tokens"), len(tokens), f"{where}: target_tokens"), f"{where}: target_tokens"
    )
    arrays = {name: _numbers(tensor, len(tokens), f"{where}: {name}") for name, tensor in inputs.items()}
    return Datum(
        tokens=tokens,
        targets=targets,
        weights=arrays.get("weights"),
        logprobs=arrays.get("logprobs"),
        advantages=arrays.get("advantages"),
        mask=arrays.get("sequence_ratio_mask"),
        low=arrays.get("clip_low_threshold"),
        high=arrays.get("clip_high_threshold"),
    )


def _check_names(loss: LossFn, inputs: Mapping[str, Any], where: str) -> None:
    known = ("target_tokens", *NEEDED[loss], *OPTIONAL.get(loss, ()))
    for name in NEEDED[loss]:
        if name not in inputs:
            raise Wrong(f"{where}: loss_fn_inputs lacks {name!r}, which {loss} needs")
    for name in inputs:
        if name not in known:
            raise Wrong(
                f"{where}: {loss} has no input {name!r}{did_you_mean(name, known)}; it takes {', '.join(known)}"
            )


def _flat(tensor: pb.Tensor, length: int, where: str) -> np.ndarray:
    """The values of an array of N positions."""
    if tensor.WhichOneof("encoding") == "sparse_csr" or len(tensor.shape) > 1:
        raise Wrong(f"{where}: only one value a position is offered, not an array of shape {list(tensor.shape[:8])}")
    if tensor.dtype not in DTYPES:
        raise Wrong(f"{where} is of a dtype that is not known: {tensor.dtype}")
    values = _values(tensor.dense, DTYPES[tensor.dtype], where)
    if len(values) != length or (tensor.shape and tensor.shape[0] != length):
        raise Wrong(f"{where} has {len(values)} values, and the model_input {length} tokens: it needs one each")
    return values


def _values(content: bytes, dtype: str, where: str) -> np.ndarray:
    try:
        return np.frombuffer(content, dtype)
    except ValueError as error:
        raise Wrong(f"{where}: {error}") from error


def _ids(values: np.ndarray, where: str) -> Array:
    if not len(values):
        raise Wrong(f"{where} is empty")
    if values.dtype.kind not in "iu":
        raise Wrong(f"{where}: token ids are integers")
    if values.min() < 0 or values.max() > MAX_TOKEN:
        raise Wrong(f"{where}: there is no token {int(values.min() if values.min() < 0 else values.max())}")
    return i32(values)


def _numbers(tensor: pb.Tensor, length: int, where: str) -> Array:
    values = _flat(tensor, length, where)
    if not ((values >= -MAX_VALUE) & (values <= MAX_VALUE)).all():
        raise Wrong(f"{where}: each value must be a number, between -{MAX_VALUE:g} and {MAX_VALUE:g}")
    return f32(values)
