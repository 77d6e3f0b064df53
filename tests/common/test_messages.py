"""Pins the wire format, so that nobody changes it by accident."""

import hashlib
from typing import Any

import msgspec
import numpy as np
import pytest

from common.wire.codec import AnyMessage, decode, encode
from common.wire.history import ShortRequest, ShortResult
from common.wire.messages import (
    BASE,
    AdapterNew,
    AdapterRef,
    AdapterUpdate,
    Array,
    Cancel,
    DeadLetter,
    EnvSpec,
    Failure,
    GradeRequest,
    GradeResult,
    Init,
    JobCommand,
    LoraSpec,
    LossSpec,
    Message,
    OptimSpec,
    Outside,
    Parked,
    Rows,
    Sampling,
    ScoredTrajectory,
    Span,
    Start,
    TrainStep,
    TrajectoryRef,
    TurnDelta,
    TurnRequest,
    TurnResult,
    Usage,
    WorkerReport,
    f32,
    i32,
    turn_id,
    u8,
)
from common.wire.operations import (
    Forget,
    Forgotten,
    NameChange,
    Operation,
    OperationResult,
    Operations,
    OperationsAnswered,
    OperationsDone,
    RunOperation,
)
from common.wire.reported import InPool
from common.wire.transcript import shown, transcript

PLAIN: dict[str, Any] = {"id": "i", "tenant": "t", "job": "j", "partition": 1, "epoch": 2}
ADAPTER = AdapterRef("t", "j", 3)
TRAJECTORY = TrajectoryRef("train", 5, 6, 7, 1)
REQUEST = TurnRequest(
    **PLAIN,
    adapter=ADAPTER,
    trajectory=TRAJECTORY,
    turn=0,
    transcript=shown([1, 2]),
    sampling=Sampling(),
)
ROWS = Rows(
    transcript=transcript([1, 2], [0, -1], [0, 1]),
    lengths=i32([2]),
    groups=i32([6]),
    samples=i32([7]),
    rewards=f32([1]),
    versions=i32([3]),
    truncated=u8([0]),
)
EXAMPLES: list[AnyMessage] = [
    Start(
        **PLAIN,
        adapter=ADAPTER,
        purpose="train",
        seed=1,
        group=2,
        samples=(0, 1),
        item={"a": [1, None]},
        env=EnvSpec("e", {"x": 1}),
        sampling=Sampling(stop=("\n",)),
    ),
    REQUEST,
    TurnResult(
        **PLAIN,
        request=REQUEST,
        adapter=ADAPTER,
        tokens=i32([3]),
        logprobs=f32([-0.5]),
        stop_reason="stop",
        usage=Usage(1, 2, 3, 0.5, 0.25, 0.125),
    ),
    TurnDelta(**PLAIN, adapter=ADAPTER, offset=1, tokens=i32([3]), logprobs=f32([-0.5])),
    ShortResult(**PLAIN, tokens=i32([3]), logprobs=f32([-0.5]), stop_reason="stop", usage=Usage()),
    ShortRequest(**PLAIN, shown=b"abcd", same=3, context=b"c", session="w/1", usage=Usage()),
    ScoredTrajectory(
        **PLAIN,
        adapter=ADAPTER,
        trajectory=TRAJECTORY,
        stop_reason="failed",
        verdicts=[{"grader": "g", "prompt": "p", "reply": "r"}],
        failure=Failure("grader", "it raised"),
    ),
    Parked(**PLAIN, request=REQUEST),
    Init(**PLAIN, adapter=ADAPTER, seed=1, lora=LoraSpec(4, 8.0, ("q_proj",)), base_digest="a-b"),
    TrainStep(
        **PLAIN,
        weight=2.0,
        adapter=ADAPTER,
        seed=1,
        lora=LoraSpec(),
        loss=LossSpec(),
        optim=OptimSpec(1e-3),
        rows=ROWS,
        trajectories=("a",),
        next_group=9,
    ),
    AdapterUpdate(**PLAIN, adapter=ADAPTER, batch="b", metrics={"loss": 0.5, "kl": None}, size=(9, 18)),
    JobCommand(**PLAIN, action="warn", text="w"),
    GradeRequest(**PLAIN, env=EnvSpec("e"), item={}, output_text="x", reply_to="r"),
    GradeResult(**PLAIN, reward=0.5),
    Cancel(**PLAIN, park=True),
    AdapterNew(**PLAIN, adapter=ADAPTER),
    DeadLetter(**PLAIN, stream="s", entry="0-1", reason="r", deliveries=11, payload=b"p"),
    WorkerReport(
        **PLAIN,
        service="env",
        pid=1,
        host="h",
        state="idle",
        busy=0.5,
        base_model="tiny",
        spans=(Span(1, 2, "t", "j", "env"),),
        outside=Outside(grader="*.test", openenv_servers=("maze",)),
        waiting={"j": "why"},
        pool=InPool("rollout-0", "disk", 0.5, 2.0),
    ),
    Operation(**PLAIN, seq=1, action="forward", payload=b"p", tokens=2, failure=Failure("invalid", "why")),
    Operations(
        **PLAIN,
        weight=2.0,
        adapter=ADAPTER,
        seed=1,
        lora=LoraSpec(),
        first=2,
        operations=(RunOperation(3, "optim_step", b"p", True),),
    ),
    OperationsDone(
        **PLAIN, adapter=ADAPTER, attempt=1, results=(OperationResult(3, b"r"),), held=3, holder="w", size=(9, 18)
    ),
    OperationsAnswered(**PLAIN, seqs=(3, 4)),
    NameChange(**PLAIN, checkpoint="weights", name="n", version=3, created_at=5, expires_at=9, deletes=True),
    Forget(**PLAIN, adapter=ADAPTER, versions=(1,), optimizers=(2,), everything=True),
    Forgotten(**PLAIN, forget="f"),
]
SNAPSHOT = "71467413cf197d9ae315059dae389fdef94ad5392e85048906ca784f3ed63167"
"""sha256 of all examples' bytes and, since defaults are not sent, of their fields. It changes when the wire format does: then
old and new workers must still understand each other (new fields with defaults only), and CHANGELOG must say so."""


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_every_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


