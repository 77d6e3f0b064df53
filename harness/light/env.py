"""Begins trajectories as `OneTurnEnv` does: the turns of a group are one payload, but for the sample's number, which stands there twice."""

from collections.abc import Callable, Sequence
from typing import cast

from common.bus.bus import Bus
from common.bus.streams import GROUP_ENV, Cell
from common.wire.codec import decode, encode
from common.wire.messages import Start
from common.worker.telemetry import Reporter
from common.worker.underway import Inbox
from harness.light.worker import LightWorker, Output
from harness.standin import OneTurnEnv

SAMPLE = b"\xa6sample"
"""The name of the field as it stands in a payload."""
LARGEST_DIGIT = 9
"""Up to it a sample's number is one character of the turn's id, and one byte of its own field."""


class Beginnings:
    """The turns that `OneTurnEnv` makes of groups that begin, and the stream to which they go."""

    def __init__(self, cell: Cell) -> None:
        self._env = OneTurnEnv(cell)
        self._stream = cell.name_of(cell.rollout)

    def outputs(self, payloads: Sequence[bytes]) -> list[list[Output]]:
        starts = [cast(Start, decode(payload)) for payload in payloads]
        return [[(self._stream, ["payload", turn]) for turn in self.turns(start)] for start in starts]

    def turns(self, start: Start) -> list[bytes]:
        """Payloads of a group's turns."""
        if max(start.samples) > LARGEST_DIGIT:
            return [encode(self._env.turn(start, sample)) for sample in start.samples]
        turn = self._env.turn(start, start.samples[0])
        payload, identity = encode(turn), turn.id.encode()
        digit = payload.index(identity) + len(identity.rsplit(b"/", 2)[0]) - 1
        number = payload.index(SAMPLE, digit) + len(SAMPLE)
        begin, between, end = payload[:digit], payload[digit + 1 : number], payload[number + 1 :]
        return [b"%b%d%b%c%b" % (begin, sample, between, sample, end) for sample in start.samples]


def light_env(
    bus: Bus, reporter: Reporter, *, lease_s: float, on_read: Callable[[Sequence[str]], None] = lambda _: None
) -> LightWorker:
    return LightWorker(
        bus, Inbox(bus.cell.env, GROUP_ENV), Beginnings(bus.cell), reporter, lease_s=lease_s, on_read=on_read
    )
