"""Gives each message of a live trajectory its seat while it is worked on."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from common.bus.streams import Cell
from common.errors import InvalidInput
from common.wire.messages import Message, Start, TrajectoryRef, TurnRequest, TurnResult
from env_service.conversation import Conversation
from env_service.environment import LiveEnvironment
from env_service.environments.catalogue import Catalogue
from env_service.live.replay import replay
from env_service.live.sessions import Seat, Sessions
from env_service.requests import alone, seed_of
from env_service.trajectory import Context
from env_service.work import Work

WAIT_S = 600.0
"""The longest that a trajectory waits in vain for what its environment runs on."""
MAX_WAITS = 10_000


class Trajectories:
    """The live trajectories of one env worker. Without `sessions` each fails with a reason."""

    def __init__(
        self, cell: Cell, environments: Catalogue, conversation: Conversation, sessions: Sessions | None
    ) -> None:
        self._cell = cell
        self._environments = environments
        self._conversation = conversation
        self._sessions = sessions
        self._counters = {"sessions": 0.0, "replays": 0.0}
        self._waits: OrderedDict[str, float] = OrderedDict()
        """Message for whose session there was no room -> since when, by the event loop's clock."""

    def counters(self) -> dict[str, float]:
        """Totals since the start: sessions opened, and how many of them in place of lost ones."""
        return dict(self._counters)

    async def take_seat(self, message: Message, doing: Work) -> None:
        """Waits for the seat of the message's session, or for a free one if it needs that."""
        if self._sessions is not None and self.needs_seat(message):
            of = message.request if isinstance(message, TurnResult) else None
            doing.seat = await self._sessions.take(message, of.session if of else "", of.turn if of else 0, doing)

    def needs_seat(self, message: Message) -> bool:
        match message:
            case TurnResult(request=request):
                return bool(request.session)
            case Start(samples=(_,)):
                return self._environments.is_live(message.env)
            case _:
                return False

    def may_wait(self, message: Message) -> bool:
        """May it go on waiting for room for its session? It was refused just now."""
        now = asyncio.get_running_loop().time()
        while len(self._waits) >= MAX_WAITS:
            self._waits.popitem(last=False)
        since = self._waits.setdefault(message.id, now)
        if now - since < WAIT_S:
            return True
        del self._waits[message.id]
        return False

    def leave_seat(self, doing: Work) -> None:
        if doing.seat and self._sessions:
            self._sessions.leave(doing.seat)

    def put_back(self, seat: Seat | None) -> str:
        """The stream for a message that waited too long for a slot: this worker's own, if it holds the session."""
        if seat is None or seat.session is None:
            return self._cell.env
        seat.stays = True
        return self._cell.holder(seat.name)

    def split(self, start: Start) -> list[Start]:
        """A Start for each sample, so that each waits for a seat of its own, at any worker; none if the Start can be worked on."""
        return alone(start) if len(start.samples) > 1 and self._environments.is_live(start.env) else []

    async def begin(
        self, environment: LiveEnvironment, item: dict[str, Any], of: Start | TrajectoryRef, doing: Work
    ) -> Seat:
        """Opens a session in the message's seat."""
        if doing.seat is None:
            raise InvalidInput("this worker holds no live sessions")
        await doing.seat.open(environment, item, seed_of(of, "environment"))
        self._waits.pop(doing.seat.message.id, None)
        self._counters["sessions"] += 1
        return doing.seat

    async def go_on(self, environment: LiveEnvironment, result: TurnResult, context: Context, doing: Work) -> Seat:
        """The trajectory's session; if it is not here, a new one to which all happened that had to the old one."""
        if self._sessions and doing.seat and await self._sessions.can_go_on(doing.seat):
            return doing.seat
        if doing.seat:
            doing.seat.replaying = True
        seat = await self.begin(environment, context.item, result.request.trajectory, doing)
        self._counters["replays"] += 1
        await replay(seat, result, context, self._conversation)
        seat.replaying = False
        return seat

    def unpublished(self, outputs: Sequence[tuple[str, Message]]) -> None:
        for _, message in outputs:
            if self._sessions and isinstance(message, TurnRequest):
                self._sessions.unpublished(message.session)


def in_session(request: TurnRequest, seat: Seat | None) -> TurnRequest:
    """The request of a trajectory that goes on in this seat's session, if it has one."""
    if seat is None:
        return request
    seat.stays = True
    return msgspec.structs.replace(request, session=seat.name)
