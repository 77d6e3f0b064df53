"""Writes the protobuf of `tinker.proto`."""

from collections.abc import Iterable

import numpy as np

from common.wire.operations import Outputs
from manager_service.http.tinker.wire import tinker_pb2 as pb
from manager_service.http.tinker.wire.sample_requests import TinkerSample

CONTENT_TYPE = "application/x-protobuf"


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
