"""Looks for work of all base models, and tells the other pool workers who opens what.

    LOOK   what waits unread in each cell, and how long    ENTER, STAY, LEAVE   who has a base open, and who opens it

A pool worker that enters a cell counts as open there for HOLD_S; it says so again each second. So a killed one is forgotten, and a Redis
that went back in time hears of it again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.bus.bus import Bus
from common.bus.streams import Cell

HOLD_S = 3.0

# KEYS: of each cell its `open-at`, then its streams: those of all workers, then the pool worker's own. ARGV: group, milliseconds of a
# lease, then of each cell: the number of streams of both kinds, key of the weights, which a worker may only read, and of the set of
# workers whose streams others look after ("": there is none), with the prefixes of these streams.
# Returns of each cell: unread entries, and the age of the oldest in ms, of both kinds; the weights; entries of the first kind that were
# read, and how many pool workers have the cell open.
_LOOK = """
local time = redis.call('TIME')
local now, at, rows = time[1] * 1000 + math.floor(time[2] / 1000), 0, {}
local function take() at = at + 1; return KEYS[at] end
local function look(stream, alone)
  local length, last, pending = redis.call('XLEN', stream), '-', 0
  if length == 0 then return 0, 0, 0 end
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    if group[2] == ARGV[1] then pending, last = group[6], '(' .. group[8] end
  end
  local unread, oldest = math.max(0, length - pending), 0
  local first = unread > 0 and redis.call('XRANGE', stream, last, '+', 'COUNT', 1)[1]
  if first then oldest = now - string.match(first[1], '^%d+') end
  -- Where nobody reads, nobody takes over either: what is idle for a lease waits like what is unread.
  local idle = alone and pending > 0 and redis.call('XPENDING', stream, ARGV[1], 'IDLE', ARGV[2], '-', '+', 1)[1]
  if idle then return unread + 1, math.max(oldest, idle[3] - ARGV[2]), pending end
  return unread, oldest, pending
end
for i = 3, #ARGV, 6 do
  local open, busy, row = redis.call('ZCOUNT', take(), now, '+inf'), 0, {}
  local owners = ARGV[i + 3] ~= '' and redis.call('ZRANGEBYSCORE', ARGV[i + 3], '-inf', '+inf') or {}
  for kind = 0, 1 do
    local unread, oldest = 0, 0
    for _ = 1, ARGV[i + kind] do
      local num, age, pending = look(take(), open == 0)
      unread, oldest, busy = unread + num, math.max(oldest, age), busy + (kind == 0 and pending or 0)
    end
    for n = 2, kind == 0 and 2 * #owners + 1 or 0 do
      local num, age, pending = look(ARGV[i + 4 + n % 2] .. owners[math.floor(n / 2)], open == 0)
      unread, oldest, busy = unread + num, math.max(oldest, age), busy + pending
    end
    row[#row + 1], row[#row + 2] = unread, oldest
  end
  local weight = 0
  for n, value in ipairs(redis.call('HGETALL', ARGV[i + 2])) do weight = weight + (n % 2 == 0 and tonumber(value) or 0) end
  row[5], row[6], row[7] = tostring(weight), busy, open
  rows[#rows + 1] = row
end
return rows
"""

# KEYS: `open-at`, `opening`. ARGV: pool worker, milliseconds of a hold, slots of one worker, unread entries; 0 slots: it enters for
# entries that nobody else can read. Returns whether it entered: others that are opening the base may have slots for all that waits.
_ENTER = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, key in ipairs(KEYS) do redis.call('ZREMRANGEBYSCORE', key, '-inf', now) end
redis.call('ZREM', KEYS[2], ARGV[1])
if tonumber(ARGV[3]) > 0 and redis.call('ZCARD', KEYS[2]) * ARGV[3] >= tonumber(ARGV[4]) then return 0 end
for _, key in ipairs(KEYS) do redis.call('ZADD', key, now + ARGV[2], ARGV[1]) end
return 1
"""

# KEYS, ARGV: as above, then whether it still opens the base. The first write needs no memory.
_STAY = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
if ARGV[3] == '1' then redis.call('ZADD', KEYS[2], now + ARGV[2], ARGV[1]) end
"""


@dataclass(frozen=True, slots=True)
class Unread:
    """The entries that wait in one cell for a service."""

    num: int = 0
    waited_s: float = 0.0
    num_own: int = 0
    """The number of those that only this pool worker can read."""
    weight: float = 0.0
    """The sum over the tenants whose jobs are active."""
    num_begun: int = 0
    """Entries that workers have read and not settled, of those that all may read."""
    num_open: int = 0
    """Pool workers that have the base model open, or open it."""


class Lookout:
    """One pool worker's view of the cells, and its place in them."""

    def __init__(self, buses: Mapping[str, Bus], service: str, pool_worker: str, lease_s: float) -> None:
        """`buses`: of each base model. Those that share a client are looked at by one script."""
        self._buses = buses
        self._service, self._pool_worker = service, pool_worker
        self._lease_ms, self._hold_ms = int(lease_s * 1000), int(HOLD_S * 1000)
        self._by_client: dict[int, list[str]] = {}
        for base, bus in buses.items():
            self._by_client.setdefault(id(bus.client), []).append(base)

    async def look(self, workers: Mapping[str, str]) -> dict[str, Unread]:
        """Counts what waits in each cell. `workers`: base model -> the id of its base worker here."""
        found: dict[str, Unread] = {}
        for bases in self._by_client.values():
            keys, words = list[str](), list[Any]([self._service, self._lease_ms])
            for base in bases:
                cell = self._buses[base].cell
                shared, own = self._streams(cell), self._own_streams(cell, workers.get(base))
                keys += [cell.open_at(self._service), *shared, *own]
                owners = cell.rollout_workers if self._service == "rollout" else ""
                prefixes = [cell.rollout_worker(""), cell.rollout_chat_worker("")]
                words += [len(shared), len(own), cell.weights, owners, *prefixes]
            for base, row in zip(bases, await self._call(bases[0], _LOOK, keys, words), strict=True):
                num, age_ms, num_own, own_age_ms, weight, *others = row
                waited_s = max(age_ms, own_age_ms) / 1000
                found[base] = Unread(num + num_own, waited_s, num_own, float(weight), *others)
        return found

    async def enter(self, base: str, unread: Unread, slots: int) -> bool:
        """False: others that are opening the base have slots for all that waits."""
        free_for_all = 0 if unread.num_own else slots
        words = [self._pool_worker, self._hold_ms, free_for_all, unread.num]
        return bool(await self._call(base, _ENTER, self._keys(base), words))

    async def stay(self, base: str, *, opening: bool) -> None:
        await self._call(base, _STAY, self._keys(base), [self._pool_worker, self._hold_ms, int(opening)])

    async def leave(self, base: str) -> None:
        await self._buses[base].pipelined(("ZREM", key, self._pool_worker) for key in self._keys(base))

    def _keys(self, base: str) -> list[str]:
        cell = self._buses[base].cell
        return [cell.open_at(self._service), cell.opening(self._service)]

    def _streams(self, cell: Cell) -> list[str]:
        return [stream for stream, group in cell.work if group == self._service]

    def _own_streams(self, cell: Cell, worker: str | None) -> Sequence[str]:
        return [cell.trainer(worker)] if worker and self._service == "trainer" else []

    async def _call(self, base: str, script: str, keys: Sequence[str], words: Sequence[Any]) -> Any:
        bus = self._buses[base]
        return await bus.retrying(lambda: bus.client.register_script(script)(keys=list(keys), args=list(words)))
