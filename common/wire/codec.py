"""Messages as bytes: msgpack, tagged by the message's class name."""

import msgspec

from common.wire import messages, operations
from common.wire.history import ShortRequest, ShortResult

AnyMessage = (
    messages.Start
    | messages.TurnRequest
    | messages.TurnResult
    | messages.TurnDelta
    | ShortResult
    | ShortRequest
    | messages.ScoredTrajectory
    | messages.Parked
    | messages.Init
    | messages.TrainStep
    | messages.AdapterUpdate
    | messages.JobCommand
    | messages.GradeRequest
    | messages.GradeResult
    | messages.Cancel
    | messages.AdapterNew
    | messages.DeadLetter
    | messages.WorkerReport
    | operations.Operation
    | operations.Operations
    | operations.OperationsDone
    | operations.OperationsAnswered
    | operations.NameChange
    | operations.Forget
    | operations.Forgotten
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: messages.Message) -> bytes:
    return _encoder.encode(message)


def decode(payload: bytes) -> AnyMessage:
    """Raises msgspec.ValidationError or msgspec.DecodeError on anything but a well-formed message."""
    return _decoder.decode(payload)
