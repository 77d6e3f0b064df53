"""Measures how a cell's rollout workers are shared when a managed job, a run of the Tinker protocol and a chat ask for more than there is.

    make tinker                                              # once: installs the SDK in .tinker
    python -m benchmarks.three_kinds [--seconds 40] [--json FILE]

Three tenants of weights 1, 2 and 1, of all of which there is always more to do: jobs whose trajectories may be two versions old, clients of
the SDK that sample 8 times 32 answers at once, and 64 completions at a time. Counted from the moment all three are served: busy
seconds of the rollout workers by tenant, as `/v1/usage` tells them, against the parts of the weights.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from benchmarks._report import Goal, Report, make_table, run
from harness.live import Api, running
from manager_service.local.supervisor import LocalCluster

PYTHON, SAMPLING = Path(".tinker/bin/python"), Path(__file__).with_name("_tinker_sampling.py")
WEIGHTS = {"job": 1.0, "run": 2.0, "chat": 1.0}
WITHIN = 0.1
WARM_UP_S = 20.0
NUM_CHATS, MAX_TOKENS = 64, 32
NUM_JOBS = 8
PLAIN = "User: What is 37 + 58?\n\nAssistant:"
"""Without the chat template `tiny` does not end its turn, so that an answer has MAX_TOKENS."""
COUNTER = "rollout_s"


@dataclass(frozen=True, slots=True)
class Share:
    tenant: str
    weight: float
    due: float
    got: float
    sampled_tokens: int


async def job(cluster: LocalCluster, api: Api) -> None:
    many: dict[str, Any] = {"max_steps": 1000, "batch_size": 8, "group_size": 8, "max_staleness": 2}
    await api.until_done(*[await api.submit("sort", seed=n, **many) for n in range(NUM_JOBS)], seconds=3600)


async def tinker(cluster: LocalCluster, api: Api) -> None:
    own = {"TINKER_BASE_URL": cluster.base_url, "TINKER_API_KEY": f"tml-{api.key}", "TINKER_TELEMETRY": "0"}
    process = await asyncio.create_subprocess_exec(str(PYTHON), str(SAMPLING), env={**os.environ, **own})
    try:
        raise SystemExit(f"error: the SDK's client ended with {await process.wait()}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def chat(cluster: LocalCluster, api: Api) -> None:
    async def one(client: AsyncOpenAI) -> None:
        while True:
            await client.completions.create(model="tiny", prompt=PLAIN, max_tokens=MAX_TOKENS)

    async with AsyncOpenAI(base_url=f"{cluster.base_url}/v1", api_key=api.key, timeout=300) as client:
        await asyncio.gather(*(one(client) for _ in range(NUM_CHATS)))


KINDS = {"job": job, "run": tinker, "chat": chat}


@asynccontextmanager
async def at_work(*work: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
        if ended := [task for task in tasks if task.done()]:
            raise SystemExit(f"error: a client has ended: {ended[0].exception()}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(seconds: int) -> list[Share]:
    async with running() as (cluster, _):
        admin = Api(cluster.base_url, cluster.admin_key)
        tenants = {name: await admin.tenant(name, weight=weight) for name, weight in WEIGHTS.items()}
        async with at_work(*(KINDS[name](cluster, api) for name, api in tenants.items())):
            await asyncio.sleep(WARM_UP_S)
            before = await used(tenants)
            await asyncio.sleep(seconds)
            after = await used(tenants)
        for api in (admin, *tenants.values()):
            await api.close()
    spent = {name: after[name][COUNTER] - before[name][COUNTER] for name in WEIGHTS}
    return [
        Share(
            tenant=name,
            weight=weight,
            due=weight / sum(WEIGHTS.values()),
            got=spent[name] / sum(spent.values()),
            sampled_tokens=after[name]["sampled_tokens"] - before[name]["sampled_tokens"],
        )
        for name, weight in WEIGHTS.items()
    ]


async def used(tenants: dict[str, Api]) -> dict[str, Any]:
    return {name: (await api.get("/usage"))["total"] for name, api in tenants.items()}


def report(given: Any) -> Report:
    if not PYTHON.exists():
        raise SystemExit("error: the tinker SDK is not installed: make tinker")
    found = asyncio.run(measure(given.seconds))
    rows = [(each.tenant, each.weight, each.due, each.got, each.sampled_tokens) for each in found]
    table = make_table("Three kinds of work", ("tenant", "weight", "due", "got", "sampled tokens"), rows)
    worst = max(abs(each.got / each.due - 1) for each in found)
    goal = Goal("worst distance from the part that is due", worst, WITHIN, more_is_better=False)
    return Report([table], [{name: getattr(each, name) for name in Share.__slots__} for each in found], [goal])


if __name__ == "__main__":
    run(__doc__, report, seconds=40)
