"""Finds whom a worker follows for a file, and tells the others what it has.

A worker's entry in `holders:<sha256>` is one line: until when it counts, ms; address; parts that it has; number; whom it follows.
Numbers grow, and whoever is not whole is followed by larger numbers only: so no ring forms. Each holder has one follower, so chains
form by themselves. A Redis that lost the entries has them again within RENEW_S.
"""

import secrets
from collections.abc import Collection, Sequence
from typing import Any

from common.bus.bus import Bus
from common.peers.server import Offer

HOLD_S = 5.0
RENEW_S = 1.0
MAX_FAILURES = 3
"""Holders that a worker tries for one file before it reads the store."""
STORE = "store"

# KEYS: `holders`, `peer-key`. ARGV: worker, address, parts that it has, of how many, its number (0: none yet), ms that an entry
# counts, places at the store, holders to try before the store, a key if there is none, then the workers that it leaves out.
# Returns whom to follow (`store`; "": wait), at which address, the worker's number, the key. The first write needs no memory, as in SETTLE.
JOIN = """
local worker, total, mine, now = ARGV[1], tonumber(ARGV[4]), tonumber(ARGV[5]), redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('HDEL', KEYS[1], worker)
local out, followed, rows, last, reading = {}, {}, {}, 0, 0
for i = 10, #ARGV do out[ARGV[i]] = true end
local entries = redis.call('HGETALL', KEYS[1])
for i = 1, #entries, 2 do
  local till, address, parts, number, source = string.match(entries[i + 1], '^(%d+) (%S+) (%d+) (%d+) (%S+)$')
  if tonumber(till) < now then
    redis.call('HDEL', KEYS[1], entries[i])
  else
    last = math.max(last, number)
    -- Whom it leaves out counts for nothing: that one's holder is free for it, or its place at the store.
    if not out[entries[i]] then
      local heard = tonumber(till) - ARGV[6] > now - 1500
      rows[#rows + 1] = {entries[i], address, tonumber(parts), tonumber(number), heard}
      followed[source] = true
      if source == 'store' then reading = reading + 1 end
    end
  end
end
if mine == 0 then mine = last + 1 end
-- Of equals one that was heard of lately: a dead one is not yet forgotten. Then who came first: so chains are of one length.
local function is_before(a, b)
  if a[3] ~= b[3] then return a[3] > b[3] end
  if a[5] ~= b[5] then return a[5] end
  return a[4] < b[4]
end
local patient, place, best = #ARGV - 9 < tonumber(ARGV[8]), reading < tonumber(ARGV[7]), nil
for _, row in ipairs(patient and rows or {}) do
  if not followed[row[1]] and (row[3] == total or row[4] < mine) then
    if not best or is_before(row, best) then best = row end
  end
end
-- The only place is for whoever finds no holder; each of several begins a chain.
if best and place and reading > 0 and best[3] < total then best = nil end
local source, address = '', ''
if best then source, address = best[1], best[2]
elseif not patient or place then source = 'store' end
if source ~= '' then
  local entry = {string.format('%.0f', now + ARGV[6]), ARGV[2], ARGV[3], mine, source}
  redis.call('HSET', KEYS[1], worker, table.concat(entry, ' '))
  redis.call('EXPIRE', KEYS[1], 60)
end
redis.call('SET', KEYS[2], ARGV[9], 'NX')
return {source, address, mine, redis.call('GET', KEYS[2])}
"""

# KEYS: `peer-key`, then `holders` of each file. ARGV: worker, ms that an entry counts, a key if there is none, then of each file the
# rest of the worker's entry. Returns the key. The first write needs no memory, as in SETTLE.
RENEW = """
local now = redis.call('TIME')
local till = string.format('%.0f ', now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[2])
for i = 2, #KEYS do
  redis.call('EXPIRE', KEYS[i], 60)
  redis.call('HSET', KEYS[i], ARGV[1], till .. ARGV[i + 2])
  redis.call('EXPIRE', KEYS[i], 60)
end
redis.call('SET', KEYS[1], ARGV[3], 'NX')
return redis.call('GET', KEYS[1])
"""


class Holders:
    """The cell's holders of files, in Redis; calls wait for it."""

    def __init__(self, bus: Bus, worker: str, *, store_places: int) -> None:
        """`store_places`: workers of the cell that may read one file from the store at once."""
        self.key = secrets.token_hex(32)
        """Followers must know it; since the first call it is the cell's."""
        self.address = ""
        """This worker's `host:port`, set before any call."""
        self._bus = bus
        self._worker = worker
        self._store_places = store_places
        self._join = bus.client.register_script(JOIN)
        self._renew = bus.client.register_script(RENEW)

    async def join(self, offer: Offer, left_out: Collection[str]) -> tuple[str, str]:
        """Finds whom to follow for the rest of a file, and notes it: a worker and its `host:port`, STORE, or "" for nobody yet.
        `left_out`: holders that failed; after MAX_FAILURES it is the store."""
        file, hold_ms = offer.file, round(1000 * HOLD_S)
        keys = [self._bus.cell.holders(file.sha256), self._bus.cell.peer_key]
        have: list[Any] = [self._worker, self.address, offer.num_parts, len(file.parts), offer.number]
        arguments = [*have, hold_ms, self._store_places, MAX_FAILURES, self.key, *left_out]
        source, address, number, key = await self._bus.retrying(lambda: self._join(keys=keys, args=arguments))
        offer.source, offer.number, self.key = source.decode(), number, key.decode()
        return offer.source, address.decode()

    async def lag(self, offer: Offer) -> int:
        """Parts that the followed worker lacks of what the one has that it follows itself, as both last told; 0 if they did not."""
        (found,) = await self._bus.read_hashes([self._bus.cell.holders(offer.file.sha256)])
        _, _, parts, _, source = found.get(offer.source.encode(), b"0 - 0 0 -").split()
        return int(found[source].split()[2]) - int(parts) if source in found else 0

    async def renew(self, offers: Sequence[Offer]) -> None:
        """Says what this worker has, for the next HOLD_S, and learns the key."""
        # one without a number might be followed by a worker that it follows later
        offers = [offer for offer in offers if offer.is_whole or offer.number]
        keys = [self._bus.cell.peer_key, *(self._bus.cell.holders(offer.file.sha256) for offer in offers)]
        entries = [f"{self.address} {offer.num_parts} {offer.number} {offer.source or '-'}" for offer in offers]
        arguments: list[Any] = [self._worker, round(1000 * HOLD_S), self.key, *entries]
        self.key = (await self._bus.retrying(lambda: self._renew(keys=keys, args=arguments))).decode()

    async def leave(self, offers: Sequence[Offer]) -> None:
        await self._bus.pipelined(("HDEL", self._bus.cell.holders(offer.file.sha256), self._worker) for offer in offers)
