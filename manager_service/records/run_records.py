"""Declares the records of a run, in `run:<run>`: `spec`, written once by the API, and `state`, by the partition's owner, both JSON.
Scripts never decode a state: next to it stand its `status` and `head`, and `log`, the bytes of its log.

A session is one client; it numbers its runs from 0, and its samplers too. The SDK builds their names itself:

    session        ses-<16 hex digits>
    run            run-<the same digits>-<n>; to its user `<session>:train:<n>`
    sampler        <session>:sample:<n>
    operation      <run>:<seq>, also the id of its future; seq 0 is the creation

What only the owner writes, next to `state`:

    versions:<run>                  hash     version that may be read -> 1 if its optimiser's state is there, else 0
    sampler:<sampler>               string   Sampler, of one that a save made; for as long after its last use as it says
    retire:<p>                      zset     ended runs of which something may be deleted, by when to look at them
    unfinished:<tenant>             hash     see manager_service.records: runs that have not ended, and jobs
    held:<tenant>                   hash     run -> bytes of its operations that wait, and of its log; a submit writes it too

What only an API replica writes, except samplers of saves:

    marlaas:{@}:session:<session>   string   ClientSession, for SESSION_KEPT_S after its last sign of life
    marlaas:{@}:sessions:<tenant>   zset     session id by creation time; likewise of the large ones: sessions:<tenant>/large
    use:<run>:<version>             string   noted by whoever means to read that version; `…:optimizer` too if with its optimiser's
                                             state; both expire after USED_S
    session:<session>               string   its tenant, in each cell, for SESSION_ALIVE_S after its last sign of life
    sampler:<sampler>               string   Sampler, of a base model or a checkpoint
    tenant-samplers:<tenant>        zset     all samplers, by when they expire: seconds since 1970
    clients:<sampler>               string   number of clients that have joined it
    seqs:<run>                      hash     until an hour after the run's end: number of an operation ->
                                             `<sha256 of what was asked> <what was asked> <path of a large payload, or -> <bytes>`;
                                             `last`: the highest number; `unload`: the number of the run's end
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from common.bus.bus import Bus
from common.wire.messages import BASE, AdapterRef, Failure, LoraSpec
from common.wire.operations import Kind, NameChange, SaveWeights

HOLE_S = 420.0
"""Time after which skipped numbers are given up: the SDK tries to send one for 5 minutes."""


RunStatus = Literal["queued", "creating", "ready", "failed", "ended"]
SAVES: Mapping[str, Kind] = {
    "save_weights": "weights",
    "save_for_sampler": "sampler_weights",
    "save_external": "external_weights",
}
"""Action -> the kind of checkpoint that it makes."""
_PUBLIC = re.compile(r"ses-([0-9a-f]{16}):train:(\d{1,6})")


class RunSpec(msgspec.Struct, frozen=True):
    id: str
    tenant: str
    session: str
    base_model: str  # the cell's name for it
    asked_model: str  # as its user wrote it: the SDK loads the tokenizer of that name
    lora: LoraSpec
    seed: int
    created_at: int  # seconds since 1970
    source: AdapterRef | None = None  # version 0 is a copy of this one; None: drawn from the seed
    with_optimizer: bool = False  # of the source
    user_metadata: dict[str, Any] = {}
    weight: float = 1.0  # the tenant's at creation

    @property
    def urgency(self) -> tuple[float, float]:
        """The urgency of a job without priority and deadline."""
        return 0.0, math.inf

    @property
    def public_id(self) -> str:
        return f"{self.session}:train:{self.id.rpartition('-')[2]}"


class Checkpoint(msgspec.Struct, frozen=True):
    """A name of a version."""

    kind: Kind
    name: str
    version: int
    created_at: int
    expires_at: int | None = None  # seconds since 1970; from then on, it is as if it had been deleted

    def is_kept(self, now: float) -> bool:
        return self.expires_at is None or self.expires_at > now


class Leaving(msgspec.Struct):
    """Versions of a run or job that nobody may begin to use, as a trainer is to delete them: see owner/runs/run_retention.py."""

    id: str  # of the message to the trainer
    versions: dict[int, bool]  # version -> its optimiser's state was there
    optimizers: list[int]  # versions that lose only their optimiser's state
    asked: bool = False  # the message is sent: there is no way back
    everything: bool = False  # whatever else the store has of the run is deleted too

    def num_bytes(self, size: tuple[int, int]) -> int:
        """The bytes that their deletion frees. `size`: as in RunState."""
        adapter, optimizer = size
        return adapter * len(self.versions) + optimizer * (sum(self.versions.values()) + len(self.optimizers))


class RunState(msgspec.Struct):
    """Changes with every operation that is answered."""

    status: RunStatus = "queued"
    version: int = -1  # the newest that is committed; -1: none yet
    head: int = 1  # number of the first operation that has no result
    attempt: int = 0  # number of the last message to a trainer
    sent: int = 0  # number of the last operation of the message that is with a trainer; 0: none is
    sent_tokens: int = 0  # positions of that message
    sent_to: str = ""  # the one trainer that can carry it out; empty: any
    holder: str = ""  # the trainer with the gradient; empty: none
    held: int = 0  # that trainer's count of the operations in it
    in_log: int = 0  # how many of the log are in it
    failed_at: int | None = None  # a failed operation since the newest version: the next optim_step fails too
    failed_why: str = ""  # what became of that operation
    size: tuple[int, int] = (0, 0)  # bytes of each version: of the adapter, of the optimiser's state
    checkpoints: list[Checkpoint] = []
    num_counted: int = 0  # of them, in what its tenant stores
    inflight: int = -1  # the version of the newest save for samplers that follow such saves
    failure: Failure | None = None  # why it can do nothing more
    leaving: Leaving | None = None
    num_left: int = 0  # messages to trainers that had them delete versions
    ended_at: int = 0  # seconds since 1970
    erased: bool = False  # the run is forgotten, and the store has nothing of it

    def kept(self, now: float) -> list[Checkpoint]:
        """The checkpoints that have not expired."""
        return [one for one in self.checkpoints if one.is_kept(now)]

    def fields(self) -> dict[Any, Any]:
        """The fields of the record, as Redis keeps them."""
        return {"state": msgspec.json.encode(self), "status": self.status, "head": self.head}


UNNAMED_KEPT_S = 7 * 86_400
"""A run without checkpoints is forgotten so long after its end; one that never had a version after an hour."""
USED_S = 3600
"""A version is kept for so long after its last use."""
NUM_SEQS_KEPT = 4096
"""Numbers of a run that `seqs:<run>` remembers, so that an operation which is sent again is known."""


SESSION_ALIVE_S, SESSION_KEPT_S = 300, 30 * 86_400
MAX_KEPT = 10_000
"""Sessions that a tenant keeps, and, in a cell, its runs, and its samplers."""


LEAST_HELD = 64 << 10


def held_bytes(payload: bytes) -> int:
    """The bytes for which an operation's data count while they stay in Redis: an owner looks at each, so small ones count for more."""
    return max(len(payload), LEAST_HELD) if payload else 0


