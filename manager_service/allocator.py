"""The owner's decisions: which queued job starts, which batch goes to a trainer, which job is issued work.

State in, Changes out: it waits for nothing, so that a simulator can run it under a virtual clock.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from manager_service.changes import Changes
from manager_service.demand import Demand, view_of
from manager_service.job import Job
from manager_service.partition import Partition
from manager_service.records import JobError, TenantRecord
from manager_service.scheduler import Fairness, room, serve, step_order

STEPS_PER_TRAINER = 2
"""Batches under way for each trainer: one that it trains, one that waits for it."""

log = structlog.get_logger()


class Slots(Protocol):
    """What there is to know of the workers."""

    def slots(self, service: str) -> int:
        """Live slots of a service's workers."""
        ...


@dataclass(slots=True)
class Allocator:
    """Shares the cell's workers between the tenants of the partitions that its owner has."""

    cluster: Slots
    tenants: dict[str, TenantRecord] = field(default_factory=dict)
    used_today: dict[str, int] = field(default_factory=dict)  # tenant -> tokens
    memory_used: float = 0.0  # Redis' memory over its limit, 0 to 1
    share: float = 1.0  # of the cell's capacity that is this owner's, 0 to 1
    demand: Demand = field(default_factory=Demand)
    _jobs: dict[str, Job] = field(default_factory=dict)
    _rollouts: Fairness = field(default_factory=Fairness)
    _training: Fairness = field(default_factory=Fairness)
    _told_quota: set[tuple[str, str]] = field(default_factory=set)

    # ---- what happened ----------------------------------------------------------------------------------------------

    def refresh(self, partition: Partition, jobs: Iterable[str]) -> None:
        """Look at these jobs of a partition again; those that it no longer has are forgotten."""
        for name in list(jobs):
            job = partition.jobs.get(name)
            if job is None:
                self._jobs.pop(name, None)
                self.demand.update(name, None)
            else:
                self._look_at(job)

    def forget(self, partition: Partition) -> None:
        """The owner lost this partition."""
        for name in partition.jobs:
            self._jobs.pop(name, None)
            self.demand.update(name, None)

    def _look_at(self, job: Job) -> None:
        self._jobs[job.id] = job
        self.demand.update(job.id, view_of(job))

    def charge(self, changes: Changes) -> None:
        """Fairness charges what was actually used."""
        for (tenant, _, counter), amount in changes.usage.items():
            if counter in ("prompt_tokens", "sampled_tokens"):
                self._rollouts.charge(tenant, amount, self._weight(tenant))
            elif counter == "trained_tokens":
                self._training.charge(tenant, amount, self._weight(tenant))
            else:
                continue
            self.used_today[tenant] = self.used_today.get(tenant, 0) + int(amount)

    # ---- decisions --------------------------------------------------------------------------------------------------

    def decide(self, now: float, changes: dict[int, Changes]) -> None:
        """Everything that may happen now. `changes`: of each owned partition, filled in."""
        self._start_queued(now, changes)
        self._publish_steps(now, changes)
        self._issue(now, changes)

    def _start_queued(self, now: float, changes: dict[int, Changes]) -> None:
        """Oldest first, within each tenant's number of concurrent jobs."""
        for tenant in list(self.demand.queued):
            free = self._tenant(tenant).max_jobs - self.demand.active[tenant]
            waiting = [self._jobs[name] for name in self.demand.queued[tenant]] if free > 0 else []
            for job in sorted(waiting, key=lambda j: (j.spec.created_at, j.id))[:free]:
                self._guarded(job, now, changes, job.start)

    def _publish_steps(self, now: float, changes: dict[int, Changes]) -> None:
        free = max(1, STEPS_PER_TRAINER * self.cluster.slots("trainer")) - self.demand.num_training
        if free <= 0 or not self.demand.ready:
            return
        self._training.busy(self.demand.active)
        for _, name in zip(range(free), step_order(dict(self.demand.ready), self._training), strict=False):
            self._guarded(self._jobs[name], now, changes, self._publish_step(self._jobs[name]))

    def _publish_step(self, job: Job) -> "Act":
        def act(now: float, changes: Changes) -> None:
            numbers = job.next_batch()
            if numbers is not None:
                job.publish_step(numbers, changes)

        return act

    def _issue(self, now: float, changes: dict[int, Changes]) -> None:
        demand = self.demand
        slots = self.cluster.slots("rollout")
        left = room(slots=slots, open_work=demand.open_work, share=self.share, memory_used=self.memory_used)
        if left <= 0 or not demand.hungry:
            return
        self._rollouts.busy(demand.tenants())
        virtual = {t: self._virtual_time(t) for t in demand.hungry if self._within_quota(t, now, changes)}
        serve(virtual, lambda tenant: self._grant(tenant, now, changes), left)

    def _grant(self, tenant: str, now: float, changes: dict[int, Changes]) -> tuple[float, int] | None:
        """Issue one group, or one item of an evaluation, of the tenant's most urgent job."""
        wanted = self.demand.hungry.get(tenant)
        name = wanted.first() if wanted else None
        if name is None:
            return None
        job, before = self._jobs[name], self.demand.open_work
        self._guarded(job, now, changes, self._issue_one(job))
        issued = self.demand.open_work - before
        return issued * job.tokens_per_trajectory / self._weight(tenant), max(issued, 0)

    def _issue_one(self, job: Job) -> "Act":
        def act(now: float, changes: Changes) -> None:
            if job.wants_group():
                job.issue_group(changes)
            else:
                job.issue_eval(changes)

        return act

    def _guarded(self, job: Job, now: float, changes: dict[int, Changes], act: "Act") -> None:
        """Do it; an error of ours fails this job, and only this job."""
        change = changes[job.partition]
        try:
            act(now, change)
        except Exception as error:  # the boundary: one job's trouble must not stop the other tenants' owner
            log.exception("decision_failed", job_id=job.id)
            job.fail(JobError("internal_error", f"{type(error).__name__}: {error}"), now, change)
        self._look_at(job)

    # ---- tenants ----------------------------------------------------------------------------------------------------

    def _within_quota(self, tenant: str, now: float, changes: dict[int, Changes]) -> bool:
        limit = self._tenant(tenant).max_tokens_per_day
        if limit is None or self.used_today.get(tenant, 0) < limit:
            return True
        for name in self.demand.jobs_of(tenant):
            if (name, today()) not in self._told_quota:
                self._told_quota.add((name, today()))
                job = self._jobs[name]
                text = f"The tenant's {limit} tokens of today are used up; the job goes on tomorrow"
                job.warn(now, text, changes[job.partition])
        return False

    def _virtual_time(self, tenant: str) -> float:
        """What a tenant was charged, and an estimate of what is under way."""
        return self._rollouts.virtual_time(tenant) + self.demand.tokens[tenant] / self._weight(tenant)

    def _tenant(self, tenant: str) -> TenantRecord:
        return self.tenants.get(tenant) or TenantRecord(id=tenant, created_at=0)

    def _weight(self, tenant: str) -> float:
        return max(1e-6, self._tenant(tenant).weight)


Act = Callable[[float, Changes], None]


def today() -> str:
    """The day that token quotas count, UTC."""
    return time.strftime("%Y%m%d", time.gmtime())
