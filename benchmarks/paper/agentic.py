"""The environment `paper_agentic`: a question, and two to four calls of a tool that takes its time, as an API would.

The latency is drawn from a log-normal law and slept. How many calls a trajectory makes, and how long each takes, are
functions of the job's seed, group, sample and turn: the same under every policy.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

from common import rng
from common.tasks import skills
from env_service.environment import Step, Turn, item_messages

MIN_CALLS, MAX_CALLS = 2, 4
LATENCY_S, SPREAD = 0.5, 0.3
"""Median, and sigma of the logarithm."""

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression such as 347*86.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def place(key: str) -> tuple[int, int]:
    """(sample, turn) of a step named `job/group/sample/turn/attempt`."""
    _, _, sample, turn, _ = key.split("/")
    return int(sample), int(turn)


def num_calls(seed: int, sample: int) -> int:
    return MIN_CALLS + int(rng.bits(seed, "calls", sample)) % (MAX_CALLS - MIN_CALLS + 1)


def latency_s(seed: int, sample: int, turn: int) -> float:
    uniform = float(rng.uniform(seed, "latency", sample, turn))
    return LATENCY_S * math.exp(SPREAD * NormalDist().inv_cdf(min(max(uniform, 1e-9), 1 - 1e-9)))


class Agentic:
    """Every turn before the last is answered with the tool's result, whatever the model wrote; the last is graded."""

    tools: Sequence[Mapping[str, Any]] = (CALCULATOR,)

    def make_item(self, seed: int, held_out: bool) -> dict[str, Any]:
        return skills.generate("calc", seed, 1, "held_out" if held_out else "train")[0]

    def reset(self, item: dict[str, Any], seed: int) -> tuple[int, Sequence[Mapping[str, Any]]]:
        """The state is the group's seed."""
        return seed & 0x7FFFFFFF, item_messages(item)

    async def step(self, state: int, turn: Turn) -> Step:
        sample, number = place(turn.key)
        right = float(turn.text == turn.item["answer"])
        if turn.last or number >= num_calls(state, sample):
            return Step(state=state, done=True, reward=right)
        await asyncio.sleep(latency_s(state, sample, number))
        reply = {"role": "tool", "tool_call_id": "call_0", "content": turn.item["answer"]}
        return Step(state=state, done=False, messages=[reply], reward=right / MAX_CALLS)


class SlowTool(Agentic):
    """Each of so many calls takes `times` as long, and all samples of a group wait equally. Rewards odd samples."""

    def __init__(self, calls: int, times: float) -> None:
        self._calls, self._times = calls, times

    async def step(self, state: int, turn: Turn) -> Step:
        sample, number = place(turn.key)
        if turn.last or number >= self._calls:
            return Step(state=state, done=True, reward=float(sample % 2))
        await asyncio.sleep(self._times * latency_s(state, 0, number))
        reply = {"role": "tool", "tool_call_id": "call_0", "content": turn.item["answer"]}
        return Step(state=state, done=False, messages=[reply])
