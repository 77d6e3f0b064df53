"""Messages between the head of a convoy and a stage: a StageStep there, a StageAnswer back; msgpack, with tensors as raw bytes.

A message is its size, 8 bytes, then its bytes. The stage says PART before it, and BEAT now and then while it computes, as holders of
files do: so the head hears that a stage is gone from that it takes long. Axes: N rows of a forward, E hidden.
"""

from functools import partial
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from rollout_service.embedded.pools import PoolChange

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}
SIZE_BYTES = 8
MAX_BYTES = 1 << 31
M = TypeVar("M", bound=msgspec.Struct)


class SentAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter's factors by fused product, of the stage's layers."""

    rank: int
    a: list[Tensor]
    b: list[list[Tensor]]


class SentProduct(msgspec.Struct, frozen=True, array_like=True):
    """See `base_model.stacked.Product`."""

    owners: list[int]  # numbers of adapters that came with this step or an earlier one
    gather: Tensor | None
    rows: Tensor | None
    places: Tensor | None


class SentAttend(msgspec.Struct, frozen=True, array_like=True):
    """The attention of a forward: of whole prompts, or of one new token a row."""

    rows: list[tuple[int, list[int]]]  # length of a pool, slots in it: of each prompt, or of each pool
    nums: list[int]  # tokens of each prompt, or of each pool's longest row
    width: int  # positions of a prompt; 0: one new token a row


class StageStep(msgspec.Struct, frozen=True, array_like=True):
    """One forward of a stage. What the stage keeps changes first."""

    changes: list[PoolChange]
    forgets: bool  # all adapters of earlier ones
    adapters: dict[int, SentAdapter]
    x: Tensor  # [N, E] hidden states before the stage's layers
    positions: Tensor  # [N]
    attend: SentAttend
    products: list[SentProduct]


class StageAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer."""

    x: Tensor | None = None  # [N, E] behind the stage's layers
    error: str = ""  # why there is none; the stage goes on


def framed(message: msgspec.Struct) -> bytes:
    content = msgspec.msgpack.encode(message, enc_hook=_packed)
    return len(content).to_bytes(SIZE_BYTES, "little") + content


def size_of(head: bytes) -> int:
    """The size that comes before a message. Raises ValueError."""
    if (size := int.from_bytes(head, "little")) > MAX_BYTES:
        raise ValueError(f"a message of {size:,} bytes")
    return size


def decoded(content: bytes, kind: type[M], device: torch.device) -> M:
    """Raises ValueError, or RuntimeError for what is no tensor."""
    return msgspec.msgpack.decode(content, type=kind, dec_hook=partial(_unpacked, device))


def _packed(tensor: Any) -> tuple[str, list[int], bytes]:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data


def _unpacked(device: torch.device, _: type, sent: Any) -> Tensor:
    dtype, shape, data = sent
    if dtype not in DTYPES:
        raise ValueError(f"no tensor is of {dtype!r}")
    flat = torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]) if data else torch.zeros(0, dtype=DTYPES[dtype])
    return flat.view(shape).to(device)
