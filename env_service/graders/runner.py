"""Runs graders: an item and a sample in, a reward and its parts out. A failing grader raises; it never gives 0."""

import asyncio
import math
from dataclasses import dataclass, field, replace
from typing import Any

from common.errors import InvalidInput
from common.tasks import formula
from common.tasks.graders import (
    EndpointGrader,
    Grader,
    LabelModel,
    MathGrader,
    ModelGrader,
    MultiGrader,
    PythonGrader,
    ScoreModel,
    SingleGrader,
    StringCheck,
    TextSimilarity,
)
from common.wire.messages import MAX_REWARD
from env_service import work
from env_service.failures import GraderFailed
from env_service.graders.attempt import Attempt
from env_service.graders.endpoint import Endpoints
from env_service.graders.model import ModelAsked, ModelEndpoints, question_of, reward_of
from env_service.graders.text import TextComparer
from env_service.sandbox.sandbox import Sandbox


@dataclass(frozen=True, slots=True)
class Grade:
    reward: float
    """Finite."""
    parts: dict[str, float] = field(default_factory=dict[str, float])
    """Rewards of a `multi` grader's graders, by name; `passed` where there is a threshold."""


@dataclass(frozen=True, slots=True)
class Grading:
    """One grading, or one grader's part in it."""

    attempt: Attempt
    allowance: work.Allowance
    key: str
    """A repeat has the same."""
    name: str = ""
    """The name of the grader in a `multi`."""


class GraderRunner:
    """Runs graders of all kinds. Safe to use from many tasks."""

    def __init__(
        self,
        *,
        sandbox: Sandbox,
        endpoints: Endpoints,
        text_comparer: TextComparer,
        timeout_s: float = 10.0,
        models: ModelEndpoints | None = None,
    ) -> None:
        """`timeout_s`: of a grader, and of all in a `multi`; models have their own. `models`: elsewhere; None: no host."""
        self._sandbox = sandbox
        self._endpoints = endpoints
        self._texts = text_comparer
        self._timeout_s = timeout_s
        self._models = models or ModelEndpoints(Endpoints(""))

    async def grade(self, grader: Grader, attempt: Attempt, *, key: str) -> Grade:
        """`key`: the same for a repeat of this grading. Raises GraderFailed, with a reason for the job's owner, and
        ModelAsked if a model of this service must answer first."""
        grading = Grading(attempt, work.Allowance(self._timeout_s), key)
        if isinstance(grader, MultiGrader):
            return await self._multi(grader, grading)
        reward = await self._one(grader, grading)
        threshold = getattr(grader, "pass_threshold", None)
        return Grade(reward, {} if threshold is None else {"passed": float(reward >= threshold)})

    async def _multi(self, grader: MultiGrader, grading: Grading) -> Grade:
        """Models of this service answer first: if one asks, all begin again."""
        rewards: dict[str, float] = {}
        for name, part in sorted(grader.graders.items(), key=lambda named: not _asks_here(named[1])):
            if not grading.allowance.left_s:
                raise GraderFailed(
                    f"multi: its graders took longer than {grading.allowance.seconds:g} seconds together"
                )
            rewards[name] = await self._one(part, replace(grading, key=f"{grading.key}/{name}", name=name))
            await asyncio.sleep(0)  # others' turn
        parts = {name: rewards[name] for name in grader.graders}
        try:
            return Grade(as_reward(formula.evaluate(grader.calculate_output, parts), "calculate_output"), parts)
        except InvalidInput as error:
            raise GraderFailed(f"calculate_output: {error}") from error

    async def _one(self, grader: SingleGrader, grading: Grading) -> float:
        reward = as_reward(await self._single(grader, grading), grader.type)
        work.beat()
        return reward

    async def _single(self, grader: SingleGrader, grading: Grading) -> Any:
        attempt, allowance = grading.attempt, grading.allowance
        try:
            match grader:
                case StringCheck() | TextSimilarity() | MathGrader():
                    return await self._texts.reward(grader, attempt, allowance)
                case PythonGrader():
                    return await self._python(grader, attempt, allowance)
                case EndpointGrader():
                    with allowance.spending():
                        return await self._endpoints.reward(
                            grader, attempt, key=grading.key, timeout_s=allowance.left_s
                        )
                case ScoreModel() | LabelModel():
                    return reward_of(grader, await self._answer(grader, grading))
        except InvalidInput as error:
            raise GraderFailed(f"{grader.type}: {error}") from error

    async def _answer(self, grader: ScoreModel | LabelModel, grading: Grading) -> str:
        """Raises ModelAsked if it is not there yet."""
        question, doing = question_of(grader, grading.attempt), work.current()
        answer = doing.answers.get(grading.name)
        if answer is None:
            if grader.url is None:
                raise ModelAsked(grading.name, question)
            answer = await self._models.ask(grader.url, question, key=grading.key)
        doing.verdicts.append(question.answered(grading.name or grader.type, answer))
        return answer

    async def _python(self, grader: PythonGrader, attempt: Attempt, allowance: work.Allowance) -> Any:
        outcome = await self._sandbox.run(
            grader.source,
            call="grade",
            arguments=[attempt.unparsed, attempt.item],
            parsed=("output_json", "output_text"),
            timeout_s=allowance.left_s,
        )
        allowance.spend(outcome.seconds)
        if outcome.ending != "ok":
            raise GraderFailed(f"python: {outcome.reason}")
        return outcome.value


def _asks_here(grader: SingleGrader) -> bool:
    return isinstance(grader, ModelGrader) and grader.url is None


def as_reward(value: Any, who: str) -> float:
    """A float. Raises GraderFailed unless it is a finite number of sensible size; True and False are not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        shown = "nothing" if value is None else repr(value)[:60]
        hint = "; write float(...)" if isinstance(value, bool) else ""
        raise GraderFailed(f"{who}: gave {shown}, not a finite number{hint}")
    try:
        reward = float(value)
    except OverflowError as error:
        raise GraderFailed(f"{who}: gave a number that is too large") from error
    if not math.isfinite(reward):
        raise GraderFailed(f"{who}: gave {reward}, not a finite number")
    if abs(reward) > MAX_REWARD:
        raise GraderFailed(f"{who}: gave {reward}; rewards are at most {MAX_REWARD:.0e} in size")
    return reward
