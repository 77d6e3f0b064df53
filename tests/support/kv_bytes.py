"""Measures what keys, values and copies of factors take in memory: the bytes of all their storages that are alive, at each moment."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from base_model.decoder import DecoderConfig


class KvBytes(TorchDispatchMode):
    """`peak`: the most bytes at once of tensors made inside the block. What an operation makes on the way counts too."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self._last_two = (2 * config.num_kv_heads, config.head_dim)
        self._alive: dict[int, int] = {}  # storage -> bytes
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.ndim > 1 and self._counts(func, made) and not _is_view(made, args):
            self._add(made)
        return made

    def _counts(self, func: Any, made: Tensor) -> bool:
        """Keys and values, or lanes: only they are made as zeros of two axes."""
        if made.ndim == 2:
            return func.overloadpacket is torch.ops.aten.new_zeros
        return tuple(made.shape[-2:]) == self._last_two

    def _add(self, made: Tensor) -> None:
        storage = made.untyped_storage()
        key = storage._cdata  # pyright: ignore[reportPrivateUsage]
        if key not in self._alive:
            self._alive[key] = storage.nbytes()
            weakref.finalize(storage, self._alive.pop, key)
        self.peak = max(self.peak, sum(self._alive.values()))


def _is_view(made: Tensor, args: tuple[Any, ...]) -> bool:
    """Has one of these tensors its storage?"""
    return made.untyped_storage().data_ptr() in [a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)]
