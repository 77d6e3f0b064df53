"""Sums up what all jobs of an owner want, by difference.

A pass changes a few jobs, and must not cost more when there are thousands of others. So each has a small `View`, and the sums
change by the difference between its old view and its new one.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field

from common.bus.streams import partition_of
from manager_service.owner.jobs.job import Job
from manager_service.scheduling.fairness import is_longest_waiting
from manager_service.scheduling.members import Urgency, View
from manager_service.scheduling.training_queue import Handed

GONE = View(tenant="")
"""The view of a job that is not there."""


def view_of(job: Job) -> View:
    status, training, supervised = job.state.status, job.state.training, job.spec.is_supervised
    ready, running = job.next_batch() is not None, status == "running"
    examples = job.open.num_in_groups if supervised else 0
    waiting = job.num_waiting - examples
    group = (*job.spec.urgency, 0, job.groups_missing()) if job.wants_group() else None
    evaluation = (*job.spec.urgency, 1, 0) if job.wants_eval() else None
    return View(
        tenant=job.spec.tenant,
        queued=status == "queued",
        active=status in ("running", "paused"),
        running=running,
        behind=running and not (ready or training) and job.steps_sent < job.num_steps,
        waiting=waiting,
        tokens=waiting * job.lengths.tokens,
        kv_tokens=waiting * job.lengths.kv_tokens,
        missing=_missing(job),
        training=training is not None,
        training_tokens=training.tokens if training else 0,
        ready=ready,
        urgency=evaluation if supervised else group or evaluation,
        fresh=job.state.next_group == 0 and group is not None and not supervised,
        examples=examples,
        example_urgency=group if supervised else None,
    )


def _missing(job: Job) -> int:
    """Trajectories that would be issued now if rollout workers had slots without limit, evaluations included. What a paused job has
    under way needs no slot."""
    if job.state.status != "running":
        return -job.num_waiting if job.state.status == "paused" else 0
    evals = sum(tally.expected * (tally.units - tally.issued) // tally.units for tally in job.state.evals.values())
    return evals + (0 if job.spec.is_supervised else job.groups_wanted() * job.spec.hyper.group_size)


@dataclass(slots=True)
class TenantDemand:
    """One tenant's jobs that want something issued, by urgency (then oldest first), and by time since their turn."""

    by_urgency: dict[Urgency, "OrderedDict[str, None]"] = field(
        default_factory=dict
    )  # few, however many jobs there are
    line: "OrderedDict[str, None]" = field(default_factory=OrderedDict)  # longest waiting first

    def change(self, job: str, old: Urgency | None, urgency: Urgency | None) -> None:
        """Places a job behind those as urgent as it is now; its place in the line stays. None: it wants nothing."""
        if old is not None:
            equals = self.by_urgency[old]
            del equals[job]
            if not equals:
                del self.by_urgency[old]
        if urgency is not None:
            self.by_urgency.setdefault(urgency, OrderedDict())[job] = None
            self.line.setdefault(job)
        else:
            self.line.pop(job, None)

    def first(self, *, longest_waiting: bool = False) -> str | None:
        """The most urgent job, or the one that has waited longest."""
        if not self.line:
            return None
        if longest_waiting:
            return next(iter(self.line))
        return next(iter(self.by_urgency[min(self.by_urgency)]))


@dataclass(slots=True)
class Wishes:
    """Jobs that want something of one kind issued, by tenant."""

    tenants: defaultdict[str, TenantDemand] = field(default_factory=lambda: defaultdict(TenantDemand))
    _turns: Counter[str] = field(default_factory=Counter)  # tenant -> what it was granted

    def change(self, tenant: str, job: str, old: Urgency | None, urgency: Urgency | None) -> None:
        """See `TenantDemand.change`."""
        if old is not None or urgency is not None:
            jobs = self.tenants[tenant]
            jobs.change(job, old, urgency)
            if not jobs.line:
                del self.tenants[tenant]

    def next_job(self, tenant: str) -> str | None:
        """The tenant's job whose turn it is."""
        jobs = self.tenants.get(tenant)
        return jobs.first(longest_waiting=is_longest_waiting(self._turns[tenant])) if jobs else None

    def granted(self, tenant: str, job: str) -> None:
        """Moves a job that had its turn to the end of the line."""
        self._turns[tenant] += 1
        jobs = self.tenants.get(tenant)
        if jobs is not None and job in jobs.line:
            jobs.line.move_to_end(job)

    def forget(self, tenant: str) -> None:
        del self._turns[tenant]


