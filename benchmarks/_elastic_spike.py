"""Measures how soon a spike is served: the part of `benchmarks.elastic` about workers that come at once.

    python -m benchmarks._elastic_spike [FILE ...]    the steepest minute of each trace, for real; without one, the spike

Turns arrive at given moments: few, then for SPIKE_S so many that all four workers are needed. Figures are of the seconds from a turn's
arrival to its first token. Workers are processes at a given pace (`_paced_rollout`), which `marlaas up`'s own `ElasticPool` forks. Each
fetches a base model with the product's own code, over a store that lets STORE_BYTES_PER_S pass, and takes LOAD_S more to load. As many
turns are in Redis as the owner would put there. A pool differs in two ways:

    who says how many    streams: their lengths, as KEDA's scaler of streams and an autoscaler of Kubernetes take them each SYNC_S
                         wanted, synced: what the owner says, each SYNC_S
                         wanted: the owner's own `PoolSizer`, followed each half second
    where a base is      store: each worker reads the whole of it; chain: it has passed through one other; node: the folder has it

A trace is lambdaScale's `Burst.txt`, one rate a line, of which a line is taken as a second and its peak as what fills four workers; or a
CSV of Azure's with TIMESTAMP and GeneratedTokens, taken as it is. Its static pool has four workers all the time.
"""

import asyncio
import csv
import math
import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks._elastic_bases import STORE_BYTES_PER_S, slow_store
from benchmarks._elastic_repack import BOUNDS, HELD_EVERY_S, SLOTS, Sizer, pool
from benchmarks._paced_rollout import CELL, ROW_S, STEP_S
from benchmarks._report import Goal, Report, make_table, parsed, parser, show
from benchmarks.rollout import request
from common.bus.bus import Bus
from common.bus.streams import GROUP_ROLLOUT
from common.wire.messages import BASE, TurnRequest, TurnResult
from harness.redis_server import embedded_redis
from manager_service.owner.surroundings import PoolSizer
from manager_service.records.cluster import Cluster, WantedWorkers
from manager_service.scheduling.elastic import TARGET, WorkerRange, wanted
from manager_service.scheduling.fairness import OVERSUBSCRIPTION

WARM_S, MINUTE_S, LIMIT_S = 10, 60, 240
TOKENS = 40
PEAK = TARGET * BOUNDS.most * SLOTS / (TOKENS * (STEP_S + ROW_S * SLOTS))
"""Turns of TOKENS a second that want all workers."""
IDLE = 0.1 * PEAK
SYNC_S = 15.0
"""Time between two decisions of an autoscaler of Kubernetes, by default. A spike comes in the middle. That for a larger number it also
wants 15 s to agree makes no difference: the window is as long."""


class Arrival(NamedTuple):
    at_s: float
    tokens: int


class Arrivals(NamedTuple):
    turns: Sequence[Arrival]
    spike_s: float
    """Seconds until the spike; what came before does not count."""


def of_rates(rates: Sequence[float]) -> list[Arrival]:
    """Turns of TOKENS, evenly within each second. `rates`: turns a second, of one second after the other."""
    arrivals, whole, total = list[Arrival](), 0, 0.0
    for second, rate in enumerate(rates):
        while whole + 1 <= total + rate:
            whole += 1
            arrivals.append(Arrival(second + (whole - total) / rate, TOKENS))
        total += rate
    return arrivals


def of_trace(file: Path, seconds: int) -> list[Arrival]:
    """A trace's steepest minute, or fewer seconds."""
    lines = [line for line in file.read_text().splitlines() if line]
    if not lines[0].startswith("TIMESTAMP"):
        rates = [float(line) for line in lines]
        begin = steepest(rates, seconds)
        most = max(rates[begin : begin + seconds])
        return of_rates([rate * PEAK / most for rate in rates[begin : begin + seconds]])
    rows = list(csv.DictReader(lines))
    moments = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    times_s = [moment - moments[0] for moment in moments]
    counts = Counter(map(int, times_s))
    begin = steepest([counts[second] for second in range(max(counts) + 1)], seconds)
    turns = zip(times_s, rows, strict=True)
    return [Arrival(at - begin, int(row["GeneratedTokens"])) for at, row in turns if begin <= at < begin + seconds]


def steepest(rates: Sequence[float], seconds: int) -> int:
    """The begin of a stretch whose second quarter is most above its first."""
    quarter = seconds // 4
    begins = range(len(rates) - seconds)
    return max(begins, key=lambda at: sum(rates[at + quarter : at + 2 * quarter]) - sum(rates[at : at + quarter]))


