"""Shares the cell's places for completions and grader runs among the manager's replicas.

Each replica tells the others in Redis, every EXCHANGE_S, which tenants ask it for places: their weights and how many places
they ask for. A tenant's weight is split among the replicas by what it asks of each. A replica has the part of the cell's
places that its tenants' weights are of all, and shares it by those weights.

Tenants who sample in bulk share the rollout workers with jobs: the weight of all of them stands in `sampling`, where owners
see it, and owners' weight is seen here.

    reads: `weights`   reads, writes: `inference`, `sampling`   after a crash: the others forget the replica after GONE_S
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

import msgspec

from common.bus import Bus

EXCHANGE_S = 0.5
BULK = "samples"
"""The places that are rollout slots, which bulk samples share with jobs."""
GONE_S = 5.0
"""A replica that was silent for so long has no part any more."""

# KEYS: inference, sampling, weights. ARGV: this replica, milliseconds until it counts as gone, what it tells, weight of all who
# sample in bulk. Answers with the weight of the owners' tenants, then with what all live replicas tell.
_EXCHANGE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %s', now + ARGV[2], ARGV[3]))
local told = redis.call('HGETALL', KEYS[1])
if ARGV[4] ~= '0.0' then redis.call('SET', KEYS[2], ARGV[4], 'PX', ARGV[2]) end
local total = 0
for _, weight in ipairs(redis.call('HVALS', KEYS[3])) do total = total + tonumber(weight) end
local answer = {tostring(total)}
for i = 1, #told, 2 do
  local ends, rest = string.match(told[i + 1], '^(%d+) (.*)$')
  if tonumber(ends) < now then
    redis.call('HDEL', KEYS[1], told[i])
  else
    answer[#answer + 1] = rest
  end
end
return answer
"""


class Asked(msgspec.Struct, frozen=True):
    """What one tenant asks of one replica."""

    weight: float
    num: int  # places that it holds or waits for


Asking = Mapping[str, Asked]
"""By tenant."""
_TOLD = dict[str, dict[str, Asked]]


class CellShare:
    """One replica's part of each kind of places."""

    def __init__(self, bus: Bus, replica: str, asking: Callable[[], Mapping[str, Asking]]) -> None:
        """`asking`: for each kind of places, what this replica is asked for at the moment."""
        self._bus = bus
        self._replica = replica
        self._asking = asking
        self._exchange = bus.client.register_script(_EXCHANGE)
        self._mine: Mapping[str, Asking] = {}
        self._all: list[_TOLD] = []
        self._jobs_weight = 0.0
        self._wanted = asyncio.Event()

    async def exchange(self) -> None:
        """Tells what this replica is asked for, and hears of the others."""
        mine = {kind: dict(asking) for kind, asking in self._asking().items()}
        cell = self._bus.cell
        keys = [cell.inference, cell.sampling, cell.weights]
        words = [self._replica, int(GONE_S * 1000), msgspec.json.encode(mine), repr(sum(self._weights(BULK).values()))]
        total, *told = await self._bus.retrying(lambda: self._exchange(keys=keys, args=words))
        self._jobs_weight = float(total)
        self._all = [msgspec.json.decode(one, type=_TOLD) for one in told]
        self._mine = mine

    async def run(self, changed: Callable[[], None]) -> None:
        """Exchanges until cancelled, and calls `changed` after each time."""
        while True:
            self._wanted.clear()
            await self.exchange()
            changed()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXCHANGE_S):
                    await self._wanted.wait()

    def exchange_soon(self) -> None:
        """Lets `run` exchange now. Call when a tenant asks for what this replica has no part of yet."""
        self._wanted.set()

    def part(self, kind: str) -> float:
        """This replica's part of the cell's places, 0 to 1: an equal one where nobody asks. Of those for BULK, jobs have theirs."""
        weights = sum(self._weights(kind).values()) + (self._jobs_weight if kind == BULK else 0.0)
        if not weights:
            return 1 / max(1, len(self._all))
        mine = sum(self.weight(kind, tenant, asked.weight) for tenant, asked in self._mine.get(kind, {}).items())
        return mine / weights

    def _weights(self, kind: str) -> dict[str, float]:
        """By tenant that asks any replica."""
        return {t: asked.weight for told in self._all for t, asked in told.get(kind, {}).items()}

    def weight(self, kind: str, tenant: str, weight: float) -> float:
        """The part of a tenant's weight that counts here."""
        here = self._mine.get(kind, {}).get(tenant)
        if here is None:
            return weight
        return weight * here.num / sum(told[kind][tenant].num for told in self._all if tenant in told.get(kind, {}))
