"""Decides which queued job starts, which batch goes to a trainer, and which job is issued work.

State comes in, Changes go out. It waits for nothing, so a simulator can run it under a virtual clock.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import structlog

from common.bus.streams import partition_of
from common.sharing.correction import JOBS, Correction
from common.sharing.fairness import Fairness
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.jobs.groups import num_tokens
from manager_service.owner.jobs.job import Job
from manager_service.owner.jobs.orders import give_homes
from manager_service.owner.runs.run import Run
from manager_service.records.job_records import JobError
from manager_service.records.tenants import TenantRecord
from manager_service.records.usage import QUOTA_COUNTERS, ROLLOUT_COUNTERS, day_field
from manager_service.scheduling.demand import Demand, view_of
from manager_service.scheduling.fairness import (
    FIRST_GROUPS,
    OVERSUBSCRIPTION,
    examples_room,
    is_longest_waiting,
    kv_room,
    largest_group,
    room,
    serve,
)
from manager_service.scheduling.members import MemberTable
from manager_service.scheduling.policies import MARLAAS, Policy, closed, may_start
from manager_service.scheduling.storage_quota import StorageQuota
from manager_service.scheduling.training_queue import ReadyBatch, Room, TrainingQueue

STEPS_PER_SLOT = 2
"""Batches under way for each trainer slot: one is trained, one waits."""

Member = Job | Run
log = structlog.get_logger()


class Slots(Protocol):
    """Capacities of the live workers."""

    def slots(self, service: str) -> int:
        """Live slots of a service's workers."""
        ...

    def num_workers(self, service: str) -> int: ...  # live ones of a service

    def kv_tokens(self) -> int | None:
        """Tokens whose keys and values all rollout engines hold at once; None: not known."""
        ...

    def least_kv_tokens(self) -> int | None:
        """The tokens that the smallest of them holds; None: not known."""
        ...

    def lora_slots(self) -> Mapping[str, int]: ...  # live rollout workers that batch rows of only so many adapters

    def sampling_gap_bound(self) -> float:
        """The largest `sampling_gap` that the live rollout workers' rounding explains."""
        ...

    def waits_for(self, job: str) -> str:
        """Reason outside of the workers that holds up the job, else one that holds up a worker; else empty."""
        ...


@dataclass(frozen=True, slots=True)
class OwnPart:
    """An owner's part of the cell, during one decision."""

    share: float  # of the rollout workers' capacity, 0 to 1
    in_env: float  # trajectories that env workers work on


