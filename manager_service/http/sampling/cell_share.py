"""Shares the cell's places for completions and grader runs among the manager's replicas.

Each replica tells the others in Redis, every EXCHANGE_S, the weights of the tenants that ask it for places, and for how many. A
tenant's weight is split among the replicas by what it asks of each. A replica has the part of the places that its tenants' weights
are of all, and shares it by those weights.

Tenants that chat or sample in bulk share the rollout workers with jobs: owners see their weight in `sampling`, and theirs is seen
here. A tenant that asks for less than its share counts with just that much weight.

What completions got of the engines' time corrects their places (common/sharing/correction.py), as owners correct jobs' share;
samples in bulk have the rest.

    reads: `weights`   reads, writes: `inference`, `sampling`, `served`, `asked`
    after a crash: the others forget the replica after GONE_S
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

import msgspec

from common.bus.bus import Bus
from common.sharing.correction import Correction, numbers

EXCHANGE_S = 0.5
CHAT, BULK = "rollout", "samples"
"""The places that are rollout slots, which completions and bulk samples share with jobs."""
ROLLOUT = (CHAT, BULK)
GONE_S = 5.0
"""A replica that was silent for so long has no part any more."""

# KEYS: inference, sampling, weights, served, asked. ARGV: this replica, milliseconds until it counts as gone, what it tells, weight of
# all who chat or sample in bulk, the slots that they ask for, then kinds and the seconds of engines that they got lately. Answers with
# the weight of the owners' tenants, what was served, then with what all live replicas tell. The first write needs no memory, which
# Redis may be out of.
_EXCHANGE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %s', now + ARGV[2], ARGV[3]))
local told = redis.call('HGETALL', KEYS[1])
if ARGV[4] ~= '0.0' then redis.call('SET', KEYS[2], ARGV[4], 'PX', ARGV[2]) end
local total = 0
for _, weight in ipairs(redis.call('HVALS', KEYS[3])) do total = total + tonumber(weight) end
redis.call('SET', KEYS[5], ARGV[5], 'PX', ARGV[2])
for i = 6, #ARGV, 2 do redis.call('HINCRBYFLOAT', KEYS[4], ARGV[i], ARGV[i + 1]) end
local answer = {tostring(total), redis.call('HGETALL', KEYS[4])}
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
    """One tenant's demand on one replica."""

    weight: float
    num: int  # places that it holds or waits for; of rollout slots at most as many as there are
    more: int = 0  # those beyond


Asking = Mapping[str, Asked]
"""Demand of each tenant."""
_TOLD = dict[str, dict[str, Asked]]


