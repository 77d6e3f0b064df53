"""Remembers what was cancelled, as far as a worker has heard."""

from collections import OrderedDict
from dataclasses import dataclass, field

from common.wire.messages import Cancel, Message

MAX_VOIDED = 100_000


@dataclass(slots=True)
class Voided:
    """Remembers, for each job, the newest epoch that this worker heard to be void."""

    _epochs: "OrderedDict[str, tuple[int, bool]]" = field(default_factory=OrderedDict)

    def add(self, cancel: Cancel) -> None:
        known = self._epochs.get(cancel.job, (-1, False))
        if cancel.epoch >= known[0]:
            self._epochs[cancel.job] = (cancel.epoch, cancel.park)
            self._epochs.move_to_end(cancel.job)
        while len(self._epochs) > MAX_VOIDED:
            self._epochs.popitem(last=False)

    def verdict(self, message: Message) -> str | None:
        """Returns `park` or `drop` for a void message; None for a valid one."""
        epoch, park = self._epochs.get(message.job, (-1, False))
        if message.epoch > epoch:
            return None
        return "park" if park else "drop"
