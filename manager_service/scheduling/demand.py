"""Sums up what all jobs of an owner want, and keeps the sums current by difference.

A pass of the owner changes a few jobs, and must not cost more when there are thousands of others. So each of them is reduced
to a small `View`, and the sums change by the difference between its old view and its new one.
"""

import heapq
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Set
from dataclasses import dataclass, field

from manager_service.jobs.job import Job
from manager_service.scheduling.fairness import is_longest_waiting
from manager_service.scheduling.members import Urgency, View
from manager_service.scheduling.training_queue import Handed


def view_of(job: Job) -> View:
    status, waiting, training = job.state.status, job.num_waiting, job.state.training
    ready, running = job.next_batch() is not None, status == "running"
    return View(
        tenant=job.spec.tenant,
        queued=status == "queued",
        active=status in ("running", "paused"),
        running=running,
        behind=running and not (ready or training) and job.steps_sent < job.spec.hyper.num_steps,
        waiting=waiting,
        tokens=waiting * job.lengths.tokens,
        kv_tokens=waiting * job.lengths.kv_tokens,
        training=training is not None,
        training_tokens=training.tokens if training else 0,
        ready=ready,
        urgency=_urgency(job),
        fresh=job.state.next_group == 0 and job.wants_group(),
    )


def _urgency(job: Job) -> Urgency | None:
    if job.wants_group():
        return (*job.spec.urgency, 0, job.groups_missing())
    return (*job.spec.urgency, 1, 0) if job.wants_eval() else None


@dataclass(slots=True)
class TenantDemand:
    """One tenant's jobs that want something issued, in two orders: by urgency (then first come, first served), and by the
    time since their last turn."""

    buckets: dict[Urgency, "OrderedDict[str, None]"] = field(default_factory=dict)
    line: "OrderedDict[str, None]" = field(default_factory=OrderedDict)  # longest waiting first
    _keys: list[Urgency] = field(default_factory=list)  # heap of the buckets' urgencies; some of them may be gone

    def add(self, job: str, urgency: Urgency) -> None:
        if urgency not in self.buckets:
            self.buckets[urgency] = OrderedDict()
            heapq.heappush(self._keys, urgency)
        self.buckets[urgency][job] = None
        self.line.setdefault(job)

    def remove(self, job: str, urgency: Urgency, *, leaves: bool = True) -> None:
        """`leaves`: the job wants nothing more, and loses its place in the line."""
        bucket = self.buckets[urgency]
        del bucket[job]
        if not bucket:
            del self.buckets[urgency]
            self._tidy()
        if leaves:
            del self.line[job]

    def first(self, *, longest_waiting: bool = False) -> str | None:
        """The most urgent job, or the one that has waited longest."""
        if not self.line:
            return None
        if longest_waiting:
            return next(iter(self.line))
        while self._keys[0] not in self.buckets:
            heapq.heappop(self._keys)
        return next(iter(self.buckets[self._keys[0]]))

    def _tidy(self) -> None:
        """Rebuilds the heap when most of its urgencies are gone."""
        if len(self._keys) > 16 + 2 * len(self.buckets):
            self._keys = sorted(self.buckets)


@dataclass(slots=True)
class Demand:
    """The sums over all views. Only `update` changes them."""

    open_work: int = 0
    num_training: int = 0
    handed: Handed = field(default_factory=Handed)
    num_running: int = 0
    waiting: Counter[str] = field(default_factory=Counter)  # tenant -> trajectories under way
    tokens: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Tenant -> tokens under way, estimated."""
    kv_tokens: float = 0.0
    active: Counter[str] = field(default_factory=Counter)  # tenant -> jobs that run or are paused
    behind: Counter[str] = field(default_factory=Counter)  # tenant -> jobs that sample what they must train next
    queued: dict[str, "OrderedDict[str, None]"] = field(default_factory=dict)  # tenant -> jobs, oldest first
    ready: dict[str, str] = field(default_factory=dict)  # job -> tenant
    hungry: dict[str, TenantDemand] = field(default_factory=dict)  # tenant -> jobs that want something issued
    fresh: dict[str, str] = field(default_factory=dict)  # job -> tenant, of those that want their first group
    _turns: Counter[str] = field(default_factory=Counter)  # tenant -> what it was granted
    _views: dict[str, View] = field(default_factory=dict)
    _jobs: dict[str, set[str]] = field(default_factory=dict)  # of each tenant

    def update(self, job: str, view: View | None) -> None:
        """Replaces the view of a job. None: the job is gone."""
        old = self._views.pop(job, None)
        if old is not None:
            stays = view is not None and view.tenant == old.tenant and view.urgency is not None
            self._subtract(job, old, stays_hungry=stays)
        if view is not None:
            self._views[job] = view
            self._add(job, view)

    def tenants(self) -> set[str]:
        """Tenants with work under way or wanted."""
        return {tenant for tenant, waiting in self.waiting.items() if waiting} | self.hungry.keys()

    def jobs_of(self, tenant: str) -> Set[str]:
        return self._jobs.get(tenant, frozenset())

    def next_job(self, tenant: str) -> str | None:
        """The tenant's job whose turn it is, among those that want something issued."""
        wanted = self.hungry.get(tenant)
        return wanted.first(longest_waiting=is_longest_waiting(self._turns[tenant])) if wanted else None

    def granted(self, tenant: str, job: str) -> None:
        """Moves a job that had its turn to the end of the line."""
        self._turns[tenant] += 1
        wanted = self.hungry.get(tenant)
        if wanted is not None and job in wanted.line:
            wanted.line.move_to_end(job)

    def _add(self, job: str, view: View) -> None:
        tenant = view.tenant
        self._count(view, 1)
        self._jobs.setdefault(tenant, set()).add(job)
        if view.queued:
            self.queued.setdefault(tenant, OrderedDict())[job] = None
        if view.ready:
            self.ready[job] = tenant
        if view.fresh:
            self.fresh[job] = tenant
        if view.urgency is not None:
            self.hungry.setdefault(tenant, TenantDemand()).add(job, view.urgency)

    def _subtract(self, job: str, view: View, *, stays_hungry: bool) -> None:
        tenant = view.tenant
        self._count(view, -1)
        self._jobs[tenant].discard(job)
        if not self._jobs[tenant]:
            del self._jobs[tenant]
        if view.queued:
            del self.queued[tenant][job]
            if not self.queued[tenant]:
                del self.queued[tenant]
        self.ready.pop(job, None)
        self.fresh.pop(job, None)
        if view.urgency is not None:
            self.hungry[tenant].remove(job, view.urgency, leaves=not stays_hungry)
            if not self.hungry[tenant].line:
                del self.hungry[tenant]
        if not self.active[tenant] and tenant not in self.queued:
            del self.active[tenant], self.waiting[tenant], self.tokens[tenant], self.behind[tenant], self._turns[tenant]

    def _count(self, view: View, sign: int) -> None:
        tenant = view.tenant
        self.open_work += sign * view.waiting
        self.waiting[tenant] += sign * view.waiting
        # Differences of floats leave traces; where nothing is under way there is nothing.
        self.tokens[tenant] = self.tokens[tenant] + sign * view.tokens if self.waiting[tenant] else 0.0
        self.kv_tokens = self.kv_tokens + sign * view.kv_tokens if self.open_work else 0.0
        self.num_training += sign * view.training
        if view.training:
            (self.handed.add if sign > 0 else self.handed.remove)(tenant, view.training_tokens)
        self.num_running += sign * view.running
        self.active[tenant] += sign * view.active
        self.behind[tenant] += sign * view.behind
