"""What all jobs of an owner want, summed up and kept current by difference.

A pass of the owner touches the few jobs that something happened to; what it decides must not cost more when there are
thousands of others. So each job is seen as a small `View`, and the sums change when a view does.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from manager_service.job import Job

Urgency = tuple[int, int]
"""Smaller first within a tenant: training before evaluation, then the groups that a batch still misses."""


@dataclass(frozen=True, slots=True)
class View:
    """Of one job, what matters to who decides."""

    tenant: str
    queued: bool
    active: bool  # counts towards the tenant's concurrent jobs
    waiting: int  # trajectories under way
    tokens: float  # estimate of what those will cost
    training: bool  # a Step is under way
    ready: bool  # a Step could be published
    urgency: Urgency | None  # None: wants nothing issued


def view_of(job: Job) -> View:
    status, waiting = job.state.status, job.num_waiting
    return View(
        tenant=job.spec.tenant,
        queued=status == "queued",
        active=status in ("running", "paused"),
        waiting=waiting,
        tokens=waiting * job.tokens_per_trajectory,
        training=job.state.training is not None,
        ready=job.next_batch() is not None,
        urgency=_urgency(job),
    )


def _urgency(job: Job) -> Urgency | None:
    if job.wants_group():
        return (0, job.groups_missing())
    return (1, 0) if job.wants_eval() else None


@dataclass(slots=True)
class TenantDemand:
    """One tenant's jobs that want something issued, by urgency; first come, first served within one."""

    buckets: dict[Urgency, "OrderedDict[str, None]"] = field(default_factory=dict)

    def add(self, job: str, urgency: Urgency) -> None:
        self.buckets.setdefault(urgency, OrderedDict())[job] = None

    def remove(self, job: str, urgency: Urgency) -> None:
        bucket = self.buckets[urgency]
        del bucket[job]
        if not bucket:
            del self.buckets[urgency]

    def first(self) -> str | None:
        """The most urgent job."""
        return next(iter(self.buckets[min(self.buckets)])) if self.buckets else None


@dataclass(slots=True)
class Demand:
    """The sums over all views. `update` is the only way to change them."""

    open_work: int = 0
    num_training: int = 0
    tokens: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Tenant -> tokens under way, estimated."""
    active: Counter[str] = field(default_factory=Counter)  # tenant -> jobs that run or are paused
    queued: dict[str, "OrderedDict[str, None]"] = field(default_factory=dict)  # tenant -> jobs, oldest first
    ready: dict[str, str] = field(default_factory=dict)  # job -> tenant
    hungry: dict[str, TenantDemand] = field(default_factory=dict)  # tenant -> jobs that want something issued
    _views: dict[str, View] = field(default_factory=dict)

    def update(self, job: str, view: View | None) -> None:
        """A job as it is now; None: it is gone."""
        old = self._views.pop(job, None)
        if old is not None:
            self._subtract(job, old)
        if view is not None:
            self._views[job] = view
            self._add(job, view)

    def tenants(self) -> set[str]:
        """Those with work under way or wanted."""
        return {tenant for tenant, tokens in self.tokens.items() if tokens > 0} | self.hungry.keys()

    def jobs_of(self, tenant: str) -> Iterator[str]:
        return (job for job, view in self._views.items() if view.tenant == tenant)

    def _add(self, job: str, view: View) -> None:
        tenant = view.tenant
        self.open_work += view.waiting
        self.tokens[tenant] += view.tokens
        self.num_training += view.training
        self.active[tenant] += view.active
        if view.queued:
            self.queued.setdefault(tenant, OrderedDict())[job] = None
        if view.ready:
            self.ready[job] = tenant
        if view.urgency is not None:
            self.hungry.setdefault(tenant, TenantDemand()).add(job, view.urgency)

    def _subtract(self, job: str, view: View) -> None:
        tenant = view.tenant
        self.open_work -= view.waiting
        self.tokens[tenant] -= view.tokens
        self.num_training -= view.training
        self.active[tenant] -= view.active
        if view.queued:
            del self.queued[tenant][job]
            if not self.queued[tenant]:
                del self.queued[tenant]
        self.ready.pop(job, None)
        if view.urgency is not None:
            self.hungry[tenant].remove(job, view.urgency)
            if not self.hungry[tenant].buckets:
                del self.hungry[tenant]
        if not self.active[tenant] and tenant not in self.queued:
            del self.active[tenant], self.tokens[tenant]
