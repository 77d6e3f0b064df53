"""Measures how soon a killed worker's turns and a neighbour's chats go on where no slot is free, and its calls beside lists.

    python -m benchmarks.takeover [--lease-s 2] [--orphans 20] [--rounds 3] [--slots 32] [--chats 30] [--jobs 100] [--json FILE]

A worker holds turns and is never heard again. It computes nothing: it takes no processor from the others before, and gives them none
after. Its turns have sampled some tokens already, as those of which progress is kept. Three workers with real engines take over, each
with all of its slots taken by turns of its own, and with more of these waiting. An orphan goes on when its handler begins. The
survivors' speed are the tokens a second of their own turns from the kill until a lease and 2 s later, against the same window of a run
without a kill; the median of some rounds. Redis is the one of `marlaas up`.

The chats go one after another through the API of a cluster as `marlaas up` starts it, while another tenant has 10 requests of 64 samples
under way, of each of the lengths SAMPLES in turn. What counts is the time to the first token. Lists of models, as many as chats, are
asked for beside each of FLOODS, of another tenant with so many jobs. Each round has all of these in turn; its 95th percentiles are
compared with each other, and the median of the rounds is shown. It takes about 7 minutes.
"""

import asyncio
import json
import random
import statistics
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from base_model.decoder import Decoder
from base_model.device import prepare_cpu
from benchmarks._report import Goal, Report, make_table, run
from benchmarks.rollout import NoEnd, request
from common.bus.bus import Bus, Out
from common.bus.streams import GROUP_ROLLOUT, Cell
from common.cancellation import cancel_all, running
from common.settings import TINY
from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.wire.messages import BASE, TurnRequest
from common.wire.transcript import wrote
from common.worker.telemetry import About, Reporter
from common.worker.worker import Habits, Inbox, Worker
from harness import live
from harness.floods import keep_asking, keep_sampling
from harness.redis_server import embedded_redis
from rollout_service.adapters import AdapterCache
from rollout_service.embedded.backbone.fused import FusedDecoder
from rollout_service.embedded.pools import EngineLimits
from rollout_service.embedded.torch_engine import TorchEngine
from rollout_service.handler import RolloutHandler

CELL = Cell("tiny")
NUM_WORKERS = 3
OWN_TOKENS = (100, 300)
"""Tokens of the survivors' own turns, at least and at most."""
SAMPLED, LEFT = 100, 200
"""Tokens of an orphan that were sampled before the kill, and those to come."""
WARM_S = 3.0
"""Seconds until all slots have a turn, at different places."""
FLOODS = {
    "nothing": (0, ""),
    "40 lists of models": (40, "/models"),
    "40 lists of jobs": (40, "/fine_tuning/jobs?limit=100"),
    "16 downloads of 20 MB": (16, "/adapters/content?model={model}"),
}
"""Requests that are always under way: their number, and the path that they ask for."""
QUICK = {"lease_s": 1, "rounds": 1, "chats": 10, "jobs": 2}
SAMPLES = (16, 64, 500)
"""Tokens of the samples beside which there are chats."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    lease_s: float
    num_orphans: int
    slots: int
    """Slots of each worker."""
    kills: bool


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens of the survivors' own turns, and when each orphan went on: seconds since the kill, sorted."""

    per_s: float
    waits_s: list[float]


class Counting(RolloutHandler):
    """Counts the tokens of turns that were not taken over."""

    def __init__(self, engine: TorchEngine, objects: Objects) -> None:
        async def send_delta(*_: object) -> None: ...

        super().__init__(engine, AdapterCache(AdapterStore(objects), engine, idle_bytes=0), CELL, send_delta=send_delta)
        self._ended = 0
        self._under_way: set[str] = set()
        self.orphans_at: dict[str, float] = {}  # monotonic

    async def __call__(self, message: TurnRequest, beat: Callable[[], None]) -> list[Out]:
        if message.num_partial:
            self.orphans_at.setdefault(message.id, time.monotonic())
            return await super().__call__(message, beat)
        self._under_way.add(message.id)
        try:
            return await super().__call__(message, beat)
        finally:
            self._under_way.remove(message.id)
            self._ended += self._sampled(message.id, message.sampling.max_tokens)

    @property
    def tokens(self) -> int:
        return self._ended + sum(self._sampled(turn, 0) for turn in self._under_way)

    def _sampled(self, turn: str, default: int) -> int:
        partial = self._engine.partial(turn)
        return default if partial is None else partial.num_sampled


