"""Reads the histories that entries refer to, except those that this process published."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from common.bus.deliveries import Delivery, Settlement
from common.bus.streams import Cell
from common.wire.codec import AnyMessage, decode
from common.wire.history import History, restored, without_history
from common.wire.messages import Message, TurnRequest, TurnResult

MAX_KNOWN_HISTORIES = 4096
HistoryItems = Mapping[History, tuple[list[Message], list[bytes]]]
"""For each history: the message made of its first items, if this process knows it, and the other items."""


class KnownHistory(NamedTuple):
    """The message that a history's first payloads make. `entry`: the one from which the last of them comes."""

    num: int
    entry: str
    message: Message


class Histories:
    """Histories of one cell, as one process knows them."""

    def __init__(self, pipelined: Callable[[Iterable[Sequence[Any]]], Awaitable[list[Any]]], cell: Cell) -> None:
        """`pipelined`: gives Redis' answers to some commands, in one round trip."""
        self._pipelined = pipelined
        self._cell = cell
        self._known: OrderedDict[str, KnownHistory] = OrderedDict()

    def of(self, fields: Mapping[bytes, bytes]) -> History | None:
        """The history that an entry refers to."""
        if (refers := fields.get(b"history")) is None:
            return None
        num, name, *entry = refers.decode().split(" ")
        return History(self._cell.history(name), int(num), entry[0] if entry else name.rpartition(":")[2])

    async def read(self, entries: Sequence[Mapping[bytes, bytes]]) -> HistoryItems:
        """The histories that these entries refer to, in one round trip, or none if this process published all of them.

        A Redis that lost its last moment may differ from what this process knows: then a second trip reads the items.
        """
        wanted = {history: self._begun(history) for fields in entries if (history := self.of(fields))}
        result: dict[History, tuple[list[Message], list[bytes]]] = {}
        for history, known in wanted.items():
            if known and known.num == history.num:
                result[history] = [known.message], []
        unknown = {history: known for history, known in wanted.items() if history not in result}
        if not unknown:
            return result
        answers = await self._pipelined(
            ("LRANGE", history.key, 2 * known.num - 1 if known else 0, 2 * history.num - 1)
            for history, known in unknown.items()
        )
        for (history, known), found in zip(unknown.items(), answers, strict=True):
            if known and found[:1] != [known.entry.encode()]:
                self._known.pop(history.key, None)
                return await self.read(entries)
            result[history] = ([known.message], found[1::2]) if known else ([], found[::2])
        return result

    def is_gone(self, fields: Mapping[bytes, bytes], items: HistoryItems) -> bool:
        """Does an entry refer to a history that was no more when it was read? It goes with its entry."""
        history = self.of(fields)
        return history is not None and not any(items[history])

    def whole(self, message: AnyMessage, history: History | None, items: HistoryItems) -> AnyMessage:
        """The message of an entry. Raises ValueError, and what `decode` raises, if its history does not lead to it."""
        if history is None:
            return cast(AnyMessage, without_history(message))
        known, rest = items[history]
        return cast(AnyMessage, restored([*known, *map(decode, rest)], message))

    def extended(self, delivery: Delivery) -> History:
        """The history that what follows on a delivery refers to: its last item is the delivery's payload."""
        begun = delivery.history
        key = begun.key if begun else self._cell.begun_history(delivery.stream, delivery.entry)
        return History(key, begun.num + 1 if begun else 1, delivery.entry)

    def field(self, history: History) -> list[Any]:
        """The field of an entry that names the history on which it builds."""
        name, newest = self._name_of(history), "" if history.num == 1 else f" {history.entry}"
        return ["history", f"{history.num} {name}{newest}"]

    def published(self, settlement: Settlement, entries: Sequence[bytes | None]) -> None:
        """Remembers turns that became these entries: what follows on one refers to it."""
        for (stream, message), entry in zip(settlement.outputs or (), entries, strict=True):
            # What begins a history has its name from the stream in which it is, which may be the one in the other's place.
            is_named = settlement.refers_to or self._cell.instead_of(stream) == stream
            if entry and is_named and isinstance(message, TurnRequest | TurnResult):
                self._know(stream, entry.decode(), settlement.refers_to, message)

    def _know(self, stream: str, entry: str, before: History | None, message: Message) -> None:
        key, num = (before.key, before.num) if before else (self._cell.begun_history(stream, entry), 0)
        self._known[key] = KnownHistory(num + 1, entry, message)
        while len(self._known) > MAX_KNOWN_HISTORIES:
            self._known.popitem(last=False)

    def fate(self, settlement: Settlement) -> tuple[str, str]:
        """The name of the input's history, and what becomes of it, as the script takes them."""
        history = settlement.delivery.history
        if settlement.refers_to is not None:
            return self._name_of(settlement.refers_to), "on"
        if history is None or settlement.outputs is None:
            return "", ""
        self._known.pop(history.key, None)
        return self._name_of(history), "ends"

    def _name_of(self, history: History) -> str:
        """It ends with its first entry."""
        return history.key.removeprefix(self._cell.history(""))

    def _begun(self, history: History) -> KnownHistory | None:
        """Its known beginning; None if Redis went back in time, and has another entry in its place."""
        known = self._known.get(history.key)
        if known is None or known.num > history.num or (known.num == history.num and known.entry != history.entry):
            return None
        return known
