"""Closes connections whose clients send no request, give no key, send too much of what is slow to read, or do not read their answers;
works for nobody who has left.

They are closed after a while; of too many, the oldest at once. An answer to a request without a key ends its connection (`KeyFirst`).
"""

import asyncio
import socket
import struct
from collections import defaultdict
from collections.abc import Awaitable
from typing import Any, ClassVar, TypeVar, cast

import h11
from fastapi import Request
from h11._receivebuffer import ReceiveBuffer
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

T = TypeVar("T")


GONE = 499
"""The status of an answer that nobody reads, as nginx has it."""


class ClientGone(HTTPException):
    """The client disconnected. FastAPI passes it on from wherever a body is read: another error would be one of ours."""

    def __init__(self) -> None:
        super().__init__(GONE)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The work's result. When the client disconnects, cancels it and raises ClientGone. Read the body before."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


HEAD_S = 10.0
"""Seconds from a connection's beginning, or from its last answer, to the next request with all its headers."""
KEYLESS_S = 30.0
"""Seconds that a connection lives without a request with a valid key."""
MAX_KEYLESS = 4096
"""Connections without a valid key so far. A busy manager has as many whose first request it has not read."""
MAX_IDLE = 1024
"""Connections of one tenant that wait for the next request."""
UNREAD_S = 30.0
"""Seconds in which a client must read what waits for it in the buffer: 64 KiB or a little more (see `OpenRequests`)."""
KERNEL_BYTES = 128 << 10
"""Bytes of an answer that the kernel keeps (Linux doubles it). By itself it keeps megabytes, which hides a slow client's reading."""
AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER's value by which the kernel drops what it still was to send."""
MAX_HEAD_LINES, MAX_HEAD_BYTES = 128, 64 << 10
"""The most that come before a body. h11 bounds only the bytes of what has not come whole."""
FEW_CHUNKS, CHUNK_BYTES = 1000, 64
"""A body's chunks beyond a few have at least so many bytes on average: each is read by itself, while everybody else waits."""


class Incoming(ReceiveBuffer):
    """Bytes that a client has sent and h11 has not read. This is no public API either."""

    def __init__(self) -> None:
        super().__init__()
        self._num_chunks = self._num_bytes = 0
        self.fault = ""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """The lines of a head, or those behind a body. Raises RemoteProtocolError."""
        lines = super().maybe_extract_lines()
        self._num_chunks = self._num_bytes = 0
        if lines and (len(lines) > MAX_HEAD_LINES or sum(map(len, lines)) > MAX_HEAD_BYTES):
            self._refuse(f"send at most {MAX_HEAD_LINES} lines and {MAX_HEAD_BYTES} bytes before the body")
        return lines

    def maybe_extract_next_line(self) -> bytearray | None:
        """The line before a chunk. Raises RemoteProtocolError."""
        line = super().maybe_extract_next_line()
        self._num_chunks += line is not None
        if (self._num_chunks - FEW_CHUNKS) * CHUNK_BYTES > self._num_bytes:
            self._refuse(f"send the body in larger chunks: {CHUNK_BYTES} bytes or more")
        return line

    def maybe_extract_at_most(self, count: int) -> bytearray | None:
        data = super().maybe_extract_at_most(count)
        self._num_bytes += len(data or b"")
        return data

    def _refuse(self, fault: str) -> None:
        self.fault = fault
        raise h11.RemoteProtocolError(fault)


class Connection(H11Protocol):
    """One connection. uvicorn itself waits without a limit for a first request, and for a client to read.

    Its class and fields are no public API, so pyproject.toml bounds its version: read `h11_impl.py` before you raise it.
    """

    _keyless: ClassVar[dict["Connection", None]] = {}
    """This process' connections without a key yet, and some that have one by now: the oldest first."""
    _idle: ClassVar[defaultdict[str, dict["Connection", None]]] = defaultdict(dict)
    """This process' connections with a key that wait for a request: by tenant, the longest waiting first."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._incoming = cast("Any", self.conn)._receive_buffer = Incoming()
        self._tenant = ""  # whose key it has shown
        self._has_shown_key = False
        self._request_due: asyncio.TimerHandle | None = None
        self._key_due: asyncio.TimerHandle | None = None
        self._reading_due: asyncio.TimerHandle | None = None
        self.app = cast("Any", self._answer)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Does nothing for a client that has closed right behind its request: once the event loop has turned, that is known."""
        await asyncio.sleep(0)
        if self.transport.is_closing():
            await _disconnected(receive)
        else:
            await cast("Any", self.config.loaded_app)(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
        self._expect_request()
        self._key_due = self.loop.call_later(KEYLESS_S, self._close_if_keyless)
        self._keyless[self] = None
        while len(self._keyless) > MAX_KEYLESS:
            oldest = next(iter(self._keyless))
            del self._keyless[oldest]
            if oldest.is_keyless():
                oldest._reset()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(self._incoming.fault or msg)
        else:  # its answer has begun
            self.transport.abort()

    def on_response_complete(self) -> None:
        newest = self._newest()
        if newest is not None and (key := _scope(newest).get("key")):
            self._tenant, self._has_shown_key = key.tenant, True
            self._keyless.pop(self, None)
        super().on_response_complete()
        self._expect_request()
        self._wait_idly()

    def handle_events(self) -> None:
        super().handle_events()
        if not self._waits():
            self._idle[self._tenant].pop(self, None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._reading_due)
        self._reading_due = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._idle[self._tenant].pop(self, None)
        self._keyless.pop(self, None)
        for timer in (self._request_due, self._key_due, self._reading_due):
            _cancel(timer)

    def is_keyless(self) -> bool:
        """True before its first request with a valid key, and while it reads no file by a signed url."""
        newest = self._newest()
        shows = newest is not None and (_scope(newest).get("key") or _scope(newest).get("is_signed"))
        return not (self._has_shown_key or shows)

    def _expect_request(self) -> None:
        _cancel(self._request_due)
        self._request_due = self.loop.call_later(HEAD_S, self._close_unless_busy)

    def _expect_reading(self) -> None:
        if self._reading_due is None:
            self._reading_due = self.loop.call_later(UNREAD_S, self._close_unless_read)

    def _wait_idly(self) -> None:
        idle = self._idle[self._tenant]
        if self._has_shown_key and self._waits():
            idle[self] = None
        if len(idle) > MAX_IDLE:
            longest = next(iter(idle))
            del idle[longest]
            longest.transport.close()

    def _waits(self) -> bool:
        """True if every request so far is answered."""
        newest = self._newest()
        return newest is None or newest.response_complete

    def _close_unless_busy(self) -> None:
        if not self._waits():
            return
        if self.transport.get_write_buffer_size() == 0:
            self.transport.abort()
            return
        self._expect_reading()
        self._expect_request()

    def _close_if_keyless(self) -> None:
        if self.is_keyless():
            self._reset()

    def _close_unless_read(self) -> None:
        """Ends the connection if bytes still wait: `resume_writing` stops the timer once most are read."""
        self._reading_due = None
        if self.transport.get_write_buffer_size():
            self._reset()

    def _reset(self) -> None:
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        self.transport.abort()

    def _newest(self) -> RequestResponseCycle | None:
        """The newest request; None before the first, which uvicorn's types deny."""
        return self.cycle


def _scope(cycle: RequestResponseCycle) -> dict[str, Any]:
    return cast("dict[str, Any]", cycle.scope)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
