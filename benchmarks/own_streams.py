"""Compares rollout workers that have streams of their own with workers that read what is for all.

    python -m benchmarks.own_streams [--slots 32] [--seconds 20] [--rounds 3] [--json FILE]

Four workers at a given pace (`_paced_rollout`) and an env worker whose tools wait. As many trajectories are under way as fill all
slots 1.2 times. The two kinds of workers take turns.

    four turns         32 jobs, turns of 4 to 40 tokens: how many later turns met the keys and values of those before
    few LoRA places    32 jobs of such trajectories, and each worker batches rows of 8 adapters: tokens a second
    short answers      one job, single turns of 2 to 8 tokens: tokens a second
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from benchmarks._paced_rollout import CELL, PacedCore, working
from benchmarks._report import Goal, Report, in_turns_async, make_table, ratio, run
from benchmarks.rollout import request
from common.bus.bus import Bus, Out
from common.bus.streams import GROUP_ENV, GROUP_ROLLOUT
from common.cancellation import running
from common.wire.messages import BASE, AdapterRef, Failure, Sampling, TrajectoryRef, TurnResult, turn_id
from common.wire.transcript import shown
from common.worker.handlers import Beat
from common.worker.telemetry import About, Reporter
from common.worker.worker import Habits, Inbox, Worker
from harness.redis_server import embedded_redis
from manager_service.owner.jobs.orders import home_of

NUM_WORKERS, NUM_JOBS, LOAD = 4, 32, 1.2
STEP_S, ROW_S = 0.1, 0.0005
TOOL_S = 0.3
PROMPT, REPLY = range(97, 113), range(97, 105)
WARM_UP_S = 3.0
JOBS = [AdapterRef("acme", f"job-{n}", 1) for n in range(NUM_JOBS)]


@dataclass(frozen=True, slots=True)
class Case:
    adapters: Sequence[AdapterRef]
    num_turns: int
    tokens: tuple[int, int]
    has_homes: bool = False


CASES = {
    "four turns": Case([BASE], 4, (4, 40)),
    "few LoRA places": Case(JOBS, 4, (4, 40), has_homes=True),
    "short answers": Case([BASE], 1, (2, 8)),
}


@dataclass
class Talking:
    """The env worker's handler: each trajectory goes on until it ends, and another of its job begins."""

    case: Case
    random: random.Random
    workers: Sequence[str] = ()
    """Homes of jobs; none: they have none."""
    num_tokens: int = 0
    num_begun: int = 0
    of_jobs: dict[str, int] = field(default_factory=dict[str, int])

    async def __call__(self, message: TurnResult, beat: Beat) -> list[Out]:
        self.num_tokens += len(message.tokens)
        asked, turn = message.request, message.request.turn + 1
        if turn == self.case.num_turns:
            return [self.begin(asked.adapter)]
        await asyncio.sleep(self.random.uniform(0, TOOL_S))
        whole, name = message.so_far + shown(REPLY), turn_id(asked.job, asked.trajectory, 1, turn)
        following = msgspec.structs.replace(asked, id=name, turn=turn, transcript=whole, num_partial=0)
        to = CELL.rollout_worker(message.worker) if message.worker else CELL.rollout_first
        return [(to, msgspec.structs.replace(following, sampling=self.sampling()))]

    def begin(self, adapter: AdapterRef) -> Out:
        self.num_begun += 1
        ref = TrajectoryRef("train", 1, self.num_begun, 0)
        first = request(adapter, list(PROMPT), 0, 1)
        name = turn_id(adapter.job, ref, 1, 0)
        made = msgspec.structs.replace(first, id=name, trajectory=ref, sampling=self.sampling())
        return (CELL.rollout_worker(home_of(adapter.job, self.workers)) if self.workers else CELL.rollout), made

    def sampling(self) -> Sampling:
        return Sampling(max_tokens=self.random.randint(*self.case.tokens), stop_ids=())

    def hand_back(self, message: Any) -> list[Out] | None:
        return None

    def failed(self, message: Any, failure: Failure) -> list[Out]:
        raise AssertionError(failure)


