"""Reads and writes the protobuf of `tinker.proto`."""

from collections.abc import Iterable

import numpy as np
from google.protobuf.message import DecodeError

from common.errors import InvalidInput
from common.operations import Outputs
from manager_service.tinker.wire import tinker_pb2 as pb
from manager_service.tinker.wire.learning import GivenDatum, GivenPass, GivenTensor
from manager_service.tinker.wire.samples import TinkerSample

CONTENT_TYPE = "application/x-protobuf"
DTYPES = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4"}


def read_pass(body: bytes) -> GivenPass:
    """Raises InvalidInput for what is no ForwardBackwardRequest."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
        data = [_datum(datum) for datum in message.data]
    except (DecodeError, ValueError) as error:
        raise InvalidInput(f"the body is no ForwardBackwardRequest: {error}") from error
    return GivenPass(
        model=message.model_id,
        seq=message.seq_id,
        forward_only=message.forward_only,
        data=data,
        loss=message.loss_fn,
        config=_config(message),
    )


def _config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    return {
        name: value.text if value.WhichOneof("value") == "text" else value.number
        for name, value in message.loss_fn_config_v2.items()
    }


def _datum(datum: pb.Datum) -> GivenDatum:
    kinds = [str(chunk.WhichOneof("chunk")) for chunk in datum.model_input]
    return GivenDatum(
        tokens=[np.frombuffer(chunk.encoded_text.tokens, "<i4") for chunk in datum.model_input],
        inputs={name: _tensor(name, tensor) for name, tensor in datum.loss_fn_inputs.items()},
        other_chunks=[kind for kind in kinds if kind != "encoded_text"],
    )


def _tensor(name: str, tensor: pb.Tensor) -> GivenTensor:
    """Raises ValueError."""
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name} is of a dtype that is not known: {tensor.dtype}")
    sparse = tensor.WhichOneof("encoding") == "sparse_csr"
    values = tensor.sparse_csr.values if sparse else tensor.dense
    return GivenTensor(np.frombuffer(values, DTYPES[tensor.dtype]), list(tensor.shape), sparse)


def write_outputs(outputs: Outputs) -> bytes:
    """A ForwardBackwardOutput."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=outputs.metrics)
    lengths = [0, *(len(array.data) for array in outputs.logprobs)]
    record = message.loss_fn_outputs.add(num_datums=len(outputs.logprobs))
    field = record.fields["logprobs"]
    field.data = b"".join(array.data for array in outputs.logprobs)
    field.offsets = np.cumsum(lengths, dtype="<i8").tobytes()
    field.dtype = pb.DTYPE_FLOAT32
    return message.SerializeToString(deterministic=True)


def write_samples(samples: Iterable[TinkerSample]) -> bytes:
    """A SampleResponse."""
    message = pb.SampleResponse()
    for sample in samples:
        reason = pb.STOP_REASON_STOP if sample.stop_reason == "stop" else pb.STOP_REASON_LENGTH
        message.sequences.add(stop_reason=reason, tokens=sample.tokens.data, logprobs=sample.logprobs.data)
        if len(sample.prompt_logprobs):
            message.prompt_logprobs = sample.prompt_logprobs.data
    return message.SerializeToString(deterministic=True)
