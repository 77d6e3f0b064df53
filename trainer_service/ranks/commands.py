"""Commands from the first rank of a trainer to the others, as bytes.

All ranks get a command, and each takes its part. Tensors (an adapter's values, log-probs, gradients) follow in collective
operations of the group.
"""

import msgspec
import numpy as np

from trainer_service.backbone.interface import Sequences


class NewStack(msgspec.Struct, frozen=True, tag=True):
    """Makes a stack of adapters of one layout; those that are empty go."""

    stack: int
    rank: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # of each name's A and B


class Put(msgspec.Struct, frozen=True, tag=True):
    """Puts an adapter into a stack; its values follow."""

    stack: int
    place: int
    scale: float


class Remove(msgspec.Struct, frozen=True, tag=True):
    """Makes an adapter's place free."""

    stack: int
    place: int


class AddUp(msgspec.Struct, frozen=True, tag=True):
    """Adds the ranks' gradients of an adapter up; the sum is the first rank's."""

    stack: int
    place: int


class RankForward(msgspec.Struct, frozen=True, tag=True):
    """Computes log-probs; each rank those of its share, sent to the first if memory sufficed on all."""

    sequences: Sequences
    adapters: tuple[tuple[int, int], ...] | None  # each sequence's stack and place; None: the bare base model
    learns: bool  # a backward follows
    num_checkpointed: int  # layers


class Backward(msgspec.Struct, frozen=True, tag=True):
    """Runs the backward of the last forward that learns; the gradients of its log-probs follow."""


class FindFree(msgspec.Struct, frozen=True, tag=True):
    """Finds the least free memory of all ranks' devices."""


RankCommand = NewStack | Put | Remove | AddUp | RankForward | Backward | FindFree


def _plain(array: np.ndarray) -> tuple[str, bytes]:
    return array.dtype.str, array.tobytes()


def _array(_: type, known: tuple[str, bytes]) -> np.ndarray:
    dtype, data = known
    return np.frombuffer(bytearray(data), dtype)


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
decode = msgspec.msgpack.Decoder(RankCommand, dec_hook=_array).decode
