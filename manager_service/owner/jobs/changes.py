"""Effects of a job's transition as values, and as Redis commands.

The job's state machine only fills a `Changes`; the partition's owner turns it into one fenced script.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from common.bus.bus import Out
from common.bus.streams import GROUP_MANAGER, Cell
from common.wire.messages import Usage
from common.wire.operations import OperationResult
from manager_service.records.job_records import MOVING, VERSION, JobState
from manager_service.records.keys import JSON
from manager_service.records.run_records import NUM_SEQS_KEPT, USED_S, RunState, Sampler, session_of
from manager_service.records.sample_records import CheckpointRecord, EventRecord, SampleKind
from manager_service.records.stored import COUNTED, add_stored
from manager_service.records.usage import ARCHIVED, KEEP_HOURS_S, QUOTA_COUNTERS, day_field, hour_of

RedisCommand = list[Any]
KEEP_RESULTS_S = 3600
"""Time in which a run's user may ask for the result of an operation."""

KEEP_ENDS_S = 3 * 86_400
"""Time in which an exporter may tell webhooks of a job's end."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A finished job whose records are in the archive now."""

    job: str
    tenant: str = ""  # empty: its record cannot be read, so it stays where it is
    usage: Mapping[str, float] = field(default_factory=dict[str, float])  # counter -> amount
    num_bytes: int = 0  # of its records in the archive; of a run: negative, of deleted versions that still count


@dataclass(frozen=True, slots=True)
class KeptSamples:
    """Samples of a step or an evaluation, for object storage once the changes are committed."""

    kind: SampleKind
    tenant: str
    job: str
    version: int
    records: bytes  # a list of SampleRecord as JSON


@dataclass(slots=True)
class Changes:
    """Effects of one partition's transitions, applied all at once or not at all."""

    published: list[Out] = field(default_factory=list)
    acks: dict[str, list[str]] = field(default_factory=dict)  # stream -> entries
    ledger: Counter[tuple[str, str]] = field(default_factory=Counter)  # (job, count name)
    opened: dict[str, dict[str, str]] = field(default_factory=dict)  # hash key -> field -> value
    closed: dict[str, set[str]] = field(default_factory=dict)  # hash key -> fields
    events: list[tuple[str, EventRecord]] = field(default_factory=list)
    dropped_events: dict[str, int] = field(default_factory=dict)  # job -> the first sequence that is kept
    usage: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # (tenant, job, counter)
    stored: Counter[tuple[str, str]] = field(
        default_factory=Counter
    )  # (tenant, what) -> bytes more; see records.stored
    counted: list[str] = field(default_factory=list)  # tenants whose stored bytes are complete from now on
    checkpoints: list[tuple[str, CheckpointRecord]] = field(default_factory=list)
    samples: list[KeptSamples] = field(default_factory=list)
    dropped_samples: list[tuple[str, str, range]] = field(default_factory=list)  # tenant, job, versions
    entered: list[str] = field(
        default_factory=list
    )  # keys of records read since the last commit: they must still exist
    states: dict[str, JobState] = field(default_factory=dict)  # changed jobs
    begun: list[str] = field(default_factory=list)  # issued something of their version 0
    ended: list[str] = field(default_factory=list)  # succeeded, failed or cancelled; a step may still be under way
    oldest_in_use: dict[str, int] = field(
        default_factory=dict
    )  # job with a new version -> oldest that messages may name
    finished: list[str] = field(default_factory=list)  # jobs that leave the active set
    to_tell: list[tuple[str, str]] = field(default_factory=list)  # tenant and job of which webhooks are to hear
    moving: list[str] = field(default_factory=list)  # finished jobs whose records must not change any more
    moved: list[Moved] = field(default_factory=list)
    runs: dict[str, RunState] = field(default_factory=dict)  # changed runs
    samplers: list[Sampler] = field(default_factory=list)  # that saves of runs made
    retire: dict[str, float | None] = field(
        default_factory=dict
    )  # ended run -> when to look at its versions; None: never
    settled: list[str] = field(default_factory=list)  # runs that have just ended
    over: list[Moved] = field(default_factory=list)  # ended runs that leave Redis
    results: dict[str, list[OperationResult]] = field(default_factory=dict)  # run -> of its operations
    oldest_operations: dict[str, int] = field(default_factory=dict)  # changed run -> its oldest that may be read again
    dropped_results: dict[str, list[int]] = field(default_factory=dict)  # run -> numbers of its operations

    def __bool__(self) -> bool:
        parts = (self.published, self.acks, self.ledger, self.opened, self.closed, self.events, self.usage, self.states)
        parts += (self.moving, self.moved, self.entered, self.runs, self.retire, self.over, self.stored, self.counted)
        return any(parts)

    def ack(self, stream: str, entry: str) -> None:
        self.acks.setdefault(stream, []).append(entry)

    def open(self, key: str, name: str, value: str) -> None:
        self.opened.setdefault(key, {})[name] = value
        self.closed.get(key, set()).discard(name)

    def close(self, key: str, *names: str) -> None:
        for name in names:
            self.opened.get(key, {}).pop(name, None)
            self.closed.setdefault(key, set()).add(name)

    def add_usage(self, tenant: str, job: str, usage: Usage, *, wasted: bool = False) -> None:
        for counter, amount in msgspec.structs.asdict(usage).items():
            if amount:
                self.usage[tenant, job, counter] += amount
        if wasted:
            self.usage[tenant, job, "wasted_tokens"] += usage.prompt_tokens + usage.sampled_tokens


