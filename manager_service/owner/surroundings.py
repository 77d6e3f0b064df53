"""Follows tenants, quotas, use and Redis' memory around an owner's jobs. Trims the broadcasts. Explains stalls."""

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import msgspec

from common.bus.bus import Bus
from common.bus.fullness import used_by
from common.bus.streams import GROUP_ENV, GROUP_MANAGER
from common.wire.messages import WorkerReport
from common.worker.telemetry import KEEP_REPORTS, KEEP_S
from manager_service.owner.jobs.job import Job
from manager_service.records.cluster import WANTED_S, WantedWorkers, named, own_streams
from manager_service.records.job_records import JobSpec
from manager_service.records.sample_records import Limits
from manager_service.records.stored import StoredBytes
from manager_service.records.tenants import Tenants
from manager_service.records.usage import INFERENCE, ROLLOUT_COUNTERS, day_field
from manager_service.scheduling.allocator import Allocator, Slots
from manager_service.scheduling.elastic import Retirement, WorkerLoad, WorkerRange, row_slots, wanted

BACKLOG_S = 0.02
"""Least time between two counts of the env workers' entries: two round trips, for each pass of a busy owner."""
STORAGE_EVERY_S = 1.0
KEEP_CANCELS, KEEP_HINTS, KEEP_ANSWERS = 10_000, 1_000, 10_000
"""Messages that the streams `control`, `adapters:new` and `done` keep at most."""


class ObservedCluster(Slots, Protocol):
    """The cluster as the workers' telemetry shows it."""

    def working(self, service: str | None = None) -> Sequence[WorkerReport]:
        """Live workers: of one service, or of all."""
        ...

    def workers(self) -> Sequence[WorkerReport]:
        """All that live, those that start or stop included."""
        ...

    def refusals(self, services: Sequence[str]) -> str:
        """The reasons for which workers of these services refuse the base model; empty if none does."""
        ...


# KEYS: wanted, scaled. ARGV: a `WantedWorkers`, the milliseconds for which it holds, worker seconds and retirements since the last one. The
# first write needs no memory, of which Redis may have none left.
_TELL = """
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('HINCRBYFLOAT', KEYS[2], 'held_worker_seconds', ARGV[3])
redis.call('HINCRBY', KEYS[2], 'retired', ARGV[4])
"""


class PoolSizer:
    """Says how many rollout workers the cell wants, and which retires. `marlaas up`, autoscalers and people read it."""

    def __init__(self, bus: Bus, cluster: ObservedCluster, bounds: WorkerRange | None, *, repack: bool) -> None:
        """`bounds`: within which somebody follows; None: nobody does, and no worker retires. `repack`: one with rows may."""
        self._bus, self._cluster, self._bounds = bus, cluster, bounds
        self._retirement = Retirement(repack)
        self._tell = bus.client.register_script(_TELL)
        self._looked_s: float | None = None
        self._row_slots = 0.0  # the last that were known: a silent worker does not make many turns want only one
        self._retiring = set[str]()  # chosen, or stopping since

    async def look(self, now_s: float) -> None:
        """Writes `wanted` for WANTED_S. `now_s`: monotonic."""
        cell = self._bus.cell
        told, asked = await self._bus.pipelined([("HVALS", cell.demand), ("GET", cell.asked)])
        turns = sum(map(float, told)) + float(asked or 0)
        workers = [each for each in self._cluster.workers() if each.service == "rollout"]
        live = [_load(each) for each in workers if each.state in ("idle", "busy")]
        self._row_slots = row_slots(live) or self._row_slots
        number = wanted(turns, self._row_slots)
        if self._bounds:
            number = self._bounds.clamp(number)
        settled = self._bounds is not None and not any(each.state in ("starting", "draining") for each in workers)
        retires = self._retirement.look(now_s, live, number, settled=settled) or ""
        num_retired = len(self._retiring - {each.id for each in workers})
        self._retiring = {
            each.id
            for each in workers
            if each.id == retires or (each.state == "draining" and each.id in self._retiring)
        }
        record = WantedWorkers(number, round(turns), len(live), str(self._bounds or ""), retires)
        held_s = len(workers) * (now_s - self._looked_s) if self._looked_s is not None else 0.0
        self._looked_s = now_s
        words = [msgspec.json.encode(record), int(WANTED_S * 1000), repr(held_s), num_retired]
        await self._bus.retrying(lambda: self._tell(keys=[cell.wanted, cell.scaled], args=words))


