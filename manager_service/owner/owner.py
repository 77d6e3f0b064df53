"""Runs the loop of a manager replica in one cell: takes partitions, applies messages to jobs, issues work.

    reads: the inboxes of the partitions it owns   writes: see manager_service.owner.partition
    waits for: a result, a command, or room for more work   unblocked by: env, trainers, API replicas, live workers
    after a crash: another replica takes the leases when they run out, and rebuilds each partition from Redis

Tasks of their own wait for object storage: for new jobs' files, big payloads, samples, versions that Redis may have lost. One
pass reads the messages, lets jobs change, decides what follows (scheduling.allocator), and commits each partition's changes by
one fenced script. A partition whose commit is refused is forgotten at once.
"""

import asyncio
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cache, partial

import structlog

from common.bus.bus import Bus, Delivery, Undecodable, Unfetched
from common.bus.fullness import DISK_FULL, MAX_MEMORY_USED
from common.bus.streams import GROUP_MANAGER, OWNER, partition_of
from common.cancellation import running, starting
from common.errors import Unavailable
from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.wire.messages import TrainStep
from manager_service.owner.archiver import Archiver, Recount
from manager_service.owner.arriving import Intake, Owned
from manager_service.owner.big_steps import BigSteps, PayloadTidier
from manager_service.owner.job_reader import JobReader
from manager_service.owner.jobs.changes import Changes, RedisCommand, commands
from manager_service.owner.jobs.job import Job
from manager_service.owner.leases import Absence, Leases, LeaseState
from manager_service.owner.partition import Fetch, Partition
from manager_service.owner.sample_writer import SampleWriter
from manager_service.owner.surroundings import ObservedCluster, PoolSizer, Surroundings, whereabouts
from manager_service.owner.transaction import Commits, Fence
from manager_service.records.sample_records import LIMITS, Limits
from manager_service.records.stored import StoredBytes
from manager_service.records.tenants import Tenants
from manager_service.scheduling.allocator import Allocator
from manager_service.scheduling.policies import MARLAAS, Policy

READ_COUNT = 512
BLOCK_MS = 100
GATHER_S = 0.004
"""Least time between two passes. Redis answers a wait for several streams with one's entries; the next read has all."""
ROUND_SHARE = 0.1
"""Time between two rounds of renewing the leases, as a share of a lease."""
MAX_FETCHES = 8
"""Payloads that are fetched from object storage at once."""
LOAD_TRIES = 3
"""Tries to load a partition, before it is left to another owner."""
LEAVE_AFTER_S = 3.0
"""Time without room on this machine's disk for a job's files after which its partition goes to another owner."""
ABSENCE_LEASES = 6.0
"""Time, in leases, for which its owner then takes no others, if others are there; longer each time: see `Absence`."""
STALL_S = 30.0
ARCHIVE_AFTER_S = 3600.0
ARCHIVE_ALL_ABOVE = MAX_MEMORY_USED / 2
"""Share of Redis' memory limit above which finished jobs are archived at once."""

log = structlog.get_logger()


