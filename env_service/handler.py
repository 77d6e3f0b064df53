"""The env service's handler: a message comes in, messages go out.

    Start        -> a TurnRequest for each sample, to `rollout`; of a live environment first a Start for each, to `env`
    TurnResult   -> the next TurnRequest, to the worker of this one, or a ScoredTrajectory, to `scored:<p>`
    GradeRequest -> a GradeResult, to the reply stream that it names

An error of an environment, a tool or a grader becomes a ScoredTrajectory without a reward and with a reason.
"""

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from common.bus.deliveries import Out
from common.bus.streams import Cell
from common.cancellation import is_cancelled
from common.errors import InvalidInput, Permanent, Retryable, Unavailable
from common.sharing.places import Claim, Places
from common.tasks.environments import BUILT_IN, SUPERVISED, imported, is_multi_turn, reply_fault, roles_of
from common.text.examples import Example
from common.text.tokens import ChatTokenizer
from common.wire.messages import (
    Cancel,
    Failure,
    GradeRequest,
    Message,
    Parked,
    ScoredTrajectory,
    Start,
    StopReason,
    TurnRequest,
    TurnResult,
    Usage,
)
from common.wire.transcript import EMPTY
from common.worker.telemetry import Waiting
from env_service import work
from env_service.conversation import Conversation
from env_service.environment import Environment, LiveEnvironment, Step, Turn
from env_service.environments.catalogue import Catalogue
from env_service.examples import example_of, log_prob, measured_by, trained_on
from env_service.failures import EnvironmentFailed, NoRoom, TrajectoryFailed, one_line, place_of
from env_service.graders.judging import Graded, graded_by, judge_request, resumed
from env_service.graders.model import ModelAsked
from env_service.live.sessions import Sessions, SessionSlot
from env_service.live.trajectories import Trajectories
from env_service.outputs import (
    NO_USAGE,
    Ending,
    advanced,
    ending_of,
    failure_of,
    first_requests,
    grade_result,
    made_item,
    next_request,
    scored,
    seed_of,
    settled,
)
from env_service.trajectory import Context, decode_context, decode_state, encode_context, encode_state, weight_in

T = TypeVar("T")

PUT_BACK_S = 2.0
"""Seconds that a message waits for a slot before it goes to the end of the stream."""


