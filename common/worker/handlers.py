"""Declares what a service is to the loop of its worker: a handler, a message in and messages out.

A service implements `Handler`, and those of the other protocols that it needs.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from common.bus.bus import Out
from common.wire.messages import Cancel, Failure

Beat = Callable[[], None]


class Handler(Protocol):
    """Does all that is particular to a service; knows no bus and no retry. Methods may run concurrently."""

    async def __call__(self, message: Any, beat: Beat) -> list[Out]:
        """Does the work. Calls `beat` whenever it advanced: only advancing work is renewed."""
        ...

    def hand_back(self, message: Any) -> list[Out] | None:
        """Returns what another worker continues with, progress included; None: the message's entry, as it is."""
        ...

    def failed(self, message: Any, failure: Failure) -> list[Out]:
        """Returns what tells the owner that nobody will work on this message."""
        ...


@runtime_checkable
class Parks(Protocol):
    """Two more methods, of a handler whose work is void once its job is paused or ended. Else all work is done."""

    def park(self, message: Any) -> list[Out]:
        """Returns what is published for a message whose job was paused."""
        ...

    def drop(self, message: Any) -> list[Out]:
        """Returns what is published for a message whose job has ended: what it cost so far."""
        ...


@runtime_checkable
class Resumes(Protocol):
    """Two more methods, of a handler whose half-done work another worker can continue, if this one dies."""

    def progress(self, message: Any) -> tuple[bytes, bytes] | None:
        """Returns the progress so far: a head of fixed size, and a body that only grows. None: not worth keeping."""
        ...

    def resumed(self, message: Any, progress: bytes) -> Any:
        """Returns the message with what was done of it. `progress`: head and body."""
        ...


@runtime_checkable
class Retries(Protocol):
    """One more method, of a handler that treats a message differently if another worker may have died at it."""

    def delivered_again(self, message: Any, times: int) -> None:
        """Comes before the call. `times`: that the message was delivered before."""
        ...


@runtime_checkable
class Holds(Protocol):
    """Two more methods, of a handler that holds something for the messages to come."""

    def voided(self, cancel: Cancel) -> None:
        """Lets go what it holds for the job's messages up to the epoch."""
        ...

    def unpublished(self, outputs: Sequence[Out]) -> None:
        """Lets go what it holds for what would follow from these outputs: another worker was first."""
        ...