class Owner:
    """Owns as many partitions of one cell as it can get, for as long as it lives."""

    def __init__(
        self,
        *,
        bus: Bus,
        cluster: ObservedCluster,
        store: AdapterStore,
        objects: Objects,
        tenants: Tenants,
        stored: StoredBytes,
        lease_s: float = 10.0,
        policy: Policy = MARLAAS,
        archive_after_s: float = ARCHIVE_AFTER_S,
        limits: Limits = LIMITS,
        pool: PoolSizer | None = None,
    ) -> None:
        self._bus, self._cell, self._cluster, self._lease_s = bus, bus.cell, cluster, lease_s
        self._reader = JobReader(bus, objects, store, limits)
        self._token, self._commits = secrets.token_hex(16), Commits(bus)
        self._leases = Leases(bus, self._token, lease_s)
        self._surplus, self._others = 0, 0  # partitions to give back; other owners
        self._absence = Absence(ABSENCE_LEASES * lease_s)
        self._to_load: set[int] = set()  # leases that were taken, of partitions that are not in memory yet
        self._taken = asyncio.Event()  # something is to be loaded
        self._owned: dict[int, Owned] = {}
        self._archiver = Archiver(bus, objects, every_s=min(lease_s, 1 + archive_after_s / 10))
        self._archive_after_s = archive_after_s
        self._recount = Recount(bus, objects)
        self._samples = SampleWriter(objects, bus.cell.base_model)
        self._payloads = PayloadTidier(objects)
        self._wanted = asyncio.Event()  # a partition wants something of the object storage
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        self._searched: set[int] = set()  # partitions that are to be reconciled at the next pass
        self._lock = asyncio.Lock()  # while jobs change; to wait for object storage under it would stop every tenant
        self._intake = Intake(self._owned, self._lock, self._decide)
        self._big_steps = BigSteps(bus, objects)
        self._allocator = Allocator(cluster, policy, admits=self._big_steps.admits)
        self._surroundings = Surroundings(bus, tenants, stored, self._allocator, limits, pool)
        self._reconciled, self._reconciled_at = -1, time.monotonic()  # the partition that came last, and when

    # ---- leases -----------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop`, then gives the leases back, so that another replica need not wait for them."""
        for stream, group in self._cell.work:
            await self._bus.ensure_group(stream, group)
        async with running(
            self._keep_leases(), self._load_taken(), self._watch(), self._intake.run(),
            self._payloads.run(), self._passes(), self._big_steps.run(self._written), self._ask_store(),
            self._samples.run(), self._archiver.run(self._archive_now, self._commit_archived),
            self._surroundings.watch_storage(), self._recount.run(self._tenants, self._commit_archived),
        ):  # fmt: skip
            await stop.wait()
            await self._samples.drain()
        await self._leases.leave()

    async def _keep_leases(self) -> None:
        """Renews leases and takes free ones. Another task loads partitions, so that no lease runs out meanwhile."""
        while True:
            told = await self._surroundings.told(self._owned)
            lease_round = await self._leases.round(*told, leaves=self._absence.lasts(time.monotonic()))
            self._allocator.hear_of_others(lease_round.other_weight, lease_round.sampling_weight, lease_round.served)
            self._surplus, self._others = lease_round.surplus, lease_round.others
            for number, state in lease_round.leases.items():
                await self._follow_lease(number, state)
            await asyncio.sleep(self._lease_s * ROUND_SHARE)

    async def _follow_lease(self, number: int, state: LeaseState) -> None:
        if number in self._owned and state is not LeaseState.RENEWED:  # it ran out: another may have written since
            async with self._lock:
                self._forget(number, "lease lost")
        if state is LeaseState.BY_ANOTHER:
            self._to_load.discard(number)
        elif number not in self._owned:
            self._to_load.add(number)
            self._taken.set()

    async def _load_taken(self) -> None:
        """Takes over the partitions whose leases were taken, each for itself."""
        loading: dict[int, asyncio.Task[None]] = {}
        async with starting() as start:
            while True:
                await self._taken.wait()
                self._taken.clear()
                for number in self._to_load:
                    if number not in loading or loading[number].done():
                        loading[number] = start(self._load(number))

    async def _load(self, number: int) -> None:
        """Takes a partition over, or leaves it to another owner after some tries."""
        for _ in range(LOAD_TRIES):
            try:
                if number in self._to_load:  # it may have been given back
                    await self._take_over(number)
                return
            except Unavailable as error:
                log.warning("loading_delayed", partition=number, reason=str(error))
            except Exception:  # the boundary: a partition that cannot be loaded must not stop the others
                log.exception("partition_not_loaded", partition=number)
            await asyncio.sleep(self._lease_s * ROUND_SHARE)
        await self._leave(number)

    async def _take_over(self, number: int) -> None:
        fence = Fence(self._bus, number, self._token)
        partition, changes = Partition(number, self._bus, self._reader), Changes()
        # The stamp before the records: if Redis loses any of these from here on, the first commit is refused
        await fence.read_stamp()
        await partition.load(time.time(), changes)
        async with self._lock:
            if number not in self._to_load:
                return  # the lease was lost meanwhile
            self._to_load.discard(number)
            self._owned[number] = (partition, fence)
            self._payloads.note([*partition.jobs, *partition.arriving])  # of the last owner, for all that is known
            await self._commit({number: changes})
        if partition.arriving:
            self._intake.wanted.set()
        if partition.jobs:
            log.info("partition_taken", partition=number, jobs=len(partition.jobs))

    def _forget(self, number: int, reason: str) -> None:
        if owned := self._owned.pop(number, None):
            self._allocator.forget(owned[0].jobs)
            self._allocator.forget(owned[0].runs.table)
            self._big_steps.forget(owned[0].jobs)
            log.warning("partition_forgotten", partition=number, reason=reason)

    async def _give_back(self) -> None:
        """Gives back what exceeds this owner's share, or this machine's disk, if there are others to take it.

        Call while no read is under way, so that no entry is lost.
        """
        for number, (partition, _) in list(self._owned.items()):
            if self._others and partition.lacks_room(time.time() - LEAVE_AFTER_S):
                await self._leave(number)
        while self._surplus > 0 and (leased := self._to_load | self._owned.keys()):
            self._surplus -= 1
            await self._release(max(leased))

    async def _leave(self, number: int) -> None:
        """Leaves to others a partition with which this owner cannot work."""
        self._absence.begin(time.monotonic())
        await self._release(number)

    async def _release(self, number: int) -> None:
        async with self._lock:
            self._to_load.discard(number)
            self._forget(number, "given to another owner")
            await self._leases.release(number)

    # ---- one pass ---------------------------------------------------------------------------------------------------

    async def _passes(self) -> None:
        while True:
            await self._give_back()
            await self._reconcile()
            owned = dict(self._owned) if self._leases.surely_held(2 * BLOCK_MS / 1000) else {}
            deliveries = await self._read(owned)
            next_at = time.monotonic() + GATHER_S
            async with self._lock:
                await self._pass([d for d in deliveries if self._still_owned(d, owned)])
            await asyncio.sleep(next_at - time.monotonic())

    def _still_owned(self, delivery: Delivery, owned: Mapping[int, Owned]) -> bool:
        """Is a partition the same as when its entry was read? If not, a fresh take-over must read it again."""
        number = _partition_of(delivery.stream)
        if self._owned.get(number) is owned.get(number):
            return True
        self._forget(number, "read across a take-over")
        return False

    async def _read(self, owned: Mapping[int, Owned]) -> list[Delivery]:
        streams = [name for partition, _ in owned.values() for name in partition.inboxes]
        if not streams:
            await asyncio.sleep(BLOCK_MS / 2000)
            return []
        read = await self._bus.read(streams, GROUP_MANAGER, OWNER, count=READ_COUNT, block_ms=BLOCK_MS)
        return [delivery for delivery in read if not self._fetched_later(owned, delivery)]

    async def _reconcile(self) -> None:
        """Finds what was lost, one partition after the other, each once a lease. Call while no read is under way."""
        if time.monotonic() - self._reconciled_at >= self._lease_s / max(1, len(self._owned)):
            self._reconciled_at = time.monotonic()
            self._reconciled = min(
                (n for n in self._owned if n > self._reconciled), default=min(self._owned, default=-1)
            )
            self._searched.add(self._reconciled)
        while self._searched:
            number = self._searched.pop()
            async with self._lock:
                if number in self._owned:
                    await self._reconcile_one(number)

    async def _reconcile_one(self, number: int) -> None:
        partition, changes = self._owned[number][0], Changes()
        await partition.reconcile(
            time.time(), changes, quiet_s=self._lease_s, nothing_under_way=self._nothing_under_way
        )
        if changes:
            await self._commit({number: changes})
        self._wanted.set()

    # ---- tasks that wait for object storage -------------------------------------------------------------------------

    def _written(self, job_id: str) -> None:
        """Lets the next pass publish a step that object storage has now."""
        for partition, _ in self._owned.values():
            if job_id in partition.jobs:
                partition.jobs.touch(job_id)

    def _fetched_later(self, owned: Mapping[int, Owned], delivery: Delivery) -> bool:
        """Takes in a claim check that was read while these partitions were owned. False for another delivery."""
        if not isinstance(delivery.message, Unfetched):
            return False
        owned[_partition_of(delivery.stream)][0].fetch_later(delivery.stream, delivery.entry, delivery.message.fetch)
        self._wanted.set()
        return True

    async def _ask_store(self) -> None:
        """Fetches the payloads, and looks for the versions, that partitions want."""
        async with starting() as start:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                for number, owned in list(self._owned.items()):
                    for stream, entry, fetch in owned[0].take_unfetched():
                        start(self._fetch(number, owned, (stream, entry), fetch))
                    if owned[0].to_search:
                        start(self._search(number, owned[0]))

    async def _fetch(self, number: int, owned: Owned, entry: tuple[str, str], fetch: Fetch) -> None:
        async with self._fetches:
            delivery = await fetch()
        if not isinstance(delivery.message, Undecodable):
            self._payloads.note_fetched(delivery.message)
        async with self._lock:
            if self._owned.get(number) is owned:  # else the next owner reads it
                owned[0].fetching.discard(entry)
                await self._pass([delivery])

    async def _search(self, number: int, partition: Partition) -> None:
        try:
            await partition.search()
        except Unavailable as error:  # the next round of reconciling wants it again
            log.warning("search_delayed", reason=str(error))
        else:
            self._searched.add(number)

    async def _pass(self, deliveries: Iterable[Delivery]) -> None:
        now = time.time()
        changes: defaultdict[int, Changes] = defaultdict(Changes)
        for delivery in deliveries:
            number = _partition_of(delivery.stream)
            await self._owned[number][0].handle(delivery, now, changes[number])
            if self._owned[number][0].arriving:
                self._intake.wanted.set()
        await self._decide(changes, now)

    async def _decide(self, changes: defaultdict[int, Changes], now: float) -> None:
        """Decides what follows from what has changed, and commits it. `changes`: of each owned partition."""
        for partition, _ in self._owned.values():
            self._allocator.follow(partition.jobs, now)
            self._allocator.follow(partition.runs.table, now)
        await self._look_at_env()
        self._allocator.decide(now, changes)
        if self._allocator.storage.unread:
            self._surroundings.storage_asked.set()
        await self._commit({number: change for number, change in changes.items() if change})

    async def _look_at_env(self) -> None:
        """Counts the trajectories and examples with env workers, only if that decides whether more may be issued."""
        allocator, backlog = self._allocator, 0
        demand = allocator.demand
        frees_slots = demand.rollouts.tenants and not allocator.policy.holds_slots
        if demand.examples.tenants or (frees_slots and not allocator.room(in_env=0, share=allocator.share)):
            backlog = await self._surroundings.env_backlog()
        allocator.env_backlog = backlog

    async def _commit(self, changes: Mapping[int, Changes]) -> None:
        """Writes the changes of several partitions by one script, and forgets those that it refuses."""
        if not changes:
            return
        writes = [(self._owned[number][1], self._commands(number, change)) for number, change in changes.items()]
        for (number, change), error in zip(changes.items(), await self._commits.apply(writes), strict=True):
            if error is None:
                self._committed(change)
            else:
                self._forget(number, f"{type(error).__name__}: {error}")

    def _commands(self, number: int, changes: Changes) -> list[RedisCommand]:
        self._owned[number][0].note(changes, time.time())
        self._allocator.charge(changes)
        encoded = [
            (stream, self._bus.fields_at(message, self._big_steps.path(message)))
            for stream, message in changes.published
        ]
        return commands(changes, self._cell, number, encoded, time.time())

    def _committed(self, changes: Changes) -> None:
        self._samples.follow(changes)
        self._payloads.note(message.job for _, message in changes.published if self._big_steps.path(message))
        self._big_steps.forget([message.job for _, message in changes.published if isinstance(message, TrainStep)])
        self._big_steps.forget(changes.finished)
        self._payloads.follow(changes)

    def _archive_now(self) -> tuple[list[int], float]:
        """Partitions whose jobs are archived, and before when these must have finished: seconds since 1970."""
        fills = ARCHIVE_ALL_ABOVE < self._allocator.memory_used < DISK_FULL
        return list(self._owned), time.time() - (0 if fills else self._archive_after_s)

    def _tenants(self) -> list[str]:
        return [name for name in self._allocator.tenants if partition_of(name) in self._owned]

    async def _commit_archived(self, number: int, changes: Changes) -> bool:
        """False: the partition is another's now."""
        async with self._lock:
            if number in self._owned:
                await self._commit({number: changes})
            return number in self._owned

    # ---- what is watched --------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Follows what changes slowly: tenants, memory, quotas, the age of broadcasts, stalls."""
        while True:
            await self._surroundings.look(sizes_pool=0 in self._owned)
            self._allocator.disk_full = any(report.disk_full for report in self._cluster.working("trainer"))
            await self._look_after_runs()
            await self._tell_stalls()
            await asyncio.sleep(min(1.0, self._lease_s / 4))

    async def _tell_stalls(self) -> None:
        """Lets jobs that wait in vain say so in their events."""
        async with self._lock:
            changes = {number: Changes() for number in self._owned}
            for number, (partition, _) in self._owned.items():
                live = Counter(run.spec.tenant for run in partition.runs.table.values() if run.view().active)
                for job in partition.jobs.values():
                    if (num := live[job.spec.tenant]) and self._allocator.is_full(job.spec.tenant):
                        job.journal.waits_for_runs(num, time.time(), changes[number])
                    if job.id in self._allocator.storage.told:
                        continue
                    limit_s, why = max(STALL_S, 3 * self._lease_s), partial(self._diagnosis, job)
                    job.journal.check_stall(time.time(), limit_s, why, changes[number])
            await self._commit({number: change for number, change in changes.items() if change})

    async def _look_after_runs(self) -> None:
        """Tells runs of trainers that died, ends those whose user has gone, and drops versions that nobody needs."""
        runs = [run for partition, _ in self._owned.values() for run in partition.runs.table.values()]
        silent = await self._surroundings.silent_sessions({run.spec.session for run in runs})
        live = {report.id for report in self._cluster.working("trainer")}
        async with self._lock:
            changes = {number: Changes() for number in self._owned}
            for number, (partition, _) in self._owned.items():
                await partition.look_after_runs(live, silent, time.time(), changes[number])
            await self._commit({number: change for number, change in changes.items() if change})

    def _diagnosis(self, job: Job) -> str:
        """Says what keeps a job from going on, as far as it can be seen from here."""
        cluster, used = self._allocator.cluster, self._allocator.memory_used
        if missing := [service for service in ("rollout", "env", "trainer") if not cluster.slots(service)]:
            return self._cluster.refusals(missing) or f"no {' and no '.join(missing)} worker is alive"
        if used == DISK_FULL:
            return "the disk of Redis is full, and nothing is issued until it has room"
        if used > MAX_MEMORY_USED:
            return f"Redis is {used:.0%} full, and above {MAX_MEMORY_USED:.0%} nothing is issued; give it more memory"
        return cluster.waits_for(job.id) or whereabouts(job, self._cluster)

    async def _nothing_under_way(self) -> bool:
        partitions = [partition for partition, _ in self._owned.values()]
        inboxes = [name for partition in partitions for name in partition.inboxes]
        trainers = {name for partition in partitions for name in partition.runs.trainer_streams}
        return await self._surroundings.nothing_under_way(inboxes, sorted(trainers))


@cache
def _partition_of(inbox: str) -> int:
    return int(inbox.rsplit(":", 1)[-1])