@dataclass(slots=True)
class Allocator:
    """Shares the cell's workers between the tenants of the partitions that its owner has."""

    cluster: Slots
    policy: Policy = MARLAAS
    queue: TrainingQueue = field(default_factory=TrainingQueue)
    tenants: dict[str, TenantRecord] = field(default_factory=dict)
    used_today: dict[str, int] = field(default_factory=dict)  # tenant -> tokens
    storage: StorageQuota = field(default_factory=StorageQuota)
    memory_used: float = 0.0  # Redis' memory over its limit, 0 to 1
    disk_full: bool = False  # trainers say that the store's disk has no room for versions
    other_weight: float = 0.0  # of active tenants that other owners have
    sampling_weight: float = 0.0  # of those who chat or sample in bulk
    admits: Callable[[Job], bool] = lambda job: True
    """May the job's complete batch be published? If not, the job is looked at again once it may."""
    env_backlog: int = 0  # entries of the env workers' streams: trajectories not at a rollout worker, and examples
    demand: Demand = field(default_factory=Demand)
    _members: dict[str, Member] = field(default_factory=dict)
    _rollouts: Fairness = field(default_factory=Fairness)
    _examples: Fairness = field(default_factory=Fairness)
    _correction: Correction = field(default_factory=Correction)
    _served_s: float = 0.0  # seconds of rollout engines, since they were last taken
    _starts: Counter[str] = field(default_factory=Counter)  # tenant -> jobs started
    _closed: bool = False  # the barrier, under a policy that has one
    _told_quota: set[tuple[str, str]] = field(default_factory=set)
    _held_back: set[str] = field(default_factory=set)  # ready, but their tenants have no tokens or no storage left

    # ---- what happened ----------------------------------------------------------------------------------------------

    def follow(self, members: MemberTable[Any], now: float) -> None:
        """Looks again at the changed jobs or runs of a partition, and forgets those that have left."""
        for name, member in members.take_changed():
            if member is None:
                self._forget_member(name)
            else:
                self._look_at(member, now)

    def forget(self, members: MemberTable[Any]) -> None:
        """Forgets the jobs, or runs, of a partition that the owner has lost."""
        for name in (*members, *(name for name, _ in members.take_changed())):
            self._forget_member(name)

    def _forget_member(self, name: str) -> None:
        self._members.pop(name, None)
        self._held_back.discard(name)
        self.storage.told.discard(name)
        self.demand.update(name, None)
        self.queue.remove(name)

    def _look_at(self, member: Member, now: float) -> None:
        self._members[member.id] = member
        self.demand.update(member.id, view_of(member) if isinstance(member, Job) else member.view())
        self._held_back.discard(member.id)
        if member.id not in self.demand.ready:
            self.queue.remove(member.id)
        elif self._must_wait(member):
            self.queue.remove(member.id)
            self._held_back.add(member.id)
        elif member.id not in self.queue.batches and (isinstance(member, Run) or self.admits(member)):
            spec = member.spec
            self.queue.put(ReadyBatch(spec.id, spec.tenant, now, _ready_tokens(member), spec.urgency))

    def charge(self, changes: Changes) -> None:
        """Charges the tenants for what they actually used."""
        for (tenant, _, counter), amount in changes.usage.items():
            if counter in ROLLOUT_COUNTERS:
                self.charge_rollouts(tenant, amount)
            elif counter == "rollout_s":
                self._served_s += amount
            if counter in QUOTA_COUNTERS:
                self.used_today[tenant] = self.used_today.get(tenant, 0) + int(amount)

    def charge_rollouts(self, tenant: str, tokens: float) -> None:
        """Charges a tenant for tokens that rollout workers computed for its jobs or completions."""
        self._rollouts.charge(tenant, tokens, self._weight(tenant))

    # ---- decisions --------------------------------------------------------------------------------------------------

    def decide(self, now: float, changes: dict[int, Changes]) -> None:
        """Decides all that may happen now, and writes it into the `changes` of each owned partition."""
        self.storage.charge(changes.values())
        if not self.disk_full:
            self._start_queued(now, changes)
        self._follow_quotas(now, changes)
        if self.policy.barrier:
            self._closed = self._is_closed()
        if self._closed or not self.policy.barrier:
            self._publish_steps(now, changes)
        if not self._closed:
            self._issue(now, changes)
        give_homes(changes.values(), self.cluster.lora_slots(), num_jobs=self.demand.active.total())

    def _is_closed(self) -> bool:
        demand = self.demand
        behind = sum(num for tenant, num in demand.behind.items() if not self.is_exhausted(tenant))
        ready = len(demand.ready) - len(self._held_back)
        return closed(self._closed, num_behind=behind, num_ready=ready, num_training=demand.num_training)

    def _start_queued(self, now: float, changes: dict[int, Changes]) -> None:
        """Starts as many jobs as the policy and each tenant's limit of concurrent jobs allow, oldest first."""
        demand = self.demand
        left = may_start(self.policy, num_running=demand.num_running, num_queued=sum(map(len, demand.queued.values())))
        next_starts: list[Member] = []
        for tenant in list(demand.queued) if left else []:
            free = self._tenant(tenant).max_jobs - demand.active[tenant]
            next_starts += self._next_starts(tenant, min(free, left))
        for job in sorted(next_starts, key=_age)[:left]:
            self._starts[job.spec.tenant] += 1
            self.storage.ask(job.spec.tenant)
            self._guarded(job, now, changes, partial(job.start, now))

    def is_full(self, tenant: str) -> bool:
        """Has the tenant as many jobs and runs at once as it may?"""
        return self.demand.active[tenant] >= self._tenant(tenant).max_jobs

    def _next_starts(self, tenant: str, num: int) -> list[Member]:
        """The tenant's queued jobs and runs that start next: the most urgent, and every fourth time the oldest."""
        if num <= 0:
            return []
        waiting = sorted((self._members[name] for name in self.demand.queued[tenant]), key=_age)
        chosen: list[Member] = []
        while waiting and len(chosen) < num:
            oldest = is_longest_waiting(self._starts[tenant] + len(chosen))
            chosen.append(waiting.pop(0) if oldest else waiting.pop(_most_urgent(waiting)))
        return chosen

    def _follow_quotas(self, now: float, changes: dict[int, Changes]) -> None:
        """Keeps out of the trainers' queue what must wait, and lets it in again. A job says once that it waits for storage."""
        over = [name for name in self.queue.batches if self._must_wait(self._members[name])]
        fresh = [name for name in self._held_back if not self._must_wait(self._members[name])]
        for name in (*over, *fresh):
            self._look_at(self._members[name], now)
        for name in self._held_back ^ self.storage.told:
            if isinstance(job := self._members[name], Job):
                self.storage.tell(job, self._tenant(job.spec.tenant), now, changes[job.partition])

    def _publish_steps(self, now: float, changes: dict[int, Changes]) -> None:
        slots = self.cluster.slots("trainer")
        free = max(1, STEPS_PER_SLOT * slots) - self.demand.num_training
        if free <= 0 or self.disk_full or not self.demand.ready:
            return
        self.queue.fairness.busy(self.demand.active)
        room = Room(slots, self.cluster.num_workers("trainer"), self.demand.handed.copy())
        for name in self.queue.take(free, self._weight, room):
            member = self._members[name]
            self._guarded(member, now, changes, partial(self._publish_step, member, now))

    def _publish_step(self, job: Member, now: float, changes: Changes) -> None:
        if isinstance(job, Run):
            job.publish(changes)
            return
        numbers = job.next_batch()
        if numbers is not None:
            job.journal.check_sampling_gap(now, self.cluster.sampling_gap_bound(), changes)
            if self.admits(job):  # what was just checked may have changed the step
                job.publish_step(numbers, changes)

    def _issue(self, now: float, changes: dict[int, Changes]) -> None:
        demand = self.demand
        if demand.examples.tenants:
            self._issue_examples(now, changes)
        if not demand.rollouts.tenants:
            return
        self._rollouts.busy(demand.tenants())
        part = OwnPart(self.share, self.in_env)
        self._issue_first_groups(part, now, changes)
        left = self.room(part.in_env, part.share)
        if left <= 0:
            return
        virtual = {t: self._virtual_time(t) for t in demand.rollouts.tenants if self._within_quota(t, now, changes)}
        serve(virtual, lambda tenant: self._grant(tenant, part, now, changes), left)

    def _issue_examples(self, now: float, changes: dict[int, Changes]) -> None:
        """Issues examples of supervised jobs, which neither need rollout workers' room nor count as their service."""
        demand = self.demand
        with_examples = demand.tenants_with_examples()
        self._examples.busy(with_examples)
        weight = sum(map(self._weight, with_examples))
        everybody = sum(map(self._weight, with_examples | demand.tenants())) + self.other_weight
        num_open = demand.open_examples.total()
        left = examples_room(
            slots=self.cluster.slots("env"),
            open_examples=num_open,
            others=max(0, self.env_backlog - num_open),
            share=weight / everybody,
            memory_used=self.memory_used,
        )
        waiting = (tenant for tenant in demand.examples.tenants if self._within_quota(tenant, now, changes))
        virtual = {tenant: self._examples.virtual_time(tenant) for tenant in waiting}
        serve(virtual, lambda tenant: self._grant_example(tenant, now, changes), left)

    def _grant_example(self, tenant: str, now: float, changes: dict[int, Changes]) -> tuple[float, int] | None:
        """Issues the next example of the tenant's supervised job whose turn it is. Returns as `_grant`."""
        name = self.demand.examples.next_job(tenant)
        if name is None:
            return None
        job, before = self._members[name], self.demand.open_examples[tenant]
        assert isinstance(job, Job)
        self._guarded(job, now, changes, job.issue_group)
        self.demand.examples.granted(tenant, name)
        issued = max(0, self.demand.open_examples[tenant] - before)
        self._examples.charge(tenant, issued * job.lengths.tokens, self._weight(tenant))
        return issued * job.lengths.tokens / self._weight(tenant), issued

    def _issue_first_groups(self, part: OwnPart, now: float, changes: dict[int, Changes]) -> None:
        """Issues one group for each tenant whose next job has had none, though earlier jobs fill the slots."""
        for tenant in dict.fromkeys(self.demand.fresh.values()):
            if self.room(part.in_env, part.share, FIRST_GROUPS) <= 0:
                return
            if self.demand.rollouts.next_job(tenant) in self.demand.fresh and self._within_quota(tenant, now, changes):
                self._grant(tenant, part, now, changes)

    def room(self, in_env: float, share: float, oversubscription: float = OVERSUBSCRIPTION) -> int:
        """Trajectories that may be issued now. `in_env`: those under way without a rollout slot; both this owner's."""
        return room(
            oversubscription=oversubscription,
            slots=self.cluster.slots("rollout"),
            open_work=self.demand.open_work,
            share=share,
            memory_used=self.memory_used,
            in_env=in_env,
            holds_slots=self.policy.holds_slots,
        )

    @property
    def in_env(self) -> float:
        """This owner's part of the trajectories in env slots, without examples; others wait as for a rollout."""
        mine = self._active_weight()
        part = mine / (mine + self.other_weight) if mine else 0.0
        return part * min(max(0, self.env_backlog - self.demand.open_examples.total()), self.cluster.slots("env"))

    def _fits(self, job: Job, part: OwnPart) -> bool:
        """Do the keys and values of the job's next issue fit? They always do if nothing else is under way."""
        demand = self.demand
        at_rollout = max(0.0, 1 - part.in_env / max(1, demand.open_work))
        left = kv_room(kv_tokens=self.cluster.kv_tokens(), open_tokens=demand.kv_tokens * at_rollout, share=part.share)
        return demand.open_work == 0 or job.next_kv_tokens <= left

    def _grant(self, tenant: str, part: OwnPart, now: float, changes: dict[int, Changes]) -> tuple[float, int] | None:
        """Issues one group, or one item of an evaluation, of the tenant's job whose turn it is.

        If its keys and values do not fit, everybody waits, so that small jobs cannot keep a large one out. A job whose group
        never fits fails. Returns tokens over weight and trajectories added, or None if the tenant wants nothing.
        """
        name = self.demand.rollouts.next_job(tenant)
        if name is None:
            return None
        job, before = self._members[name], self.demand.open_work
        assert isinstance(job, Job), "runs want nothing issued"
        if job.next_kv_tokens > largest_group(self.cluster.least_kv_tokens()):
            self._guarded(job, now, changes, partial(self._fail_as_too_large, job, now))
            return 0.0, 0
        if not self._fits(job, part):
            return 0.0, sys.maxsize
        is_for_training = job.wants_group() and not job.spec.is_supervised
        self._guarded(job, now, changes, job.issue_group if is_for_training else job.issue_eval)
        self.demand.rollouts.granted(tenant, name)
        issued = self.demand.open_work - before
        return issued * job.lengths.tokens / self._weight(tenant), max(issued, 0)

    def _fail_as_too_large(self, job: Job, now: float, changes: Changes) -> None:
        most = largest_group(self.cluster.least_kv_tokens())
        reason = (
            f"a group needs keys and values for {job.next_kv_tokens:.0f} tokens at once, and the rollout workers take at most"
            f" {most:.0f} since one with less memory joined: lower group_size, eval_samples or max_tokens"
        )
        job.fail(JobError("group_too_large", reason), now, changes)

    def _guarded(self, job: Member, now: float, changes: dict[int, Changes], act: Callable[[Changes], None]) -> None:
        """Acts on a job. An error of ours fails it, and only it."""
        change = changes[job.partition]
        try:
            act(change)
        except Exception as error:  # the boundary: one job's trouble must not stop the other tenants' owner
            log.exception("decision_failed", job_id=job.id)
            job.fail(JobError("internal_error", f"{type(error).__name__}: {error}"), now, change)
        self._look_at(job, now)

    # ---- other owners -----------------------------------------------------------------------------------------------

    def take_served_s(self) -> float:
        """Seconds of rollout engines that this owner's jobs got since they were last taken."""
        taken, self._served_s = self._served_s, 0.0
        return taken

    def hear_of_others(self, other_weight: float, sampling_weight: float, served: Mapping[str, float]) -> None:
        """Weights of other owners' active tenants, and of those who chat or sample; engine seconds so far, by kind."""
        self.other_weight, self.sampling_weight = other_weight, sampling_weight
        jobs = self._active_weight() + other_weight
        due = jobs / (jobs + sampling_weight) if jobs else 0.0
        self._correction.look(served, JOBS, due, asks=bool(self.demand.rollouts.tenants))

    def active_weights(self, partitions: Iterable[int]) -> dict[int, float]:
        """Weight of the tenants with rollouts under way or wanted, by partition."""
        weights = dict.fromkeys(partitions, 0.0)
        for tenant in self.demand.tenants():
            weights[partition_of(tenant)] += self._weight(tenant)
        return weights

    @property
    def share(self) -> float:
        """This owner's part of the rollout workers' capacity, 0 to 1: its active tenants' weight over everybody's."""
        mine = self._active_weight()
        if not mine:
            return 0.0
        if not self.sampling_weight:
            return mine / (mine + self.other_weight)
        return min(1.0, mine / (mine + self.other_weight + self.sampling_weight) * self._correction.factor)

    def _active_weight(self) -> float:
        return sum(map(self._weight, self.demand.tenants()))

    # ---- tenants ----------------------------------------------------------------------------------------------------

    def _within_quota(self, tenant: str, now: float, changes: dict[int, Changes]) -> bool:
        if not self.is_exhausted(tenant):
            return True
        limit, today = self._tenant(tenant).max_tokens_per_day, day_field(now)
        for name in self.demand.jobs_of(tenant):
            job = self._members[name]
            if isinstance(job, Job) and (name, today) not in self._told_quota:
                self._told_quota.add((name, today))
                text = f"The tenant's {limit} tokens of today are used up; the job goes on tomorrow"
                job.journal.warn(now, text, changes[job.partition])
        return False

    def _must_wait(self, member: Member) -> bool:
        """Must its next message to a trainer wait? A job's steps are paid for, so only a lack of storage holds them up; of a run, it
        holds up what commits a version."""
        is_full = self.storage.is_full(self._tenant(member.spec.tenant))
        if isinstance(member, Job):
            return is_full
        return self.is_exhausted(member.spec.tenant) or (is_full and member.commits_next())

    def is_exhausted(self, tenant: str) -> bool:
        limit = self._tenant(tenant).max_tokens_per_day
        return limit is not None and self.used_today.get(tenant, 0) >= limit

    def _virtual_time(self, tenant: str) -> float:
        """Tokens over weight that a tenant was charged, plus an estimate for its work under way."""
        return self._rollouts.virtual_time(tenant) + self.demand.tokens[tenant] / self._weight(tenant)

    def _tenant(self, tenant: str) -> TenantRecord:
        return self.tenants.get(tenant) or TenantRecord(id=tenant, created_at=0)

    def _weight(self, tenant: str) -> float:
        return max(1e-6, self._tenant(tenant).weight)


def _ready_tokens(member: Member) -> int:
    """Tokens of what is handed to the trainers next."""
    if isinstance(member, Run):
        return member.ready_tokens()
    return num_tokens(member.open.groups[number] for number in member.next_batch() or ())


def _age(job: Member) -> tuple[int, str]:
    return job.spec.created_at, job.id


def _most_urgent(jobs: Sequence[Member]) -> int:
    """Index of the most urgent job; the first of equals."""
    return min(range(len(jobs)), key=lambda n: jobs[n].spec.urgency)