def turn(name: str, num_tokens: int, num_partial: int = 0) -> TurnRequest:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    asked = request(BASE, rng.integers(97, 122, 16 + num_partial), 0, num_partial + num_tokens)
    sampled = wrote(asked.tokens.numpy()[16:], np.zeros(num_partial))
    return replace(asked, id=name, transcript=asked.transcript.first(16) + sampled, num_partial=num_partial)


async def measure(url: str, objects: Objects, case: Case) -> Speed:
    """Over a lease and 2 s, from the kill on or, without one, from the same moment on."""
    bus = Bus.connect(url, CELL)
    for stream in (CELL.rollout_first, CELL.rollout):
        await bus.ensure_group(stream, GROUP_ROLLOUT)
    await bus.publish([(CELL.rollout, turn(f"orphan-{n}", LEFT, SAMPLED)) for n in range(case.num_orphans)])
    held = await bus.read([CELL.rollout], GROUP_ROLLOUT, "killed", count=case.num_orphans)
    rng, num_own = random.Random(1), NUM_WORKERS * case.slots * 20
    await bus.publish([(CELL.rollout, turn(f"own-{n}", rng.randint(*OWN_TOKENS))) for n in range(num_own)])
    async with surviving(url, objects, case) as handlers:
        renewing = asyncio.create_task(_renew(bus, [delivery.entry for delivery in held], case.lease_s))
        await asyncio.sleep(WARM_S)
        if case.kills:
            await cancel_all([renewing])
        found = await _speed(handlers, case.lease_s + 2)
        await cancel_all([renewing])
    await bus.close()
    return found


async def _renew(bus: Bus, entries: Sequence[str], lease_s: float) -> None:
    """Runs until the worker is killed."""
    try:
        while True:
            await asyncio.sleep(lease_s / 3)
            await bus.renew(CELL.rollout, GROUP_ROLLOUT, "killed", entries)
    finally:
        await bus.renew(CELL.rollout, GROUP_ROLLOUT, "killed", entries)


async def _speed(handlers: Sequence[Counting], seconds: float) -> Speed:
    since, before = time.monotonic(), sum(handler.tokens for handler in handlers)
    await asyncio.sleep(seconds)
    num = sum(handler.tokens for handler in handlers) - before
    waits_s = sorted(at - since for handler in handlers for at in handler.orphans_at.values())
    return Speed(num / (time.monotonic() - since), waits_s)


@asynccontextmanager
async def surviving(url: str, objects: Objects, case: Case) -> AsyncGenerator[list[Counting]]:
    """Workers with an engine each."""
    prepare_cpu(1)
    decoder = Decoder.load(TINY, max_context=1024)
    limits = EngineLimits(slots=2 * case.slots, kv_bytes=256 << 20)
    engines = [TorchEngine(FusedDecoder(decoder, exact=False), NoEnd(), limits=limits) for _ in range(NUM_WORKERS)]
    buses, stop = [Bus.connect(url, CELL) for _ in engines], asyncio.Event()
    handlers = [Counting(engine, objects) for engine in engines]
    for engine in engines:
        await engine.start()
    workers = [_worker(*each, case) for each in zip(buses, handlers, range(NUM_WORKERS), strict=True)]
    tasks = [asyncio.create_task(worker.run(stop)) for worker in workers]
    yield handlers
    stop.set()
    await asyncio.wait(tasks)
    for engine, bus in zip(engines, buses, strict=True):
        await engine.stop()
        await bus.close()


def _worker(bus: Bus, handler: Counting, number: int, case: Case) -> Worker:
    reporter = Reporter(f"survivor-{number}", "rollout", CELL.base_model, About(slots=case.slots))
    inboxes = [Inbox(CELL.rollout_first, GROUP_ROLLOUT), Inbox(CELL.rollout, GROUP_ROLLOUT)]
    habits = Habits(progress_s=1.0, orphan_slots=case.slots)
    return Worker(bus, handler, inboxes, reporter, lease_s=case.lease_s, habits=habits)


# ---- a neighbour's chats and calls beside samples, lists and downloads ------------------------------------------------


