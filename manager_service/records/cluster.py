"""Reads from the workers' telemetry who is alive, and who worked for whom when.

reads: telemetry   holds: last reports, spans of the last hour (lost on a crash, read again from the stream)
waits for: a worker's report   unblocked by: every worker, once a second
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from common.bus.bus import Bus
from common.bus.streams import GROUP_ENV, GROUP_ROLLOUT, Cell
from common.wire.messages import Outside, Span, WorkerReport
from common.wire.reported import Tier
from common.worker.telemetry import KEEP_S


async def own_streams(client: Any, cell: Cell) -> list[tuple[str, str]]:
    """The streams of single env and rollout workers, each with its group. `client`: of Redis. Raises its errors."""
    return named([await client.zrange(key, 0, -1) for key in (cell.env_workers, cell.rollout_workers)], cell)


def named(workers: Sequence[Iterable[Any]], cell: Cell) -> list[tuple[str, str]]:
    """The streams of these env and rollout workers, as Redis names them, in one order."""
    env, rollout = ([worker.decode() for worker in sorted(each)] for each in workers)
    streams = [stream(worker) for worker in rollout for stream in (cell.rollout_worker, cell.rollout_chat_worker)]
    return [(cell.env_worker(worker), GROUP_ENV) for worker in env] + [(each, GROUP_ROLLOUT) for each in streams]


class WantedWorkers(msgspec.Struct, frozen=True):
    """The number of rollout workers that a cell wants."""

    workers: int
    turns: int  # that run, wait, or would be issued if there were slots
    live: int
    bounds: str = ""  # `1:4`; empty: nobody follows
    retires: str = ""  # the worker that is to stop; empty: none


async def wanted_of(client: Any, cell: Cell) -> WantedWorkers | None:
    """None: no owner has said so lately. `client`: of Redis. Raises its errors."""
    told = await client.get(cell.wanted)
    return msgspec.json.decode(told, type=WantedWorkers) if told else None


WANTED_S = 10.0
"""Time for which `wanted` holds."""
ALIVE_S = 5.0
"""Silence after which a worker counts as dead."""
FORGET_S = 120.0
GAP_BOUNDS = {"float32": 0.001, "bfloat16": 0.01}
"""Mean |log-prob in training - log-prob at sampling| that rounding in this dtype explains."""
MAX_SPANS = 200_000
BLOCK_MS = 1000
READ_COUNT = 100
"""Reports at a time: a new manager has an hour of them to read, and partitions to serve meanwhile."""
GATHER_S = 0.2
"""Time between two reads: a thousand reports a second must not each wake the manager."""
SUMS_S = 0.25
"""Most age of sums over the workers: as many decisions as there are messages ask for them."""


@dataclass(frozen=True, slots=True)
class WorkerSpan:
    worker: str
    service: str
    span: Span


@dataclass(frozen=True, slots=True)
class _Heard:
    report: WorkerReport
    at_s: float  # monotonic, here


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sums over the live workers of a service, or of all."""

    slots: int
    num: int  # workers
    kv_tokens: int | None
    least_kv_tokens: int | None
    gap_bound: float
    lora_slots: dict[str, int]

    @classmethod
    def of(cls, working: Sequence[WorkerReport]) -> "Capacity":
        """A worker that announces no `kv_tokens` counts as the others do for its slots."""
        slots = sum(worker.slots for worker in working)
        announced = [(worker.kv_tokens, worker.slots) for worker in working if worker.kv_tokens is not None]
        known, of_slots = sum(kv for kv, _ in announced), sum(num for _, num in announced)
        return cls(
            slots=slots,
            num=len(working),
            kv_tokens=known * slots // of_slots if announced else None if working else 0,
            least_kv_tokens=min((kv for kv, _ in announced), default=None),
            gap_bound=max((GAP_BOUNDS.get(worker.dtype, 0.0) for worker in working), default=0.0),
            lora_slots={worker.id: worker.lora_slots for worker in working if worker.lora_slots is not None},
        )


@dataclass(frozen=True, slots=True)
class BaseTurn:
    """Says whether the workers of a service read the cell's work, or when they may."""

    state: Literal["open", "closed", "away", "refused", "absent"]
    tier: Tier | None = None  # of a closed base
    opens_in_s: float = 0.0
    waiting_s: float = 0.0

    @classmethod
    def of(cls, reports: Sequence[WorkerReport]) -> "BaseTurn":
        """`reports`: of the service's live workers. Of several places at which it is closed the one that opens it soonest counts."""
        if any(report.state not in ("refused", "closed") for report in reports):
            return cls("open")
        places = [report.pool for report in reports if report.state == "closed" and report.pool]
        if not places:
            return cls("refused" if reports else "absent")
        place = min(places, key=lambda each: each.opens_in_s)
        waiting_s = max(each.waiting_s for each in places)
        return cls("away" if place.tier == "away" else "closed", place.tier, place.opens_in_s, waiting_s)