@dataclass(slots=True)
class Demand:
    """Sums of what all jobs of an owner want, over their views. Only `update` changes them."""

    open_work: int = 0
    num_training: int = 0
    handed: Handed = field(default_factory=Handed)
    num_running: int = 0
    waiting: Counter[str] = field(default_factory=Counter)  # tenant -> trajectories under way
    tokens: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Tenant -> tokens under way, estimated."""
    kv_tokens: float = 0.0
    missing: Counter[str] = field(default_factory=Counter)  # tenant -> what it would be issued besides, see `View`
    active: Counter[str] = field(default_factory=Counter)  # tenant -> jobs that run or are paused
    behind: Counter[str] = field(default_factory=Counter)  # tenant -> jobs that sample what they must train next
    queued: dict[str, "OrderedDict[str, None]"] = field(default_factory=dict)  # tenant -> jobs, oldest first
    ready: dict[str, str] = field(default_factory=dict)  # job -> tenant
    rollouts: Wishes = field(default_factory=Wishes)
    examples: Wishes = field(default_factory=Wishes)  # of supervised jobs, for their steps
    open_examples: Counter[str] = field(default_factory=Counter)  # tenant -> those under way; of tenants that have some
    fresh: dict[str, str] = field(default_factory=dict)  # job -> tenant, of those that want their first group
    _views: dict[str, View] = field(default_factory=dict)
    _jobs: dict[str, set[str]] = field(default_factory=dict)  # of each tenant

    def update(self, job: str, view: View | None) -> None:
        """Replaces the view of a job. None: the job is gone."""
        old = self._views.pop(job, None)
        if old is not None:
            self._count(old, -1)
            self._unlist(job, old)
        if view is not None:
            self._views[job] = view
            self._jobs.setdefault(view.tenant, set()).add(job)
            self._count(view, 1)
            self._list(job, view)
        before, after, tenant = old or GONE, view or GONE, (view or old or GONE).tenant
        self.rollouts.change(tenant, job, before.urgency, after.urgency)
        self.examples.change(tenant, job, before.example_urgency, after.example_urgency)
        if old is not None and view is None:
            self._leave(job, tenant)

    def turns(self, partitions: Iterable[int], in_env: float, is_exhausted: Callable[[str], bool]) -> dict[int, float]:
        """Slots of rollout workers that the trajectories under way, and those missing, would fill at once, by partition. `in_env`: how
        many of those under way need none. `is_exhausted`: may a tenant be issued nothing?"""
        at_rollout = max(0.0, 1 - in_env / max(1, self.open_work))
        turns = dict.fromkeys(partitions, 0.0)
        for tenant, waiting in self.waiting.items():
            missing = 0 if is_exhausted(tenant) else self.missing[tenant]
            turns[partition_of(tenant)] += max(0.0, at_rollout * waiting + missing)
        return turns

    def tenants(self) -> set[str]:
        """Tenants with rollouts under way or wanted."""
        return {tenant for tenant, waiting in self.waiting.items() if waiting} | self.rollouts.tenants.keys()

    def tenants_with_examples(self) -> set[str]:
        """Tenants with examples under way or wanted."""
        return self.open_examples.keys() | self.examples.tenants.keys()

    def jobs_of(self, tenant: str) -> Set[str]:
        return self._jobs.get(tenant, frozenset())

    def _leave(self, job: str, tenant: str) -> None:
        """Forgets a job that is gone, and its tenant if that has no other."""
        self._jobs[tenant].discard(job)
        if not self._jobs[tenant]:
            del self._jobs[tenant]
        if not self.active[tenant] and tenant not in self.queued:
            del (
                self.active[tenant],
                self.waiting[tenant],
                self.tokens[tenant],
                self.behind[tenant],
                self.missing[tenant],
            )
            self.rollouts.forget(tenant)
            self.examples.forget(tenant)

    def _list(self, job: str, view: View) -> None:
        if view.queued:
            self.queued.setdefault(view.tenant, OrderedDict())[job] = None
        if view.ready:
            self.ready[job] = view.tenant
        if view.fresh:
            self.fresh[job] = view.tenant

    def _unlist(self, job: str, view: View) -> None:
        if view.queued:
            del self.queued[view.tenant][job]
            if not self.queued[view.tenant]:
                del self.queued[view.tenant]
        self.ready.pop(job, None)
        self.fresh.pop(job, None)

    def _count(self, view: View, sign: int) -> None:
        tenant = view.tenant
        self.open_work += sign * view.waiting
        self.waiting[tenant] += sign * view.waiting
        # Differences of floats leave traces; where nothing is under way there is nothing.
        self.tokens[tenant] = self.tokens[tenant] + sign * view.tokens if self.waiting[tenant] else 0.0
        self.kv_tokens = self.kv_tokens + sign * view.kv_tokens if self.open_work else 0.0
        self.missing[tenant] += sign * view.missing
        self.num_training += sign * view.training
        if view.training:
            (self.handed.add if sign > 0 else self.handed.remove)(tenant, view.training_tokens)
        self.num_running += sign * view.running
        if view.examples:
            self.open_examples[tenant] += sign * view.examples
            if not self.open_examples[tenant]:
                del self.open_examples[tenant]
        self.active[tenant] += sign * view.active
        self.behind[tenant] += sign * view.behind
