"""Gives each message of a live trajectory its session's slot while it is worked on.

A session lost with its worker is opened again, and replays the answered turns from the request's tokens.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from common.bus.streams import Cell
from common.errors import InvalidInput
from common.wire.messages import Failure, Message, Start, TrajectoryRef, TurnRequest, TurnResult, f32, i32, turn_id
from env_service.conversation import Conversation
from env_service.environment import LiveEnvironment
from env_service.environments.catalogue import Catalogue
from env_service.failures import EnvironmentFailed
from env_service.live.sessions import Sessions, SessionSlot
from env_service.outputs import seed_of, split_by_sample
from env_service.trajectory import Context
from env_service.work import Work

WAIT_S = 600.0
"""The longest that a trajectory waits in vain for what its environment runs on."""
MAX_WAITS = 10_000


class Trajectories:
    """The live trajectories of one env worker."""

    def __init__(self, cell: Cell, environments: Catalogue, conversation: Conversation, sessions: Sessions) -> None:
        self._cell = cell
        self._environments = environments
        self._conversation = conversation
        self._sessions = sessions
        self._slots: dict[Work, SessionSlot] = {}
        """The slots of the messages that are worked on."""
        self._counters = {"sessions": 0.0, "replays": 0.0}
        self._waits: OrderedDict[str, float] = OrderedDict()
        """Message for whose session there was no room -> since when, by the event loop's clock."""

    def counters(self) -> dict[str, float]:
        """Totals since the start: sessions opened, and how many of them in place of lost ones."""
        return dict(self._counters)

    async def take_slot(self, message: Message, doing: Work) -> None:
        """Waits for the slot of the message's session, or for a free one if it needs that."""
        if self.needs_slot(message):
            session, turn = ("", 0)
            if isinstance(message, TurnResult):
                session, turn = message.request.session, message.request.turn
            self._slots[doing] = await self._sessions.take(message, session, turn, doing)

    def needs_slot(self, message: Message) -> bool:
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

    def leave_slot(self, doing: Work) -> None:
        if slot := self._slots.pop(doing, None):
            self._sessions.leave(slot)

    def put_back(self, doing: Work) -> str:
        """The stream for a message that waited too long: this worker's own, if it holds the session."""
        slot = self._slots.get(doing)
        if slot is None or slot.session is None:
            return self._cell.env
        slot.stays = True
        return self._cell.holder(slot.name)

    def in_session(self, request: TurnRequest, doing: Work) -> TurnRequest:
        """The trajectory's next request: its result comes to this worker if that holds its session."""
        slot = self._slots.get(doing)
        if slot is None:
            return request
        slot.stays = True
        return msgspec.structs.replace(request, session=slot.name)

    def explained(self, failure: Failure, doing: Work) -> Failure:
        """The failure, as one of the replay if it is."""
        slot = self._slots.get(doing)
        if slot is None or not slot.replaying:
            return failure
        return Failure("infrastructure", f"the trajectory's session was lost, and its replay failed: {failure.reason}")

    def split(self, start: Start) -> list[Start]:
        """A Start for each sample, each for a slot of its own at any worker; none if the Start can be worked on."""
        return split_by_sample(start) if len(start.samples) > 1 and self._environments.is_live(start.env) else []

    async def begin(
        self, environment: LiveEnvironment, item: dict[str, Any], of: Start | TrajectoryRef, doing: Work
    ) -> SessionSlot:
        """Opens a session in the message's slot. Raises InvalidInput if the trajectory began without one."""
        slot = self._slots.get(doing)
        if slot is None:
            raise InvalidInput("the trajectory began before its environment had sessions")
        await slot.open(environment, item, seed_of(of, "environment"))
        self._waits.pop(slot.message.id, None)
        self._counters["sessions"] += 1
        return slot

    async def go_on(
        self, environment: LiveEnvironment, result: TurnResult, context: Context, doing: Work
    ) -> SessionSlot:
        """The trajectory's session, or a new one with the same turns replayed."""
        if slot := self._slots.get(doing):
            if await self._sessions.can_go_on(slot):
                return slot
            slot.replaying = True
        slot = await self.begin(environment, context.item, result.request.trajectory, doing)
        self._counters["replays"] += 1
        await replay(slot, result, context, self._conversation)
        slot.replaying = False
        return slot

    def unpublished(self, outputs: Sequence[tuple[str, Message]]) -> None:
        for _, message in outputs:
            if isinstance(message, TurnRequest):
                self._sessions.unpublished(message.session)


async def replay(slot: SessionSlot, result: TurnResult, context: Context, conversation: Conversation) -> None:
    """Replays a lost session's turns in a new one, from the request's tokens.

    Raises EnvironmentFailed if it shows anything else than the model was shown then, and the errors of the session.
    """
    conversation = conversation.told(context.env)
    shown = await conversation.opening(slot.messages, slot.tools, slot.tokens)
    for past in earlier(result):
        _compare(shown, past)
        step = await slot.step(None, await conversation.turn(past, context, slot.tools))
        if step.done:
            raise EnvironmentFailed(f"the environment now ends after turn {past.request.turn + 1}")
        shown = await conversation.reply(past, step)
    _compare(shown, result)


def earlier(result: TurnResult) -> Iterator[TurnResult]:
    """The results of the turns before this one. Each led to another, so it was not cut off."""
    request = result.request
    whole = request.transcript.first(request.num_prompt)
    tokens, logprobs = whole.tokens.numpy(), whole.logprobs.numpy()
    for turn, (start, end) in enumerate(whole.segments):
        before = msgspec.structs.replace(
            request,
            id=turn_id(request.job, request.trajectory, request.trajectory_adapter.version, turn),
            turn=turn,
            transcript=whole.first(start),
            num_partial=0,
        )
        yield msgspec.structs.replace(
            result,
            id=before.id,
            request=before,
            tokens=i32(tokens[start:end]),
            logprobs=f32(logprobs[start:end]),
            stop_reason="stop",
            stop_string="",
        )


def _compare(shown: list[int], result: TurnResult) -> None:
    request = result.request
    before = request.transcript.first(request.num_prompt)
    start = before.edges[-1] if before.edges else 0
    if shown != before.tokens.numpy()[start:].tolist():
        raise EnvironmentFailed(f"the environment now shows the model something else before turn {request.turn + 1}")