async def forget_oldest(redis: Any, key: str, *records: Callable[[str], str], most: int | None = None) -> list[str]:
    """Forgets the first names of a sorted set beyond `most`, or MAX_KEPT, with the records of each; returns them."""
    gone = [name.decode() for name in await redis.zrange(key, 0, -1 - (most or MAX_KEPT))]
    if gone:
        await redis.delete(*(record(name) for name in gone for record in records))
        await redis.zrem(key, *gone)
    return gone


class ClientSession(msgspec.Struct, frozen=True):
    """One client."""

    id: str
    tenant: str
    created_at: int
    sdk_version: str = ""
    display_name: str | None = None
    user_metadata: dict[str, Any] = {}
    finished: str = ""  # how its client ended, if it said so


class Sampler(msgspec.Struct, frozen=True):
    """The model with which a sampler samples. It never changes."""

    id: str
    tenant: str
    asked_model: str  # as its user wrote it
    keep_s: int  # after its last use
    adapter: AdapterRef = BASE
    inflight: bool = False  # the state of the adapter's run says the version
    path: str | None = None  # as its user wrote it


def run_of(public_id: str) -> str | None:
    """The run that its user names so; None for what is no name of a run."""
    found = _PUBLIC.fullmatch(public_id)
    return f"run-{found[1]}-{int(found[2])}" if found else None


