"""Names of every key of a cell (all that belongs to one base model), and their types.

    key `marlaas:{<base>}:…`   type     content
    env                        stream   Start, TurnResult, GradeRequest            group `env`
    env:<worker>               stream   TurnResult of sessions that the worker holds group `env`
    env-workers                zset     env workers with such a stream, by when they count as gone, ms
    rollout                    stream   TurnRequest, first turns                   group `rollout`
    rollout:first              stream   TurnRequest, later turns and inference     group `rollout`
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
    partial:<stream>:<entry>   string   what a worker has done so far of an entry it holds; expires
    history:<stream>:<entry>   list     payloads that led to a pending entry, each with its entry's id
    looked:<stream>            string   set while nobody need look for idle entries; expires
    lease:<p>                  string   the owner's random token, expires
    rev:<p>                    string   number of the owner's last write
    bits                       hash     `mode`, and service -> fingerprint: what workers must compute to join
    bits:live                  zset     services that have live workers, by when they count as gone, ms
    memory                     hash     kind of key -> bytes of Redis' memory, estimated by one owner
    dropped                    hash     stream -> entries that were dropped because it had too many bytes
    owners                     zset     tokens of live owners by when they count as dead, ms
    weights                    hash     partition, from 1 -> weight of its active tenants
    sampling                   string   weight of the tenants who sample in bulk; expires
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
    exports                    hash     job -> tenant: jobs whose figures a logger still waits for, <job>/<logger> -> Delay
    ends                       zset     `<tenant> <job>` of which webhooks are to hear, by when the job ended, s
    told                       hash     an entry of `ends` -> Told: which webhooks have taken it
    ledger:<job>               hash     the conservation counts
    open:<job>                 hash     unsettled trajectories
    events:<job>               stream   the job's event log; entry id is `<sequence>-0`
    checkpoints:<job>          hash     version -> checkpoint record, JSON
    samples:<job>              hash     version -> samples shown to the user, JSON
    answers:<job>              hash     <version>/<item> -> an evaluation's answer shown to the user, JSON
    evals:<job>                hash     unsettled trajectories of evaluations
    usage:<tenant>             hash     `<job>/<counter>` -> amount; `day/<yyyymmdd>` -> tokens
    hours:<tenant>:<yyyymmddhh> hash    `<session>/<counter>` -> tokens of an hour, UTC; no session: jobs and chat; expires
    run:<run>                  hash     `spec` (immutable), `state` (mutable): JSON
    seqs:<run>                 hash     number of an operation -> sha256 of what was asked
    versions:<run>             hash     version that may be read -> is its optimiser's state there? 1 or 0
    use:<run>:<version>        string   set while somebody uses that version, `…:optimizer` with its optimiser's state; expires
    retire:<p>                 zset     ended runs of which something may be deleted, by when to look at them, s
    results:<run>              hash     number of an operation -> OperationResult, msgpack; expires
    tenant-runs:<tenant>       zset     run id by creation time
    session:<session>          string   JSON; expires when its client is silent
    sampler:<sampler>          string   JSON: what it samples with
    ended:<sampler>:<clone>    stream   ids of one client's requests for samples that have ended; expires
    clients:<sampler>          string   how many clients have joined it; expires
    idempotency:<tenant>:<key> string   job id, expires

The braces are literal: Redis Cluster hashes only what stands between them, so one script may touch any key of a cell.
"""

import zlib
from dataclasses import dataclass, field

NUM_PARTITIONS = 16


def partition_of(tenant: str) -> int:
    """The partition that owns a tenant's jobs, in [0, NUM_PARTITIONS)."""
    return zlib.crc32(tenant.encode()) % NUM_PARTITIONS