class Cluster:
    """The workers of one cell, as their broadcasts show them."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._heard: dict[str, _Heard] = {}
        self._spans: deque[WorkerSpan] = deque(maxlen=MAX_SPANS)
        self._cursor = "0"
        self._sums: dict[str | None, Capacity] = {}
        self._summed_at_s = 0.0  # monotonic

    async def run(self) -> None:
        """Follows the telemetry until cancelled, beginning with what the stream still holds."""
        while True:
            if await self.follow_once(block_ms=BLOCK_MS) < READ_COUNT:
                await asyncio.sleep(GATHER_S)

    async def follow_once(self, *, block_ms: int | None = None) -> int:
        """Takes in the reports that are there, at most READ_COUNT. Returns their number."""
        entries = await self._bus.follow(self._bus.cell.telemetry, self._cursor, block_ms=block_ms, count=READ_COUNT)
        if not entries:
            return 0
        seconds, micros = await self._bus.retrying(self._bus.client.time)
        redis_now_s, now_s = seconds + micros / 1e6, time.monotonic()
        for entry, message in entries:
            self._cursor = entry
            if isinstance(message, WorkerReport):
                self._take(message, now_s - (redis_now_s - int(entry.split("-")[0]) / 1000))
        self._forget(now_s)
        self._sums = {}
        return len(entries)

    def _take(self, report: WorkerReport, at_s: float) -> None:
        self._heard[report.id] = _Heard(report, at_s)
        self._spans.extend(WorkerSpan(report.id, report.service, span) for span in report.spans)

    def _forget(self, now_s: float) -> None:
        for worker in [w for w, heard in self._heard.items() if now_s - heard.at_s > FORGET_S]:
            del self._heard[worker]
        oldest_s = time.time() - KEEP_S
        while self._spans and self._spans[0].span.end_s < oldest_s:
            self._spans.popleft()

    def workers(self) -> list[WorkerReport]:
        """Last reports of the live workers, by service and id. A worker that said goodbye is not alive."""
        now_s = time.monotonic()
        alive = [
            heard.report
            for heard in self._heard.values()
            if now_s - heard.at_s <= ALIVE_S and heard.report.state != "stopped"
        ]
        return sorted(alive, key=lambda report: (report.service, report.id))

    def working(self, service: str | None = None) -> list[WorkerReport]:
        """Live workers that have joined the cell: of one service, or of all."""
        return [w for w in self.workers() if w.state not in ("refused", "starting") and service in (None, w.service)]

    def _capacity(self, service: str | None = None) -> Capacity:
        now_s = time.monotonic()
        if now_s - self._summed_at_s > SUMS_S:
            self._sums, self._summed_at_s = {}, now_s
        if service not in self._sums:
            self._sums[service] = Capacity.of(self.working(service))
        return self._sums[service]

    def slots(self, service: str) -> int:
        """Pieces of work that the live workers of a service can do at once."""
        return self._capacity(service).slots

    def num_workers(self, service: str) -> int:
        return self._capacity(service).num

    def kv_tokens(self) -> int | None:
        """Tokens whose keys and values all rollout engines hold at once; None: unknown."""
        return self._capacity("rollout").kv_tokens

    def least_kv_tokens(self) -> int | None:
        """Tokens that the smallest live rollout engine holds, of those that announce it; None: unknown."""
        return self._capacity("rollout").least_kv_tokens

    def lora_slots(self) -> dict[str, int]:
        """Live rollout workers that batch rows of no more than so many adapters."""
        return self._capacity("rollout").lora_slots

    def max_lora_rank(self) -> int | None:
        """The smallest limit that a live worker announces; None: no worker announces one."""
        ranks = [worker.max_lora_rank for worker in self.working() if worker.max_lora_rank is not None]
        return min(ranks, default=None)

    def outside(self) -> list[Outside]:
        """Hosts that the live env workers may call, as far as they announce them."""
        return list({worker.outside for worker in self.working() if worker.outside is not None})

    def sampling_gap_bound(self) -> float:
        """The largest `sampling_gap` that the coarsest dtype of a live worker explains."""
        return self._capacity().gap_bound or min(GAP_BOUNDS.values())

    def waits_for(self, job: str) -> str:
        """Reason outside of the workers that holds up the job, else one that holds up a worker; else empty."""
        reasons = [worker.waiting.get(job, "") for worker in self.working()]
        reasons += [f"workers wait: {worker.reason}" for worker in self.working() if worker.reason]
        turns = {service: self.turn(service) for service in ("rollout", "trainer")}
        reasons += [
            f"it waits for its base model, which {service} workers open in about {turn.opens_in_s:.1f} s once it is its turn"
            for service, turn in turns.items()
            if turn.state in ("closed", "away") and turn.waiting_s
        ]
        return next(filter(None, reasons), "")

    def refusals(self, services: Sequence[str]) -> str:
        """The reasons for which workers of these services refuse the base model; empty if none does."""
        refused = {(each.service, each.reason) for each in self.workers() if each.state == "refused"}
        told = [
            f"{service} workers refuse its base model: {why}" for service, why in sorted(refused) if service in services
        ]
        return "; ".join(told)

    def turn(self, service: str) -> BaseTurn:
        return BaseTurn.of([each for each in self.workers() if each.service == service and each.state != "starting"])

    def timeline(self, since_s: float) -> list[WorkerSpan]:
        """Busy spans that end after `since_s` (seconds since 1970), by start."""
        return sorted((s for s in self._spans if s.span.end_s > since_s), key=lambda s: s.span.start_s)