def commands(
    changes: Changes, cell: Cell, partition: int, encoded: list[tuple[str, list[Any]]], now: float
) -> list[RedisCommand]:
    """The Redis commands of one script. `encoded`: the published messages as stream and fields."""
    result: list[RedisCommand] = [["HEXISTS", key, "spec"] for key in changes.entered]
    result += [["XADD", stream, "*", *fields] for stream, fields in encoded]
    result += _bookkeeping(changes, cell)
    result += _usage(changes, cell, now)
    for (tenant, what), num_bytes in changes.stored.items():
        result += add_stored(cell, tenant, what, num_bytes)
    result += [["HSET", cell.stored(tenant), COUNTED, 1] for tenant in changes.counted]
    for job, event in changes.events:
        result.append(["XADD", cell.events(job), f"{event.sequence}-0", "event", JSON.encode(event)])
    for job, first in changes.dropped_events.items():
        result.append(["XTRIM", cell.events(job), "MINID", f"{first}-0"])
    for job, state in changes.states.items():
        result.append(["HSET", cell.job(job), "state", JSON.encode(state), VERSION, state.version])
    result += [["SADD", cell.begun, job] for job in changes.begun]
    result += [["SREM", cell.begun, job] for job in changes.ended]
    for job in changes.finished:
        result.append(["SREM", cell.active(partition), job])
        result.append(["ZADD", cell.finished(partition), changes.states[job].finished_at or 0, job])
    for tenant, job in changes.to_tell:
        result.append(["ZADD", cell.ends, now, f"{tenant} {job}"])
        result.append(["ZREMRANGEBYSCORE", cell.ends, "-inf", now - KEEP_ENDS_S])
    result += [["HSET", cell.job(job), MOVING, "1"] for job in changes.moving]
    for moved in changes.moved:
        result += _deletions(moved, cell, partition)
    result += _of_runs(changes, cell, partition)
    for stream, entries in changes.acks.items():  # last, behind all effects: see `transaction.COMMIT`
        result.append(["XACK", stream, GROUP_MANAGER, *entries])
        result.append(["XDEL", stream, *entries])
    return result


def _bookkeeping(changes: Changes, cell: Cell) -> list[RedisCommand]:
    result: list[RedisCommand] = [["HINCRBY", cell.ledger(job), name, by] for (job, name), by in changes.ledger.items()]
    for key, values in changes.opened.items():
        if values:
            result.append(["HSET", key, *_flat(values)])
    for key, names in changes.closed.items():
        if names:
            result.append(["HDEL", key, *names])
    for job, record in changes.checkpoints:
        result.append(["HSET", cell.checkpoints(job), record.version, JSON.encode(record)])
    return result