@dataclass
class ArrivalLoad:
    """Turns that arrive at given moments. What the owner would hold back waits here."""

    bus: Bus
    cluster: Cluster
    arrivals: Arrivals
    first_workers: int
    """Workers that serve when it begins."""
    begun_s: float = math.inf
    due: dict[str, float] = field(default_factory=dict[str, float])
    """Each turn's arrival, by the machine's monotonic clock."""
    all_ended: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: deque[TurnRequest] = field(default_factory=deque[TurnRequest])
    _issued: set[str] = field(default_factory=set[str])

    @property
    def under_way(self) -> int:
        return len(self._waiting) + len(self._issued)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._hear())
            group.create_task(self._arrive())

    async def _arrive(self) -> None:
        while self._slots() < self.first_workers * SLOTS:
            await asyncio.sleep(0.1)
        self.begun_s = time.monotonic()
        for number, (at_s, tokens) in enumerate(self.arrivals.turns):
            await asyncio.sleep(self.begun_s + at_s - time.monotonic())
            turn = request(BASE, list(range(97, 113)), number, tokens)
            self.due[turn.id] = self.begun_s + at_s
            self._waiting.append(turn)
            await self._issue()

    def _slots(self) -> int:
        return SLOTS * len(self.cluster.working("rollout"))

    async def _issue(self) -> None:
        room = round(OVERSUBSCRIPTION * self._slots()) - len(self._issued)
        turns = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        self._issued |= {turn.id for turn in turns}
        if turns:
            await self.bus.publish([(CELL.rollout, turn) for turn in turns])

    async def _hear(self) -> None:
        cursor = "0"
        while not self.all_ended.is_set():
            for entry, message in await self.bus.follow(CELL.env, cursor, block_ms=100):
                cursor = entry
                if isinstance(message, TurnResult):
                    self._issued.remove(message.id)
            await self._issue()
            if len(self.due) == len(self.arrivals.turns) and not self.under_way:
                self.all_ended.set()


@dataclass
class Autoscaler:
    """Takes a number each SYNC_S, in place of the owner. It takes none that is lower: its window for that is longer than a run."""

    load: ArrivalLoad
    number: Callable[[], Awaitable[int]]
    _told: int = BOUNDS.least
    _syncs: int = -1

    async def look(self, now_s: float) -> None:
        since_s = now_s - self.load.begun_s - self.load.arrivals.spike_s + SYNC_S / 2
        if since_s > -math.inf and (syncs := math.floor(since_s / SYNC_S)) != self._syncs:
            self._syncs, self._told = syncs, max(self._told, await self.number())
        record = msgspec.json.encode(WantedWorkers(self._told, self.load.under_way, 0))
        await self.load.bus.client.set(CELL.wanted, record, ex=10)


def by_streams(load: ArrivalLoad) -> Sizer:
    async def number() -> int:
        lengths = await load.bus.pipelined([("XLEN", CELL.rollout), ("XLEN", CELL.rollout_first)])
        return math.ceil(max(lengths) / SLOTS)

    return Autoscaler(load, number)


def synced(load: ArrivalLoad) -> Sizer:
    async def number() -> int:
        return wanted(load.under_way, SLOTS)

    return Autoscaler(load, number)


def followed(load: ArrivalLoad) -> Sizer:
    return PoolSizer(load.bus, load.cluster, BOUNDS, repack=True)


class Contender(NamedTuple):
    size: Callable[[ArrivalLoad], Sizer]
    base: str
    """`store`, `chain` or `node`."""
    bounds: WorkerRange = BOUNDS

    def options(self, where: str, folder: Path) -> list[str]:
        """Options of `_paced_rollout`; `{}` gives each worker a node folder of its own."""
        node_dir = folder / ("node" if self.base == "node" else "node-{}")
        return [where, str(node_dir), *([str(STORE_BYTES_PER_S)] if self.base == "chain" else [])]


BEFORE, HERE = "streams, store", "wanted, node"
SPIKE = {
    BEFORE: Contender(by_streams, "store"),
    "wanted, store": Contender(followed, "store"),
    "wanted, chain": Contender(followed, "chain"),
    "wanted synced, node": Contender(synced, "node"),
    HERE: Contender(followed, "node"),
}
TRACE = {
    "static": Contender(followed, "node", WorkerRange(BOUNDS.most, BOUNDS.most)),
    BEFORE: SPIKE[BEFORE],
    HERE: SPIKE[HERE],
}


