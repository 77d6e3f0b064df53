"""The codec: our bytes are the SDK's, what is wrong with a pass is told, and no body costs more than its limit."""

from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import numpy as np
import pytest
import zstandard
from google.protobuf import descriptor_pb2

from common.errors import InvalidInput
from common.wire.messages import f32, i32
from common.wire.operations import Forward, LossFn, Outputs
from deploy.compile_proto import PROTO, compile_into
from manager_service.http.tinker.wire import learning, protobuf, tinker_pb2
from manager_service.http.tinker.wire import tinker_pb2 as pb
from manager_service.http.tinker.wire.learning import NEEDED, CheckedPass, read_pass
from manager_service.http.tinker.wire.sample_requests import TinkerSample, read_sample
from tests.support.tinker_sdk import run_sdk
from trainer_service.data import RUN_RULES

MAX_BYTES = 1 << 20
OUTPUTS = Outputs((f32([-0.5, -1.5]), f32([-2.0])), {"loss:sum": 3.5, "tokens:sum": 3.0})
SAMPLES = [TinkerSample(i32([1, 2]), f32([-0.5, -1.0]), "stop"), TinkerSample(i32([3]), f32([-0.25]), "length")]


def test_the_committed_code_is_what_the_compiler_makes(tmp_path: Path) -> None:
    compile_into(tmp_path)
    text = (tmp_path / "tinker_pb2.py").read_text()
    again = text[text.index("AddSerializedFile(") :]
    committed = Path(str(tinker_pb2.__file__)).read_text()
    assert again.splitlines()[0] in committed
    assert (tmp_path / "tinker_pb2.pyi").read_text() == PROTO.with_name("tinker_pb2.pyi").read_text()


# ---- the SDK's own bytes --------------------------------------------------------------------------------------------

ENCODE = """
import json
import numpy as np
from tinker import types
from tinker.proto import request_conv, response_conv, tinker_public_pb2 as pb

def tokens(*ids): return types.EncodedTextChunk(tokens=list(ids))
def array(values, dtype): return types.TensorData.from_numpy(np.array(values, dtype))
def request(loss, config, *data):
    asked = types.ForwardBackwardInput(data=list(data), loss_fn=loss, loss_fn_config=config)
    asked = types.ForwardBackwardRequest(forward_backward_input=asked, model_id="ses-0123456789abcdef:train:3", seq_id=7)
    message = request_conv.forward_backward_request_to_proto(asked)
    message.forward_only = loss == "gspo"
    return message.SerializeToString(deterministic=True).hex()
def datum(chunks, **inputs): return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)
target = array([5, 6, 7], np.int64)
floats = {name: array([0.5, -1.0, 2.0], np.float32) for name in ("logprobs", "advantages", "sequence_ratio_mask")}
ratio = {name: floats[name] for name in ("logprobs", "advantages")}
requests = [
    request("cross_entropy", None, datum([tokens(1, 2), tokens(3)], target_tokens=target, weights=array([0, 1, 1], np.float32))),
    request("ppo", {"clip_low_threshold": 0.7}, datum([tokens(1, 2, 3)], target_tokens=target, **ratio)),
    request("gspo", None, datum([tokens(1, 2, 3)], target_tokens=target, **floats)),
    request("dro", {"beta": 0.5}, *[datum([tokens(1, 2, 3)], target_tokens=target, **ratio)] * 2),
]
def read_outputs(data):
    out = response_conv.deserialize_forward_backward_output(bytes.fromhex(data))
    return [[row["logprobs"].tolist() for row in out.loss_fn_outputs], out.metrics]
def read_samples(data):
    out = response_conv.deserialize_sample_response(bytes.fromhex(data))
    return [[s.tokens_np.tolist(), s.logprobs_np.tolist(), s.stop_reason] for s in out.sequences]
def again(kind, data):
    message = kind()
    message.ParseFromString(bytes.fromhex(data))
    message.DiscardUnknownFields()
    return message.SerializeToString(deterministic=True).hex()
outputs, samples = OUTPUTS, SAMPLES
print(json.dumps({"requests": requests, "outputs": read_outputs(outputs), "samples": read_samples(samples),
    "outputs_again": again(pb.ForwardBackwardOutput, outputs), "samples_again": again(pb.SampleResponse, samples)}))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_our_bytes_are_those_of_the_sdk(tmp_path: Path) -> None:
    outputs, samples = protobuf.write_outputs(OUTPUTS).hex(), protobuf.write_samples(SAMPLES).hex()
    told = await run_sdk(ENCODE.replace("OUTPUTS, SAMPLES", f"{outputs!r}, {samples!r}"))
    assert told["outputs"] == [[[-0.5, -1.5], [-2.0]], {"loss:sum": 3.5, "tokens:sum": 3.0}]
    assert told["samples"] == [[[1, 2], [-0.5, -1.0], "stop"], [[3], [-0.25], "length"]]
    assert (told["outputs_again"], told["samples_again"]) == (outputs, samples)
    for request in told["requests"]:
        message = tinker_pb2.ForwardBackwardRequest.FromString(bytes.fromhex(request))
        message.DiscardUnknownFields()
        assert message.SerializeToString(deterministic=True).hex() == request
    read = [checked(bytes.fromhex(request)) for request in told["requests"]]
    assert [(one.model, one.seq, one.fault) for one in read] == [("ses-0123456789abcdef:train:3", 7, "")] * 4
    assert [one.forward_only for one in read] == [False, False, True, False]
    passes = [msgspec.msgpack.decode(one.payload, type=Forward) for one in read]
    assert [p.loss for p in passes] == ["cross_entropy", "ppo", "gspo", "dro"]
    assert (passes[1].clip_low, passes[1].clip_high, passes[3].beta) == (pytest.approx(0.7), None, 0.5)
    first, ratio = passes[0].data[0], passes[2].data[0]
    assert first.tokens.numpy().tolist() == [1, 2, 3] and first.targets.numpy().tolist() == [5, 6, 7]
    assert first.weights is not None and first.weights.numpy().tolist() == [0, 1, 1]
    assert ratio.mask is not None and ratio.mask.numpy().tolist() == [0.5, -1.0, 2.0] and ratio.weights is None


def test_the_numbers_of_our_fields_are_fixed() -> None:
    """The fields in the SDK's descriptor, so that a change is seen where the SDK cannot be installed."""
    file = descriptor_pb2.FileDescriptorProto()
    tinker_pb2.DESCRIPTOR.CopyToProto(file)
    numbers = {message.name: {field.name: field.number for field in message.field} for message in file.message_type}
    assert numbers["ForwardBackwardRequest"] == {
        "model_id": 1,
        "seq_id": 2,
        "data": 3,
        "loss_fn": 4,
        "loss_fn_config": 5,
        "forward_only": 6,
        "loss_fn_config_v2": 7,
    }
    assert numbers["Datum"] == {
        "model_input": 1,
        "loss_fn_inputs": 2,
        "model_input_spans": 3,
        "loss_fn_input_spans": 4,
    }
    assert numbers["BatchedTensor"] == {"data": 1, "offsets": 2, "dtype": 3, "trailing_shape": 4}
    assert numbers["SampledSequence"] == {"stop_reason": 1, "tokens": 2, "logprobs": 3}
    assert (file.package, file.name) == ("marlaas.tinker.wire", "tinker.proto")


