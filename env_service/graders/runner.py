"""Runs graders: an item and a sample in, a reward and its parts out. A grader that fails raises; it never gives 0."""

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

from common import formula
from common.errors import InvalidInput
from common.graders import (
    EndpointGrader,
    Grader,
    MathGrader,
    MultiGrader,
    PythonGrader,
    SingleGrader,
    StringCheck,
    TextSimilarity,
)
from common.messages import MAX_REWARD
from env_service import work
from env_service.failures import GraderFailed
from env_service.graders.attempt import Attempt
from env_service.graders.endpoint import Endpoints
from env_service.graders.text import TextComparer
from env_service.sandbox.sandbox import Sandbox


@dataclass(frozen=True, slots=True)
class Grade:
    reward: float
    """Finite."""
    parts: dict[str, float] = field(default_factory=dict[str, float])
    """Rewards of a `multi` grader's graders, by name; `passed` where there is a threshold."""


class GraderRunner:
    """Runs graders of all kinds. Safe to use from many tasks."""

    def __init__(
        self, *, sandbox: Sandbox, endpoints: Endpoints, text_comparer: TextComparer, timeout_s: float
    ) -> None:
        """`timeout_s`: of one grader, and of all graders of a `multi` together."""
        self._sandbox = sandbox
        self._endpoints = endpoints
        self._texts = text_comparer
        self._timeout_s = timeout_s

    async def grade(self, grader: Grader, attempt: Attempt, *, key: str) -> Grade:
        """`key` names this grading: a repeat has the same. Raises GraderFailed, with a reason for the job's owner."""
        allowance = work.Allowance(self._timeout_s)
        if isinstance(grader, MultiGrader):
            return await self._multi(grader, attempt, allowance, key)
        reward = await self._one(grader, attempt, allowance, key)
        threshold = getattr(grader, "pass_threshold", None)
        return Grade(reward, {} if threshold is None else {"passed": float(reward >= threshold)})

    async def _multi(self, grader: MultiGrader, attempt: Attempt, allowance: work.Allowance, key: str) -> Grade:
        parts: dict[str, float] = {}
        for name, part in grader.graders.items():
            if not allowance.left_s:
                raise GraderFailed(f"multi: its graders took longer than {allowance.seconds:g} seconds together")
            parts[name] = await self._one(part, attempt, allowance, f"{key}/{name}")
            await asyncio.sleep(0)  # others' turn
        try:
            return Grade(as_reward(formula.evaluate(grader.calculate_output, parts), "calculate_output"), parts)
        except InvalidInput as error:
            raise GraderFailed(f"calculate_output: {error}") from error

    async def _one(self, grader: SingleGrader, attempt: Attempt, allowance: work.Allowance, key: str) -> float:
        reward = as_reward(await self._single(grader, attempt, allowance, key), grader.type)
        work.beat()
        return reward

    async def _single(self, grader: SingleGrader, attempt: Attempt, allowance: work.Allowance, key: str) -> Any:
        try:
            match grader:
                case StringCheck() | TextSimilarity() | MathGrader():
                    return await self._texts.reward(grader, attempt, allowance)
                case PythonGrader():
                    return await self._python(grader, attempt, allowance)
                case EndpointGrader():
                    with allowance.spending():
                        return await self._endpoints.reward(
                            grader, attempt.item, attempt.sample, key=key, timeout_s=allowance.left_s
                        )
        except InvalidInput as error:
            raise GraderFailed(f"{grader.type}: {error}") from error

    async def _python(self, grader: PythonGrader, attempt: Attempt, allowance: work.Allowance) -> Any:
        outcome = await self._sandbox.run(
            grader.source, call="grade", arguments=[attempt.sample, attempt.item], timeout_s=allowance.left_s
        )
        allowance.spend(outcome.seconds)
        if outcome.ending != "ok":
            raise GraderFailed(f"python: {outcome.reason}")
        return outcome.value


def as_reward(value: Any, who: str) -> float:
    """Returns it as a float. Raises GraderFailed unless it is a finite number of sensible size; True and False are not."""
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
