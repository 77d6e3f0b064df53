"""Effects of a job's transition as values, and as Redis commands.

The job's state machine only fills a `Changes`; the partition's owner turns it into one fenced script.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from common.bus import Out
from common.messages import Usage
from common.streams import GROUP_MANAGER, Cell
from manager_service.records import JSON, QUOTA_COUNTERS, CheckpointRecord, EventRecord, JobState

Command = list[Any]


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
    checkpoints: list[tuple[str, CheckpointRecord]] = field(default_factory=list)
    samples: list[tuple[str, int, bytes]] = field(default_factory=list)  # job, version, list of SampleRecord as JSON
    dropped_samples: list[tuple[str, int, int]] = field(default_factory=list)  # job, first version, one past the last
    states: dict[str, JobState] = field(default_factory=dict)  # changed jobs
    begun: list[str] = field(default_factory=list)  # have a version 0
    ended: list[str] = field(default_factory=list)  # succeeded, failed or cancelled; a step may still be under way
    finished: list[str] = field(default_factory=list)  # jobs that leave the active set

    def __bool__(self) -> bool:
        parts = (self.published, self.acks, self.ledger, self.opened, self.closed, self.events, self.usage, self.states)
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
    changes: Changes, cell: Cell, partition: int, encoded: list[tuple[str, list[Any]]], today: str
) -> list[Command]:
    """The Redis commands of one script. `encoded`: the published messages as stream and fields.

    `today`: the day's field in `usage:<tenant>`.
    """
    result: list[Command] = [["XADD", stream, "*", *fields] for stream, fields in encoded]
    result += _bookkeeping(changes, cell)
    result += _usage(changes, cell, today)
    for job, event in changes.events:
        result.append(["XADD", cell.events(job), f"{event.sequence}-0", "event", JSON.encode(event)])
    for job, first in changes.dropped_events.items():
        result.append(["XTRIM", cell.events(job), "MINID", f"{first}-0"])
    for job, state in changes.states.items():
        result.append(["HSET", cell.job(job), "state", JSON.encode(state)])
    result += [["SADD", cell.begun, job] for job in changes.begun]
    result += [["SREM", cell.begun, job] for job in changes.ended]
    for job in changes.finished:
        result.append(["SREM", cell.active(partition), job])
    for stream, entries in changes.acks.items():
        result.append(["XACK", stream, GROUP_MANAGER, *entries])
        result.append(["XDEL", stream, *entries])
    return result


def _bookkeeping(changes: Changes, cell: Cell) -> list[Command]:
    result: list[Command] = [["HINCRBY", cell.ledger(job), name, by] for (job, name), by in changes.ledger.items()]
    for key, values in changes.opened.items():
        if values:
            result.append(["HSET", key, *_flat(values)])
    for key, names in changes.closed.items():
        if names:
            result.append(["HDEL", key, *names])
    for job, record in changes.checkpoints:
        result.append(["HSET", cell.checkpoints(job), record.version, JSON.encode(record)])
    for job, version, samples in changes.samples:
        result.append(["HSET", cell.samples(job), version, samples])
    for job, first, end in changes.dropped_samples:
        result.append(["HDEL", cell.samples(job), *range(first, end)])
    return result


def _usage(changes: Changes, cell: Cell, today: str) -> list[Command]:
    result: list[Command] = []
    for (tenant, job, counter), amount in changes.usage.items():
        result.append(["HINCRBYFLOAT", cell.usage(tenant), f"{job}/{counter}", repr(float(amount))])
        if counter in QUOTA_COUNTERS:
            result.append(["HINCRBY", cell.usage(tenant), today, int(amount)])
    return result


def _flat(values: Mapping[str, str]) -> list[str]:
    return [part for pair in values.items() for part in pair]
