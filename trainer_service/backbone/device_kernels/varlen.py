"""Attention over a pack by one call of flash attention, over runs of queries and of keys. CUDA and bfloat16 only.

The two operators are opaque to the compiler of whole layers, and free of sizes that it would take for constants.

Axes: N positions of a pack, H query heads, K key/value heads, D head size, m keys of all runs.
"""

from typing import Any

import torch
from torch import Tensor

from trainer_service.backbone.attention import Pack, register

NAME = "marlaas_varlen"


def varlen_packed(
    pack: Pack, query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float | None
) -> Tensor:
    """See PackAttention."""
    rows = [each[0].transpose(0, 1).contiguous() for each in (query, key, value)]
    runs = pack.runs
    marks = (runs.keys_m, runs.query_cuts, runs.key_cuts, runs.uses_m, runs.use_cuts, runs.most)
    return _AttendRuns.apply(*rows, *marks, window or 0, scaling)[None]  # pyright: ignore


class _AttendRuns(torch.autograd.Function):
    """q [N, H, D], k and v [N, K, D] -> [N, H, D]"""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        found, sums = torch.ops.marlaas.attend_runs(*given)
        *tensors, ctx.window, ctx.scale = given
        ctx.save_for_backward(*tensors[:3], found, sums, *tensors[3:])
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given = (grads[0].contiguous(), *ctx.saved_tensors, ctx.window, ctx.scale)
        return *torch.ops.marlaas.attend_runs_backward(*given), None, None, None, None, None, None, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, *about: Any) -> tuple[Tensor, Tensor]:
    """The result, and each query's log-sum-exp, float32 [H, N]. `window`: keys that a query sees at most, itself included; 0: all
    before it."""
    keys_m, query_cuts, key_cuts, *_, most, window, scale = about
    most_queries, most_keys, others = most.tolist()
    if others:
        k, v = k.index_select(0, keys_m), v.index_select(0, keys_m)
    found, sums, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, query_cuts, key_cuts, most_queries, most_keys, 0.0, not window, False, **_about(window, scale)
    )
    return found, sums


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, found: Tensor, sums: Tensor, *about: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. Keys are gathered again: kept, each branch would keep the beginning's."""
    keys_m, query_cuts, key_cuts, uses_m, use_cuts, most, window, scale = about
    most_queries, most_keys, others = most.tolist()
    keys = [each.index_select(0, keys_m) if others else each for each in (k, v)]
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # what dropout would have drawn
    cuts = (query_cuts, key_cuts, most_queries, most_keys)
    of_q, of_k, of_v = torch.ops.aten._flash_attention_backward(
        grad, q, *keys, found, sums, *cuts, 0.0, not window, unused, unused, **_about(window, scale)
    )
    if others:
        from trainer_service.backbone.device_kernels.uses_kernel import sum_uses  # here: it imports Triton

        of_k, of_v = sum_uses(of_k.contiguous(), of_v.contiguous(), use_cuts, uses_m)
    return of_q, of_k, of_v


def _about(window: int, scale: float | None) -> dict[str, Any]:
    return {"scale": scale, "window_size_left": window - 1 if window else -1, "window_size_right": 0}


def _forward_shapes(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


def _backward_shapes(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_LIBRARY = torch.library.Library("marlaas", "FRAGMENT")
_ABOUT = "Tensor keys, Tensor query_cuts, Tensor key_cuts, Tensor uses, Tensor use_cuts, Tensor most, int window, float? scale"
_LIBRARY.define(f"attend_runs(Tensor q, Tensor k, Tensor v, {_ABOUT}) -> (Tensor, Tensor)")
_LIBRARY.define(
    f"attend_runs_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor found, Tensor sums, {_ABOUT}) "
    "-> (Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("attend_runs", _forward, "CUDA")
_LIBRARY.impl("attend_runs_backward", _backward, "CUDA")


torch.library.register_fake("marlaas::attend_runs", _forward_shapes, lib=_LIBRARY)
torch.library.register_fake("marlaas::attend_runs_backward", _backward_shapes, lib=_LIBRARY)

register(NAME, varlen_packed)