@dataclass(frozen=True, slots=True)
class Found:
    speed: float  # tokens a second
    hits: float  # share of later turns that met the keys and values of those before


async def measure(url: str, case: Case, given: Any, *, own_streams: bool) -> Found:
    bus, talking = Bus.connect(url, CELL), Talking(case, random.Random(0))
    await bus.client.flushall()
    await bus.ensure_group(CELL.rollout, GROUP_ROLLOUT)
    stop, reporter = asyncio.Event(), Reporter("env-0", "env", CELL.base_model, About(slots=10_000))
    env = Worker(bus, talking, [Inbox(CELL.env, GROUP_ENV)], reporter, habits=Habits())
    jobs = [job for job in case.adapters if job != BASE]
    async with contextlib.AsyncExitStack() as stack:
        for_each: dict[str, Any] = {"own_streams": own_streams, "jobs": jobs}
        cores = [PacedCore(STEP_S, ROW_S) for _ in range(NUM_WORKERS)]
        engines = [await stack.enter_async_context(working(url, 10.0, given.slots, core, **for_each)) for core in cores]
        (task,) = await stack.enter_async_context(running(env.run(stop)))
        if own_streams and case.has_homes:
            there: Any = await bus.client.zrange(CELL.rollout_workers, 0, -1)
            talking.workers = [each.decode() for each in there]
        num = round(LOAD * NUM_WORKERS * given.slots)
        await bus.publish([talking.begin(case.adapters[n % len(case.adapters)]) for n in range(num)])
        await asyncio.sleep(min(WARM_UP_S, given.seconds))
        before = talking.num_tokens, sums(engines)
        await asyncio.sleep(given.seconds)
        tokens, (hits, later) = talking.num_tokens - before[0], sums(engines)
        stop.set()
        await task
    await bus.close()
    return Found(tokens / given.seconds, (hits - before[1][0]) / max(1.0, later - before[1][1]))


def sums(engines: Sequence[Any]) -> tuple[float, float]:
    counters = [engine.counters() for engine in engines]
    return sum(each["kv_hits"] for each in counters), sum(each["later_turns"] for each in counters)


async def compare(given: Any) -> dict[str, dict[bool, list[Found]]]:
    found: dict[str, dict[bool, list[Found]]] = {}
    with embedded_redis() as server:
        for name, case in CASES.items():

            async def one(own: bool, case: Case = case) -> Found:
                return await measure(server.url, case, given, own_streams=own)

            contenders = {own: (lambda own=own: one(own)) for own in (False, True)}
            found[name] = await in_turns_async(contenders, given.rounds, warm_up=0)
    return found


def report(given: Any) -> Report:
    found = asyncio.run(compare(given))
    rows = [
        (
            f"{name}, {'own' if own else 'for all'}",
            *(sum(values) / len(values) for values in zip(*map(_row, each), strict=True)),
        )
        for name, kinds in found.items()
        for own, each in kinds.items()
    ]
    gain = {
        name: 100 * (ratio([e.speed for e in kinds[True]], [e.speed for e in kinds[False]]) - 1)
        for name, kinds in found.items()
    }
    hits = 100 * min(each.hits for each in found["four turns"][True])
    return Report(
        [make_table("Streams of single rollout workers", ("", "tokens/s", "% that met their keys"), rows)],
        {"gain_percent": gain, "rows": rows},
        [
            Goal("later turns that met their keys and values", hits, 90, " %"),
            Goal("more tokens/s with few LoRA places", gain["few LoRA places"], 50, " %"),
            Goal("more tokens/s of short answers", gain["short answers"], -2, " %"),
        ],
    )


def _row(found: Found) -> tuple[float, float]:
    return found.speed, 100 * found.hits


if __name__ == "__main__":
    run(__doc__, report, {"slots": 8, "seconds": 1, "rounds": 1}, slots=32, seconds=20, rounds=3)
