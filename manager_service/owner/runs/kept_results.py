"""Bounds the results that wait in Redis for the clients of a tenant's runs. Those of an owner that died go by age or number."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence

from common.wire.operations import OperationResult
from manager_service.owner.jobs.changes import Changes

MAX_BYTES = 64 << 20
"""Bytes of all results of one tenant: many times what its clients, who wait for each, have not fetched yet."""
LEAST_BYTES = 1 << 10
"""A result counts for at least so many: this process remembers each."""


class KeptResults:
    """The results that one owner has written, of each tenant in their order."""

    def __init__(self) -> None:
        self._kept: defaultdict[str, deque[tuple[str, int, int]]] = defaultdict(deque)  # run, number, bytes
        self._num_bytes: Counter[str] = Counter()

    def add(self, tenant: str, run: str, results: Sequence[OperationResult], changes: Changes) -> None:
        """Counts new results, and drops the tenant's oldest beyond MAX_BYTES. The newest stays, however large."""
        kept, new = self._kept[tenant], [(run, one.seq, max(len(one.outputs), LEAST_BYTES)) for one in results]
        kept += new
        self._num_bytes[tenant] += sum(size for _, _, size in new)
        while self._num_bytes[tenant] > MAX_BYTES and len(kept) > 1:
            oldest, seq, size = kept.popleft()
            self._num_bytes[tenant] -= size
            changes.dropped_results.setdefault(oldest, []).append(seq)
