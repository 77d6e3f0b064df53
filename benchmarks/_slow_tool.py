"""The environment `slow_tool`: each turn before the last waits for a tool that takes seconds, as a build or a simulation does.

All samples of a group wait equally long: their seconds are a function of the job's seed, the group and the turn, so that jobs wait for
the same tools wherever they run.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

from benchmarks.paper.agentic import CALCULATOR, Agentic, place
from common import rng
from env_service.environment import Step, Turn

SPREAD = 0.2
"""Sigma of the logarithm."""


class SlowTool(Agentic):
    """Rewards odd samples."""

    tools: Sequence[Mapping[str, Any]] = (CALCULATOR,)

    def __init__(self, calls: int, seconds: float) -> None:
        """`seconds`: the median of one call."""
        self._calls, self._seconds = calls, seconds

    async def step(self, state: int, turn: Turn) -> Step:
        sample, number = place(turn.key)
        if turn.last or number >= self._calls:
            return Step(state=state, done=True, reward=float(sample % 2))
        uniform = float(rng.uniform(state, "latency", 0, number))
        await asyncio.sleep(self._seconds * math.exp(SPREAD * NormalDist().inv_cdf(min(max(uniform, 1e-9), 1 - 1e-9))))
        return Step(state=state, done=False, messages=[{"role": "tool", "tool_call_id": "call_0", "content": "42"}])
