"""Gives loaders of one base model its stages, and finds which of them serve together before any has the whole.

    enter ─► a place ─► its stage's weights come ─► ready ─► all of a convoy are: they serve ─► one is whole: they end

A loader holds the first free place, `convoy:<place>`, and renews it; Redis ends it HOLD_S later. Places beside each other, one for each
stage, are a convoy, led by the first. All read the same, so none has to decide for others.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import NamedTuple

from common.bus.bus import Bus
from common.cancellation import running
from common.models.stages import Stage

HOLD_S = 5.0
TELL_S = 0.25
LOADING, READY, WHOLE = "loading", "ready", "whole"


class Loader(NamedTuple):
    """A worker that loads a base model, or just did."""

    worker: str
    state: str
    address: str


class Convoy:
    """One loader's place in one."""

    def __init__(self, bus: Bus, worker: str, address: str, num_stages: int) -> None:
        self.num_stages = num_stages
        self.place = -1
        """Counted through all convoys; negative: it has none, for it loads nothing yet, or had all."""
        self.state = LOADING
        self.began, self.over = asyncio.Event(), asyncio.Event()
        """Are its stage's weights here? Has it handed back what it had as a part of a convoy?"""
        self.folder, self.stages = Path(), list[Stage]()
        """With its stage's weights; all stages. They count once it began."""
        self.reading = asyncio.Lock()
        """Whoever reads the folder, or renames it, holds it."""
        self.loaders = list[Loader]()
        """The loaders of its convoy, by stage, as of TELL_S ago; empty unless all are there."""
        self._bus, self._worker, self._address = bus, worker, address

    @property
    def number(self) -> int:
        """The number of its stage."""
        return self.place % self.num_stages

    @property
    def whole(self) -> str:
        """A worker of it that has the whole base model; empty: none."""
        return next((each.worker for each in self.loaders if each.state == WHOLE), "")

    @property
    def is_formed(self) -> bool:
        return bool(self.loaders) and all(each.state == READY for each in self.loaders)

    async def enter(self) -> int:
        """Takes the first free place; returns the number of its stage."""
        place = max(self.place, 0)
        while place != self.place and not (await self._bus.pipelined([(*self._told(place), "NX")]))[0]:
            place += 1
        self.place = place
        return self.number

    @contextlib.asynccontextmanager
    async def taken_part(self) -> AsyncGenerator[None]:
        """Inside, it tells how far it is, and hears of the others."""
        try:
            async with running(self._keep()):
                yield
            if self.place >= 0:
                await self._bus.pipelined([("DEL", self._bus.cell.convoy(str(self.place)))])
        finally:
            self.over.set()

    async def _keep(self) -> None:
        while True:
            if self.place >= 0:
                first = self.place - self.number
                keys = [self._bus.cell.convoy(str(place)) for place in range(first, first + self.num_stages)]
                _, told = await self._bus.pipelined([self._told(self.place), ("MGET", *keys)])
                self.loaders = [Loader(*each.decode().split()) for each in told] if all(told) else []
            await asyncio.sleep(TELL_S)

    def _told(self, place: int) -> tuple[str | int, ...]:
        entry = f"{self._worker} {self.state} {self._address}"
        return "SET", self._bus.cell.convoy(str(place)), entry, "PX", round(1000 * HOLD_S)
