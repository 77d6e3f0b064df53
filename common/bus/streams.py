"""Names of every key of a cell (all that belongs to one base model), and their types.

    key `marlaas:{<base>}:…`   type     content
    env                        stream   Start, TurnResult, GradeRequest            group `env`
    env:<worker>               stream   TurnResult of sessions that the worker holds group `env`
    env-workers                zset     env workers with such a stream, by when they count as gone, ms
    rollout                    stream   TurnRequest, first turns                   group `rollout`
    rollout:first              stream   TurnRequest of later turns: read before    group `rollout`
    rollout:chat               stream   TurnRequest of completions: read first of all, has places of its own  group `rollout`
    rollout:<worker>,
    rollout:chat:<worker>      stream   of these, what one worker should get: read before what is for all     group `rollout`
    rollout-workers            zset     rollout workers with such streams, by when they count as gone, ms
    hungry                     hash     rollout worker -> free slots, and until when that holds, s
    train                      stream   Init, TrainStep, Operations, Forget        group `trainer`
    scored:<p>                 stream   ScoredTrajectory, Parked, DeadLetter       group `manager`, consumer `owner`
    adapters:<p>               stream   AdapterUpdate, OperationsDone, Forgotten,
                                        DeadLetter                                 group `manager`, consumer `owner`
    jobs:<p>                   stream   JobCommand, NameChange                     group `manager`, consumer `owner`
    ops:<p>                    stream   Operation                                  group `manager`, consumer `owner`
    train:<worker>             stream   Operations whose gradient that trainer has group `trainer`
    reply:<api>                stream   TurnResult, TurnDelta, GradeResult         no group, has a time to live
    peers:<api>                stream   what API replicas ask each other             no group, has a time to live
    control, adapters:new,
    done, telemetry            stream   broadcasts, trimmed by age                 no group
    dead                       stream   DeadLetter                                 no group
    partial:<stream>:<entry>   string   what a worker has done so far of an entry it holds; expires. `:by` behind it: by which delivery
    moved:<stream>:<entry>     string   stream and entry to which an entry of a worker's own stream was passed on; expires
    history:<stream>:<entry>   list     payloads that led to a pending entry, each with its entry's id
    looked:<stream>            string   set while nobody need look for idle entries; expires
    lease:<p>                  string   the owner's random token, expires
    rev:<p>                    string   number of the owner's last write
    open-at:<service>          zset     pool workers that have or open the base model, by until when that holds, ms
    opening:<service>          zset     of these, those that still open it
    bits                       hash     `mode`, and service -> fingerprint: what workers must compute to join
    bits:live                  zset     services that have live workers, by when they count as gone, ms
    holders:<sha256>           hash     rollout worker -> what it has of a file, and until when that counts; expires
    peer-key                   string   what rollout workers must know to follow each other
    convoy:<place>             string   rollout worker that loads a stage of the base model, how far it is, and its address; expires
    store                      string   identity of the local store that the cell's first service found
    disk-full                  string   set while the disk of `marlaas up`'s Redis is full
    dropped                    hash     stream -> entries that were dropped because it had too many bytes
    owners                     zset     tokens of live owners by when they count as dead, ms
    weights                    hash     partition, from 1 -> weight of its active tenants
    sampling                   string   weight of the tenants who sample in bulk; expires
    demand                     hash     partition, from 1 -> rollout slots that its jobs would fill
    asked                      string   rollout slots that completions and samples in bulk would fill; expires
    wanted                     string   JSON: how many rollout workers there should be, and which retires; expires
    scaled                     hash     `retired` workers, `held_worker_seconds`: totals of the rollout workers
    served                     hash     what was served -> seconds of rollout engines: `jobs`, `rollout` (completions), `samples` (in bulk)
    inference                  hash     API replica -> until when it counts as alive, ms, and which tenants ask it for places
    active:<p>                 set      ids of the partition's jobs that its owner holds: unfinished, or with a step under way
    begun                      set      ids of the cell's unfinished jobs of which something was issued
    job:<job>                  hash     `spec` (immutable), `state` (mutable): JSON
    tenant-jobs:<tenant>       zset     job id by creation time
    unfinished:<tenant>        hash     job -> bytes of its record: the jobs that its owner has not finished
    jobs-all                   zset     job id by creation time
    finished:<p>               zset     ids of jobs whose records move to object storage, by when they finished
    num-archived               string   number of jobs whose records are in object storage
    exports                    hash     job -> tenant: jobs whose figures a logger still waits for
    ends                       zset     `<tenant> <job>` of which webhooks are to hear, by when the job ended, s
    ledger:<job>               hash     the conservation counts
    open:<job>                 hash     unsettled trajectories
    events:<job>               stream   the job's event log; entry id is `<sequence>-0`
    checkpoints:<job>          hash     version -> checkpoint record, JSON
    evals:<job>                hash     unsettled trajectories of evaluations
    stored:<tenant>            hash     bytes in object storage: of a job's or run's versions, `<job>/records`, `archived`, `total`
    usage:<tenant>             hash     `<job>/<counter>` -> amount; `day/<yyyymmdd>` -> tokens
    hours:<tenant>:<yyyymmddhh> hash    `<session>/<counter>` -> tokens of an hour, UTC; no session: jobs and chat; expires
    run:<run>                  hash     `spec` (immutable), `state` (mutable): JSON
    seqs:<run>                 hash     number of an operation -> sha256 of what was asked
    versions:<run>             hash     version that may be read -> is its optimiser's state there? 1 or 0
    use:<run>:<version>        string   set while somebody uses that version, `…:optimizer` with its optimiser's state; expires
    retire:<p>                 zset     ended runs of which something may be deleted, by when to look at them, s
    results:<run>              hash     number of an operation -> OperationResult, msgpack; expires
    tenant-runs:<tenant>       zset     run id by creation time
    tenant-samplers:<tenant>   zset     samplers, by when they expire, s; expires
    held:<tenant>              hash     run -> bytes of its operations that are not done
    session:<session>          string   JSON; expires when its client is silent
    sampler:<sampler>          string   JSON: what it samples with
    clients:<sampler>          string   how many clients have joined it; expires
    idempotency:<tenant>:<key> string   job id, expires
    pool:<service>             hash     of the cell `@` alone, for all base models: pool worker -> what it tells of their needs

The braces are literal: Redis Cluster hashes only what stands between them, so one script may touch any key of a cell.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

NUM_PARTITIONS = 16
T = TypeVar("T", str, int)


def partition_of(tenant: str) -> int:
    """The partition that owns a tenant's jobs, in [0, NUM_PARTITIONS)."""
    return zlib.crc32(tenant.encode()) % NUM_PARTITIONS


