"""Server-sent events, and the errors that end them."""

from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse

from manager_service.http.errors import error_body, json_bytes, translated

DONE = "data: [DONE]\n\n"


def event_stream(events: AsyncIterator[str], headers: dict[str, str] | None = None) -> StreamingResponse:
    """Sends the events. An error on the way becomes an event, since the status has been sent."""
    no_buffer = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}
    return StreamingResponse(_with_errors(events), media_type="text/event-stream", headers=no_buffer)


async def _with_errors(events: AsyncIterator[str]) -> AsyncIterator[str]:
    try:
        async for event in events:
            yield event
    except Exception as error:  # the boundary: whatever it is, the client must hear of it
        ours = translated(error)
        yield data(error_body(ours.status_code, ours.detail, param=ours.param, code=ours.code))


def data(content: Any) -> str:
    return f"data: {json_bytes(content).decode()}\n\n"