async def beside_others(rounds: int, chats: int, jobs: int) -> list[dict[str, list[float]]]:
    """Milliseconds to a chat's first token, or for a list of models, sorted, by what another tenant of `jobs` jobs has under way; of
    each round."""
    found = [dict[str, list[float]]() for _ in range(rounds)]
    small: dict[str, Any] = {"max_steps": 1, "batch_size": 2, "group_size": 2}
    async with live.running() as (cluster, api):
        admin = live.Api(cluster.base_url, cluster.admin_key)
        other = await admin.tenant("bulk")
        made = [await other.submit("sort", lora_rank=8 if n else 512, **small) for n in range(jobs)]
        model = (await other.until_done(*made, seconds=600))[0]["fine_tuned_model"]
        beside: Any = {f"samples of {n} tokens": (first_token_ms, [(keep_sampling, n)] * 10) for n in SAMPLES}
        for what, (num, path) in FLOODS.items():
            beside[what] = (models_ms, [(keep_asking, (num, path.format(model=model)))] * bool(num))
        for of_round in found:
            for what, (measured, floods) in beside.items():
                async with running(*(keep(other, asked) for keep, asked in floods)):
                    await asyncio.sleep(WARM_S)
                    of_round[what] = sorted([await measured(api) for _ in range(chats)])
        for each in (admin, other):
            await each.close()
    return found


async def models_ms(api: live.Api) -> float:
    since = time.monotonic()
    await api.get("/models")
    return 1000 * (time.monotonic() - since)


async def first_token_ms(api: live.Api) -> float:
    since = time.monotonic()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "sort 40213"}], "max_tokens": 16, "stream": True}
    async with api.http.stream("POST", "/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                return 1000 * (time.monotonic() - since)
    raise SystemExit("error: a chat without a token")


def p95(ms: Sequence[float]) -> float:
    return ms[min(len(ms) - 1, round(0.95 * len(ms)))]


def beside_goals(rounds: Sequence[dict[str, list[float]]]) -> list[Goal]:
    few, some, many, idle, *_ = rounds[0]
    bounds = [(many, few, 2), (many, some, 1.3), *((flood, idle, 2) for flood in FLOODS if flood != idle)]
    ratios = {(more, less): [p95(ms[more]) / p95(ms[less]) for ms in rounds] for more, less, _ in bounds}
    return [
        Goal(f"p95 beside {more}, over {less}", statistics.median(ratios[more, less]), most, " x", more_is_better=False)
        for more, less, most in bounds
    ]


def report(given: Any) -> Report:
    lease_s, rounds = float(given.lease_s), [_round(given) for _ in range(given.rounds)]
    ratio = statistics.median(after.per_s / before.per_s for before, after in rounds)
    in_time = [sum(wait <= lease_s + 2 for wait in after.waits_s) for _, after in rounds]
    rows = [(a.per_s, b.per_s, len(b.waits_s), max(b.waits_s, default=0.0)) for a, b in rounds]
    columns = ("without a kill", "with one", "orphans that went on", "the last after s")
    figures = {"rounds": [[asdict(speed) for speed in both] for both in rounds], "token_ratio": ratio}
    goals = [
        Goal("orphans that go on within a lease and 2 s, the fewest", 100 * min(in_time) / given.orphans, 100, " %"),
        Goal("survivors' own tokens", 100 * ratio, 90, " %"),
    ]
    beside_ms = asyncio.run(beside_others(given.rounds, given.chats, given.jobs))
    shown = (statistics.median, p95, max)
    beside = [
        (what, *(statistics.median(each(ms[what]) for ms in beside_ms) for each in shown)) for what in beside_ms[0]
    ]
    tables = [
        make_table("Tokens a second of the survivors' own turns", columns, rows),
        make_table("A chat's first token, or a list of models, ms", ("beside", "median", "95 %", "most"), beside),
    ]
    return Report(tables, figures | {"beside_ms": beside_ms}, [*goals, *beside_goals(beside_ms)])


def _round(given: Any) -> tuple[Speed, Speed]:
    """Without a kill, and with one."""
    found: list[Speed] = []
    for kills in (False, True):
        with embedded_redis() as server:
            case = Case(float(given.lease_s), given.orphans, given.slots, kills)
            found.append(asyncio.run(measure(server.url, Objects.open("memory:///"), case)))
    return found[0], found[1]


if __name__ == "__main__":
    run(__doc__, report, QUICK, lease_s=2, orphans=20, rounds=3, slots=32, chats=30, jobs=100)
