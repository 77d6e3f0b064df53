"""Begins trajectories as `OneTurnEnv` does: the turns of a group are one payload, but for the sample's number, which stands there twice."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from common.bus import Bus
from common.messages import Start
from common.repeats import sent_once
from common.streams import GROUP_ENV, Cell
from common.telemetry import Reporter
from common.underway import Inbox
from common.wire import decode, encode
from harness.light.worker import LightWorker, Output
from harness.standin import OneTurnEnv

SAMPLE = b"\xa6sample"
"""The name of the field as it stands in a payload."""
LARGEST_DIGIT = 9
"""Up to it a sample's number is one character of the turn's id, and one byte of its own field."""


class Turns(NamedTuple):
    """Payloads of one group's first and last turn, and the fields of the entries of all but the first."""

    first: bytes
    others: list[list[Any]]
    last: bytes


class Beginnings:
    """The turns that `OneTurnEnv` makes of groups that begin, and the stream to which they go."""

    def __init__(self, cell: Cell) -> None:
        self._env = OneTurnEnv(cell)
        self._stream = cell.name_of(cell.rollout)

    def outputs(self, payloads: Sequence[bytes]) -> list[list[Output]]:
        found, before = list[list[Output]](), list[list[Any]]()
        for payload in payloads:
            turns = self.turns(cast(Start, decode(payload)))
            first = sent_once([*before, ["payload", turns.first]])[-1]
            found.append([(self._stream, fields) for fields in (first, *turns.others)])
            before = [["payload", turns.last]]
        return found

    def turns(self, start: Start) -> Turns:
        if max(start.samples) > LARGEST_DIGIT:
            return self._ordinary(start)
        turn = self._env.turn(start, start.samples[0])
        payload, identity = encode(turn), turn.id.encode()
        digit = payload.index(identity) + len(identity.rsplit(b"/", 2)[0]) - 1
        number = payload.index(SAMPLE, digit) + len(SAMPLE)
        between, tail = payload[digit + 1 : number], len(payload) - number - 1
        pieces = [b"%d%b%c" % (sample, between, sample) for sample in start.samples]
        others = [["like", digit, tail, piece] for piece in pieces[1:]]
        return Turns(payload, others, payload[:digit] + pieces[-1] + payload[number + 1 :])

    def _ordinary(self, start: Start) -> Turns:
        payloads = [encode(self._env.turn(start, sample)) for sample in start.samples]
        return Turns(payloads[0], sent_once([["payload", payload] for payload in payloads])[1:], payloads[-1])


def light_env(
    bus: Bus, reporter: Reporter, *, lease_s: float, on_read: Callable[[Sequence[str]], None] = lambda _: None
) -> LightWorker:
    return LightWorker(
        bus, Inbox(bus.cell.env, GROUP_ENV), Beginnings(bus.cell), reporter, lease_s=lease_s, on_read=on_read
    )
