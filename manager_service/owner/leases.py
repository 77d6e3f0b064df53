"""Shares the partitions of a cell evenly among its live owners, by leases in Redis.

One script does an owner's round: it notes that the owner lives, renews its leases, and takes free ones up to its even share.
An owner gives back what exceeds its share, so a manager that starts gets its part. A dead owner's leases run out, and others
take them. All times are Redis' own.

The round also exchanges the weight of each partition's active tenants: that, and not the number of partitions, is an owner's
part of the workers. API replicas whose tenants chat or sample in bulk share too (manager_service/http/sampling/cell_share.py):
`sampling` has their tenants' weight, and `served` what all got of the rollout engines' time. `demand` has the turns that each
partition's jobs would fill slots with, from which the owner of the first one makes `wanted`.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from common.bus.bus import Bus
from common.bus.streams import NUM_PARTITIONS
from common.sharing.correction import JOBS, numbers

# KEYS: owners, weights, sampling, served, demand, then the lease of each partition. ARGV: token, milliseconds, engine seconds of
# jobs since the last round, whether the others, if any, take the free ones and share without this owner ("1"), then the weight of
# each partition that the owner works for ("" for the others), and their turns. Answers with the number of other owners, the even
# share, owners' and samplers' weight, what was served, and for each partition whether it is another's (0), was taken now (1) or is
# renewed (2). The first write needs no memory: then Redis refuses none of the others, however full it is.
ROUND = """
local owners, weights, token, ms = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', owners, '-inf', '(' .. now)
redis.call('ZREM', owners, token)
local others = redis.call('ZCARD', owners)
local leaves = ARGV[4] == '1' and others > 0
if not leaves then redis.call('ZADD', owners, now + ms, token) end
local partitions = #KEYS - 5
local share = math.ceil(partitions / redis.call('ZCARD', owners))
local answer, held, free = {}, 0, {}
for i = 1, partitions do
  local holder = redis.call('GET', KEYS[i + 5])
  answer[i] = 0
  if holder == token then
    redis.call('SET', KEYS[i + 5], token, 'PX', ms)
    answer[i], held = 2, held + 1
  elseif not holder then
    free[#free + 1] = i
  end
end
for _, i in ipairs(free) do
  if held < share and not leaves then
    redis.call('SET', KEYS[i + 5], token, 'PX', ms)
    answer[i], held = 1, held + 1
  end
end
for i = 1, partitions do
  if ARGV[i + 4] ~= '' and answer[i] == 2 then
    redis.call('HSET', weights, i, ARGV[i + 4])
    redis.call('HSET', KEYS[5], i, ARGV[i + 4 + partitions])
  end
end
local total = 0
for _, weight in ipairs(redis.call('HVALS', weights)) do total = total + tonumber(weight) end
if ARGV[3] ~= '0.0' then redis.call('HINCRBYFLOAT', KEYS[4], '%s', ARGV[3]) end
return {others, share, tostring(total), redis.call('GET', KEYS[3]) or '0', redis.call('HGETALL', KEYS[4]), unpack(answer)}
""".replace("%s", JOBS)

# KEYS: owners, then leases. ARGV: token, "1" if the owner leaves for good.
RELEASE = """
if ARGV[2] == '1' then redis.call('ZREM', KEYS[1], ARGV[1]) end
for i = 2, #KEYS do
  if redis.call('GET', KEYS[i]) == ARGV[1] then redis.call('DEL', KEYS[i]) end
end
"""
NONE: Mapping[int, float] = {}
LONGEST_ABSENCE_S = 3600.0
"""The longest `Absence`, and the time after one within which the next is longer."""


class LeaseState(Enum):
    """The state of a lease after a round."""

    BY_ANOTHER = 0  # or by nobody, if the owner has its share
    TAKEN = 1  # it was free, so memory of the partition may be old
    RENEWED = 2


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one round."""

    leases: Mapping[int, LeaseState]  # every partition
    others: int  # live owners that take partitions, without this one
    share: int  # partitions that one owner should hold at most
    other_weight: float  # of active tenants in partitions that this owner does not work for
    sampling_weight: float  # of those who chat or sample in bulk
    served: Mapping[str, float]  # seconds of rollout engines up to now, by kind

    @property
    def surplus(self) -> int:
        """Number of partitions to give back."""
        return max(0, sum(state is not LeaseState.BY_ANOTHER for state in self.leases.values()) - self.share)


@dataclass
class Absence:
    """Times in which an owner leaves free partitions to others. Each doubles the last one of the past hour, so that owners
    without room pass a partition on ever more rarely."""

    first_s: float
    _length_s: float = field(default=0.0, init=False)
    _until_s: float = field(default=float("-inf"), init=False)  # monotonic

    def lasts(self, now_s: float) -> bool:
        return now_s < self._until_s

    def begin(self, now_s: float) -> None:
        """Begins one, unless one lasts."""
        if self.lasts(now_s):
            return
        lately = now_s < self._until_s + LONGEST_ABSENCE_S
        self._length_s = min(2 * self._length_s, LONGEST_ABSENCE_S) if lately else self.first_s
        self._until_s = now_s + self._length_s


@dataclass
class Leases:
    """The leases of one owner."""

    bus: Bus
    token: str
    """Random; it is the value of the owner's leases."""
    lease_s: float
    valid_until_s: float = field(default=0.0, init=False)
    """Monotonic time until which nobody else can take what the last round renewed."""

    def __post_init__(self) -> None:
        cell = self.bus.cell
        self._leases = [cell.lease(partition) for partition in range(NUM_PARTITIONS)]
        self._round = self.bus.client.register_script(ROUND)
        self._release = self.bus.client.register_script(RELEASE)

    async def round(
        self,
        weights: Mapping[int, float],
        served_s: float = 0.0,
        turns: Mapping[int, float] = NONE,
        *,
        leaves: bool = False,
    ) -> Round:
        """Renews leases, and takes free ones. `weights`: of the partitions that this owner works for, and `turns` of their jobs.
        `served_s`: engine seconds of its jobs since the last round. `leaves`: it takes none while there are others, who share them."""
        began_s, partitions = time.monotonic(), range(NUM_PARTITIONS)
        own_weights = [repr(float(weights[p])) if p in weights else "" for p in partitions]
        told = [*own_weights, *(repr(float(turns.get(p, 0))) for p in partitions)]
        cell = self.bus.cell
        keys = [cell.owners, cell.weights, cell.sampling, cell.served, cell.demand, *self._leases]
        arguments = [self.token, int(self.lease_s * 1000), repr(float(served_s)), int(leaves), *told]
        answer: list[Any] = await self.bus.retrying(lambda: self._round(keys=keys, args=arguments))
        others, share, total, sampling, served, *states = answer
        # From before the call: Redis counts the lease from a later moment, so this owner stops before another begins
        self.valid_until_s = began_s + self.lease_s
        mine = sum(weight for partition, weight in weights.items() if states[partition] == LeaseState.RENEWED.value)
        leases = {partition: LeaseState(value) for partition, value in enumerate(states)}
        return Round(leases, others, share, max(0.0, float(total) - mine), float(sampling), numbers(served))

    def surely_held(self, margin_s: float) -> bool:
        """Will the leases that the last round renewed last for `margin_s` more?"""
        return time.monotonic() + margin_s < self.valid_until_s

    async def release(self, partition: int) -> None:
        """Gives one lease back."""
        keys = [self.bus.cell.owners, self._leases[partition]]
        await self.bus.retrying(lambda: self._release(keys=keys, args=[self.token, "0"]))

    async def leave(self) -> None:
        """Gives all leases back, so that other owners need not wait. Raises RedisError, without any retry."""
        await self._release(keys=[self.bus.cell.owners, *self._leases], args=[self.token, "1"])
