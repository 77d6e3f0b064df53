"""Operations of a run whose entries stay pending, and what becomes of them."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from common.wire.operations import LoadWeights, Operation, RunOperation


class PendingOperation(NamedTuple):
    """An operation, with the entry that stays pending for it."""

    entry: str
    operation: Operation


def load_of(operation: Operation) -> LoadWeights:
    return msgspec.msgpack.decode(operation.payload, type=LoadWeights)


def is_for_trainer(operation: Operation) -> bool:
    """Does a trainer carry it out, in a segment with others?"""
    return operation.failure is None and operation.action in ("forward", "forward_backward", "optim_step")


def for_trainer(operation: Operation, head: int) -> RunOperation:
    assert operation.action in ("forward", "forward_backward", "optim_step")
    answered = operation.seq < head
    return RunOperation(operation.seq, operation.action, operation.payload, answered, operation.tokens)


def num_tokens(operations: Iterable[Operation]) -> int:
    """Positions of a message to a trainer, at least 1."""
    return max(1, sum(operation.tokens for operation in operations))
