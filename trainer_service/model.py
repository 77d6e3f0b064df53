"""Computes log-probabilities of trained tokens under the base model with adapters, differentiable in the adapters.

Axes: B sequences, T positions, M targets of the micro-batch, E hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from base_model.decoder import Attend, Decoder, Project, RunLayer, directly, plain
from common.errors import InvalidInput
from trainer_service.batch import Bools, Ints
from trainer_service.packing import Cost, Tree

MAX_SCORES = 1 << 22  # logits that exist at one time
MIN_ROWS = 8  # of a matrix product
ATTENTION_COST = 4
"""Time of a multiply-add in attention over one in a linear layer, forward and backward, measured on a CPU."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """A micro-batch on the device."""

    tokens_BT: Tensor
    positions_BT: Tensor
    bias_BTT: Tensor | None  # added to attention scores; None: every sequence is one row, plainly causal
    predictors_M: Tensor  # index into the flattened B x T
    targets_M: Tensor  # token ids
    temperatures_M: Tensor
    learned_M: Tensor | None  # places of the targets that may have a gradient; None: all may


def make_inputs(
    trees: Sequence[Tree],
    targets: Sequence[Ints],
    temperatures: Sequence[float],
    decoder: Decoder,
    *,
    multiple: int,
    learned: Sequence[Bools] = (),
) -> Inputs:
    """`targets`, `temperatures`, `learned`: of each row, sequence by sequence, token ids, temperature, and which targets may have a
    gradient (none given: all may). T: a multiple of `multiple`."""
    width = -(-max(len(tree) for tree in trees) // multiple) * multiple
    tokens_BT, positions_BT, branches_BT = np.zeros((3, len(trees), width), np.int64)
    branches_BT -= 1
    predictors: list[Ints] = []
    for i, tree in enumerate(trees):
        tokens_BT[i, : len(tree)], positions_BT[i, : len(tree)] = tree.tokens, tree.positions
        branches_BT[i, : len(tree)] = tree.branches
        predictors += [row_M + i * width for row_M in tree.predictors]
    device, dtype = decoder.device, decoder.embedding.dtype
    branched = any(tree.branched for tree in trees)
    temperatures_M = np.repeat(np.array(temperatures, np.float32), [len(row_M) for row_M in targets])
    return Inputs(
        tokens_BT=torch.from_numpy(tokens_BT).to(device),
        positions_BT=torch.from_numpy(positions_BT).to(device),
        bias_BTT=_attention_bias(torch.from_numpy(branches_BT).to(device), dtype) if branched else None,
        predictors_M=torch.from_numpy(np.concatenate(predictors)).to(device),
        targets_M=torch.from_numpy(np.concatenate(targets)).to(device),
        temperatures_M=torch.from_numpy(temperatures_M).to(device),
        learned_M=_places(learned, device),
    )


def _places(learned: Sequence[Bools], device: torch.device) -> Tensor | None:
    if all(row_M.all() for row_M in learned):
        return None
    return torch.from_numpy(np.flatnonzero(np.concatenate(learned))).to(device)


def _attention_bias(branches_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a position sees another: up to itself in its own branch and in the shared beginning; else -inf. [B, 1, T, T]"""
    to, by = branches_BT[:, None, None, :], branches_BT[:, None, :, None]
    seen = ((to == by) | (to == 0)).tril()
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def logprobs(decoder: Decoder, inputs: Inputs, project: Project = plain, layer: RunLayer = directly) -> Tensor:
    """float32 log_softmax(logits / temperature) of each target, [M]. `project` plain: the bare base model."""
    attend = _attend(decoder, inputs.bias_BTT)
    hidden_BTE = decoder.forward(inputs.tokens_BT, inputs.positions_BT, attend, project, layer)
    hidden_ME = hidden_BTE.flatten(0, 1).index_select(0, inputs.predictors_M)
    return _TargetLogprobs.apply(  # pyright: ignore[reportReturnType]
        hidden_ME, decoder.head, inputs.targets_M, inputs.temperatures_M, inputs.learned_M
    )


