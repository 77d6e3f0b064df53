"""Weighted fair sharing: who of several tenants was served least for its weight?

Start-time fair queueing (Goyal et al. 1996): each tenant has a virtual time, its charges over its weight. The smallest is
served next. An idle tenant starts again at the smallest of the busy ones, so it neither hoards service nor starves.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Fairness:
    """Virtual time of each tenant: what it was charged, over its weight. In tokens, or in seconds."""

    _virtual: dict[str, float] = field(default_factory=dict)
    _busy: set[str] = field(default_factory=set)

    def busy(self, tenants: Iterable[str]) -> None:
        """Names the tenants with work. Newcomers start level with the least served of the others."""
        now = set(tenants)
        if now == self._busy:
            return
        level = min((self._virtual[t] for t in self._busy & now), default=None)
        if level is None:
            level = max(self._virtual.values(), default=0.0)
        for tenant in now - self._busy:
            self._virtual[tenant] = max(self._virtual.get(tenant, 0.0), level)
        self._busy = now

    def charge(self, tenant: str, amount: float, weight: float) -> None:
        self._virtual[tenant] = self._virtual.get(tenant, 0.0) + amount / weight

    def virtual_time(self, tenant: str) -> float:
        return self._virtual.get(tenant, 0.0)
