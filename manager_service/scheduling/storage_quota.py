"""Says which tenants of an owner keep all that they may in object storage."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from manager_service.owner.jobs.changes import Changes
from manager_service.owner.jobs.job import Job
from manager_service.records.stored import WHAT_TO_DELETE
from manager_service.records.tenants import TenantRecord


@dataclass(slots=True)
class StorageQuota:
    """The bytes that tenants store: as they were read last, and what has happened since."""

    max_bytes: int | None = None  # of a tenant whose record says nothing else; None: nobody reads, and nothing waits
    unread: set[str] = field(default_factory=set)  # tenants that were asked about, and are to be read
    told: set[str] = field(default_factory=set)  # jobs that have said that they wait
    _read: Counter[str] = field(default_factory=Counter)
    _since: Counter[str] = field(default_factory=Counter)

    def begin_reading(self) -> None:
        """Call before the bytes are read: what happens meanwhile may count twice until the next time, and never not at all."""
        self._read = Counter({tenant: num + self._since[tenant] for tenant, num in self._read.items()})
        self._since.clear()

    def read(self, num_bytes: Counter[str]) -> None:
        """Takes in what all tenants store of which it is to know."""
        self._read = num_bytes
        self.unread -= num_bytes.keys()

    def charge(self, changes: Iterable[Changes]) -> None:
        for change in changes:
            for (tenant, _), num_bytes in change.stored.items():
                self._since[tenant] += num_bytes

    def ask(self, tenant: str) -> None:
        """Has a tenant read whose jobs will soon have steps."""
        if tenant not in self._read and self.max_bytes is not None:
            self.unread.add(tenant)

    def is_full(self, tenant: TenantRecord) -> bool:
        """Does it keep all that it may, as far as is known? Then its jobs add at most one version each: that of a step under way."""
        self.ask(tenant.id)
        if self.max_bytes is None or tenant.id not in self._read:
            return self.max_bytes is not None
        return self._used(tenant) >= tenant.may_store(self.max_bytes)

    def tell(self, job: Job, tenant: TenantRecord, now: float, changes: Changes) -> None:
        """Lets a job say once that it waits, as soon as it is known why; and again only after it has gone on."""
        if job.id in self.told:
            self.told.discard(job.id)
            job.journal.progressed(now, changes)  # it has waited for no worker
        elif self.max_bytes is not None and tenant.id in self._read:
            self.told.add(job.id)
            what = f"its tenant stores {self._used(tenant):,} bytes, and may store {tenant.may_store(self.max_bytes):,}"
            told = f"The job waits: {what}. {WHAT_TO_DELETE.capitalize()}: then it goes on by itself"
            job.journal.warn(now, told, changes)

    def _used(self, tenant: TenantRecord) -> int:
        return self._read[tenant.id] + self._since[tenant.id]