@dataclass(frozen=True, slots=True)
class Cell:
    """Key names of one base model's cell."""

    base_model: str
    _prefix: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_prefix", f"marlaas:{{{self.base_model}}}:")

    def key(self, name: str) -> str:
        return self._prefix + name

    def name_of(self, key: str) -> str:
        """The name of which `key` makes a key of this cell."""
        return key.removeprefix(self._prefix)

    @property
    def env(self) -> str:
        return self.key("env")

    def env_worker(self, worker: str) -> str:
        """The inbox of one env worker."""
        return self.key(f"env:{worker}")

    @property
    def env_workers(self) -> str:
        return self.key("env-workers")

    def holder(self, session: str) -> str:
        """The stream of the env worker that holds a session, or that of all for none; see `TurnRequest.session`."""
        return self.env_worker(session.partition("/")[0]) if session else self.env

    def instead_of(self, stream: str) -> str:
        """The stream to which an entry goes if this one does not exist: the same, which then begins, or another.

        A reply stream belongs to an API replica, and nobody else may bring one into being: "", nowhere.
        """
        name = stream.removeprefix(self._prefix)
        if name.startswith("reply:"):
            return ""
        return self.env if name.startswith("env:") else stream

    @property
    def rollout(self) -> str:
        return self.key("rollout")

    @property
    def rollout_first(self) -> str:
        return self.key("rollout:first")

    @property
    def train(self) -> str:
        return self.key("train")

    @property
    def control(self) -> str:
        return self.key("control")

    @property
    def adapters_new(self) -> str:
        return self.key("adapters:new")

    @property
    def telemetry(self) -> str:
        return self.key("telemetry")

    @property
    def dead(self) -> str:
        return self.key("dead")

    @property
    def bits(self) -> str:
        return self.key("bits")

    @property
    def memory(self) -> str:
        return self.key("memory")

    @property
    def dropped(self) -> str:
        return self.key("dropped")

    @property
    def begun(self) -> str:
        return self.key("begun")

    @property
    def bits_live(self) -> str:
        return self.key("bits:live")

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

    def scored(self, partition: int) -> str:
        return self.key(f"scored:{partition}")

    def adapters(self, partition: int) -> str:
        return self.key(f"adapters:{partition}")

    def jobs(self, partition: int) -> str:
        return self.key(f"jobs:{partition}")

    def reply(self, api: str) -> str:
        return self.key(f"reply:{api}")

    def peers(self, api: str) -> str:
        return self.key(f"peers:{api}")

    def ops(self, partition: int) -> str:
        return self.key(f"ops:{partition}")

    def trainer(self, worker: str) -> str:
        """The inbox of one trainer."""
        return self.key(f"train:{worker}")

    @property
    def done(self) -> str:
        return self.key("done")

    def run(self, run: str) -> str:
        return self.key(f"run:{run}")

    def seqs(self, run: str) -> str:
        return self.key(f"seqs:{run}")

    def versions(self, run: str) -> str:
        return self.key(f"versions:{run}")

    def samplers(self, run: str) -> str:
        return self.key(f"samplers:{run}")

    def tenant_samplers(self, tenant: str) -> str:
        return self.key(f"tenant-samplers:{tenant}")

    def held(self, tenant: str) -> str:
        return self.key(f"held:{tenant}")

    def use(self, run: str, version: int, *, with_optimizer: bool = False) -> str:
        return self.key(f"use:{run}:{version}{':optimizer' if with_optimizer else ''}")

    def retire(self, partition: int) -> str:
        return self.key(f"retire:{partition}")

    def results(self, run: str) -> str:
        return self.key(f"results:{run}")

    def tenant_runs(self, tenant: str) -> str:
        return self.key(f"tenant-runs:{tenant}")

    def session(self, session: str) -> str:
        return self.key(f"session:{session}")

    def finished_session(self, session: str) -> str:
        return self.key(f"finished-session:{session}")

    def ended(self, sampler: str, clone: int) -> str:
        return self.key(f"ended:{sampler}:{clone}")

    def clients(self, sampler: str) -> str:
        return self.key(f"clients:{sampler}")

    def sampler(self, sampler: str) -> str:
        return self.key(f"sampler:{sampler}")

    def lease(self, partition: int) -> str:
        return self.key(f"lease:{partition}")

    def rev(self, partition: int) -> str:
        return self.key(f"rev:{partition}")

    def active(self, partition: int) -> str:
        return self.key(f"active:{partition}")

    def job(self, job: str) -> str:
        return self.key(f"job:{job}")

    def ledger(self, job: str) -> str:
        return self.key(f"ledger:{job}")

    def open(self, job: str) -> str:
        return self.key(f"open:{job}")

    def evals(self, job: str) -> str:
        return self.key(f"evals:{job}")

    def events(self, job: str) -> str:
        return self.key(f"events:{job}")

    def checkpoints(self, job: str) -> str:
        return self.key(f"checkpoints:{job}")

    def samples(self, job: str) -> str:
        return self.key(f"samples:{job}")

    def answers(self, job: str) -> str:
        return self.key(f"answers:{job}")

    def usage(self, tenant: str) -> str:
        return self.key(f"usage:{tenant}")

    def hours(self, tenant: str, hour: str) -> str:
        """`hour`: `2026112207`, UTC."""
        return self.key(f"hours:{tenant}:{hour}")

    def tenant_jobs(self, tenant: str) -> str:
        return self.key(f"tenant-jobs:{tenant}")

    def unfinished(self, tenant: str) -> str:
        return self.key(f"unfinished:{tenant}")

    @property
    def jobs_all(self) -> str:
        return self.key("jobs-all")

    def finished(self, partition: int) -> str:
        return self.key(f"finished:{partition}")

    @property
    def num_archived(self) -> str:
        return self.key("num-archived")

    @property
    def exports(self) -> str:
        return self.key("exports")

    @property
    def ends(self) -> str:
        return self.key("ends")

    @property
    def told(self) -> str:
        return self.key("told")

    def records(self, job: str) -> tuple[str, ...]:
        """All keys of one job."""
        keys = (self.job, self.ledger, self.open, self.evals, self.events, self.checkpoints, self.samples, self.answers)
        return tuple(key(job) for key in keys)

    @property
    def work(self) -> tuple[tuple[str, str], ...]:
        """The streams that workers read, each with their group."""
        return (
            (self.env, GROUP_ENV),
            (self.rollout, GROUP_ROLLOUT),
            (self.rollout_first, GROUP_ROLLOUT),
            (self.train, GROUP_TRAINER),
        )

    def inboxes(self, partition: int) -> tuple[str, ...]:
        """The streams that a partition's owner reads, each in the group `manager`; a new owner reads `ops` before what answers them."""
        return (self.jobs(partition), self.ops(partition), self.adapters(partition), self.scored(partition))

    @property
    def owners(self) -> str:
        return self.key("owners")

    @property
    def weights(self) -> str:
        return self.key("weights")

    @property
    def sampling(self) -> str:
        return self.key("sampling")

    @property
    def served(self) -> str:
        return self.key("served")

    @property
    def inference(self) -> str:
        return self.key("inference")


GROUP_ENV = "env"
GROUP_ROLLOUT = "rollout"
GROUP_TRAINER = "trainer"
GROUP_MANAGER = "manager"
OWNER = "owner"
