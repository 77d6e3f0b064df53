"""Lets turns pass a gate together, and a suspect turn alone."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Comer:
    """A turn that waits before the gate."""

    alone: bool
    let_in: "asyncio.Future[None]"


@dataclass(slots=True)
class Gate:
    """Admits in order of arrival, as a fair lock for readers and writers does. Used from one event loop."""

    _waiting: deque[Comer] = field(default_factory=deque[Comer])
    _num_inside: int = 0
    _is_alone: bool = False  # the turn inside wants no company

    @contextlib.asynccontextmanager
    async def enter(self, *, alone: bool) -> AsyncGenerator[None]:
        """Waits to be let in. `alone`: nobody else is inside meanwhile."""
        comer = Comer(alone, asyncio.get_running_loop().create_future())
        self._waiting.append(comer)
        self._advance()
        try:
            await comer.let_in
        except asyncio.CancelledError:
            if comer.let_in.cancelled():
                self._waiting.remove(comer)
                self._advance()
            else:
                self._leave()
            raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._num_inside -= 1
        self._is_alone = False
        self._advance()

    def _advance(self) -> None:
        while self._waiting and not self._is_alone:
            comer = self._waiting[0]
            if comer.alone and self._num_inside:
                return
            self._waiting.popleft()
            self._num_inside += 1
            self._is_alone = comer.alone
            comer.let_in.set_result(None)