def _usage(changes: Changes, cell: Cell, now: float) -> list[RedisCommand]:
    result: list[RedisCommand] = []
    for (tenant, job, counter), amount in changes.usage.items():
        result.append(["HINCRBYFLOAT", cell.usage(tenant), f"{job}/{counter}", repr(float(amount))])
        if counter in QUOTA_COUNTERS:
            result.append(["HINCRBY", cell.usage(tenant), day_field(now), int(amount)])
            hour = cell.hours(tenant, hour_of(now))
            result.append(["HINCRBY", hour, f"{session_of(job)}/{counter}", int(amount)])
            result.append(["EXPIRE", hour, KEEP_HOURS_S])
    return result


def _deletions(moved: Moved, cell: Cell, partition: int) -> list[RedisCommand]:
    """Deletes what the archive has. The tenant's use stays, summed over all its archived jobs."""
    job, tenant = moved.job, moved.tenant
    result: list[RedisCommand] = [["ZREM", cell.finished(partition), job]]
    if not tenant:
        return result
    result.append(["DEL", *cell.records(job)])
    result.append(["HDEL", cell.unfinished(tenant), job])
    result += [["ZREM", key, job] for key in (cell.tenant_jobs(tenant), cell.jobs_all)]
    result.append(["INCR", cell.num_archived])
    result += add_stored(cell, tenant, ARCHIVED, moved.num_bytes)
    return result + _used_up(moved, cell)


def _used_up(moved: Moved, cell: Cell) -> list[RedisCommand]:
    """Counts what a job or run has used as that of all that have left Redis."""
    result: list[RedisCommand] = []
    for counter, amount in moved.usage.items():
        result.append(["HDEL", cell.usage(moved.tenant), f"{moved.job}/{counter}"])
        result.append(["HINCRBYFLOAT", cell.usage(moved.tenant), f"{ARCHIVED}/{counter}", repr(amount)])
    return result


def _of_runs(changes: Changes, cell: Cell, partition: int) -> list[RedisCommand]:
    result: list[RedisCommand] = []
    for run, state in changes.runs.items():
        result.append(["HSET", cell.run(run), *_flat(state.fields())])
        if state.status == "ended":
            result.append(["SREM", cell.active(partition), run])
            result.append(["EXPIRE", cell.seqs(run), KEEP_RESULTS_S])
    for sampler in changes.samplers:
        result.append(["SET", cell.use(sampler.adapter.job, sampler.adapter.version), "", "EX", USED_S])
        result.append(["SET", cell.sampler(sampler.id), JSON.encode(sampler), "EX", sampler.keep_s])
    for run, due in changes.retire.items():
        key = cell.retire(partition)
        result.append(["ZREM", key, run] if due is None else ["ZADD", key, due, run])
    for run, results in changes.results.items():
        pairs = [part for each in results for part in (each.seq, msgspec.msgpack.encode(each))]
        result += [["HSET", cell.results(run), *pairs], ["EXPIRE", cell.results(run), KEEP_RESULTS_S]]
        if forgotten := [each.seq - NUM_SEQS_KEPT for each in results if each.seq > NUM_SEQS_KEPT]:
            result.append(
                ["HDEL", cell.results(run), *forgotten]
            )  # nobody can ask for these: `seqs` has forgotten them
    result += [["HDEL", cell.results(run), *seqs] for run, seqs in changes.dropped_results.items()]
    for moved in changes.over:
        run, tenant = moved.job, moved.tenant
        result.append(["DEL", *(key(run) for key in (cell.run, cell.versions, cell.seqs, cell.results))])
        result += [["ZREM", key, run] for key in (cell.tenant_runs(tenant), cell.retire(partition))]
        result += add_stored(cell, tenant, run, moved.num_bytes) + [["HDEL", cell.stored(tenant), run]]
        result += _used_up(moved, cell)
    return result


def _flat(values: Mapping[str, Any]) -> list[Any]:
    return [part for pair in values.items() for part in pair]
