"""Messages as bytes: msgpack, tagged by the message's class name."""

import msgspec

from common.wire.history import ShortRequest, ShortResult
from common.wire.messages import (
    AdapterNew,
    AdapterUpdate,
    Cancel,
    DeadLetter,
    GradeRequest,
    GradeResult,
    Init,
    JobCommand,
    Message,
    Parked,
    ScoredTrajectory,
    Start,
    TrainStep,
    TurnDelta,
    TurnRequest,
    TurnResult,
    WorkerReport,
)
from common.wire.operations import (
    Forget,
    Forgotten,
    NameChange,
    Operation,
    Operations,
    OperationsAnswered,
    OperationsDone,
)

AnyMessage = (
    Start
    | TurnRequest
    | TurnResult
    | TurnDelta
    | ShortResult
    | ShortRequest
    | ScoredTrajectory
    | Parked
    | Init
    | TrainStep
    | AdapterUpdate
    | JobCommand
    | GradeRequest
    | GradeResult
    | Cancel
    | AdapterNew
    | DeadLetter
    | WorkerReport
    | Operation
    | Operations
    | OperationsDone
    | OperationsAnswered
    | NameChange
    | Forget
    | Forgotten
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(payload: bytes) -> AnyMessage:
    """Raises msgspec.ValidationError or msgspec.DecodeError on anything but a well-formed message."""
    return _decoder.decode(payload)
