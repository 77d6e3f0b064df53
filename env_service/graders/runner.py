"""Runs graders: an item and a sample in, a reward and its parts out. A grader that fails raises; it never gives 0."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common import formula, templates
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
from common.text.tokens import ToolCall
from env_service import work
from env_service.failures import GraderFailed
from env_service.graders.endpoint import Endpoints
from env_service.graders.math import MathChecker
from env_service.graders.text import TextComparer, string_check
from env_service.sandbox.sandbox import Sandbox


@dataclass(frozen=True, slots=True)
class Grade:
    reward: float
    """Finite."""
    parts: dict[str, float] = field(default_factory=dict[str, float])
    """Rewards of a `multi` grader's graders, by name; `passed` where there is a threshold."""


def make_sample(output_text: str, calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
    """Makes the view of the model's last turn that templates and graders have."""
    sample: dict[str, Any] = {"output_text": output_text, "output_tools": [_tool(i, c) for i, c in enumerate(calls)]}
    try:
        sample["output_json"] = json.loads(output_text)
    except (ValueError, RecursionError):
        sample["output_json"] = None
    return sample


def _tool(index: int, call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments) if call.error is None else call.text
    return {"id": f"call_{index}", "type": "function", "function": {"name": call.name, "arguments": arguments}}


class GraderRunner:
    """Runs graders of all kinds. Safe to use from many tasks."""

    def __init__(
        self,
        *,
        sandbox: Sandbox,
        endpoints: Endpoints,
        math_checker: MathChecker,
        text_comparer: TextComparer,
        timeout_s: float,
    ) -> None:
        self._sandbox = sandbox
        self._endpoints = endpoints
        self._math = math_checker
        self._texts = text_comparer
        self._timeout_s = timeout_s

    async def grade(self, grader: Grader, item: Mapping[str, Any], sample: Mapping[str, Any], *, key: str) -> Grade:
        """`key` names this grading: a repeat has the same. Raises GraderFailed, with a reason for the job's owner."""
        if isinstance(grader, MultiGrader):
            return await self._multi(grader, item, sample, key)
        reward = as_reward(await self._single(grader, item, sample, key), grader.type)
        work.beat()
        threshold = getattr(grader, "pass_threshold", None)
        return Grade(reward, {} if threshold is None else {"passed": float(reward >= threshold)})

    async def _multi(self, grader: MultiGrader, item: Mapping[str, Any], sample: Mapping[str, Any], key: str) -> Grade:
        parts: dict[str, float] = {}
        for name, part in grader.graders.items():
            parts[name] = (await self.grade(part, item, sample, key=f"{key}/{name}")).reward
        try:
            return Grade(as_reward(formula.evaluate(grader.calculate_output, parts), "calculate_output"), parts)
        except InvalidInput as error:
            raise GraderFailed(f"calculate_output: {error}") from error

    async def _single(self, grader: SingleGrader, item: Mapping[str, Any], sample: Mapping[str, Any], key: str) -> Any:
        try:
            match grader:
                case StringCheck():
                    return string_check(grader.operation, *_texts(grader, item, sample))
                case TextSimilarity():
                    metric, texts = grader.evaluation_metric, _texts(grader, item, sample)
                    return await self._texts.similarity(metric, *texts, timeout_s=self._timeout_s)
                case MathGrader():
                    text, reference = _texts(grader, item, sample)
                    return float(await self._math.equal(text, reference, timeout_s=self._timeout_s))
                case PythonGrader():
                    return await self._python(grader, item, sample)
                case EndpointGrader():
                    return await self._endpoints.reward(grader, item, sample, key=key, timeout_s=self._timeout_s)
        except InvalidInput as error:
            raise GraderFailed(f"{grader.type}: {error}") from error

    async def _python(self, grader: PythonGrader, item: Mapping[str, Any], sample: Mapping[str, Any]) -> Any:
        outcome = await self._sandbox.run(
            grader.source, call="grade", arguments=[sample, item], timeout_s=self._timeout_s
        )
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


def _texts(
    grader: StringCheck | TextSimilarity | MathGrader, item: Mapping[str, Any], sample: Mapping[str, Any]
) -> tuple[str, str]:
    return templates.render(grader.input, item, sample), templates.render(grader.reference, item, sample)
