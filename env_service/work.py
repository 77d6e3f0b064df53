"""The piece of work at hand: how long it kept this worker busy, and a beat that says that it advances.

Tools and graders are called from foreign code with fixed signatures, so this travels in a context variable; tasks
that are started for one piece of work share its object.
"""

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from common.cancellation import beating
from common.sharing.places import Places, SharedThreads

T = TypeVar("T")

BEAT_EVERY_S = 1.0


class Work:
    """One message being handled."""

    def __init__(self, beat: Callable[[], None], tenant: str, weight: float = 1.0) -> None:
        self.tenant = tenant
        self.weight = weight
        """The tenant's, where places are shared."""
        self.beat = beat
        """Says that the work advanced, so that no other worker takes it over."""
        self.answers: dict[str, str] = {}
        """Answers of graders' models, by the grader's name in a `multi`; "" for a single one."""
        self.verdicts: list[dict[str, str]] = []
        """The same with what was asked, those of models outside of this service too."""
        self.grader_tokens = 0
        """Tokens of models outside of this service."""
        self.busy_s = 0.0
        """Seconds of the event loop, and of helpers charged by `charge`; waiting is not counted."""


_current: ContextVar[Work | None] = ContextVar("work", default=None)


def begin(beat: Callable[[], None], tenant: str, weight: float = 1.0) -> Work:
    """Makes a new Work the current one of this task."""
    work = Work(beat, tenant, weight)
    _current.set(work)
    return work


def current() -> Work:
    """The work of this task. Outside of any, one that nobody waits for."""
    return _current.get() or Work(lambda: None, tenant="")


def beat() -> None:
    current().beat()


def place(places: Places) -> AbstractAsyncContextManager[None]:
    """Waits for a place in the name of the current work's tenant, and holds it while the block runs."""
    work = current()
    return places.one(work.tenant, work.weight, work.beat)


def charge(seconds: float) -> None:
    """Counts the time that a thread or a process spent on the current work."""
    current().busy_s += seconds


@contextlib.contextmanager
def charged() -> Generator[None]:
    """Charges the current work for the time that the block takes."""
    started = time.monotonic()
    try:
        yield
    finally:
        charge(time.monotonic() - started)


class Threads:
    """Threads that tenants' works share."""

    def __init__(self, num: int = os.cpu_count() or 1) -> None:
        """`num`: calls at once."""
        self._threads = SharedThreads(num)

    async def run(self, function: Callable[[], T]) -> T:
        """Calls the function at its tenant's turn. The current work is charged for the thread's time, and beats until the end."""
        work = current()

        def charged() -> T:
            started = time.thread_time()  # without the time in which other threads ran
            try:
                return function()
            finally:
                work.busy_s += time.thread_time() - started

        return await beating(beat, self._threads.run(charged, work.tenant, work.weight, work.beat))


@contextlib.asynccontextmanager
async def time_limit(seconds: float) -> AsyncGenerator[None, None]:
    """A wall-clock limit, within which the work counts as advancing. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    timer: asyncio.TimerHandle | None = None

    def tick() -> None:
        nonlocal timer
        beat()
        if loop.time() + BEAT_EVERY_S < end:
            timer = loop.call_later(BEAT_EVERY_S, tick)

    tick()
    try:
        async with asyncio.timeout(seconds):
            yield
    finally:
        if timer:
            timer.cancel()


class Allowance:
    """The seconds that a piece of work may take in all; waiting for a place is not counted."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.left_s = seconds

    def spend(self, seconds: float) -> None:
        self.left_s = max(0.0, self.left_s - seconds)

    @contextlib.contextmanager
    def spending(self) -> Generator[None]:
        """Takes away the time that the block takes."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.spend(time.monotonic() - started)


class Metered(Generic[T]):
    """Awaits a coroutine and charges the current work for the time it ran, not for its waiting."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._send: Callable[[], Any] = functools.partial(coroutine.send, None)
        self._coroutine = coroutine
        self._waits_for: Any = None

    def ends_at_once(self) -> bool:
        """Runs the coroutine to its first wait, once, before it is awaited. True: it has ended with `value`."""
        started = time.monotonic()
        try:
            self._waits_for = self._send()
        except StopIteration as stop:
            self.value: T = stop.value
            return True
        finally:
            charge(time.monotonic() - started)
        return False

    def __await__(self) -> Generator[Any, Any, T]:
        """Goes on after `ends_at_once`."""
        while True:
            try:
                value = yield self._waits_for
                self._send = functools.partial(self._coroutine.send, value)
            except BaseException as error:
                self._send = functools.partial(self._coroutine.throw, error)
            if self.ends_at_once():
                return self.value
