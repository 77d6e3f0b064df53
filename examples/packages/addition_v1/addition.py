"""Sums of two numbers, as a taskset of `verifiers.v1`: nothing here knows who trains on it."""

import random
from collections.abc import Iterator
from functools import cache

import httpx
import verifiers.v1 as vf

__all__ = ["AdditionHarness", "AdditionTaskset"]


class AdditionData(vf.TaskData):
    answer: str


class AdditionTask(vf.Task[AdditionData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class AdditionConfig(vf.TasksetConfig):
    num_tasks: int = 2000


class AdditionTaskset(vf.Taskset[AdditionTask, AdditionConfig]):
    def load(self) -> Iterator[AdditionTask]:
        rng = random.Random(0)
        for _ in range(self.config.num_tasks):
            a, b = rng.randrange(10, 100), rng.randrange(10, 100)
            yield AdditionTask(AdditionData(prompt=f"add {a}+{b}", answer=str(a + b)), self.config.task)


class AdditionHarness(vf.Harness[vf.HarnessConfig]):
    """Asks once, in this process; the harnesses that come with verifiers start a program for each trajectory."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        headers = {"Authorization": f"Bearer {secret}"}
        answer = await connection().post(f"{endpoint}/chat/completions", json=body, headers=headers)
        answer.raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


@cache
def connection() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=None)
