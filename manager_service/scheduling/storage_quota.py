"""Says which tenants of an owner keep all that they may in object storage."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from manager_service.owner.jobs.changes import Changes
from manager_service.records.stored import WHAT_TO_DELETE
from manager_service.records.tenants import TenantRecord


@dataclass(slots=True)
class StorageQuota:
    """The bytes that tenants store, as they were last read, and what was committed since."""

    max_bytes: int | None = None  # of a tenant whose record says nothing else; None: nobody reads, and nothing waits
    unread: set[str] = field(default_factory=set)  # tenants that were asked about, and are to be read
    _read: Counter[str] = field(default_factory=Counter)
    _since: Counter[str] = field(default_factory=Counter)
    _coming: Counter[str] = field(default_factory=Counter)  # by the changes that the next commit has

    def begin_reading(self) -> None:
        """Call before the bytes are read: what is committed meanwhile may count twice until the next time, and never not at all."""
        for tenant in self._read:
            self._read[tenant] += self._since[tenant]
        self._since.clear()

    def read(self, num_bytes: Counter[str]) -> None:
        """Takes in what all tenants store of which it is to know."""
        self._read = num_bytes
        self.unread -= num_bytes.keys()

    def charge(self, changes: Changes) -> None:
        self._since.update(_bytes_of([changes]))

    def expect(self, changes: Iterable[Changes]) -> None:
        """Takes in what else has happened, and is not committed yet."""
        self._coming = _bytes_of(changes)

    def is_full(self, tenant: TenantRecord) -> bool:
        """Does it keep all that it may, as far as is known? Then its jobs add at most one version each: that of a step under way."""
        if self.max_bytes is None:
            return False
        if tenant.id not in self._read:
            self.unread.add(tenant.id)
            return True
        return self._used(tenant.id) >= self._limit(tenant)

    def why(self, tenant: TenantRecord) -> str:
        """Says to its users why their jobs wait; empty while it is not known."""
        if tenant.id not in self._read:
            return ""
        what = f"its tenant stores {self._used(tenant.id):,} bytes, and may store {self._limit(tenant):,}"
        return f"The job waits: {what}. {WHAT_TO_DELETE.capitalize()}: then it goes on by itself"

    def _used(self, tenant: str) -> int:
        return self._read[tenant] + self._since[tenant] + self._coming[tenant]

    def _limit(self, tenant: TenantRecord) -> int:
        return (self.max_bytes or 0) if tenant.max_stored_bytes is None else tenant.max_stored_bytes


def _bytes_of(changes: Iterable[Changes]) -> Counter[str]:
    found = Counter[str]()
    for change in changes:
        for (tenant, _), num_bytes in change.stored.items():
            found[tenant] += num_bytes
    return found