def _load(report: WorkerReport) -> WorkerLoad:
    return WorkerLoad(report.id, report.slots, report.in_use, report.kv_tokens, report.kv_used)


class Surroundings:
    """Tells an Allocator what it cannot see from jobs and messages."""

    def __init__(
        self,
        bus: Bus,
        tenants: Tenants,
        stored: StoredBytes,
        allocator: Allocator,
        limits: Limits,
        pool: PoolSizer | None = None,
    ) -> None:
        allocator.storage.max_bytes = stored.max_bytes
        self._bus = bus
        self._cell = bus.cell
        self._tenants = tenants
        self._stored = stored
        self.storage_asked = asyncio.Event()  # a tenant's bytes are to be read that were not
        self._allocator = allocator
        self._limits = limits
        self._pool = pool
        self._backlog, self._counted_at = 0, float("-inf")
        self._completed: dict[str, float] = {}
        """Tenant with jobs here -> tokens of its completions, as they were charged."""

    async def look(self, *, sizes_pool: bool) -> None:
        """Renews what the Allocator is told, and trims. `sizes_pool`: this owner says for all how many workers are wanted."""
        await self._refresh()
        if sizes_pool and self._pool:
            await self._pool.look(time.monotonic())
        await self._trim_broadcasts()

    async def _refresh(self) -> None:
        tenants = {record.id: record for record in await self._bus.retrying(self._tenants.all)}
        self._allocator.tenants = tenants
        self._allocator.memory_used = await self._bus.retrying(lambda: used_by(self._bus.client, self._cell))
        limited = [name for name, record in tenants.items() if record.max_tokens_per_day is not None]
        self._allocator.used_today.update(await self._used_today(limited))
        await self._charge_completions()

    async def told(self, partitions: Collection[int]) -> tuple[dict[int, float], float, dict[int, float]]:
        """Tells a round of leases about these partitions: see `Leases.round`."""
        allocator = self._allocator
        allocator.env_backlog = await self.env_backlog()
        turns = allocator.demand.turns(partitions, allocator.in_env, allocator.is_exhausted)
        return allocator.active_weights(partitions), allocator.take_served_s(), turns

    async def watch_storage(self) -> None:
        """Tells what tenants with work here store, each second and as soon as one is new, until cancelled. It asks other cells' Redis
        too, so nothing else waits for it."""
        storage = self._allocator.storage
        while True:
            storage.begin_reading()
            tenants = sorted({*self._allocator.demand.active, *storage.unread})
            storage.read(await self._bus.retrying(lambda t=tenants: self._stored.totals(t, own=self._cell)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STORAGE_EVERY_S):
                    await self.storage_asked.wait()
            self.storage_asked.clear()

    async def _charge_completions(self) -> None:
        """Charges the tenants with jobs here for their completions' tokens since the last look, as for jobs'."""
        tenants = sorted(self._allocator.demand.active)
        fields = [f"{INFERENCE}/{counter}" for counter in ROLLOUT_COUNTERS]
        used = await self._bus.pipelined(("HMGET", self._cell.usage(tenant), *fields) for tenant in tenants)
        by_tenant = zip(tenants, used, strict=True)
        totals = {tenant: sum(float(amount or 0) for amount in amounts) for tenant, amounts in by_tenant}
        for tenant, total in totals.items():
            self._allocator.charge_rollouts(tenant, max(0.0, total - self._completed.get(tenant, total)))
        self._completed = totals

    async def env_backlog(self) -> int:
        """Entries of the stream of all env workers, and of each one's own; at most BACKLOG_S old."""
        if time.monotonic() - self._counted_at < BACKLOG_S:
            return self._backlog
        own = await self._bus.retrying(lambda: own_streams(self._bus.client, self._cell))
        streams = [self._cell.env, *(stream for stream, group in own if group == GROUP_ENV)]
        lengths = await self._bus.pipelined(("XLEN", stream) for stream in streams)
        self._backlog, self._counted_at = sum(lengths), time.monotonic()
        return self._backlog

    async def nothing_under_way(self, inboxes: Sequence[str], trainers: Sequence[str]) -> bool:
        """Are all streams of work empty, and these? Reads all in one transaction, so that nothing moves between them.

        Entries that an owner keeps pending from its inboxes (half-full batches, parked turns) do not count.
        """
        own = await self._bus.retrying(lambda: own_streams(self._bus.client, self._cell))
        streams = [*(stream for stream, _ in (*self._cell.work, *own)), *trainers, *inboxes]
        commands: list[Sequence[Any]] = [("XLEN", stream) for stream in streams]
        commands += [("XPENDING", stream, GROUP_MANAGER) for stream in inboxes]
        commands += [("ZRANGE", key, 0, -1) for key in (self._cell.env_workers, self._cell.rollout_workers)]
        *answers, env, rollout = await self._bus.pipelined(commands, transaction=True)
        lengths, pending = answers[: len(streams)], answers[len(streams) :]
        return named([env, rollout], self._cell) == own and sum(lengths) <= sum(row["pending"] for row in pending)

    async def silent_sessions(self, sessions: Collection[str]) -> set[str]:
        """The sessions of these whose client has said nothing for too long."""
        if not sessions:
            return set()
        there = await self._bus.pipelined(("EXISTS", self._cell.session(session)) for session in sessions)
        return {session for session, alive in zip(sessions, there, strict=True) if not alive}

    async def _used_today(self, tenants: list[str]) -> dict[str, int]:
        """Tokens that each of these tenants has used today, chats included."""
        today = day_field(time.time())
        used = await self._bus.pipelined(("HGET", self._cell.usage(tenant), today) for tenant in tenants)
        return {tenant: int(num or 0) for tenant, num in zip(tenants, used, strict=True)}

    async def _trim_broadcasts(self) -> None:
        """Trims the broadcasts to what a returning reader needs, and what operators read to its bytes; scripts trim none."""
        seconds, _ = await self._bus.retrying(self._bus.client.time)
        oldest = int((seconds - KEEP_S) * 1000)
        for stream, most in {
            self._cell.control: KEEP_CANCELS,
            self._cell.adapters_new: KEEP_HINTS,
            self._cell.done: KEEP_ANSWERS,
            self._cell.telemetry: KEEP_REPORTS,
        }.items():
            await self._bus.retrying(lambda s=stream: self._bus.client.xtrim(s, minid=oldest, approximate=True))
            await self._bus.retrying(lambda s=stream, n=most: self._bus.client.xtrim(s, n, approximate=True))
        await bound(self._bus, self._cell.telemetry, self._limits.telemetry)
        await bound(self._bus, self._cell.dead, self._limits.dead)


# KEYS: a stream, and the hash that counts. ARGV: entries to keep, the stream's name. The first write needs no memory, of which Redis may
# have none left.
_TRIM = """
local num = redis.call('XTRIM', KEYS[1], 'MAXLEN', ARGV[1])
redis.call('HINCRBY', KEYS[2], ARGV[2], num)
"""


async def bound(bus: Bus, stream: str, max_bytes: int) -> None:
    """Drops a stream's oldest entries if it has too many bytes, a tenth more than needed, and counts them."""
    used, length = await bus.pipelined([("MEMORY USAGE", stream), ("XLEN", stream)])
    if (used or 0) > max_bytes:
        kept, trim = int(length * 0.9 * max_bytes / used), bus.client.register_script(_TRIM)
        await bus.retrying(lambda: trim(keys=[stream, bus.cell.dropped], args=[kept, bus.cell.name_of(stream)]))


def whereabouts(job: Job, cluster: ObservedCluster) -> str:
    """Names the services that have what a job waits for, and whose work they had by their last reports."""
    state, kind = job.state, "examples" if job.spec.is_supervised else "trajectories"
    samplers = ["env"] if job.spec.is_supervised else ["rollout", "env"]
    places, services = list[str](), list[str]()
    if state.training or state.initialising:
        places.append(f"{'a step' if state.training else 'its first version'} is with the trainers")
        services.append("trainer")
    if job.num_waiting or not places:
        places.append(f"{job.num_waiting or 'no'} {kind} are with the {' and '.join(samplers)} workers")
        services += samplers
    owners = [f"{service} workers have {_whose(cluster.working(service), job.spec)}" for service in services]
    return f"{', and '.join(places)}; {', '.join(owners)}; if this lasts, look at their logs"


def _whose(workers: Sequence[WorkerReport], spec: JobSpec) -> str:
    spans = [span for worker in workers for span in worker.spans]
    present = {
        "of this job": any(span.job == spec.id for span in spans),
        "of others of yours": any(span.tenant == spec.tenant and span.job != spec.id for span in spans),
        "of other tenants": any(span.tenant != spec.tenant for span in spans),
    }
    whose = [words for words, has in present.items() if has]
    return f"work {' and '.join(whose)}" if whose else "no work"