class Key:
    """The key of one name, an attribute of each cell."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, cell: "Cell", owner: type) -> str:
        return cell.key(self._name)


class KeyOf(Generic[T]):
    """The keys `<name>:<whose>`: a method of each cell."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, cell: "Cell", owner: type) -> Callable[[T], str]:
        return lambda whose: cell.key(f"{self._name}:{whose}")


@dataclass(frozen=True, slots=True)
class Cell:
    """Key names of one base model's cell."""

    base_model: str
    _prefix: str = field(init=False, repr=False, compare=False)

    env = Key("env")
    env_worker = KeyOf[str]("env")
    env_workers = Key("env-workers")
    rollout = Key("rollout")
    rollout_first = Key("rollout:first")
    rollout_chat = Key("rollout:chat")
    rollout_worker = KeyOf[str]("rollout")
    rollout_chat_worker = KeyOf[str]("rollout:chat")
    rollout_workers = Key("rollout-workers")
    hungry = Key("hungry")
    train = Key("train")
    scored = KeyOf[int]("scored")
    adapters = KeyOf[int]("adapters")
    jobs = KeyOf[int]("jobs")
    ops = KeyOf[int]("ops")
    trainer = KeyOf[str]("train")
    reply = KeyOf[str]("reply")
    peers = KeyOf[str]("peers")
    control = Key("control")
    adapters_new = Key("adapters:new")
    done = Key("done")
    telemetry = Key("telemetry")
    dead = Key("dead")
    lease = KeyOf[int]("lease")
    rev = KeyOf[int]("rev")
    open_at = KeyOf[str]("open-at")
    opening = KeyOf[str]("opening")
    bits = Key("bits")
    bits_live = Key("bits:live")
    store = Key("store")
    holders = KeyOf[str]("holders")
    peer_key = Key("peer-key")
    convoy = KeyOf[str]("convoy")
    disk_full = Key("disk-full")
    dropped = Key("dropped")
    owners = Key("owners")
    weights = Key("weights")
    sampling = Key("sampling")
    served = Key("served")
    inference = Key("inference")
    demand = Key("demand")
    asked = Key("asked")
    wanted = Key("wanted")
    scaled = Key("scaled")
    active = KeyOf[int]("active")
    begun = Key("begun")
    job = KeyOf[str]("job")
    tenant_jobs = KeyOf[str]("tenant-jobs")
    unfinished = KeyOf[str]("unfinished")
    jobs_all = Key("jobs-all")
    finished = KeyOf[int]("finished")
    num_archived = Key("num-archived")
    exports = Key("exports")
    ends = Key("ends")
    ledger = KeyOf[str]("ledger")
    open = KeyOf[str]("open")
    events = KeyOf[str]("events")
    checkpoints = KeyOf[str]("checkpoints")
    evals = KeyOf[str]("evals")
    stored = KeyOf[str]("stored")
    usage = KeyOf[str]("usage")
    run = KeyOf[str]("run")
    seqs = KeyOf[str]("seqs")
    versions = KeyOf[str]("versions")
    retire = KeyOf[int]("retire")
    results = KeyOf[str]("results")
    tenant_runs = KeyOf[str]("tenant-runs")
    session = KeyOf[str]("session")
    sampler = KeyOf[str]("sampler")
    clients = KeyOf[str]("clients")
    pool = KeyOf[str]("pool")
    tenant_samplers = KeyOf[str]("tenant-samplers")
    held = KeyOf[str]("held")

    def __post_init__(self) -> None:
        object.__setattr__(self, "_prefix", f"marlaas:{{{self.base_model}}}:")

    def key(self, name: str) -> str:
        return self._prefix + name

    def name_of(self, key: str) -> str:
        """The name of which `key` makes a key of this cell."""
        return key.removeprefix(self._prefix)

    def holder(self, session: str) -> str:
        """The stream of the env worker that holds a session, or of all for none; see `TurnRequest.session`."""
        return self.env_worker(session.partition("/")[0]) if session else self.env

    def instead_of(self, stream: str) -> str:
        """The stream for an entry if this one does not exist: the same, which then begins, or another.

        Only its API replica may make a reply stream: "", nowhere.
        """
        name = stream.removeprefix(self._prefix)
        if name.startswith("reply:"):
            return ""
        if name.startswith("rollout:chat:"):
            return self.rollout_chat
        if name.startswith("rollout:") and stream != self.rollout_chat:
            return self.rollout_first
        return self.env if name.startswith("env:") else stream

    def moved(self, stream: str, entry: str) -> str:
        """`stream`: a worker's own. Names the stream, and the entry, to which the entry was passed on."""
        return self.key(f"moved:{self.name_of(stream)}:{entry}")

    def partial(self, stream: str, entry: str) -> str:
        """`stream`: a key of this cell; "*" for any entry."""
        return self.key(f"partial:{self.name_of(stream)}:{entry}")

    def history(self, name: str) -> str:
        """`name`: of the stream, and the entry with which it begins; "*" for any."""
        return self.key(f"history:{name}")

    def begun_history(self, stream: str, entry: str) -> str:
        return self.history(f"{self.name_of(stream)}:{entry}")

    def looked(self, stream: str) -> str:
        return self.key(f"looked:{self.name_of(stream)}")

    def owner_inbox(self, stream: str, partition: int) -> str:
        """The stream in which a partition's owner hears of an entry of a work stream."""
        to_trainers = stream == self.train or stream.startswith(self.trainer(""))
        return self.adapters(partition) if to_trainers else self.scored(partition)

    def use(self, run: str, version: int, *, with_optimizer: bool = False) -> str:
        return self.key(f"use:{run}:{version}{':optimizer' if with_optimizer else ''}")

    def hours(self, tenant: str, hour: str) -> str:
        """`hour`: `2026112207`, UTC."""
        return self.key(f"hours:{tenant}:{hour}")

    def records(self, job: str) -> tuple[str, ...]:
        """All keys of one job."""
        keys = (self.job, self.ledger, self.open, self.evals, self.events, self.checkpoints, self.versions)
        return tuple(key(job) for key in keys)

    @property
    def work(self) -> tuple[tuple[str, str], ...]:
        """The streams that workers read, each with their group."""
        return (
            (self.env, GROUP_ENV),
            (self.rollout, GROUP_ROLLOUT),
            (self.rollout_first, GROUP_ROLLOUT),
            (self.rollout_chat, GROUP_ROLLOUT),
            (self.train, GROUP_TRAINER),
        )

    def inboxes(self, partition: int) -> tuple[str, ...]:
        """The streams that a partition's owner reads, each in the group `manager`; `ops` before what answers it."""
        return (self.jobs(partition), self.ops(partition), self.adapters(partition), self.scored(partition))


ALL_CELLS = Cell("@")
"""Keys of all base models together."""
GROUP_ENV = "env"
GROUP_ROLLOUT = "rollout"
GROUP_TRAINER = "trainer"
GROUP_MANAGER = "manager"
OWNER = "owner"