def test_there_is_an_example_of_every_message() -> None:
    kinds = {kind.__name__ for kind in AnyMessage.__args__}
    assert {type(m).__name__ for m in EXAMPLES} == kinds


def test_the_wire_format_is_the_one_on_record() -> None:
    assert hashlib.sha256(repr([(encode(m), m) for m in EXAMPLES]).encode()).hexdigest() == SNAPSHOT


def test_a_newer_workers_extra_field_is_ignored() -> None:
    fields = msgspec.msgpack.decode(encode(EXAMPLES[14]))
    assert decode(msgspec.msgpack.encode({**fields, "invented_later": 1})) == EXAMPLES[14]


def test_an_array_whose_bytes_do_not_fit_its_shape_is_refused() -> None:
    for data in (b"12345", b"123456789", b"123456789012"):
        with pytest.raises(ValueError, match="needs 8 bytes"):
            Array("i4", (2,), data)
    sent, four, five = encode(EXAMPLES[2]), b"\xc4\x04\x03\0\0\0", b"\xc4\x05\x03\0\0\0\0"  # bytes of tokens
    assert four in sent
    with pytest.raises(msgspec.MsgspecError):
        decode(sent.replace(four, five))


def test_zeros_at_the_beginning_of_an_array_are_not_sent() -> None:
    values = np.array([0, 0, -0.0, 0.5, 0], np.float32)
    sent = f32(values)
    assert len(sent.rest) == 12 and sent.data == values.tobytes() == sent.numpy().tobytes()
    assert f32(np.zeros((2, 3))) == Array("f4", (2, 3), b"") and not f32(np.zeros((2, 3))).numpy().any()
    assert u8([0, 0]).numpy().tolist() == [0, 0] and i32([0, 256]).rest == b"\0\1\0\0"


def test_what_has_its_default_is_not_sent() -> None:
    def sent(message: Message) -> dict[str, Any]:
        return msgspec.msgpack.decode(encode(decode(encode(message))))

    request = sent(REQUEST)
    assert request["sampling"] == {} and request.keys().isdisjoint({"context", "usage", "reply_to", "stream"})
    assert sent(EXAMPLES[2])["request"] == request
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Usage(env_s=0.5) + Usage(sampled_tokens=3))) == {
        "sampled_tokens": 3,
        "env_s": 0.5,
    }


def test_ids_tell_what_they_belong_to() -> None:
    assert turn_id("j", TRAJECTORY, 3, 0) == "j/6/7/0/1"
    assert turn_id("j", TrajectoryRef("eval", 5, 6, 7), 3, 0) == "j/eval@3.6/7/0/0"
    assert str(ADAPTER) == "j@3" and str(BASE) == "base"
    assert ADAPTER.path() == "adapters/t/j/00000003"