class EnvHandler:
    """Gives the same messages for the same message, except time and tools with effects: any replica can take it."""

    def __init__(
        self,
        *,
        cell: Cell,
        tokenizer: ChatTokenizer,
        environments: Catalogue,
        step_timeout_s: float = 900.0,
        slots: int = 64,
        sessions: Sessions,
    ) -> None:
        """`slots`: messages worked on at once, shared by weight. `sessions`: of live environments here."""
        self._cell = cell
        self._tokenizer = tokenizer
        self._threads = work.Threads()
        self._conversation = Conversation(tokenizer, self._threads)
        self._environments = environments
        self._step_timeout_s = step_timeout_s
        self._slots = Places(lambda: slots)
        self.waiting = Waiting()
        self._sessions = sessions
        self._live = Trajectories(cell, environments, self._conversation, sessions)
        tools = ("tool_turns", "sum_log_tool_s", "sum_squared_log_tool_s")
        names = ("starts", "start_s", *tools, "graded", "grade_s", "sum_squared_calls")
        self._counters: dict[str, float] = dict.fromkeys(names, 0.0)

    async def __call__(self, message: Message, beat: Callable[[], None]) -> list[Out]:
        """Works on a message once its tenant's turn for a slot comes. If that takes long, or a live environment has no room,
        it puts the message back for a worker with a free slot, and so that others are not stuck behind it; the job hears of it.
        Raises Unavailable.
        """
        try:
            return await self._in_turn(message, beat)
        except Unavailable as error:
            self.waiting.note(message.job, one_line(error))
            if not isinstance(error, NoRoom):
                raise
            if not self._live.may_wait(message):
                return self.failed(message, Failure("infrastructure", one_line(error)))
            beat()
            await asyncio.sleep(PUT_BACK_S)
            return [(self._cell.env, message)]

    async def _in_turn(self, message: Message, beat: Callable[[], None]) -> list[Out]:
        doing = work.begin(beat, message.tenant, _weight_of(message))
        if isinstance(message, Start | GradeRequest):
            await imported(message.env, doing.beat)
        try:
            claim = await self._claim(message, doing)
            if claim is None:
                return [(self._live.put_back(doing), message)]
            try:
                return await self._work(message, doing)
            finally:
                self._slots.end(claim)
        finally:
            self._live.leave_slot(doing)

    async def _claim(self, message: Message, doing: work.Work) -> Claim | None:
        """Waits for a live session's slot, if needed, and for one of this worker. None: that takes long."""
        if not self._live.needs_slot(message) and (free := self._slots.take_now(doing.tenant, doing.weight)):
            return free
        try:
            async with asyncio.timeout(PUT_BACK_S):
                await self._live.take_slot(message, doing)
                return await self._slots.take(doing.tenant, doing.weight, doing.beat)
        except TimeoutError:
            return None

    async def _work(self, message: Message, doing: work.Work) -> list[Out]:
        match message:
            case Start():
                return await self._start(message, doing)
            case TurnResult() if message.request.judges is not None:
                return await self._judged(message, doing)
            case TurnResult():
                return await self._turn(message, doing)
            case GradeRequest():
                return await self._grade(message, doing)
            case _:
                raise InvalidInput(f"the env service has no use for a {type(message).__name__}")

    def counters(self) -> dict[str, float]:
        """Totals since the start: groups begun, with seconds to their first prompts; turns answered by tools, with sums of
        log seconds and of its square; trajectories graded, with seconds and sum of squared calls; those of live sessions.
        Waiting counts for tools and grading."""
        return self._counters | self._live.counters()

    def park(self, message: Message) -> list[Out]:
        """A turn's request, from which it is sampled again; nothing for a Start, which its owner issues again."""
        if not isinstance(message, TurnResult):
            return []
        request = msgspec.structs.replace(message.request, usage=message.usage)
        parked = Parked(**message.about(), id=request.id, request=request)
        return [(self._cell.scored(message.partition), parked)]

    def drop(self, message: Message) -> list[Out]:
        """Tells the owner what the trajectory of an ended job has cost."""
        if not isinstance(message, TurnResult):
            return []
        return self.failed(message, Failure("cancelled", "the job has ended"))

    def hand_back(self, message: Message) -> list[Out] | None:
        """Returns None: this service holds no progress."""
        return None

    def voided(self, cancel: Cancel) -> None:
        self._sessions.voided(cancel)

    def unpublished(self, outputs: Sequence[Out]) -> None:
        self._live.unpublished(outputs)

    def failed(self, message: Message, failure: Failure) -> list[Out]:
        match message:
            case Start():
                return self._failed_start(message, failure)
            case TurnResult() if message.request.judges is not None:
                return self.failed(graded_by(message), failure)
            case TurnResult():
                reason: StopReason = "cancelled" if failure.kind == "cancelled" else "failed"
                ending, text = Ending(reason, failure=failure), self._conversation.text(message)
                return self._to_owner(settled(message, None, ending, Usage(), text, []))
            case GradeRequest():
                return [grade_result(message, Ending("failed", failure=failure))]
            case _:
                return []

    # ------------------------------------------------------------------------------------------------ beginning

    async def _start(self, start: Start, doing: work.Work) -> list[Out]:
        if start.env.name == SUPERVISED:
            return await self._show(start, doing)
        if split := self._live.split(start):
            return [(self._cell.env, one) for one in split]
        prepared = await self._guarded(self._prepare(start, doing))
        if isinstance(prepared, Failure):
            return self._failed_start(start, prepared)
        tokens, context = prepared
        doing.beat()
        self._counters["starts"] += 1
        self._counters["start_s"] += doing.busy_s
        usage = Usage(env_s=doing.busy_s / max(1, len(start.samples)))
        requests = first_requests(start, tokens, context, usage)
        first = self._cell.rollout_worker(start.home) if start.home else self._cell.rollout
        return [(first, self._live.in_session(request, doing)) for request in requests]

    async def _show(self, start: Start, doing: work.Work) -> list[Out]:
        """Renders an example: it is learned as it stands, or measured."""
        example = await self._guarded(self._example(start))
        if isinstance(example, Failure):
            return self._failed_start(start, example)
        doing.beat()
        usage = Usage(env_s=doing.busy_s / max(1, len(start.samples)))
        if start.purpose != "train":
            return [(self._cell.rollout, request) for request in measured_by(start, example, usage)]
        text = await self._conversation.decoded([t for t, learned in zip(*example, strict=True) if learned])
        return self._to_owner(*trained_on(start, example, text, usage))

    async def _example(self, start: Start) -> Example:
        """Rendered in a thread, since long ones take their time."""
        async with work.time_limit(self._step_timeout_s):
            return await self._threads.run(partial(example_of, start, self._tokenizer))

    async def _prepare(self, start: Start, doing: work.Work) -> tuple[list[int], bytes]:
        """Returns a group's prompt and context. Raises the environment's errors, and Permanent ones."""
        environment, tokenizer = self._environments.get(start.env), self._tokenizer.told(start.env.chat_template_kwargs)
        item = start.item if start.item is not None else made_item(environment, start)
        rendered: Sequence[int] = ()
        if isinstance(environment, LiveEnvironment):
            environment = await self._live.begin(environment, item, start, doing)
            state, messages, rendered = None, environment.messages, environment.tokens
            if environment.tools and not tokenizer.shows_tools():
                raise InvalidInput(
                    "the environment has tools, and the base's chat template does not tell the model of them"
                )
        else:
            state, messages = environment.reset(item, seed_of(start, "environment"))
        if is_multi_turn(start.env) and (fault := reply_fault(tokenizer, roles_of(environment))):
            raise InvalidInput(fault)
        tokens = await self._conversation.told(start.env).opening(messages, _tools(environment), rendered)
        most = start.sampling.context(tokenizer.context)
        if len(tokens) + 1 > most:
            whose = "job's max_context" if start.sampling.max_context else "model's context"
            raise InvalidInput(f"the prompt has {len(tokens)} tokens; the {whose} of {most} leaves no room")
        context = Context(
            env=start.env,
            item=item,
            state=encode_state(state),
            num_prompt=len(tokens),
            max_turns=start.max_turns,
            tool_timeout_s=start.tool_timeout_s,
            weight=start.weight,
        )
        return tokens, encode_context(context)

    def _failed_start(self, start: Start, failure: Failure) -> list[Out]:
        ending = Ending("failed", failure=failure)
        requests = first_requests(start, [], b"", Usage())
        return self._to_owner(*(scored(request, EMPTY, ending, num_turns=0) for request in requests))

    def _to_owner(self, *trajectories: ScoredTrajectory) -> list[Out]:
        return [(self._cell.scored(each.partition), each) for each in trajectories]

    # ------------------------------------------------------------------------------------------------ a turn

    async def _turn(self, result: TurnResult, doing: work.Work) -> list[Out]:
        if (failure := failure_of(result)) is not None:
            return self.failed(result, failure)
        since = time.monotonic()
        outcome = await self._guarded(self._or_ask(self._advance(result, doing), result, doing))
        usage = Usage(env_s=doing.busy_s, grader_tokens=doing.grader_tokens)
        if isinstance(outcome, TurnRequest):
            return [(self._cell.rollout_first, msgspec.structs.replace(outcome, usage=result.usage + usage))]
        if isinstance(outcome, Failure):
            outcome = self._live.explained(outcome, doing)
            reason = "tool_error" if outcome.kind == "tool" else "failed"
            ending, text = Ending(reason, failure=outcome), await self._conversation.read(result)
            return self._to_owner(settled(result, None, ending, usage, text, doing.verdicts))
        context, ending, reply = outcome
        self._count(time.monotonic() - since, result.request.turn, ended=ending is not None)
        if ending is not None:
            text = await self._conversation.read(result)
            return self._to_owner(settled(result, context, ending, usage, text, doing.verdicts))
        request = next_request(result, context, reply, result.usage + usage)
        back = self._cell.rollout_worker(result.worker) if result.worker else self._cell.rollout_first
        return [(back, self._live.in_session(request, doing))]

    def _count(self, seconds: float, num_calls: int, *, ended: bool) -> None:
        counters, log = self._counters, math.log(max(seconds, 1e-6))
        if ended:
            counters["graded"] += 1
            counters["grade_s"] += seconds
            counters["sum_squared_calls"] += num_calls * num_calls
        else:
            counters["tool_turns"] += 1
            counters["sum_log_tool_s"] += log
            counters["sum_squared_log_tool_s"] += log * log

    async def _advance(self, result: TurnResult, doing: work.Work) -> tuple[Context, Ending | None, list[int]]:
        """Takes one step of the environment. Returns the ending, or the tokens that follow the turn."""
        context = decode_context(result.request.context)
        if context.env.name == SUPERVISED:
            return context, ending_of("stop", None, log_prob(result, context)), []
        await imported(context.env, doing.beat)
        environment = self._environments.get(context.env)
        if isinstance(environment, LiveEnvironment):
            environment = await self._live.go_on(environment, result, context, doing)
        turn = await self._conversation.turn(result, context, _tools(environment))
        step = await _stepped(environment, decode_state(context.state), turn)
        work.beat()
        if step.done or turn.last:
            stop: StopReason = result.stop_reason if step.done or result.stop_reason != "stop" else "max_turns"
            return context, ending_of(stop, context, step), []
        reply = await self._conversation.told(context.env).reply(result, step)
        if len(result.so_far) + len(reply) + 1 > result.request.sampling.context(self._tokenizer.context):
            step = await _stepped(environment, decode_state(context.state), replace(turn, last=True))
            return context, ending_of("context", context, step), []
        return advanced(context, step), None, reply

    # ------------------------------------------------------------------------------------------------ grading

    async def _grade(self, request: GradeRequest, doing: work.Work, before: Usage = NO_USAGE) -> list[Out]:
        """`before`: what models that answered have cost."""
        started = time.monotonic()
        outcome = await self._guarded(self._or_ask(self._grade_once(request), request, doing))
        usage = before + Usage(grader_tokens=doing.grader_tokens)
        if isinstance(outcome, TurnRequest):
            return [(self._cell.rollout_first, msgspec.structs.replace(outcome, usage=usage))]
        ending = Ending("failed", failure=outcome) if isinstance(outcome, Failure) else outcome
        return [grade_result(request, ending, time.monotonic() - started, usage)]

    async def _judged(self, result: TurnResult, doing: work.Work) -> list[Out]:
        """Goes on with the grading for which a grader's model has answered."""
        graded, grader, answers = resumed(result)
        if (failure := failure_of(result)) is not None:
            kind = "grader" if failure.kind == "invalid" else failure.kind
            return self.failed(graded, Failure(kind, f"the grader's model: {failure.reason}"))
        doing.answers = answers | {grader: await self._conversation.read(result)}
        if isinstance(graded, GradeRequest):
            return await self._grade(graded, doing, result.usage)
        return await self._turn(graded, doing)

    async def _or_ask(self, steps: Coroutine[Any, Any, T], graded: Graded, doing: work.Work) -> T | TurnRequest:
        """Asks the model of this service that a grader waits for. Raises GraderFailed."""
        try:
            return await steps
        except ModelAsked as asked:
            return await self._threads.run(partial(judge_request, graded, asked, doing, self._tokenizer))

    async def _grade_once(self, request: GradeRequest) -> Ending:
        environment = self._environments.get(request.env)
        if isinstance(environment, LiveEnvironment):
            raise InvalidInput(f"the environment {request.env.name} grades no answer without its session")
        state = None if request.env.name in BUILT_IN else environment.reset(request.item, 0)[0]
        turn = Turn(item=request.item, text=request.output_text, last=True, key=request.id)
        step = await _stepped(environment, state, turn)
        return ending_of("stop", None, step)

    async def _guarded(self, steps: Coroutine[Any, Any, T]) -> T | Failure:
        """Makes values of foreign code's errors. Leaves Retryable errors to the worker loop."""
        metered = work.Metered(steps)
        try:
            if metered.ends_at_once():
                return metered.value
            async with asyncio.timeout(self._step_timeout_s):
                return await metered
        except Retryable:
            raise
        except TrajectoryFailed as error:
            return Failure(error.kind, one_line(error))
        except Permanent as error:
            return Failure("invalid", one_line(error))
        except TimeoutError:
            return Failure("infrastructure", f"the environment took longer than {self._step_timeout_s:g} seconds")
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            return Failure("environment", f"CancelledError: nobody cancelled it{place_of(error)}")
        except (Exception, SystemExit) as error:
            return Failure("environment", f"{type(error).__name__}: {one_line(error)}{place_of(error)}")


def _weight_of(message: Message) -> float:
    """The weight of the message's tenant, where it says one."""
    if isinstance(message, TurnResult):
        return weight_in(message.request.context)
    return message.weight if isinstance(message, Start | GradeRequest) else 1.0


def _tools(environment: Environment | SessionSlot) -> Sequence[Mapping[str, Any]]:
    return getattr(environment, "tools", ())


async def _stepped(environment: Environment | SessionSlot, state: Any, turn: Turn) -> Step:
    """Raises EnvironmentFailed if what `step` returns is something else."""
    made: Any = environment.step(state, turn)
    step = await made if inspect.isawaitable(made) else made
    if made is step or not isinstance(step, Step):
        is_what = type(step).__name__
        raise EnvironmentFailed(f"step must be `async def`, and return env_service.environment.Step, not {is_what}")
    return step
