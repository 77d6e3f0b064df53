"""Holds one partition: its jobs in memory, and the messages that change them.

reads: scored:<p>, adapters:<p>, jobs:<p>, ops:<p>   writes: env, rollout:first, train, control, and the jobs' records
holds: unfinished jobs with their half-full batches (lost on a crash, read again from the pending entries)
after a crash: the next owner takes the lease, loads the records, and reads the entries that the last one had pending
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import NamedTuple

import structlog
from msgspec.structs import replace

from common.bus.bus import Bus, Delivery, Undecodable, Unfetched
from common.bus.deliveries import dead_letter, fetched
from common.bus.streams import GROUP_MANAGER, OWNER
from common.errors import CorruptObject, InvalidInput, StoreUnavailable, Unavailable
from common.store.adapters import update_of
from common.wire.messages import AdapterUpdate, DeadLetter, JobCommand, Parked, ScoredTrajectory, Usage
from common.wire.operations import Forgotten
from manager_service.owner.job_reader import FetchedJob, JobHashes, JobReader, VersionSearch
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.jobs.job import Job
from manager_service.owner.jobs.job_retention import JobRetention
from manager_service.owner.runs.runs import Runs
from manager_service.records.job_records import FINAL, JobError
from manager_service.records.run_records import is_run
from manager_service.scheduling.members import MemberTable

LOAD_COUNT = 200
"""Jobs whose records are read together."""
FILES_S = 2.0
"""Time for which a take-over waits for its jobs' files and versions. Jobs whose come later enter later."""
GIVE_UP_S = 600.0
"""A new job fails without room on this machine's disk for its files for so long. It waits for the store without limit."""

Fetch = Callable[[], Awaitable[Delivery]]
log = structlog.get_logger()


class DelayedJob(NamedTuple):
    """A job that waits for its files."""

    since: float  # seconds since 1970, when errors of this kind began
    error: Unavailable
    retention: JobRetention


