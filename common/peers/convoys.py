"""Gives loaders of one base model its stages, and finds which of them serve together before any has the whole.

    enter ─► a stage ─► its weights come ─► ready ─► a convoy: one of each stage, led by the first ─► whole: convoys dissolve

A loader's entry in `convoy` is one line: until when it counts, ms; stage; number; state; address. All read the same entries, so each
knows by a pure rule whom it serves with, and none has to decide for others.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.bus.bus import Bus
from common.cancellation import running
from common.models.stages import Stage

HOLD_S = 5.0
TELL_S = 0.25
LOADING, READY, WHOLE = "loading", "ready", "whole"

# KEYS: `convoy`. ARGV: worker, ms that an entry counts, number of stages, state, address, its stage; "": the one that fewest loaders
# have. Returns all entries. The first write needs no memory, as in SETTLE.
TELL = """
local now, own = redis.call('TIME'), redis.call('HGET', KEYS[1], ARGV[1])
now = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('HDEL', KEYS[1], ARGV[1])
local nums, last = {}, now
for i = 0, ARGV[3] - 1 do nums[i] = 0 end
local entries = redis.call('HGETALL', KEYS[1])
for i = 1, #entries, 2 do
  local till, of, which, state = string.match(entries[i + 1], '^(%d+) (%d+) (%d+) (%S+) %S+$')
  if tonumber(till) < now then
    redis.call('HDEL', KEYS[1], entries[i])
  else
    last = math.max(last, which)
    of = tonumber(of)
    if state ~= 'whole' and nums[of] then nums[of] = nums[of] + 1 end
  end
end
local stage, number = string.match(own or '', '^%d+ (%d+) (%d+) ')
stage, number = ARGV[6] ~= '' and ARGV[6] or stage, number or last + 1
if not stage then
  stage = 0
  for i = 1, ARGV[3] - 1 do if nums[i] < nums[stage] then stage = i end end
end
local entry = {string.format('%.0f', now + ARGV[2]), stage, number, ARGV[4], ARGV[5]}
redis.call('HSET', KEYS[1], ARGV[1], table.concat(entry, ' '))
redis.call('EXPIRE', KEYS[1], 60)
return redis.call('HGETALL', KEYS[1])
"""


class Loader(NamedTuple):
    """A worker that loads a base model, or just did."""

    worker: str
    stage: int
    number: int  # in order of arrival; the first's is the time, ms
    state: str
    address: str


def behind(loaders: Sequence[Loader], head: str, num_stages: int) -> list[Loader]:
    """The other stages of the convoy that `head` leads, in order: the n-th of each stage serve together. Empty: there is none, or it is
    not needed any more."""
    ready = [
        sorted((each.number, each) for each in loaders if each.stage == n and each.state == READY)
        for n in range(num_stages)
    ]
    heads = [each.worker for _, each in ready[0]]
    place = heads.index(head) if head in heads else len(loaders)
    if any(each.state == WHOLE for each in loaders) or any(len(same) <= place for same in ready):
        return []
    return [same[place][1] for same in ready[1:]]


class Convoy:
    """One loader's place."""

    def __init__(self, bus: Bus, worker: str, address: str, num_stages: int) -> None:
        self.num_stages = num_stages
        self.worker = worker
        self.began, self.over = asyncio.Event(), asyncio.Event()
        """Are its stage's weights here? Has it handed back what it had as a part of a convoy?"""
        self.folder, self.stages, self.number = Path(), list[Stage](), -1
        """With its stage's weights; all stages, and which one is its own. They count once it began."""
        self.reading = asyncio.Lock()
        """Whoever reads the folder, or renames it, holds it."""
        self.state = ""
        """Empty: it has no stage, for it loads nothing yet, or had all."""
        self.loaders: list[Loader] = []
        """All, as of TELL_S ago."""
        self._bus, self._address = bus, address
        self._tell = bus.client.register_script(TELL)

    async def enter(self) -> tuple[int, int]:
        """The number of its stage, and that of all who load with it: these read the store once, each another stage first, and pass on
        what they have. Whole workers give nothing, for all would draw on one of them."""
        self.state = self.state or LOADING
        loaders = await self._told()
        self.number = next(each.stage for each in loaders if each.worker == self.worker)
        return self.number, min(each.number for each in loaders)

    def begin(self, folder: Path, stages: Sequence[Stage]) -> None:
        self.folder, self.stages = folder, list(stages)
        self.began.set()

    def is_now(self, state: str) -> None:
        """Notes how far it is, if it has a stage; WHOLE is the last word."""
        if self.state and self.state != WHOLE:
            self.state = state

    @contextlib.asynccontextmanager
    async def taken_part(self) -> AsyncGenerator[None]:
        """Inside, it tells how far it is, and hears of the others."""
        try:
            async with running(self._keep()):
                yield
            if self.state:
                await self._bus.pipelined([("HDEL", self._bus.cell.convoy, self.worker)])
        finally:
            self.over.set()

    async def _keep(self) -> None:
        while True:
            if self.state:
                self.loaders = await self._told()
            await asyncio.sleep(TELL_S)

    async def _told(self) -> list[Loader]:
        stage = "" if self.number < 0 else self.number
        words: list[Any] = [self.worker, round(1000 * HOLD_S), self.num_stages, self.state, self._address, stage]
        answer = await self._bus.retrying(lambda: self._tell(keys=[self._bus.cell.convoy], args=words))
        entries = [
            (worker.decode(), *entry.decode().split()) for worker, entry in zip(answer[::2], answer[1::2], strict=True)
        ]
        return [Loader(worker, int(stage), int(number), *more) for worker, _, stage, number, *more in entries]
