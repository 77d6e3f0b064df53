"""Connections that send no request: they are closed after a while, the oldest of too many at once."""

import asyncio
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEAD_S = 10.0
"""Seconds from a connection's beginning, or from its last answer, to the next request with all its headers."""
MAX_SILENT = 512
"""Connections that have not sent their first request yet."""


class Connection(H11Protocol):
    """One connection. uvicorn itself waits for a first request for ever."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._since_s = time.monotonic()
        self._due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._expect_request()
        silent = [one for one in self.connections if isinstance(one, Connection) and one.is_silent()]
        if len(silent) > MAX_SILENT:
            min(silent, key=Connection.since).transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._expect_nothing()

    def is_silent(self) -> bool:
        """True before its first request."""
        return self._newest() is None and not self.transport.is_closing()

    def since(self) -> float:
        """When it began, in monotonic seconds."""
        return self._since_s

    def _expect_request(self) -> None:
        self._expect_nothing()
        self._due = self.loop.call_later(HEAD_S, self._close_unless_busy)

    def _expect_nothing(self) -> None:
        if self._due is not None:
            self._due.cancel()

    def _close_unless_busy(self) -> None:
        newest = self._newest()
        if newest is None or newest.response_complete:
            self.transport.abort()

    def _newest(self) -> RequestResponseCycle | None:
        """The newest request; None before the first, which uvicorn's types deny."""
        return self.cycle