# ---- what is wrong --------------------------------------------------------------------------------------------------


def checked(body: bytes, *, content_type: str = protobuf.CONTENT_TYPE, encoding: str = "") -> CheckedPass:
    return read_pass(body, content_type=content_type, encoding=encoding, max_bytes=MAX_BYTES)


def given(loss: str = "cross_entropy", config: Any = None, **inputs: Any) -> bytes:
    """A pass over one datum of three tokens. An input is its values, or a tensor; None leaves it out."""
    message = tinker_pb2.ForwardBackwardRequest(model_id="ses-0:train:0", seq_id=1, loss_fn=loss)
    for name, value in (config or {}).items():
        message.loss_fn_config_v2[name].MergeFrom(
            tinker_pb2.LossConfigValue(text=value)
            if isinstance(value, str)
            else tinker_pb2.LossConfigValue(number=value)
        )
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = i32([1, 2, 3]).data
    for name, values in ({"target_tokens": [5, 6, 7]} | inputs).items():
        if values is not None:
            datum.loss_fn_inputs[name].MergeFrom(
                values if isinstance(values, tinker_pb2.Tensor) else tensor(name, values)
            )
    return message.SerializeToString()


def tensor(name: str, values: Any, *shape: int) -> tinker_pb2.Tensor:
    ids = name == "target_tokens" and all(isinstance(value, int) for value in values)
    dtype = tinker_pb2.DTYPE_INT64 if ids else tinker_pb2.DTYPE_FLOAT32
    return tinker_pb2.Tensor(dense=np.array(values, "<i8" if ids else "<f4").tobytes(), dtype=dtype, shape=shape)