@dataclass(frozen=True, slots=True)
class SpikeFigures:
    """Seconds to the first token of the turns that count, and of workers that were held while turns arrived."""

    p50_s: float
    p99_s: float
    held_s: float


async def measure(url: str, folder: Path, where: str, arrivals: Arrivals, contender: Contender) -> SpikeFigures:
    bus, held = Bus.connect(url, CELL), list[int]()
    for stream in (CELL.rollout, CELL.rollout_first):
        await bus.ensure_group(stream, GROUP_ROLLOUT)
    load = ArrivalLoad(bus, Cluster(bus), arrivals, contender.bounds.least)
    options = contender.options(where, folder)
    async with (
        asyncio.timeout(LIMIT_S),
        pool(url, folder, load, contender.size(load), bounds=contender.bounds, options=options) as running,
    ):
        while not load.all_ended.is_set():
            if len(load.due) < len(arrivals.turns) and load.begun_s < math.inf:
                held.append(sum(process.pid is not None for process in running.values()))
            await asyncio.sleep(HELD_EVERY_S)
    await bus.close()
    notes = sorted(line.split() for file in folder.glob("[0-9]") for line in file.read_text().splitlines())
    begun = {note[2]: float(note[1]) for note in reversed(notes) if note[0] == "begin"}  # one that moved begins twice
    counted = {turn: at_s for turn, at_s in load.due.items() if at_s >= load.begun_s + arrivals.spike_s}
    waits = sorted(begun[turn] - at_s for turn, at_s in counted.items())
    held_s = sum(held) / len(held) * arrivals.turns[-1].at_s
    return SpikeFigures(waits[len(waits) // 2], waits[len(waits) * 99 // 100], held_s)


async def compared(arrivals: Arrivals, num_bytes: int, contenders: Mapping[str, Contender]) -> dict[str, SpikeFigures]:
    found = dict[str, SpikeFigures]()
    with tempfile.TemporaryDirectory() as folder:
        async with slow_store(Path(folder), num_bytes) as (where, store):
            os.environ |= store
            for name, contender in contenders.items():
                with embedded_redis() as server, tempfile.TemporaryDirectory() as own:
                    found[name] = await measure(server.url, Path(own), where, arrivals, contender)
    return found


def _report(title: str, found: dict[str, SpikeFigures], goals: Sequence[Goal] = ()) -> Report:
    columns = ("who says how many, where a base is", "p50 s", "p99 s", "worker seconds")
    table = make_table(
        f"To the first token: {title}", columns, [(name, *astuple(each)) for name, each in found.items()]
    )
    return Report([table], {title: {name: asdict(each) for name, each in found.items()}}, goals)


def spike_report(num_bytes: int, spike_s: int) -> Report:
    warm_s = min(WARM_S, spike_s)
    arrivals = Arrivals(of_rates([IDLE] * warm_s + [PEAK] * spike_s), warm_s)
    contenders = SPIKE if spike_s > SYNC_S else {name: SPIKE[name] for name in (BEFORE, HERE)}
    found = asyncio.run(compared(arrivals, num_bytes, contenders))
    ratio = found[BEFORE].p99_s / found[HERE].p99_s
    goal = Goal("p99 to the first token by stream lengths and from the store, over ours", ratio, 5, " x")
    return _report(f"a spike of {spike_s} s, a base model of {num_bytes / 1e6:.0f} MB", found, [goal])


def report(given: Any) -> Report:
    num_bytes, seconds = given.megabytes * 1_000_000, given.seconds
    if not given.traces:
        return spike_report(num_bytes, seconds)
    tables, figures = list[Any](), dict[str, Any]()
    for file in given.traces:
        found = asyncio.run(compared(Arrivals(of_trace(file, seconds), 0.0), num_bytes, TRACE))
        part = _report(f"{seconds} s of {file.name}", found)
        tables, figures = [*tables, *part.tables], figures | part.figures
    return Report(tables, figures)


if __name__ == "__main__":
    options = parser(__doc__, megabytes=600, seconds=MINUTE_S)
    options.add_argument("traces", nargs="*", type=Path, metavar="FILE")
    given = parsed(options, {"megabytes": 16, "seconds": 8})
    show(report(given), given.json)
