"""Asks for the largest of some numbers, then twice for the largest of the player's own answer and new ones.

Each right answer earns a third. A conversation: "max 14,92,7", "92", "max 92,5,63", "92", "max 92,11,95", "95".
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownParameterType=false

import random
from typing import Any
from uuid import uuid4

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import State

from examples.largest_env.models import LargestAction, LargestObservation

NUM_QUESTIONS = 3


class LargestEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS: bool = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id=str(uuid4()), step_count=0)
        self._random = random.Random()
        self._numbers: list[int] = []

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> LargestObservation:
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        self._random = random.Random(seed)
        self._numbers = [self._random.randrange(100) for _ in range(3)]
        return LargestObservation(question=self._question(), done=False, reward=0.0)

    def step(self, action: LargestAction) -> LargestObservation:
        self._state.step_count += 1
        right = max(self._numbers)
        is_number = action.answer.isascii() and action.answer.isdecimal() and len(action.answer) <= 2
        answer = int(action.answer) if is_number else right
        self._numbers = [answer, *(self._random.randrange(100) for _ in range(2))]
        return LargestObservation(
            question=self._question(),
            done=self._state.step_count == NUM_QUESTIONS,
            reward=float(action.answer == str(right)) / NUM_QUESTIONS,
        )

    @property
    def state(self) -> State:
        return self._state

    def _question(self) -> str:
        return f"max {','.join(map(str, self._numbers))}"
