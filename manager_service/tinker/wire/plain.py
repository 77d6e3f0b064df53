"""Reads and writes as JSON what is protobuf for newer clients: the `tinker` SDK up to 0.21."""

import math
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import numpy as np

from common.errors import InvalidInput
from common.messages import Array
from common.operations import Outputs
from manager_service.tinker.wire.learning import GivenDatum, GivenPass, GivenTensor
from manager_service.tinker.wire.samples import Chunk, ModelInput, TinkerSample

CONTENT_TYPE = "application/json"


class Tensor(msgspec.Struct):
    data: list[int | float]
    dtype: Literal["int64", "float32"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None


class PlainDatum(msgspec.Struct):
    model_input: ModelInput
    loss_fn_inputs: dict[str, Tensor]


class PassInput(msgspec.Struct):
    data: list[PlainDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class PassGiven(msgspec.Struct):
    """The body of `forward_backward`, or of `forward`."""

    model_id: str
    seq_id: int = 0
    forward_backward_input: PassInput | None = None
    forward_input: PassInput | None = None


def read_pass(body: bytes) -> GivenPass:
    """Raises InvalidInput for what is no such body."""
    try:
        given = msgspec.json.decode(body, type=PassGiven)
        asked = given.forward_backward_input or given.forward_input
        if asked is None:
            raise ValueError("`forward_backward_input` is missing")
        data = [_datum(datum) for datum in asked.data]
    except (ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"the body: {error}", code="invalid_json") from error
    return GivenPass(
        model=given.model_id,
        seq=given.seq_id,
        forward_only=given.forward_backward_input is None,
        data=data,
        loss=asked.loss_fn,
        config=asked.loss_fn_config or {},
    )


def _datum(datum: PlainDatum) -> GivenDatum:
    inputs = {name: _tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()}
    return GivenDatum([_tokens(chunk) for chunk in datum.model_input.chunks], inputs, datum.model_input.other_chunks())


def _tokens(chunk: Chunk) -> np.ndarray:
    return np.array(chunk.tokens, np.int64)


def _tensor(tensor: Tensor) -> GivenTensor:
    """Raises OverflowError for a number that is too large."""
    values = np.array(tensor.data, None if tensor.dtype == "int64" else np.float32)
    return GivenTensor(values, tensor.shape or [], tensor.sparse_crow_indices is not None)


def write_outputs(outputs: Outputs) -> bytes:
    rows = [{"logprobs": _array(array)} for array in outputs.logprobs]
    answer = {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": rows, "metrics": outputs.metrics}
    return msgspec.json.encode(answer)


def _array(array: Array) -> dict[str, Any]:
    return {"data": array.numpy().tolist(), "dtype": "float32", "shape": list(array.shape)}


def write_samples(samples: Iterable[TinkerSample]) -> bytes:
    samples = list(samples)
    sequences = [
        {
            "stop_reason": sample.stop_reason,
            "tokens": sample.tokens.numpy().tolist(),
            "logprobs": sample.logprobs.numpy().tolist(),
        }
        for sample in samples
    ]
    prompt = [
        None if math.isnan(value) else value for each in samples for value in each.prompt_logprobs.numpy().tolist()
    ]
    return msgspec.json.encode({"type": "sample", "sequences": sequences, "prompt_logprobs": prompt or None})
