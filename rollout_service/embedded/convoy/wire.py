"""What the head of a convoy and a stage say to each other: a Step there, a Computed back; msgpack, with tensors as raw bytes.

A message is its size in bytes, 8 of them, then its bytes. The stage says PART before it, and BEAT now and then while it computes, as
holders of files do: so the head hears that a stage is gone from that it takes long. Axes: N rows of a forward, E hidden.
"""

from typing import Any

import msgspec
import torch
from torch import Tensor

from rollout_service.embedded.pools import PoolChange

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}
SIZE_BYTES = 8
MAX_BYTES = 1 << 31


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """A tensor."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes  # little-endian, row by row

    @classmethod
    def of(cls, tensor: Tensor) -> "Packed":
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)

    def on(self, device: torch.device) -> Tensor:
        """Raises ValueError or RuntimeError if it is none."""
        if self.dtype not in DTYPES:
            raise ValueError(f"no tensor is of {self.dtype!r}")
        dtype = DTYPES[self.dtype]
        flat = torch.frombuffer(bytearray(self.data), dtype=dtype) if self.data else torch.zeros(0, dtype=dtype)
        return flat.view(self.shape).to(device)


class SentAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter's factors by fused product, of the stage's layers."""

    rank: int
    a: list[Packed]
    b: list[list[Packed]]


class SentProduct(msgspec.Struct, frozen=True, array_like=True):
    """See `base_model.stacked.Product`."""

    owners: list[int]  # numbers of adapters that came with this Step or an earlier one
    gather: Packed | None
    rows: Packed | None
    places: Packed | None


class SentAttend(msgspec.Struct, frozen=True, array_like=True):
    """The attention of a forward: of whole prompts, or of one new token a row."""

    rows: list[tuple[int, list[int]]]  # length of a pool, slots in it: of each prompt, or of each pool
    nums: list[int]  # tokens of each prompt, or of each pool's longest row
    width: int  # positions of a prompt; 0: one new token a row


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One forward of a stage. What the stage keeps changes first."""

    changes: list[PoolChange]
    forgets: bool  # all adapters of earlier ones
    adapters: dict[int, SentAdapter]
    x: Packed  # [N, E] hidden states before the stage's layers
    positions: Packed  # [N]
    attend: SentAttend
    products: list[SentProduct]


class Computed(msgspec.Struct, frozen=True, array_like=True):
    """The answer."""

    x: Packed | None = None  # [N, E] behind the stage's layers
    error: str = ""  # why there is none; the stage goes on


def framed(message: Step | Computed) -> bytes:
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(SIZE_BYTES, "little") + content


def size_of(head: bytes) -> int:
    """The size that comes before a message. Raises ValueError."""
    size = int.from_bytes(head, "little")
    if size > MAX_BYTES:
        raise ValueError(f"a message of {size:,} bytes")
    return size


def packed_or_none(tensor: Tensor | None) -> Packed | None:
    return None if tensor is None else Packed.of(tensor)


def decode(content: bytes, kind: Any) -> Any:
    """Raises ValueError."""
    return msgspec.msgpack.decode(content, type=kind)