def session_of(name: str) -> str:
    """The session of what stands where jobs' ids do; empty if it is no run."""
    return f"ses-{name.split('-')[1]}" if is_run(name) else ""


def is_run(name: str) -> bool:
    """Does a name that stands where jobs' ids do mean a run?"""
    return name.startswith("run-")


# KEYS: versions, use, use with the optimiser's state. ARGV: version, is its optimiser's state wanted (1 or 0), seconds to keep, is it a
# run's. Answers 0 if the version is not there. Jobs that keep all have no list, nor have those in the archive.
_USE = """
local there = redis.call('HGET', KEYS[1], ARGV[1])
if not there and ARGV[4] == '0' and redis.call('EXISTS', KEYS[1]) == 0 then return 1 end
if not there or there < ARGV[2] then return 0 end
redis.call('SET', KEYS[2], '', 'EX', ARGV[3])
if ARGV[2] == '1' then redis.call('SET', KEYS[3], '', 'EX', ARGV[3]) end
return 1
"""


async def use(bus: Bus, adapter: AdapterRef, *, with_optimizer: bool = False) -> bool:
    """Keeps a version for USED_S. False: it is deleted, or about to be. True for a job's without a list: nothing of it is deleted."""
    if adapter.is_base:
        return True
    cell, run, version = bus.cell, adapter.job, adapter.version
    keys = [cell.versions(run), cell.use(run, version), cell.use(run, version, with_optimizer=True)]
    script = bus.client.register_script(_USE)
    words = [version, int(with_optimizer), USED_S, int(is_run(run))]
    return bool(await bus.retrying(lambda: script(keys=keys, args=words)))


MAX_CHECKPOINTS = 1000
"""Checkpoints of one run: the state has them all, and is written with each operation."""
NAME_BYTES = 64 << 10
"""Stored bytes for which each counts, besides its version: a tenant's 10,000 runs could fill Redis with names of one version each."""


def give_name(state: RunState, wanted: SaveWeights, kind: Kind, now: float) -> str:
    """Names the newest version; why that cannot be, or empty."""
    others = [known for known in state.kept(now) if (known.kind, known.name) != (kind, wanted.name)]
    if len(others) >= MAX_CHECKPOINTS:
        return (
            f"this run has {MAX_CHECKPOINTS} checkpoints: delete some (`tinker checkpoint delete PATH`), or save with ttl_seconds,"
            " so that they expire"
        )
    expires_at = None if wanted.ttl_s is None else int(now) + wanted.ttl_s
    state.checkpoints = [*others, Checkpoint(kind, wanted.name, state.version, int(now), expires_at)]
    return ""


def count_names(state: RunState) -> int:
    """Stored bytes by which a run's checkpoints have more than when they were counted last; they count from now on."""
    more = len(state.checkpoints) - state.num_counted
    state.num_counted += more
    return more * NAME_BYTES


def meant(state: RunState, change: NameChange) -> Checkpoint | None:
    """The checkpoint that a change is about; None if it is gone, or was saved again since."""
    about = change.checkpoint, change.name, change.version, change.created_at
    for known in state.checkpoints:
        if (known.kind, known.name, known.version, known.created_at) == about:
            return known
    return None


def change_name(state: RunState, change: NameChange, now: float) -> None:
    """A repeat changes nothing. What has expired goes too."""
    known = meant(state, change)
    kept = state.kept(now)
    if known is not None and known in kept:
        place = kept.index(known)
        changed = msgspec.structs.replace(known, expires_at=change.expires_at)
        kept[place : place + 1] = [] if change.deletes else [changed]
    state.checkpoints = kept