class CellShare:
    """One replica's part of each kind of places."""

    def __init__(
        self,
        bus: Bus,
        replica: str,
        asking: Callable[[], Mapping[str, Asking]],
        *,
        slots: Callable[[], int],
        most_for_chat: float,
    ) -> None:
        """`asking`: by kind of places, what this replica is asked for now. `slots`: of the cell's rollout workers. `most_for_chat`:
        the largest part of them that completions have, also where nobody else wants them."""
        self._slots = slots
        self._most_for_chat = most_for_chat
        self._bus = bus
        self._replica = replica
        self._asking = asking
        self._exchange = bus.client.register_script(_EXCHANGE)
        self._mine: Mapping[str, Asking] = {}
        self._all: list[_TOLD] = []
        self._jobs_weight = 0.0
        self._got = defaultdict[str, float](float)
        self._correction = Correction()
        self._wanted = asyncio.Event()

    async def exchange(self) -> None:
        """Tells what this replica is asked for, and hears of the others."""
        mine = {
            kind: {t: self._at_most(kind, asked) for t, asked in asking.items()}
            for kind, asking in self._asking().items()
        }
        cell = self._bus.cell
        keys = [cell.inference, cell.sampling, cell.weights, cell.served, cell.asked]
        got, self._got = self._got, defaultdict[str, float](float)
        words = [self._replica, int(GONE_S * 1000), msgspec.json.encode(mine), repr(self._sampling_weight())]
        words.append(repr(self._slots_asked()))
        words += [word for kind, seconds in got.items() for word in (kind, repr(seconds))]
        total, served, *told = await self._bus.retrying(lambda: self._exchange(keys=keys, args=words))
        self._jobs_weight = float(total)
        self._all = [msgspec.json.decode(one, type=_TOLD) for one in told]
        self._mine = mine
        self._correct(numbers(served))

    def _at_most(self, kind: str, asked: Asked) -> Asked:
        """Splits a tenant's demand equally between replicas once it exceeds what there is."""
        num = min(asked.num, max(1, self._slots())) if kind in ROLLOUT else asked.num
        return Asked(asked.weight, num, asked.num - num)

    def note(self, kind: str, seconds: float) -> None:
        """Notes what a turn got of the engines' time."""
        self._got[kind] += seconds

    def _correct(self, served: Mapping[str, float]) -> None:
        asked = {tenant: self._asked(tenant, CHAT) for tenant in self._weights(CHAT)}
        counted = self._counted()
        weight = sum(counted[tenant] * num / self._asked(tenant) for tenant, num in asked.items())
        due = weight / (sum(counted.values()) + self._jobs_weight) if weight else 0.0
        more = sum(asked.values()) > due * self._slots() * self._correction.factor
        self._correction.look(served, CHAT, due, asks=more)

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
        """Lets `run` exchange now. Call when a tenant asks for what this replica has no part of."""
        self._wanted.set()

    def part(self, kind: str) -> float:
        """This replica's part of the cell's places of a kind, 0 to 1, next to jobs': an equal one where nobody asks."""
        weights = sum(self._weights(kind).values())
        if not weights and (kind != BULK or not self._jobs_weight):
            return 1 / max(1, len(self._all))
        mine = sum(self.weight(kind, tenant, asked.weight) for tenant, asked in self._mine.get(kind, {}).items())
        if kind not in ROLLOUT:
            return mine / weights
        here = {tenant for each in ROLLOUT for tenant in self._mine.get(each, {})}
        due = mine / (self._sampling_weight(whole=here) + self._jobs_weight) if mine else 0.0
        return due if kind == BULK else min(mine / weights, due / self._most_for_chat * self._correction.factor)

    def weight(self, kind: str, tenant: str, weight: float) -> float:
        """The part of a tenant's weight that counts here, for this kind: as this is of all that it asks for."""
        here = self._mine.get(kind, {}).get(tenant)
        if here is None:
            return weight
        return weight * here.num / self._asked(tenant, *(ROLLOUT if kind in ROLLOUT else (kind,)))

    def _sampling_weight(self, *, whole: Collection[str] = ()) -> float:
        """The weight of all who chat or sample that counts against jobs. `whole`: tenants whose whole weight counts."""
        return sum(self._counted(whole=whole).values())

    def _counted(self, *, whole: Collection[str] = ()) -> dict[str, float]:
        """Weight of each tenant that chats or samples. All chats together count for no more than they may have."""
        tenants = {tenant: weight for kind in ROLLOUT for tenant, weight in self._weights(kind).items()}
        each = (sum(tenants.values()) + self._jobs_weight) / max(1, self._slots())
        found = {t: weight if t in whole else min(weight, self._asked(t) * each) for t, weight in tenants.items()}
        chats = {t: found[t] * self._asked(t, CHAT) / max(1, self._asked(t)) for t in self._weights(CHAT)}
        chat = sum(chats.values())
        rest = sum(found.values()) - chat + self._jobs_weight
        if rest and chat * (1 - self._most_for_chat) > self._most_for_chat * rest:
            over = 1 - self._most_for_chat * rest / (1 - self._most_for_chat) / chat
            return found | {t: found[t] - over * part for t, part in chats.items()}
        return found

    def _slots_asked(self) -> float:
        """Rollout slots that all would fill, or in which completions find their part."""
        each = {CHAT: 1 / self._most_for_chat, BULK: 1.0}
        asked = ((each[kind], one) for told in self._all for kind in ROLLOUT for one in told.get(kind, {}).values())
        return sum(slots * (one.num + one.more) for slots, one in asked)

    def _weights(self, kind: str) -> dict[str, float]:
        """Weight of each tenant that asks any replica."""
        return {t: asked.weight for told in self._all for t, asked in told.get(kind, {}).items()}

    def _asked(self, tenant: str, *kinds: str) -> int:
        """The places of these kinds, by default rollout slots, that a tenant asks of all replicas."""
        found = (told.get(kind, {}).get(tenant) for told in self._all for kind in kinds or ROLLOUT)
        return sum(each.num for each in found if each)
