"""The environment `simulated_user`: a user who goes on talking. Copy it for one of your own.

A package makes it known to MARLaaS by two lines of its `pyproject.toml`; install it where the manager and the env workers run:

    [project.entry-points."marlaas.environments"]
    simulated_user = "examples.simulated_user:SimulatedUser"

A trajectory, as `tiny` sees it: user "max 14,92,7", answer "92", user "max 92,5,63", answer "many", user "that is no number",
user "max 92,11,95", answer "95".
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from env_service.environment import Step, Turn

NUM_TURNS = 3


class SimulatedUser:
    """Asks for the largest of some numbers, then for the largest of the model's own answer and new ones. Each right answer earns
    its share of 1."""

    reply_roles = ("user",)

    def make_item(self, seed: int, held_out: bool) -> dict[str, Any]:
        rng = random.Random(seed)
        return {"numbers": [[rng.randrange(100) for _ in range(n)] for n in (3, *[2] * (NUM_TURNS - 1))]}

    def reset(self, item: dict[str, Any], seed: int) -> tuple[int, Sequence[Mapping[str, Any]]]:
        """The state is the right answer to the last question."""
        first = item["numbers"][0]
        return max(first), [_asked(first)]

    async def step(self, state: int, turn: Turn) -> Step:
        reward = float(turn.text == str(state)) / NUM_TURNS
        if turn.last or turn.index + 1 == NUM_TURNS:
            return Step(state=state, done=True, reward=reward)
        is_number = turn.text.isascii() and turn.text.isdecimal() and len(turn.text) <= 2
        numbers = [int(turn.text) if is_number else state, *turn.item["numbers"][turn.index + 1]]
        told = [] if is_number else [{"role": "user", "content": "that is no number"}]
        return Step(state=max(numbers), messages=[*told, _asked(numbers)], done=False, reward=reward)


def _asked(numbers: Sequence[int]) -> dict[str, str]:
    return {"role": "user", "content": f"max {','.join(map(str, numbers))}"}