SPARSE = tinker_pb2.Tensor(sparse_csr=tinker_pb2.SparseCsr(), dtype=tinker_pb2.DTYPE_FLOAT32, shape=[3])
RATIO = {"logprobs": [-1.0, -1.0, -1.0], "advantages": [1.0, 1.0, 1.0]}
WRONG: list[tuple[str, Any, dict[str, Any], str]] = [
    ("cross_entrop", None, {}, "unknown loss_fn 'cross_entrop'; did you mean 'cross_entropy'?"),
    ("stable_reinforce", {"kl_coef": 1}, RATIO, "stable_reinforce has no 'kl_coef'; did you mean 'kl_coeff'?"),
    ("stable_reinforce", {"kl_coeff": -1}, RATIO, "kl_coeff must be at least 0"),
    ("custom", None, {}, "runs in the client"),
    ("cross_entropy", None, {"target_tokens": None}, "data[0]: loss_fn_inputs lacks 'target_tokens'"),
    ("cross_entropy", None, {"target_tokens": [5, 6]}, "target_tokens has 2 values, and the model_input 3 tokens"),
    ("cross_entropy", None, {"target_tokens": [5, 6, -1]}, "there is no token -1"),
    ("cross_entropy", None, {"target_tokens": [5, 6, 2**40]}, "there is no token 1099511627776"),
    ("cross_entropy", None, {"target_tokens": [5, 6, 7.5]}, "token ids are integers"),
    ("cross_entropy", {"beta": 1}, {}, "loss_fn_config: cross_entropy has no 'beta'; it takes none"),
    ("cross_entropy", None, {"advantages": [1, 1, 1]}, "cross_entropy has no input 'advantages'"),
    ("cross_entropy", None, {"weights": [1, 1e30, 1]}, "weights: each value must be a number"),
    ("importance_sampling", None, {"logprobs": [0, 0, 0]}, "lacks 'advantages', which importance_sampling needs"),
    ("ppo", {"clip_low": 0.5}, RATIO, "ppo has no 'clip_low'; did you mean 'clip_low_threshold'?"),
    ("ppo", {"clip_low_threshold": "0.5"}, RATIO, "clip_low_threshold must be a number"),
    ("gspo", None, RATIO, "lacks 'sequence_ratio_mask', which gspo needs"),
    ("cross_entropy", None, {"weights": tensor("weights", [1] * 3, 3, 1)}, "only one value a position is offered"),
    ("cross_entropy", None, {"weights": SPARSE}, "only one value a position is offered"),
    ("cross_entropy", None, {"weights": [1, float("nan"), 1]}, "weights: each value must be a number"),
]


@pytest.mark.parametrize(("loss", "config", "inputs", "told"), WRONG)
def test_what_is_wrong_with_a_pass_is_a_value(loss: str, config: Any, inputs: dict[str, Any], told: str) -> None:
    found = checked(given(loss, config, **inputs))
    assert told in found.fault
    assert (found.model, found.seq, found.payload) == ("ses-0:train:0", 1, b"")


def test_what_is_told_is_no_longer_than_it_must_be() -> None:
    assert len(checked(given("a" * 100_000)).fault) == 1000


def test_pictures_are_refused_by_name() -> None:
    message = tinker_pb2.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().image.SetInParent()
    assert "not chunks of kind 'image'" in checked(message.SerializeToString()).fault


# ---- bodies ---------------------------------------------------------------------------------------------------------


def test_a_compressed_body_reads_like_a_plain_one() -> None:
    body = given()
    packed = zstandard.ZstdCompressor().compress(body)
    assert checked(packed, encoding="zstd") == checked(body)


@pytest.mark.parametrize("announced", [True, False])
def test_a_small_body_that_unpacks_to_a_large_one_is_refused(announced: bool) -> None:
    packer = zstandard.ZstdCompressor(write_content_size=announced)
    bomb = packer.compress(bytes(64 * MAX_BYTES))
    assert len(bomb) < MAX_BYTES // 50
    with pytest.raises(InvalidInput, match="at most 1048576"):
        checked(bomb, encoding="zstd")


NUM = learning.MAX_PARTS
DATUM = pb.Datum(model_input=[pb.Chunk(), pb.Chunk()]).SerializeToString()
MANY: list[tuple[dict[str, Any], str]] = [
    ({"data": [b""] * 4097}, "4,097 data in one operation are too many: at most 4,096"),
    ({"data": [b"", pb.DatumOutline(loss_fn_inputs=[b""] * 65).SerializeToString()]}, "data[1]: 65 loss_fn_inputs"),
    ({"data": [pb.DatumOutline(model_input=[b""] * NUM).SerializeToString(), DATUM]}, "more than 262,144 chunks"),
    ({"loss_fn_config": [b""] * 33, "loss_fn_config_v2": [b""] * 32}, "loss_fn_config: at most 64"),
]


