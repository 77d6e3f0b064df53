"""Answers turns as `OneTurnRollout` does those of `OneTurnEnv`, of the request's bytes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from msgspec.structs import replace

from common.bus.bus import Bus
from common.bus.streams import GROUP_ROLLOUT, Cell
from common.wire.codec import decode, encode
from common.wire.messages import AdapterRef, EnvSpec, Sampling, Start, TurnRequest
from common.worker.telemetry import Reporter
from common.worker.underway import Inbox
from harness.light.worker import LightWorker, Output
from harness.standin import OneTurnEnv, OneTurnRollout

TENANT, PARTITION, SAMPLE, TURN, TRANSCRIPT = (
    b"\xa6tenant",
    b"\xa9partition",
    b"\xa6sample",
    b"\xa4turn",
    b"\xaatranscript",
)
"""Names of fields as they stand in a payload. From `tenant` up to `turn` a request says what its answer says up to `transcript`."""
NUM_FIELDS = 2
"""The place where a payload says, in one byte, how many fields it has."""
LARGEST_BYTE = 0x7F
"""Numbers up to it are one byte in a payload."""


class Asked(NamedTuple):
    """A kind of requests: all but what each says from `tenant` up to `turn`, which its answer says too."""

    begin: bytes
    end: bytes
    more_fields: int  # that its answer has


class Answers:
    """The payloads of `OneTurnRollout`'s answers to the requests of `OneTurnEnv`, and the streams to which they go."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._rollout = OneTurnRollout(cell)
        env = OneTurnEnv(cell)
        even, odd = (encode(self._rollout.scored(env.turn(EXAMPLE, sample))) for sample in (0, 1))
        asked = [encode(env.turn(replace(EXAMPLE, untrained=each), 0)) for each in (False, True)]
        self._asked = [
            Asked(
                form[NUM_FIELDS + 1 : form.index(TENANT)],
                form[form.index(TURN) :],
                even[NUM_FIELDS] - form[NUM_FIELDS],
            )
            for form in asked
        ]
        self._size, self._begin = even[:NUM_FIELDS], even[NUM_FIELDS + 1 : even.index(TENANT)]
        self._ends = even[even.index(TRANSCRIPT) :], odd[odd.index(TRANSCRIPT) :]
        self._streams = [cell.name_of(cell.scored(partition)) for partition in range(LARGEST_BYTE + 1)]

    def to(self, request: bytes) -> tuple[str, bytes]:
        """The name of the stream to which the answer goes, and its payload."""
        for begin, end, more_fields in self._asked:
            if request.endswith(end) and request.startswith(begin, NUM_FIELDS + 1):
                same = request[NUM_FIELDS + 1 + len(begin) : -len(end)]
                partition, sample = _number(same, PARTITION), _number(same, SAMPLE)
                if max(partition, sample) <= LARGEST_BYTE:
                    num_fields = request[NUM_FIELDS] + more_fields
                    payload = b"%b%c%b%b%b" % (self._size, num_fields, self._begin, same, self._ends[sample % 2])
                    return self._streams[partition], payload
        return self._ordinary(request)

    def _ordinary(self, request: bytes) -> tuple[str, bytes]:
        message = cast(TurnRequest, decode(request))
        stream = self._cell.name_of(self._cell.scored(message.partition))
        return stream, encode(self._rollout.scored(message))

    def outputs(self, payloads: Sequence[bytes]) -> list[list[Output]]:
        return [[(stream, ["payload", answer])] for stream, answer in map(self.to, payloads)]


EXAMPLE = Start(
    tenant="tenant",
    job="job",
    partition=0,
    id="start",
    adapter=AdapterRef("tenant", "job", 0),
    purpose="train",
    seed=0,
    group=0,
    samples=(0, 1),
    item=None,
    env=EnvSpec("single_turn"),
    sampling=Sampling(),
)


def _number(payload: bytes, name: bytes) -> int:
    """The first byte of a field's value: the value itself, if it is no larger than LARGEST_BYTE."""
    return payload[payload.index(name) + len(name)]


def light_rollout(bus: Bus, reporter: Reporter, seconds: Callable[[], float], *, lease_s: float) -> LightWorker:
    """Answers each turn after `seconds`."""
    inbox = Inbox(bus.cell.rollout, GROUP_ROLLOUT)
    return LightWorker(bus, inbox, Answers(bus.cell), reporter, seconds=seconds, lease_s=lease_s)
