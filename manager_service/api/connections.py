"""Connections of those who send no request, give no key or read no answer: they are closed after a while, the oldest of too many at
once. An answer to a request without a key ends its connection (`key_first.py`), so that what follows it is never worked on."""

import asyncio
import socket
import struct
import time
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEAD_S = 10.0
"""Seconds from a connection's beginning, or from its last answer, to the next request with all its headers."""
KEYLESS_S = 30.0
"""Seconds that a connection lives without a request with a valid key."""
MAX_KEYLESS = 512
"""Connections that have not sent a request with a valid key yet."""
UNREAD_S = 30.0
"""Seconds in which a client reads nothing of what waits for it."""
AT_ONCE = struct.pack("ii", 1, 0)
"""The option by which the kernel forgets what it still was to send, instead of keeping it for a client that does not read."""


class Connection(H11Protocol):
    """One connection. uvicorn itself waits for a first request for ever, and for a client to read."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._since_s = time.monotonic()
        self._has_shown_key = False
        self._request_due: asyncio.TimerHandle | None = None
        self._key_due: asyncio.TimerHandle | None = None
        self._reading_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._expect_request()
        self._key_due = self.loop.call_later(KEYLESS_S, self._close_if_keyless)
        keyless = [one for one in self.connections if isinstance(one, Connection) and one.is_keyless()]
        if len(keyless) > MAX_KEYLESS:
            min(keyless, key=Connection.since)._reset()

    def on_response_complete(self) -> None:
        self._has_shown_key = not self.is_keyless()
        super().on_response_complete()
        self._expect_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._reading_due)
        self._reading_due = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._request_due, self._key_due, self._reading_due):
            _cancel(timer)

    def is_keyless(self) -> bool:
        """True before its first request with a valid key."""
        newest = self._newest()
        return not self._has_shown_key and (newest is None or not cast("dict[str, Any]", newest.scope).get("key"))

    def since(self) -> float:
        """When it began, in monotonic seconds."""
        return self._since_s

    def _expect_request(self) -> None:
        _cancel(self._request_due)
        self._request_due = self.loop.call_later(HEAD_S, self._close_unless_busy)

    def _expect_reading(self) -> None:
        if self._reading_due is None:
            left = self.transport.get_write_buffer_size()
            self._reading_due = self.loop.call_later(UNREAD_S, self._close_unless_it_reads, left)

    def _close_unless_busy(self) -> None:
        newest = self._newest()
        if newest is not None and not newest.response_complete:
            return
        if self.transport.get_write_buffer_size() == 0:
            self.transport.abort()
            return
        self._expect_reading()
        self._expect_request()

    def _close_if_keyless(self) -> None:
        if self.is_keyless():
            self._reset()

    def _close_unless_it_reads(self, before: int) -> None:
        """`before`: bytes that waited for it UNREAD_S ago; none came to them since."""
        self._reading_due = None
        left = self.transport.get_write_buffer_size()
        if left >= before:
            self._reset()
        elif left:
            self._expect_reading()

    def _reset(self) -> None:
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        self.transport.abort()
        self.connections.discard(self)  # the next one closed is another

    def _newest(self) -> RequestResponseCycle | None:
        """The newest request; None before the first, which uvicorn's types deny."""
        return self.cycle


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
