"""The live sessions that an env worker holds between the turns of their trajectories.

A session has a slot from its trajectory's beginning here to its end, and with it one of the worker's places, which tenants
share by weight. The handler has the slot during a message. Else it is idle, and is closed if its job is cancelled or
paused, if no turn comes for `idle_s`, or if others took the worker for gone and so have its turns.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from common.sharing.places import Claim, Places
from common.tasks.environments import TOOL_REPLIES
from common.wire.messages import Cancel, Message
from env_service import work
from env_service.environment import LiveEnvironment, Session, Step, Turn

CLOSE_S = 5.0
"""The longest that a session may take to close."""
LOOK_EVERY_S = 5.0
log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class SessionSlot:
    """One session, or the place for it. To the handler an environment, whose turns are the session's steps."""

    name: str
    """See `TurnRequest.session`."""
    message: Message
    """The newest message of its trajectory."""
    claim: Claim
    limit_s: float
    """Time limit of each call of the session."""
    session: Session | None = None
    num_turns: int = 0
    """Turns that the session has answered."""
    stays: bool = False
    """The trajectory goes on: the slot is kept for its next turn."""
    void: bool = False
    """Others have the trajectory."""
    replaying: bool = False
    last: Step | None = None
    used_s: float = 0.0  # by the event loop's clock

    async def open(self, environment: LiveEnvironment, item: dict[str, Any], seed: int) -> None:
        """Begins the session."""
        async with work.time_limit(self.limit_s):
            self.session = await environment.open(item, seed)

    @property
    def opened(self) -> Session:
        assert self.session is not None
        return self.session

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        return self.opened.messages

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self.opened.tools

    @property
    def tokens(self) -> Sequence[int]:
        return getattr(self.opened, "tokens", ())

    @property
    def reply_roles(self) -> Sequence[str]:
        return getattr(self.opened, "reply_roles", TOOL_REPLIES)

    async def step(self, state: Any, turn: Turn) -> Step:
        """Takes a step once; if it comes again, or no turn may follow, it gives the rest of the reward."""
        async with work.time_limit(self.limit_s):
            if self.last is None or self.num_turns != turn.index + 1:
                self.last = await self.opened.step(turn)
                self.num_turns += 1
            if self.last.done or not turn.last:
                return self.last
            return _together(self.last, await self.opened.end())


def _together(step: Step, end: Step) -> Step:
    rewards = [each.reward for each in (step, end) if each.reward is not None]
    return Step(done=step.done, reward=sum(rewards) if rewards else None, parts={**step.parts, **end.parts})


class Sessions:
    """The slots of one env worker. `close_idle` closes abandoned ones; `close` when done."""

    def __init__(self, worker: str, *, num: int = 64, idle_s: float = 600.0, limit_s: float = 900.0) -> None:
        """`num`: sessions at once, and one more of a tenant that has none."""
        self._worker = worker
        self._idle_s = idle_s
        self._limit_s = limit_s
        self._places = Places(lambda: num)
        self._numbers = itertools.count()
        self._idle_slots: dict[str, SessionSlot] = {}
        self._in_use: set[SessionSlot] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._trusted_until_s = math.inf
        self._trusted = asyncio.Event()

    async def take(self, message: Message, session: str, turn: int, doing: work.Work) -> SessionSlot:
        """The slot of a session that has answered so many turns, or an empty one, once there is a place."""
        slot = self._idle_slots.pop(session, None)
        if slot is not None and slot.num_turns != turn:
            self._close(slot)
            slot = None
        if slot is None:
            claim = await self._places.take(doing.tenant, doing.weight, doing.beat)
            slot = SessionSlot(self._name(), message, claim, self._limit_s)
        slot.message = message
        self._in_use.add(slot)
        return slot

    async def can_go_on(self, slot: SessionSlot) -> bool:
        """True for a session that no other worker can have replaced; else the slot is emptied. A worker that was late first
        waits to learn whether others declared it dead.
        """
        if slot.session is None:
            return False
        while not slot.void and asyncio.get_running_loop().time() >= self._trusted_until_s:
            self._trusted.clear()
            async with work.time_limit(self._limit_s):
                await self._trusted.wait()
        if not slot.void:
            return True
        self._spawn(_close(slot.name, slot.session))
        slot.name, slot.session, slot.num_turns, slot.void = self._name(), None, 0, False
        return False

    def leave(self, slot: SessionSlot) -> None:
        """Takes back a slot, for the next turn if it stays."""
        self._in_use.remove(slot)
        if slot.stays and not slot.void:
            slot.stays, slot.used_s = False, asyncio.get_running_loop().time()
            self._idle_slots[slot.name] = slot
        else:
            self._close(slot)

    def voided(self, cancel: Cancel) -> None:
        """Closes the idle sessions of a job that was paused, cancelled, or has ended."""
        self._close_where(lambda slot: slot.message.job == cancel.job and slot.message.epoch <= cancel.epoch)

    def unpublished(self, session: str) -> None:
        """Closes a session of which nobody will hear."""
        self._close_where(lambda slot: slot.name == session)

    def trusted_until(self, until_s: float) -> None:
        """Event loop time until which no other worker takes this one for gone. It may have been stopped since."""
        self._trusted_until_s = until_s
        self._trusted.set()

    def missed(self) -> None:
        """Closes all sessions: others were given their turns."""
        for slot in self._in_use:
            slot.void = True
        self._close_where(lambda _: True)

    async def close(self) -> None:
        self._close_where(lambda _: True)
        if self._closing:
            await asyncio.wait(self._closing)

    def __len__(self) -> int:
        return len(self._idle_slots) + len(self._in_use)

    async def close_idle(self) -> None:
        while True:
            await asyncio.sleep(min(LOOK_EVERY_S, self._idle_s))
            self._close_where(self._is_idle)

    def _is_idle(self, slot: SessionSlot) -> bool:
        return asyncio.get_running_loop().time() - slot.used_s > self._idle_s

    def _close_where(self, chosen: Callable[[SessionSlot], bool]) -> None:
        for slot in [slot for slot in self._idle_slots.values() if chosen(slot)]:
            self._close(self._idle_slots.pop(slot.name))

    def _close(self, slot: SessionSlot) -> None:
        self._spawn(self._closed(slot))

    async def _closed(self, slot: SessionSlot) -> None:
        """Frees the place once the session is closed, or has taken too long for that."""
        try:
            if slot.session is not None:
                await _close(slot.name, slot.session)
        finally:
            self._places.end(slot.claim)

    def _spawn(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(closing, name="close a session")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _name(self) -> str:
        return f"{self._worker}/{next(self._numbers)}"


async def _close(name: str, session: Session) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await session.close()
    except (Exception, SystemExit) as error:  # foreign code; nobody waits for the session any more
        log.warning("session_not_closed", session=name, reason=f"{type(error).__name__}: {error}"[:500])
