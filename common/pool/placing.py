"""Gives base models their places in production: pool workers tell each other what each base model needs, and all compute the same places.

looks ─► the share of time that each base model needs ─► a row of `marlaas:{@}:pool:<service>` ─► all rows ─► `place`
"""

import math
import time
from collections.abc import Collection, Mapping, Sequence

import msgspec

from common.bus.bus import Bus
from common.pool.base_states import BaseState
from common.pool.choosing import WaitingBase
from common.pool.looking import HOLD_S, Unread
from common.pool.placement import PlacementRule, PoolRow, may_open, place

AVERAGE_S = 30.0
"""Needs are averaged over about so long. A base model without work for so long gives its places up: a job that samples and trains in
turn keeps them."""

# KEYS: the hash. ARGV: pool worker, its row, seconds of a hold. Returns the rows that hold, by worker. The first write needs no memory;
# a row of the future was written before Redis' clock went back.
_TELL = """
redis.call('HDEL', KEYS[1], ARGV[1])
local time, rows = redis.call('TIME'), {}
redis.call('HSET', KEYS[1], ARGV[1], time[1] .. ' ' .. ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local at, row = string.match(all[i + 1], '^(%d+) (.*)$')
  if math.abs(time[1] - at) > tonumber(ARGV[3]) then
    redis.call('HDEL', KEYS[1], all[i])
  else
    rows[#rows + 1] = {all[i], row}
  end
end
return rows
"""


class BaseNeed(msgspec.Struct):
    """The need for one base model, as one pool worker sees it."""

    since_s: float
    """Unix time from when on there was work; below, when there last was."""
    needed_at_s: float
    share: float = 0.0
    """Share of one worker's time; those of all pool workers add up."""


class WorkerRow(msgspec.Struct, frozen=True):
    """One pool worker's part of what places depend on."""

    limit_bytes: int
    in_memory: Sequence[str]
    """Base models with their place there, and loaded ones that have none anywhere: places move only for a reason."""
    refused: Sequence[str]
    needs: dict[str, BaseNeed]
    num_bytes: dict[str, int]


def places_of(placement: PlacementRule, rows: Mapping[str, WorkerRow]) -> dict[str, tuple[str, ...]]:
    """The places of each base model with work, by what all pool workers told."""
    needs: dict[str, list[BaseNeed]] = {}
    for row in rows.values():
        for base, need in row.needs.items():
            needs.setdefault(base, []).append(need)
    order = sorted(needs, key=lambda base: (min(need.since_s for need in needs[base]), base))
    demand = {base: sum(need.share for need in needs[base]) for base in order}
    num_bytes = {base: max(row.num_bytes.get(base, 0) for row in rows.values()) for base in order}
    workers = [PoolRow(name, row.limit_bytes, row.in_memory, row.refused) for name, row in sorted(rows.items())]
    return place(placement, demand, num_bytes, workers)


class Placing:
    """One pool worker's view of the places."""

    def __init__(self, bus: Bus, service: str, pool_worker: str, placement: PlacementRule, slots: int) -> None:
        """`bus`: of ALL_CELLS."""
        self._bus, self._key, self._pool_worker, self._slots = bus, bus.cell.pool(service), pool_worker, slots
        self._placement: PlacementRule = placement
        self.places: dict[str, tuple[str, ...]] = {}
        self._needs: dict[str, BaseNeed] = {}
        self._measured_at_s, self._num_workers = time.time(), 1

    def measure(self, served: str | None, seen: Mapping[str, Unread]) -> None:
        """Averages needs, at each look. A base needs a worker that serves it, and for what waits, which all see, up to one more."""
        now_s = time.time()
        kept, self._measured_at_s = math.exp(min(0.0, self._measured_at_s - now_s) / AVERAGE_S), now_s
        for base, unread in seen.items():
            now = (base == served) + min(1.0, unread.num / self._slots) / self._num_workers
            need = self._needs.setdefault(base, BaseNeed(now_s, 0.0))
            need.share = now + kept * (need.share - now)
            need.needed_at_s = now_s if now else need.needed_at_s
            if now_s - need.needed_at_s > AVERAGE_S:
                del self._needs[base]

    async def tell(self, limit_bytes: int, states: Mapping[str, BaseState], loaded: Collection[str]) -> None:
        """Writes this worker's row, which holds for HOLD_S, and computes the places again."""
        row = WorkerRow(
            limit_bytes,
            [base for base in states if self._has_place(base) or (base in loaded and not self.places.get(base))],
            [base for base, state in states.items() if not state.may_open],
            self._needs,
            {base: states[base].num_bytes for base in self._needs},
        )
        args = [self._pool_worker, msgspec.json.encode(row), int(HOLD_S)]
        script = self._bus.client.register_script(_TELL)
        told = await self._bus.retrying(lambda: script(keys=[self._key], args=args))
        rows = {name.decode(): msgspec.json.decode(row, type=WorkerRow) for name, row in told}
        self._num_workers, self.places = len(rows), places_of(self._placement, rows)

    def is_off(self, base: str) -> bool:
        """Has the base places, and all on other workers?"""
        return bool(self.places.get(base)) and not self._has_place(base)

    def may_open(
        self, waiting: Sequence[WaitingBase], seen: Mapping[str, Unread], *, is_idle: bool
    ) -> list[WaitingBase]:
        """The bases that this worker may open: by their places, and those with work that nobody else can do."""
        able = may_open(self._placement, self._pool_worker, waiting, self.places, is_idle=is_idle)
        return [base for base in waiting if base in able or seen[base.base].num_own]

    def _has_place(self, base: str) -> bool:
        return self._pool_worker in self.places.get(base, ())
