"""The simulated cluster: the owner's decisions in, a PolicyRun out. One owner, no Redis, and only rollout workers die."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import inf

from common.bus.streams import NUM_PARTITIONS, Cell
from common.wire.messages import (
    AdapterNew,
    AdapterUpdate,
    EnvSpec,
    Init,
    LoraSpec,
    LossSpec,
    OptimSpec,
    ScoredTrajectory,
    Start,
    TrainStep,
    TrajectoryRef,
    Usage,
    turn_id,
)
from common.wire.transcript import Transcript, shown, wrote
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.jobs.items import Items
from manager_service.owner.jobs.job import Job
from manager_service.records.job_records import Hyper, JobSpec, JobState
from manager_service.records.tenants import TenantRecord
from manager_service.scheduling.allocator import Allocator
from manager_service.scheduling.members import MemberTable
from manager_service.scheduling.policies import Policy
from simulator.calibration import Calibration, PolicyRun, Spread, Workload, jain
from simulator.clock import Clock, Process, SimulatedHost
from simulator.engine import EngineTurns, SimulatedEngine
from simulator.fleet import Fleet
from simulator.links import Links
from simulator.workers import REWARD, Flight, SimulatedEnvironment, TrainerWorker

CELL = Cell("simulated")


@dataclass(slots=True)
class RunProgress:
    """Times and counts of a job, for the figures."""

    submitted_s: float
    first_token_s: float | None = None
    versions_s: list[float] = field(default_factory=list[float])  # when each was committed, from version 1
    ended_s: float | None = None
    tokens: int = 0  # of trained trajectories


@dataclass
class World:
    """Jobs, the Allocator that decides, simulated workers, and the clock. `run` until all jobs have ended."""

    calibration: Calibration
    policy: Policy
    clock: Clock = field(default_factory=Clock)
    jobs: MemberTable[Job] = field(default_factory=MemberTable[Job])
    progress: dict[str, RunProgress] = field(default_factory=dict[str, RunProgress])
    workloads: dict[str, Workload] = field(default_factory=dict[str, Workload])
    issued: int = 0  # trajectories
    settled: int = 0
    _to_end: int = 0  # jobs submitted that have not ended
    _inbox: list[ScoredTrajectory | AdapterUpdate] = field(default_factory=list)
    _pass_planned: bool = False
    _entries: int = 0

    def __post_init__(self) -> None:
        machine, size = self.calibration.machine, self.calibration.size
        self.host = SimulatedHost(self.clock, machine.cores and machine.cores - machine.idle)
        self.control = Process(self.host)
        self.turns = EngineTurns(self.clock, machine.hop_s, size.own_streams)
        self.links = Links(self.clock, machine.load_s, size)
        self.fleet = Fleet(self.clock, size, self._make_engine, self._num_turns, self._plan_pass)
        self.train_queue: deque[Init | TrainStep] = deque()
        self.trainers = [
            TrainerWorker(
                self.host, machine, self.train_queue, size.trainer_slots, size.trainer_window_tokens,
                self.links.write, self._trained,
            )
            for _ in range(size.trainer)
        ]  # fmt: skip
        self.fleet.begin()
        loops = deque(Process(self.host) for _ in range(size.env))
        self.env = SimulatedEnvironment(self.host, machine, loops, size.env * size.env_slots, self._answered)
        self.allocator = Allocator(self, self.policy)

    def _make_engine(self, name: str) -> SimulatedEngine:
        machine, size = self.calibration.machine, self.calibration.size
        made = (self.turns, self.links, self._turn_done, self._turn_began)
        return SimulatedEngine(name, self.host, machine, size, *made)

    # ---- what the Allocator asks ------------------------------------------------------------------------------------

    def waits_for(self, job: str) -> str:
        return ""

    def slots(self, service: str) -> int:
        return self.num_workers(service) * getattr(self.calibration.size, f"{service}_slots")

    def num_workers(self, service: str) -> int:
        return len(self.fleet.live) if service == "rollout" else getattr(self.calibration.size, service)

    def kv_tokens(self) -> int | None:
        return None

    def lora_slots(self) -> dict[str, int]:
        size = self.calibration.size
        scarce = size.own_streams and size.lora_slots
        return {each.name: size.lora_slots for each in self.fleet.live} if scarce else {}

    def least_kv_tokens(self) -> int | None:
        return None

    def sampling_gap_bound(self) -> float:
        return inf

    # ---- jobs -------------------------------------------------------------------------------------------------------

    def submit(self, number: int, workload: Workload, *, tenant: str, at_s: float = 0.0, **hyper: object) -> None:
        spec = _spec(number, workload, tenant, at_s, hyper)
        self.allocator.tenants[tenant] = TenantRecord(id=tenant, created_at=0, max_jobs=1_000_000)
        self.workloads[spec.id] = workload
        self._to_end += 1
        self.clock.at(at_s, lambda: self._create(spec))

    def _create(self, spec: JobSpec) -> None:
        job = Job(CELL, spec, JobState(), Items(), Items())
        self.progress[spec.id] = RunProgress(self.clock.now)
        job.queue(self.clock.now, Changes())
        self.jobs.add(job)
        self._plan_pass()

    def run(self) -> None:
        """Runs until every job has ended. Raises RuntimeError if one cannot."""
        while self.clock.step():
            pass
        if self._to_end:
            raise RuntimeError(f"{len(self.jobs)} jobs never ended, such as {next(iter(self.jobs.values())).state}")

    def _num_turns(self) -> float | None:
        """Slots that turns would fill, as the owner tells; None: no job is left."""
        if not self._to_end:
            return None
        found = self.allocator.demand.turns(range(NUM_PARTITIONS), self.allocator.in_env, lambda _: False)
        return sum(found.values())

    # ---- the owner --------------------------------------------------------------------------------------------------

    def _deliver(self, message: ScoredTrajectory | AdapterUpdate) -> None:
        self._inbox.append(message)
        self._plan_pass()

    def _plan_pass(self) -> None:
        """The owner reads what came until then one hop from now; while it works, more comes for the next pass."""
        if not self._pass_planned:
            self._pass_planned = True
            self.clock.after(self.calibration.machine.hop_s, self._pass)

    def _pass(self) -> None:
        self._pass_planned = False
        inbox, self._inbox = self._inbox, []
        changes: defaultdict[int, Changes] = defaultdict(Changes)
        for number in range(NUM_PARTITIONS):
            changes[number] = Changes()
        for message in inbox:
            self._handle(message, changes)
        self.allocator.follow(self.jobs, self.clock.now)
        self.allocator.env_backlog = self.env.backlog
        self.allocator.decide(self.clock.now, changes)
        for change in changes.values():
            self.allocator.charge(change)
            self.issued += sum(amount for (_, name), amount in change.ledger.items() if name == "issued")
            self.settled += sum(amount for (_, name), amount in change.ledger.items() if name != "issued")
            for _, message in change.published:
                self._send(message)

    def _handle(self, message: ScoredTrajectory | AdapterUpdate, changes: dict[int, Changes]) -> None:
        job, now = self.jobs[message.job], self.clock.now
        change = changes[job.partition]
        self._entries += 1
        if isinstance(message, AdapterUpdate):
            self.progress[job.id].versions_s.append(now)
            job.on_adapter(message, now, change)
        else:
            job.on_scored(f"{self._entries}-0", message, change)
        job.advance(now, change)
        if job.settled:
            self.progress[job.id].ended_s = now
            self.jobs.remove(job.id)
            self._to_end -= 1
            if not self._to_end:
                self.fleet.end()
        else:
            self.jobs.touch(job.id)

    def _send(self, message: object) -> None:
        hop_s = self.calibration.machine.hop_s
        match message:
            case Start():
                self.env.starts += 1
                self.clock.after(hop_s, lambda: self.env.start(lambda: self._started(message)))
            case AdapterNew():
                self.clock.after(hop_s, lambda: self.links.announce(message.adapter, self.fleet.live))
            case Init() | TrainStep():
                self.train_queue.append(message)
                self.clock.after(hop_s, self._train)
            case _:  # hints
                pass

    # ---- workers ----------------------------------------------------------------------------------------------------

    def _started(self, start: Start) -> None:
        """Its prompts are made."""
        self.env.starts -= 1
        home = next((each for each in self.fleet.live if each.name == start.home), None) if start.home else None
        for sample in start.samples:
            self.turns.put(Flight(start, sample, self.workloads[start.job], engine=home))

    def _turn_began(self, flight: Flight) -> None:
        progress = self.progress[flight.start.job]
        if progress.first_token_s is None:
            progress.first_token_s = self.clock.now

    def _turn_done(self, flight: Flight) -> None:
        self.clock.after(self.calibration.machine.hop_s, lambda: self.env.put(flight))

    def _answered(self, flight: Flight) -> None:
        self.control.do(self.calibration.machine.control_s, lambda: self._told(flight))

    def _told(self, flight: Flight) -> None:
        if flight.calls_next:
            flight.turn += 1
            self.turns.put(flight)
        else:
            self._deliver(_scored(flight))

    def _train(self) -> None:
        for trainer in self.trainers:
            trainer.take()

    def _trained(self, message: Init | TrainStep, seconds: float) -> None:
        if isinstance(message, TrainStep):
            self.progress[message.job].tokens += len(message.rows.tokens)
        self._deliver(_update(message, seconds))
        if self.train_queue:
            self.clock.after(self.calibration.machine.hop_s, self._train)

    # ---- figures ----------------------------------------------------------------------------------------------------

    def figures(self, workload: str) -> PolicyRun:
        """Call when all jobs have ended."""
        jobs = list(self.progress.values())
        start = min(job.submitted_s for job in jobs)
        ends = [job.ended_s for job in jobs if job.ended_s is not None]
        makespan_s = max(ends) - start
        steps = [later - at for job in jobs for at, later in pairwise([job.first_token_s or start, *job.versions_s])]
        waits = [job.first_token_s - job.submitted_s for job in jobs if job.first_token_s is not None]
        rates = [job.tokens / (end - job.submitted_s) for job, end in zip(jobs, ends, strict=True)]
        return PolicyRun(
            kind="simulated",
            policy=self.policy.name,
            workload=workload,
            n=len(jobs),
            steps=max(len(job.versions_s) for job in jobs),
            makespan_s=makespan_s,
            tokens_per_s=sum(job.tokens for job in jobs) / makespan_s,
            steps_per_s=len(steps) / makespan_s,
            rollout_busy=sum(engine.busy_s for engine in self.fleet.all) / self.fleet.held_s,
            trainer_busy=sum(trainer.busy_s for trainer in self.trainers) / len(self.trainers) / makespan_s,
            ttfs_s=Spread.of(waits),
            tpts_s=Spread.of(steps),
            jain=jain(rates),
            held_s=self.fleet.held_s,
            met=self.turns.met / max(1, self.turns.later),
            spread_s=Spread.of(self.links.spread_s) if self.links.spread_s else None,
        )


def simulate(
    calibration: Calibration,
    *,
    policy: Policy,
    num_jobs: int,
    tenant_of: Callable[[int], str] = lambda number: f"tenant-{number}",
) -> World:
    """All jobs are submitted at once, each of another tenant unless told otherwise. Returns the world at its end."""
    world = World(calibration, policy)
    staleness = policy.max_staleness(None)
    for number in range(num_jobs):
        world.submit(number, calibration.workload, tenant=tenant_of(number), max_staleness=staleness)
    world.run()
    return world


def _spec(number: int, workload: Workload, tenant: str, at_s: float, hyper: dict[str, object]) -> JobSpec:
    values: dict[str, object] = {
        "batch_size": workload.batch_size,
        "group_size": workload.group_size,
        "num_steps": workload.num_steps,
        "max_tokens": workload.max_tokens,
        **hyper,
    }
    return JobSpec(
        id=f"job-{number:05d}",
        tenant=tenant,
        base_model="simulated",
        created_at=int(at_s),
        seed=number,
        method={},
        env=EnvSpec("single_turn", {}),
        hyper=Hyper(lora=LoraSpec(), loss=LossSpec(), optim=OptimSpec(1e-3), **values),  # type: ignore[arg-type]
        num_items=0,
    )


@lru_cache(maxsize=8192)
def _transcript(num_prompt: int, num_sampled: int) -> Transcript:
    """Tokens of these numbers: nothing else matters here."""
    return shown([0] * num_prompt) + wrote([1] * num_sampled, [-1.0] * num_sampled)


def _scored(flight: Flight) -> ScoredTrajectory:
    start, workload = flight.start, flight.workload
    ref = TrajectoryRef(start.purpose, start.seed, start.group, flight.sample, start.attempt)
    num_prompt = round(workload.prompt_tokens)
    return ScoredTrajectory(
        **start.about(),
        id=turn_id(start.job, ref, start.adapter.version, flight.turn),
        adapter=start.adapter,
        trajectory=ref,
        transcript=_transcript(num_prompt, flight.sampled),
        num_prompt=num_prompt,
        reward=float(flight.draw(REWARD) < 0.5),
        stop_reason="stop",
        num_turns=flight.turn + 1,
        usage=Usage(prompt_tokens=num_prompt, sampled_tokens=flight.sampled),
    )


def _update(message: Init | TrainStep, seconds: float) -> AdapterUpdate:
    is_step = isinstance(message, TrainStep)
    return AdapterUpdate(
        id=f"{message.id}/done",
        **message.about(),
        adapter=message.adapter.next() if is_step else message.adapter,
        batch=message.id,
        next_group=message.next_group if is_step else 0,
        usage=Usage(trained_tokens=len(message.rows.tokens), train_s=seconds) if is_step else Usage(),
    )
