"""Compares rollout workers that have streams of their own with workers that read what is for all, on the torch engine.

    python -m benchmarks.later_turns [--jobs 4] [--steps 3] [--conversations 8] [--turns 6] [--rounds 2] [--json FILE]

A whole cluster with two rollout workers. The two kinds of workers take turns.

    agentic   jobs of `benchmarks.paper`, whose trajectories call a tool two to four times
    chat      conversations through the HTTP API at once; each message follows the answer to the one before

The tokens that the engines prefill for a trajectory, or a conversation, and the seconds until the last has ended.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import astuple, dataclass
from typing import Any

from benchmarks._report import Goal, Report, at_most, in_turns_async, make_table, ratio, run
from benchmarks.paper.measure import REPORTED_S, make_tenant, running, train
from benchmarks.paper.workloads import WORKLOADS
from common.tasks.skills import WORDS
from harness.live import Api

AGENTIC = WORKLOADS["agentic"]
THINK_S, NUM_WORDS, MAX_TOKENS = 0.2, 12, 24
Work = Callable[[Api, Any], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Found:
    prefilled: float  # tokens of one trajectory or conversation
    seconds: float


async def agentic(admin: Api, given: Any) -> int:
    """Trains the jobs; returns how many trajectories were issued."""

    async def one(number: int) -> int:
        api = await admin.tenant(f"job-{number}")
        job = (await api.post("/fine_tuning/jobs", AGENTIC.body(number, None, given.steps)))["id"]
        (done,) = await api.until_done(job, seconds=1800)
        assert done["status"] == "succeeded", done
        issued = (await api.ledger(job))["issued"]
        await api.close()
        return issued

    return sum(await asyncio.gather(*map(one, range(given.jobs))))


async def chat(admin: Api, given: Any) -> int:
    """Holds the conversations; returns how many."""
    api = await admin.tenant("chat")

    async def one(number: int) -> None:
        rng, messages = random.Random(number), list[dict[str, str]]()
        for _ in range(given.turns):
            await asyncio.sleep(rng.uniform(0, THINK_S))
            messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=NUM_WORDS))})
            body = {"model": "tiny", "messages": messages, "max_tokens": MAX_TOKENS, "seed": number}
            answer = (await api.post("/chat/completions", body))["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": answer})

    await asyncio.gather(*map(one, range(given.conversations)))
    await api.close()
    return given.conversations


async def prefilled(admin: Api) -> float:
    """Tokens that all rollout workers have computed before turns."""
    await asyncio.sleep(REPORTED_S)
    workers = (await admin.get("/cluster/workers"))["data"]
    return sum(worker["counters"]["prefill_tokens"] for worker in workers if worker["service"] == "rollout")


async def measure(work: Work, given: Any, *, own_streams: bool) -> Found:
    settings = {"MARLAAS_OWN_STREAMS": str(int(own_streams))}
    async with running(AGENTIC, "marlaas", settings, rollout=2) as cluster:
        admin = Api(cluster.base_url, cluster.admin_key)
        first = await make_tenant(admin, "first", AGENTIC)
        await train(first, AGENTIC.body(0, first.file, 1, batch_size=1, group_size=2))
        before, since_s = await prefilled(admin), time.perf_counter()
        number = await work(admin, given)
        seconds = time.perf_counter() - since_s
        found = Found((await prefilled(admin) - before) / number, seconds)
        for each in (admin, first.api):
            await each.close()
    return found


async def compare(work: Work, given: Any) -> dict[bool, list[Found]]:
    contenders = {own: (lambda own=own: measure(work, given, own_streams=own)) for own in (False, True)}
    return await in_turns_async(contenders, given.rounds, warm_up=0)


def report(given: Any) -> Report:
    rows: list[tuple[Any, ...]] = []
    goals: list[Goal] = []
    for work in (agentic, chat):
        found = asyncio.run(compare(work, given))
        for own, each in found.items():
            means = [sum(values) / len(values) for values in zip(*map(astuple, each), strict=True)]
            rows.append((f"{work.__name__}, {'own' if own else 'for all'}", *means))
        tokens, seconds = (
            ratio(*([getattr(each, of) for each in found[own]] for own in (True, False))) for of in Found.__slots__
        )
        goals.append(at_most(f"prefilled tokens, {work.__name__}", tokens, 1, " x"))
        goals.append(at_most(f"seconds, {work.__name__}", seconds, 1.05, " x"))
    table = make_table("Two rollout workers", ("streams", "prefilled tokens", "s"), rows)
    return Report([table], {"rows": rows}, goals)


if __name__ == "__main__":
    quick = {"jobs": 1, "steps": 1, "conversations": 2, "turns": 2, "rounds": 1}
    run(__doc__, report, quick, jobs=4, steps=3, conversations=8, turns=6, rounds=2)
