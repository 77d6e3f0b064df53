"""One question, one answer, one grader."""

from collections.abc import Mapping, Sequence
from typing import Any

from common.tasks.graders import Grader
from env_service.environment import Step, Turn, item_messages
from env_service.graders.attempt import Attempt, tools_of
from env_service.graders.runner import GraderRunner


class SingleTurn:
    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, grader: Grader, graders: GraderRunner) -> None:
        self._grader = grader
        self._graders = graders

    def reset(self, item: dict[str, Any], seed: int) -> tuple[None, Sequence[Mapping[str, Any]]]:
        return None, item_messages(item)

    async def step(self, state: None, turn: Turn) -> Step:
        attempt = Attempt(turn.item, turn.text, tools_of(turn.calls))
        grade = await self._graders.grade(self._grader, attempt, key=turn.key)
        return Step(state=None, done=True, reward=grade.reward, parts=grade.parts)