def checkpointed(layer: Callable[..., Tensor], *args: Any) -> Tensor:
    """Keeps the layer's input alone and computes the layer again in the backward (Chen et al. 2016, arXiv 1604.06174)."""
    return checkpoint(layer, *args, use_reentrant=False)  # pyright: ignore


def compile_parts(decoder: Decoder) -> None:
    """See `Decoder.compile`. Raises InvalidInput if torch cannot compile on this machine."""
    decoder.compile()
    tokens_BT = torch.zeros(2, 2, dtype=torch.int64, device=decoder.device)
    try:
        decoder.forward(tokens_BT, tokens_BT, _attend(decoder, None))
    except RuntimeError as error:
        reason = next(line for line in str(error).splitlines() if line)
        raise InvalidInput(
            f"MARLAAS_TRAINER_COMPILE: torch cannot compile here ({reason}): install a C++ compiler, or leave it off"
        ) from error


def sequence_cost(decoder: Decoder) -> Cost:
    """The cost of sequences in this base model. It only decides how rows are packed."""
    shapes = decoder.linear_shapes().values()
    config = decoder.config
    per_token = sum(out * width for out, width in shapes) // config.num_layers
    return Cost(per_token, ATTENTION_COST * 2 * config.num_heads * config.head_dim)


def _attend(decoder: Decoder, bias_BTT: Tensor | None) -> Attend:
    grouped = decoder.config.num_heads > decoder.config.num_kv_heads

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        causal = bias_BTT is None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias_BTT, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return attend


class _TargetLogprobs(torch.autograd.Function):
    """Hidden states [M, E] and a frozen head [V, E] -> log-probs [M], without keeping [M, V].

    d logprob / d hidden = (head[target] - softmax @ head) / temperature does not depend on the loss's gradient, so the
    forward computes it, a chunk of M at a time, and the backward is one product by rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ME: Tensor,
        head_VE: Tensor,
        targets_M: Tensor,
        temperatures_M: Tensor,
        learned_M: Tensor | None,
    ) -> Tensor:
        slope_ME = _empty_slope(hidden_ME, learned_M) if ctx.needs_input_grad[0] else None
        logprobs_M = torch.empty_like(temperatures_M)
        chunk = max(1, MAX_SCORES // len(head_VE))
        for start in range(0, len(targets_M), chunk):
            own = slice(start, start + chunk)
            temperatures_M1 = temperatures_M[own, None]
            scores_MV = _head(hidden_ME[own], head_VE).float().div_(temperatures_M1).log_softmax(-1)
            logprobs_M[own] = scores_MV.gather(1, targets_M[own, None]).squeeze(1)
            if slope_ME is not None and learned_M is None:
                slope_ME[own] = _slope(scores_MV, head_VE, targets_M[own], temperatures_M1)
            elif slope_ME is not None and learned_M is not None:
                some = learned_M[(learned_M >= start) & (learned_M < start + chunk)]
                slope_ME[some] = _slope(scores_MV[some - start], head_VE, targets_M[some], temperatures_M[some, None])
        ctx.save_for_backward(slope_ME)
        return logprobs_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slope_ME,) = ctx.saved_tensors
        return grads[0].to(slope_ME.dtype)[:, None] * slope_ME, None, None, None, None


def _empty_slope(hidden_ME: Tensor, learned_M: Tensor | None) -> Tensor:
    """Room for the slopes; those of targets without a gradient stay 0."""
    return torch.empty_like(hidden_ME) if learned_M is None else torch.zeros_like(hidden_ME)


def _slope(scores_MV: Tensor, head_VE: Tensor, targets_M: Tensor, temperatures_M1: Tensor) -> Tensor:
    """d logprob / d hidden, [M, E]; overwrites the scores."""
    mean_ME = _head(scores_MV.exp_().to(head_VE.dtype), head_VE.t())
    return (head_VE[targets_M] - mean_ME).div_(temperatures_M1)


def _head(x_MI: Tensor, weight_OI: Tensor) -> Tensor:
    """x W', [M, O]. Adds rows to a product of few, which would take another kernel, with other bits."""
    missing = max(0, MIN_ROWS - len(x_MI))
    return F.linear(F.pad(x_MI, (0, 0, 0, missing)), weight_OI)[: len(x_MI)]