@pytest.mark.parametrize(("parts", "told"), MANY)
def test_what_would_become_too_many_objects_fails_its_operation_before(
    parts: dict[str, list[bytes]], told: str
) -> None:
    body = pb.PassOutline(model_id="run", seq_id=7, **cast(Any, parts)).SerializeToString()
    found = checked(zstandard.compress(body), encoding="zstd")
    assert (found.model, found.seq) == ("run", 7) and told in found.fault


def test_a_body_is_one_whole_frame() -> None:
    frame = zstandard.ZstdCompressor().compress(given())
    for body in (frame * 2, frame[:-8]):
        with pytest.raises(InvalidInput, match="no zstd frame"):
            checked(body, encoding="zstd")


def test_an_array_that_is_cut_in_the_middle_of_a_number_is_wrong() -> None:
    message = tinker_pb2.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    message.data.add().model_input.add().encoded_text.tokens = b"abcde"
    assert "multiple of element size" in checked(message.SerializeToString()).fault


# ---- samples --------------------------------------------------------------------------------------------------------


def asked(**fields: Any) -> bytes:
    params = fields.pop("sampling_params", {})
    prompt = fields.pop("prompt", {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"tokens": [3]}]})
    return msgspec.json.encode({"prompt": prompt, "sampling_params": params, **fields})


def test_a_request_for_samples_is_read() -> None:
    found = read_sample(
        asked(num_samples=4, sampling_params={"max_tokens": 5, "stop": ["a", "b"], "seed": -1, "temperature": 0.5})
    )
    assert found.prompt.numpy().tolist() == [1, 2, 3]
    assert (found.num_samples, found.seed, found.sampling.max_tokens) == (4, 2**53 - 1, 5)
    assert (found.sampling.stop, found.sampling.temperature, found.sampling.top_p) == (("a", "b"), 0.5, 1.0)
    assert read_sample(asked(sampling_params={"stop": "end"})).sampling.stop == ("end",)


@pytest.mark.parametrize(
    ("stop", "strings", "ids"),
    [(None, (), None), ([], (), ()), (["a"], ("a",), None), ([7, 8], (), (7, 8)), (["a", 7], ("a",), (7,))],
)
def test_what_ends_a_sample(stop: Any, strings: tuple[str, ...], ids: tuple[int, ...] | None) -> None:
    """Nothing said: the model's own ids; an empty list: nothing."""
    sampling = read_sample(asked(sampling_params={"stop": stop})).sampling
    assert (sampling.stop, sampling.stop_ids) == (strings, ids)


@pytest.mark.parametrize(
    ("fields", "num"),
    [
        ({}, 0),
        ({"prompt_logprobs": True}, -1),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, 3),
        ({"sampling_params": {"top_k": 5}}, 0),
        ({"sampling_params": {"top_k": 2**63}}, 0),
    ],
)
def test_log_probs_of_the_prompt_and_the_best_tokens_are_asked_for(fields: dict[str, Any], num: int) -> None:
    sampling = read_sample(asked(**fields)).sampling
    assert sampling.prompt_logprobs == num
    assert sampling.top_k == min(fields.get("sampling_params", {}).get("top_k", 0), 2**31 - 1)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, "prompt_logprobs_last_n must be at least 1"),
        ({"topk_sample_logprobs": 3}, "topk_sample_logprobs"),
        ({"sampling_params": {"top_k": -2}}, "top_k is at least 1"),
        ({"sampling_params": {"stop": [""]}}, "strings of 1 to"),
        ({"sampling_params": {"stop": list(range(65))}}, "at most 64 token ids"),
        ({"sampling_params": {"stop": [2**64]}}, "sampling_params.stop"),
        ({"sampling_params": {"stop": [-1]}}, "sampling_params.stop"),
        ({"sampling_params": {"max_tokens": 2**64}}, "sampling_params.max_tokens"),
        ({"seq_id": 2**64}, "seq_id"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"response_format": {"type": "json_object"}}}, "response_format: samples to learn from"),
        ({"sampling_params": {"structured_outputs": {}}}, "structured_outputs: samples to learn from"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens must be at least 1"),
        ({"num_samples": 0}, "num_samples is between 1 and"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "not chunks of kind 'image'"),
        ({"prompt": {"chunks": [{"tokens": [2**40]}]}}, "token ids are between"),
        ({"prompt": 3}, "the body"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told.replace("[[]", r"\[\]")):
        read_sample(asked(**fields))


def test_each_loss_of_runs_says_what_it_needs() -> None:
    assert set(get_args(LossFn)) == set(NEEDED) == set(RUN_RULES)
