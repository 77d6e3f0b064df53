"""Gives an operation's result as its client wants it: waits for it, then encodes it.

reads: done, results:<run>   waits for: OperationsAnswered, with one reader per replica, however many wait
after a crash: clients ask again, and look at the results first
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from common.bus.bus import Bus
from common.errors import NotFound
from common.wire.messages import Failure
from common.wire.operations import OperationResult, OperationsAnswered, Outputs, Saved
from manager_service.http.tinker.wire import protobuf
from manager_service.records.run_records import NUM_SEQS_KEPT, SAVES, RunSpec

BLOCK_MS = 1000
CREATIONS = ("create_model", "load_weights")
CREATING = (b"queued", b"creating")
"""States of a run whose creation, number 0, has no result yet."""
TYPES: Mapping[str, str] = {
    "save_weights": "save_weights",
    "save_for_sampler": "save_weights_for_sampler",
    "save_external": "save_weights_external",
}
"""The protocol's names for the result of a save."""
SERVERS_FAULT = ("infrastructure", "dead_letter", "corrupt_adapter", "cancelled")
"""Kinds of failures that are not the user's."""


OperationKey = tuple[str, int]  # run, number of the operation


class Answered:
    """Wakes those who wait for operations of one cell."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: dict[OperationKey, set[asyncio.Event]] = {}

    @contextmanager
    def of(self, run: str, seq: int) -> Generator[asyncio.Event]:
        """An event that is set when the operation's result comes. Look for the result after this call."""
        event = asyncio.Event()
        waiting = self._waiting.setdefault((run, seq), set())
        waiting.add(event)
        try:
            yield event
        finally:
            waiting.discard(event)
            if not waiting:
                self._waiting.pop((run, seq), None)

    async def run(self) -> None:
        """Reads until cancelled, beginning with what the stream still holds."""
        cursor = "0"
        while True:
            for entry, message in await self._bus.follow(self._bus.cell.done, cursor, block_ms=BLOCK_MS):
                cursor = entry
                for seq in message.seqs if isinstance(message, OperationsAnswered) else ():
                    for event in self._waiting.get((message.job, seq), ()):
                        event.set()


@dataclass(frozen=True, slots=True)
class ReadyResult:
    """A result that is there."""

    body: bytes
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class Pending:
    """No result yet."""

    status: str  # of the run; empty: it is not known
    missing: int | None = None  # number of an operation before it that has not come


class Expired(NotFound):
    """The result was there, and is kept no longer."""


Beside = Callable[[Callable[[], ReadyResult]], Awaitable[ReadyResult]]
"""Calls a function in a thread."""


async def look(bus: Bus, run: RunSpec, seq: int, beside: Beside) -> ReadyResult | Pending:
    """Looks once. Raises NotFound for an operation that nobody asked for, Expired."""
    cell = bus.cell

    async def call() -> Any:
        pipe = bus.client.pipeline(transaction=False)
        pipe.hmget(cell.seqs(run.id), str(seq), "last")
        pipe.hget(cell.results(run.id), str(seq))
        pipe.hmget(cell.run(run.id), "status", "head")
        return await pipe.execute()

    (asked, last), result, (status, head) = await bus.retrying(call)
    if asked is None:
        if head is not None and seq < int(head) and (last is None or seq <= int(last) - NUM_SEQS_KEPT):
            raise _expired(run, seq)
        raise NotFound(f"there is no request {run.id}:{seq}")
    if result is not None:
        action = asked.decode().split()[1]
        return await beside(partial(_encoded, run, action, msgspec.msgpack.decode(result, type=OperationResult)))
    if status is None or (seq < int(head) and status not in CREATING):
        raise _expired(run, seq)
    return Pending(status.decode(), await _missing(bus, run, head, seq))


def _expired(run: RunSpec, seq: int) -> Expired:
    return Expired(f"the result of {run.id}:{seq} is kept no longer: the newest are, for an hour")


async def _missing(bus: Bus, run: RunSpec, head: bytes, seq: int) -> int | None:
    """The run's first operation without a result, if nobody sent it and it is before this one."""
    if int(head) >= seq:
        return None
    there: Any = await bus.retrying(lambda: bus.client.hmget(bus.cell.seqs(run.id), head))
    return int(head) if there[0] is None else None


def _encoded(run: RunSpec, action: str, result: OperationResult) -> ReadyResult:
    """Encodes a result, in a thread: it may have a million numbers."""
    if result.failure is not None:
        return failed(result.failure)
    public_id = run.public_id
    if action in CREATIONS:
        return _plain({"model_id": public_id, "type": action})
    if action == "unload":
        return _plain({"model_id": public_id, "type": "unload_model"})
    if action in SAVES:
        saved = msgspec.msgpack.decode(result.outputs, type=Saved)
        path = {"path": f"tinker://{public_id}/{SAVES[action]}/{saved.name}"}
        name = {"sampling_session_id": saved.sampler} if saved.sampler else path
        return _plain(name | {"type": TYPES[action]})
    if action == "load":
        loaded = msgspec.msgpack.decode(result.outputs, type=Saved)
        return _plain({"path": loaded.name, "model_id": public_id, "type": "load_weights"})
    outputs = msgspec.msgpack.decode(result.outputs, type=Outputs)
    if action == "optim_step":
        return _plain({"metrics": outputs.metrics, "type": "optim_step"})
    return ReadyResult(protobuf.write_outputs(outputs), protobuf.CONTENT_TYPE)


def failed(failure: Failure) -> ReadyResult:
    category = "server" if failure.kind in SERVERS_FAULT else "user"
    return _plain({"error": failure.reason, "category": category})


def _plain(content: dict[str, Any]) -> ReadyResult:
    return ReadyResult(msgspec.json.encode(content))
