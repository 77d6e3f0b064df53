"""Computes flash attention's operators a run at a time, on a machine without CUDA, where a test asks for it."""

import sys
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import_module("trainer_service.backbone.device_kernels.varlen")  # it defines the operators

ATTENDS: list[Any] = []
"""The stand-in for the kernel; empty: it does not run here."""


def by_runs(q: Tensor, k: Tensor, v: Tensor, keys_m: Tensor, *about: Any) -> Tensor:
    query_cuts, key_cuts, _, _, most, window, scale = about
    most_queries, most_keys, others = most.tolist()
    if others:
        k, v = k.index_select(0, keys_m), v.index_select(0, keys_m)
    found: list[Tensor] = []
    for own, keys in zip(_runs(query_cuts), _runs(key_cuts), strict=True):
        num_queries, num_keys = own.stop - own.start, keys.stop - keys.start
        assert num_queries <= most_queries and num_keys <= most_keys
        ahead = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
        seen = (ahead >= 0) & (ahead < (window or num_keys))
        row = (each.transpose(0, 1)[None] for each in (q[own], k[keys], v[keys]))
        attended = F.scaled_dot_product_attention(*row, attn_mask=seen, scale=scale, enable_gqa=True)
        found.append(attended[0].transpose(0, 1))
    return torch.cat(found)


def _runs(cuts: Tensor) -> list[slice]:
    assert cuts.dtype == torch.int32
    return [slice(*pair) for pair in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)]


def _forward(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _attend()(q, *others).contiguous(), q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)


def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, _: Tensor, __: Tensor, *about: Any) -> tuple[Tensor, ...]:
    back = torch.func.vjp(lambda *given: _attend()(*given, *about), q, k, v)[1]
    return tuple(each.contiguous() for each in back(grad))


_LIBRARY = torch.library.Library("marlaas", "FRAGMENT")
_LIBRARY.impl("attend_runs", _forward, "CPU")
_LIBRARY.impl("attend_runs_backward", _backward, "CPU")


def _attend() -> Any:
    if not ATTENDS:
        raise RuntimeError("flash attention does not run here")
    return ATTENDS[-1]


def use(monkeypatch: pytest.MonkeyPatch, attend: Any = by_runs) -> None:
    """Lets flash attention compute on a processor, by `attend`."""
    monkeypatch.setattr(sys.modules[__name__], "ATTENDS", [attend])