class Partition:
    """The state machine of one partition's jobs. All methods fill `changes`; the owner commits them."""

    def __init__(self, number: int, bus: Bus, reader: JobReader) -> None:
        self.number = number
        self.jobs: MemberTable[Job] = MemberTable()
        self.runs = Runs(number, bus)
        self._bus = bus
        self._cell = bus.cell
        self.inboxes = bus.cell.inboxes(number)
        self._reader = reader
        self._arriving: dict[str, dict[tuple[str, str], Delivery]] = {}  # job -> stream and entry -> what waits for it
        self._delayed: dict[str, DelayedJob] = {}  # arriving jobs
        self._fetched: dict[str, FetchedJob] = {}  # arriving jobs that were read
        self._reading: dict[str, asyncio.Task[None]] = {}  # jobs whose files `load` began to read
        self._looked_at = dict.fromkeys(self.inboxes, "0")  # inbox -> newest pending entry that was looked at
        self._searched: dict[str, VersionSearch] = {}  # job -> the version that the store has or has not
        self.fetching: set[tuple[str, str]] = set()
        """Streams and entries whose payloads are to be fetched from the store, and stay pending meanwhile."""
        self._unfetched: list[tuple[str, str, Fetch]] = []

    # ---- taking over ------------------------------------------------------------------------------------------------

    async def load(self, now: float, changes: Changes) -> None:
        """Rebuilds memory from records, the last owner's pending entries, and versions that only the store knows.

        A job fails by itself if its records are unreadable; without its files or version it is `arriving`, as a new one.
        """
        for stream in self.inboxes:
            await self._bus.ensure_group(stream, GROUP_MANAGER)
        (members,) = await self._bus.pipelined([("SMEMBERS", self._cell.active(self.number))])
        names = [name.decode() for name in members]
        await self.runs.load([name for name in names if is_run(name)], now, changes)
        await self._load_jobs([name for name in names if not is_run(name)])
        read = [job_id for job_id in self._fetched if job_id not in self._arriving]
        entered = {job_id: searched for job_id in read if (searched := self._add(job_id, now, changes))}
        # Entries that the last owner read and did not acknowledge are delivered to nobody again, results of half-full batches among
        # them: records only count these, the entries hold what they say. So all pending entries are read here
        for stream in self.inboxes:
            await self._replay(stream, now, changes)
        self.runs.advance_all(now, changes)
        for job_id, searched in entered.items():
            await self._catch_up(job_id, searched, now, changes)

    async def _catch_up(self, job_id: str, searched: VersionSearch, now: float, changes: Changes) -> None:
        """Brings a job that has just entered in line. Call when its pending entries are handled."""
        job = self.jobs[job_id]
        await self._isolated(job_id, now, changes, self._reconcile(job, searched, now, changes, lost=False))

    async def _isolated(self, job_id: str, now: float, changes: Changes, work: Awaitable[object]) -> None:
        """Does the work on one job; its error fails only that job. Raises Unavailable."""
        try:
            await work
        except Unavailable:
            raise
        except Exception as error:  # the boundary: one job's records must not stop the other tenants' owner
            log.exception("job_unreadable", job_id=job_id)
            if job := self.jobs.get(job_id):
                self._fail(job, error, now, changes)
                self.advance(job, now, changes)

    def _fail(self, job: Job, error: Exception, now: float, changes: Changes) -> None:
        code = "corrupt_adapter" if isinstance(error, CorruptObject) else "internal_error"
        job.fail(JobError(code, f"{type(error).__name__}: {error}"), now, changes)

    async def _load_jobs(self, job_ids: Sequence[str]) -> None:
        """Reads jobs, many at a time; jobs without a record are left out."""
        for start in range(0, len(job_ids), LOAD_COUNT):
            some = job_ids[start : start + LOAD_COUNT]
            records = zip(some, await self._reader.records(some), strict=True)
            await asyncio.gather(*(self._load_job(job_id, hashes) for job_id, hashes in records))

    async def _load_job(self, job_id: str, records: JobHashes) -> None:
        """Reads a job, or leaves it arriving: `fetch` then waits for what was begun here."""
        self._reading[job_id] = reading = asyncio.create_task(self._read(job_id, records))
        await asyncio.wait([reading], timeout=FILES_S)
        if reading.done():
            del self._reading[job_id]
        if not reading.done() or reading.exception():
            self._arriving[job_id] = {}

    async def _read(self, job_id: str, records: JobHashes) -> None:
        """Reads a job's files. Raises Unavailable."""
        await self._isolated(job_id, 0.0, Changes(), self._read_files(job_id, records))  # the job does not count yet

    async def _read_files(self, job_id: str, records: JobHashes) -> None:
        if fetched := await self._reader.read(job_id, records):
            self._fetched[job_id] = fetched

    def _add(self, job_id: str, now: float, changes: Changes) -> VersionSearch | None:
        """Lets a job count from now on that was read. None if it was not."""
        fetched = self._fetched.pop(job_id, None)
        if fetched is None:
            return None
        job = fetched.job
        job.changed_at = job.retention.asked_at = now
        self.jobs.add(job)
        changes.entered.append(self._cell.job(job_id))
        if fetched.missing:
            job.fail(JobError("file_not_found", fetched.missing), now, changes)
        return fetched.searched

    async def _replay(self, stream: str, now: float, changes: Changes) -> None:
        after = "0"
        while deliveries := await self._bus.read_pending(stream, GROUP_MANAGER, OWNER, after=after):
            for delivery in [await fetched(each) for each in deliveries]:
                if not self._restored(delivery, changes):
                    await self.handle(delivery, now, changes)
            self._looked_at[stream] = after = deliveries[-1].entry

    # ---- reconciling ------------------------------------------------------------------------------------------------

    async def reconcile(
        self, now: float, changes: Changes, *, quiet_s: float, nothing_under_way: Callable[[], Awaitable[bool]]
    ) -> None:
        """Finds what was lost on its way, and brings each job in line with what exists.

        lost                                          seen by                                           then
        an entry that was delivered to nobody: its    it is pending, and no job in memory holds it      it is handled
        reply was lost with the connection, or was
        read by an owner that had lost its lease
        a result that the last owner had counted      after a take-over, no pending entry has it        it is sampled again
        the update of a version                       the store has the manifest of the next version    the update is applied
        any other message: Redis lost its last        nothing came back for `quiet_s`, and nothing is   it is sent again
        moment                                        in any stream                                     (`Job.resend`)

        `load` looks for the first three of every job. Later only a job that waits and has been quiet for `quiet_s` is looked at.
        Call while no read is under way, so that all that was delivered is known here. Waits only for Redis: `search` asks the
        store about a job found quiet, and the next call brings it in line.
        """
        for stream in self.inboxes:
            await self._handle_unseen(stream, now, changes)
        for job in self.jobs.values():
            job.changed_at = min(job.changed_at, now)  # the clock may have gone back
        quiet = [job for job in self.jobs.values() if _is_quiet(job, now - quiet_s)]
        searched, self._searched = self._searched, {}
        leaving = [job.retention for job in self.jobs.values() if job.retention.under_way]
        if not (quiet or leaving or self.runs.num_open) or self.fetching or not await nothing_under_way():
            return
        self.runs.resend_quiet(leaving, now - quiet_s, now, changes)
        for job in quiet:
            search = searched.get(job.id)
            if search is None or search.since != job.changed_at:
                self._searched[job.id] = VersionSearch(job.changed_at)
            elif search.done:
                await self._isolated(job.id, now, changes, self._reconcile(job, search, now, changes, lost=True))
            else:
                self._searched[job.id] = search

    @property
    def to_search(self) -> bool:
        """Does `search` have anything to do?"""
        return any(not searched.begun for searched in self._searched.values())

    async def look_after_runs(
        self, live_trainers: Collection[str], silent: Collection[str], now: float, changes: Changes
    ) -> None:
        """Takes in which trainers live and which sessions are silent, and drops versions that nobody needs."""
        self.runs.look(live_trainers, silent, now, changes)
        if not self._arriving.keys() <= self._delayed.keys():
            return  # somebody's copies are not known
        jobs = [job.retention for job in self.jobs.values()]
        delayed = (job.retention for job in self._delayed.values())
        copies = [copy for retention in (*jobs, *delayed) for copy in retention.copies()]
        if self.runs.may_retire(now):
            await self.runs.retire(jobs, copies, now, changes)
        elif ended := [retention for retention in jobs if retention.state.status in FINAL]:
            await self.runs.look_at(ended, copies, now, changes)

    async def search(self) -> None:
        """Asks the store for the versions that quiet jobs wait for, without limit. Call outside of the passes.

        The next `reconcile` uses the answers for jobs that stayed quiet. Raises Unavailable.
        """
        for name, searched in list(self._searched.items()):
            if not searched.begun and (job := self.jobs.get(name)):
                searched.begun = True
                try:
                    await self._reader.search(job, searched)
                finally:
                    searched.begun = searched.done

    async def _reconcile(self, job: Job, searched: VersionSearch, now: float, changes: Changes, *, lost: bool) -> None:
        """Brings one job in line. `lost`: nothing of it is in any stream. Raises CorruptObject."""
        job.open.expect_counted()
        if job.state.status == "validating_files":
            job.queue(now, changes)
        if searched.error is not None:
            raise searched.error
        if searched.manifest is not None:
            job.on_adapter(update_of(searched.manifest, job.orders.about(job.state)), now, changes)
        if lost:
            job.resend(now, changes)
        self.advance(job, now, changes)

    async def _handle_unseen(self, stream: str, now: float, changes: Changes) -> None:
        """Handles the pending entries of an inbox that no job holds. Each is looked at once."""
        held = {entry for waiting in self._arriving.values() for inbox, entry in waiting if inbox == stream}
        if stream == self._cell.scored(self.number):
            held |= self._held()
        elif stream == self._cell.ops(self.number):
            held |= self.runs.pending_entries
        held |= {entry for inbox, entry in self.fetching if inbox == stream}
        while entries := await self._bus.pending(stream, GROUP_MANAGER, after=self._looked_at[stream]):
            unseen = [entry for entry in entries if entry not in held]
            for delivery in await self._bus.reread(stream, GROUP_MANAGER, OWNER, unseen):
                if isinstance(delivery.message, Unfetched):
                    self.fetch_later(stream, delivery.entry, delivery.message.fetch)
                    continue
                log.warning("entry_unseen", stream=stream, entry=delivery.entry)
                await self.handle(delivery, now, changes)
            self._looked_at[stream] = entries[-1]

    def fetch_later(self, stream: str, entry: str, fetch: Fetch) -> None:
        """Takes in a claim check."""
        self.fetching.add((stream, entry))
        self._unfetched.append((stream, entry, fetch))

    def take_unfetched(self) -> list[tuple[str, str, Fetch]]:
        """Entries of `fetch_later` since the last call. The owner fetches them outside of the passes, then calls `handle`."""
        unfetched, self._unfetched = self._unfetched, []
        return unfetched

    def _held(self) -> set[str]:
        """Entries that stay pending because a job in memory holds them."""
        return {entry for job in self.jobs.values() for entry in job.open.held_entries}

    def _restored(self, delivery: Delivery, changes: Changes) -> bool:
        """Puts a result that the last owner had counted back into its group. False: it is to be handled."""
        message = delivery.message
        if not isinstance(message, ScoredTrajectory):
            return self.runs.restore(delivery, changes)
        job = self.jobs.get(message.job)
        return job is not None and job.open.restore(delivery.entry, message)

    # ---- messages ---------------------------------------------------------------------------------------------------

    async def handle(self, delivery: Delivery, now: float, changes: Changes) -> None:
        """Applies one entry of an inbox. An error of ours fails its job, and only its job."""
        message = delivery.message
        if isinstance(message, Undecodable):
            self._to_dead(delivery, message.reason, changes)
            message = dead_letter(delivery, message.reason)
            delivery = replace(delivery, message=message)
        try:
            if is_run(message.job):
                await self.runs.handle(delivery, now, changes)
                return
            job = await self._dispatch(delivery, now, changes)
        except Exception as error:  # the boundary: one job's trouble must not stop the other tenants' owner
            log.exception("transition_failed", job_id=message.job, message_id=message.id)
            self._to_dead(delivery, f"{type(error).__name__}: {error}", changes)
            job = self.jobs.get(message.job)
            if job is not None:
                self._fail(job, error, now, changes)
        if job is not None:
            job.journal.progressed(now, changes)
            self.advance(job, now, changes)

    async def _dispatch(self, delivery: Delivery, now: float, changes: Changes) -> Job | None:
        message = delivery.message
        assert not isinstance(message, Undecodable)
        is_new = isinstance(message, JobCommand) and message.action == "create" and message.job not in self.jobs
        if is_new or message.job in self._arriving:
            self._arriving.setdefault(message.job, {})[delivery.stream, delivery.entry] = delivery
            return None
        if isinstance(message, JobCommand):
            changes.ack(delivery.stream, delivery.entry)
            return self._command(message, now, changes)
        job = self.jobs.get(message.job)
        if job is None:  # it has finished; the work is still counted
            changes.ack(delivery.stream, delivery.entry)
            usage = message.request.usage if isinstance(message, Parked) else getattr(message, "usage", Usage())
            changes.add_usage(message.tenant, message.job, usage, wasted=True)
        elif isinstance(message, ScoredTrajectory):
            job.on_scored(delivery.entry, message, changes)
        elif isinstance(message, Parked):
            job.on_parked(delivery.entry, message, changes)
        elif isinstance(message, AdapterUpdate):
            changes.ack(delivery.stream, delivery.entry)
            job.on_adapter(message, now, changes)
        elif isinstance(message, Forgotten):
            changes.ack(delivery.stream, delivery.entry)
            job.retention.forgotten(message.forget, changes)
        elif isinstance(message, DeadLetter):
            changes.ack(delivery.stream, delivery.entry)
            if message.stream not in (self._cell.jobs(self.number), self._cell.adapters(self.number)):
                # `reconcile` finds lost updates; a lost command's user asks again
                try:
                    job.on_dead_letter(delivery.entry, message, now, changes)
                except InvalidInput as error:
                    reason = f"a message could not be read, and {error}: {message.reason}"
                    job.fail(JobError("dead_letter", reason), now, changes)
        else:
            self._to_dead(delivery, f"a {type(message).__name__} has no business here", changes)
        return job

    def _command(self, command: JobCommand, now: float, changes: Changes) -> Job | None:
        job = self.jobs.get(command.job)
        if job is None:
            return None
        if command.action == "warn":
            job.journal.warn(now, command.text, changes)
            return None
        if command.action != "create":
            {"pause": job.pause, "resume": job.resume, "cancel": job.cancel}[command.action](now, changes)
        elif job.state.status == "validating_files":
            job.queue(now, changes)
        return job

    # ---- arriving jobs ----------------------------------------------------------------------------------------------

    @property
    def arriving(self) -> list[str]:
        """Jobs to be fetched: new ones, and the last owner's unreadable ones. What comes for them waits, pending."""
        return list(self._arriving)

    async def fetch(self, job_id: str) -> None:
        """Reads a job's record and files, however long that takes. Call outside of the passes.

        Raises Unavailable if store or disk do not let it: then call `delay`, and this again later.
        """
        if reading := self._reading.pop(job_id, None):
            await reading
            return
        (records,) = await self._reader.records([job_id])
        await self._read(job_id, records)

    async def delay(self, job_id: str, error: Unavailable, now: float, changes: Changes) -> None:
        """Says once in a job's events why it waits for files; fails a new one after GIVE_UP_S if the store is there."""
        (records,) = await self._reader.records([job_id])
        job = self._reader.without_files(job_id, records)
        if job is None:
            return
        before = self._delayed.get(job_id)
        since = before.since if before and type(before.error) is type(error) else now
        self._delayed[job_id] = DelayedJob(since, error, job.retention)
        is_new = job.state.started_at is None
        gives_up = is_new and now - since >= GIVE_UP_S and not isinstance(error, StoreUnavailable)
        if before and str(before.error) == str(error) and not gives_up:
            return
        if not gives_up:
            job.journal.warn(now, f"The job waits, because its files cannot be read: {error}", changes)
            return
        self.jobs.add(job)
        reason = f"the job's files could not be read for {GIVE_UP_S:.0f} s: {error}; create it again later"
        job.fail(JobError("files_unavailable", reason), now, changes)

    def lacks_room(self, since: float) -> bool:
        """Has this machine's disk had no room for a job's files since then?"""
        delayed = self._delayed.values()
        return any(each.since <= since and not isinstance(each.error, StoreUnavailable) for each in delayed)

    async def take_in(self, job_id: str, now: float, changes: Changes) -> None:
        """Lets a job that is fetched count, and handles what waited for it."""
        self._delayed.pop(job_id, None)
        searched = self._add(job_id, now, changes)
        for delivery in self._arriving.pop(job_id).values():
            if job_id not in self.jobs:
                changes.ack(delivery.stream, delivery.entry)
            elif not self._restored(delivery, changes):
                await self.handle(delivery, now, changes)
        if searched is not None:
            await self._catch_up(job_id, searched, now, changes)

    def advance(self, job: Job, now: float, changes: Changes) -> None:
        """Does what follows from the state of a job to which something has happened."""
        job.changed_at = now
        job.advance(now, changes)
        self.jobs.touch(job.id)

    def note(self, changes: Changes, now: float) -> None:
        """Sets the clocks of the changed jobs, and removes the settled ones. Call before each commit."""
        for job in filter(None, map(self.jobs.get, changes.states)):
            job.changed_at = now
            if job.settled:
                self.jobs.remove(job.id)
                changes.finished.append(job.id)
                if job.spec.webhooks:
                    changes.to_tell.append((job.spec.tenant, job.id))
                changes.close(self._cell.unfinished(job.spec.tenant), job.id)
        self.runs.note(changes, now)

    def _to_dead(self, delivery: Delivery, reason: str, changes: Changes) -> None:
        changes.published.append((self._cell.dead, dead_letter(delivery, reason)))
        changes.ack(delivery.stream, delivery.entry)


def _is_quiet(job: Job, since: float) -> bool:
    """Does a job wait while nothing has happened to it? A paused one is looked at once it runs again."""
    return job.under_way and job.state.status != "paused" and job.changed_at < since
