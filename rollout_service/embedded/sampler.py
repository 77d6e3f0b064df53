"""Draws tokens from scores: exact log-probs over the whole vocabulary, one uniform number a token, by inverse CDF. Scores given tokens.

Axes: B rows, V vocabulary, T tokens of a prompt, E hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.wire.messages import Sampling


@dataclass(slots=True)
class SamplingPlan:
    """The sampling parameters of the rows of a forward; remade only when rows come or go."""

    temperature: Tensor | None  # [B, 1], 1 for greedy rows; None: 1 for all
    greedy: Tensor | None  # [B] bool; None: no row is
    all_greedy: bool
    top_p: Tensor | None  # [B, 1] float64; None: 1 for all
    num_top: int  # log-probs of that many best tokens, for all rows
    top_k: Tensor | None = None  # [B, 1], the vocabulary's size for all tokens; None: all for all

    @classmethod
    def of(cls, rows: Sequence[Sampling], vocab: int, device: torch.device) -> "SamplingPlan":
        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        greedy = [row.temperature == 0 for row in rows]
        temperature = [row.temperature or 1.0 for row in rows]
        top_p = [row.top_p for row in rows]
        top_k = [min(row.top_k or vocab, vocab) for row in rows]
        return cls(
            temperature=None if set(temperature) == {1.0} else column(temperature, torch.float32),
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            all_greedy=all(greedy),
            top_p=None if min(top_p) >= 1 else column(top_p, torch.float64),
            num_top=max(row.num_top_logprobs for row in rows),
            top_k=None if min(top_k) == vocab else column(top_k, torch.int64),
        )

    def columns(self) -> dict[str, Tensor]:
        """The tensors that it has, by the names of their fields."""
        columns = {name: getattr(self, name) for name in ("temperature", "greedy", "top_p", "top_k")}
        return {name: column for name, column in columns.items() if column is not None}

    def kind(self) -> tuple[object, ...]:
        """Equal for plans whose draws take the same operations."""
        return self.all_greedy, self.num_top, *self.columns()


@dataclass(slots=True)
class Sampled:
    """The next token of each row of a forward."""

    tokens: Tensor  # [B]
    logprobs: Tensor  # [B]; not a number where the row's scores are not
    top: tuple[Tensor, Tensor] | None  # [B, num_top] log-probs, tokens
    both: Tensor  # float64 [2, B]: tokens and log-probs, for one transfer


@dataclass(frozen=True, slots=True)
class Allowed:
    """The tokens that the grammars of some rows allow. Axis: M such rows."""

    rows: Tensor  # [M]
    tokens: Tensor  # bool [M, V]

    def among(self, logits: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and log-probs by which these rows choose among their tokens; those of all other rows keep their bits."""
        own = logits[self.rows].masked_fill(~self.tokens, -torch.inf)
        return logits.index_copy(0, self.rows, own), logprobs.index_copy(0, self.rows, torch.log_softmax(own, dim=-1))


def sample(logits: Tensor, uniforms: Tensor, plan: SamplingPlan, allowed: Allowed | None = None) -> Sampled:
    """Draws a token for each row. logits float32 [B, V], uniforms float64 [B] in [0, 1)."""
    if plan.temperature is not None:
        logits = logits / plan.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    logits, choosing = (logits, logprobs) if allowed is None else allowed.among(logits, logprobs)
    if plan.all_greedy:
        tokens = logits.argmax(-1)
    else:
        tokens = _draw(choosing, uniforms, plan)
        if plan.greedy is not None:
            tokens = torch.where(plan.greedy, logits.argmax(-1), tokens)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    top = logprobs.topk(plan.num_top, dim=-1) if plan.num_top else None
    both = torch.stack([tokens.double(), chosen.double()])
    return Sampled(tokens, chosen, (top.values, top.indices) if top else None, both)


def score(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    tokens: Tensor,
    *,
    temperature: float,
    piece: int,
    num_top: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The log-prob of each token [T] after the hidden state [T, E] that precedes it; log-probs and tokens of the best there, [T, num_top].
    `logits_of`: hidden states [T, E] -> float32 [T, V], then overwritten; called for `piece` of them at a time."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for states, wanted in zip(hidden.split(piece), tokens.split(piece), strict=True):
        logprobs = torch.log_softmax(logits_of(states).div_(temperature), dim=-1)
        best, places = logprobs.topk(num_top, dim=-1)
        found.append((logprobs.gather(1, wanted.unsqueeze(1)).squeeze(1), best, places))
    own, values, indices = map(torch.cat, zip(*found, strict=True))
    return own, values, indices


def _draw(logprobs: Tensor, uniforms: Tensor, plan: SamplingPlan) -> Tensor:
    """Inverse CDF: the first token whose cumulative probability exceeds u. [B]"""
    # A row's number u follows from its trajectory, turn and position (`row_states.py`), not from a shared generator: a turn sampled
    # again elsewhere, or among other rows, draws the same tokens. Sums are float64, or the last tokens of a large vocabulary would
    # round away; u is scaled by the whole sum, so that weights cut by top_p or top_k need no division.
    weights = logprobs.exp()
    if plan.top_k is not None or plan.top_p is not None:
        weights = _best(weights, plan.top_k, plan.top_p)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = uniforms.unsqueeze(1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True)
    return drawn.squeeze(1).clamp_(max=logprobs.shape[1] - 1)


def _best(weights: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Keeps the top_k best tokens, and of these the fewest best that have top_p of their weight; top_p 1 keeps all. The first of equal
    tokens is the better one, as for argmax."""
    best, order = weights.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        best = best.masked_fill(torch.arange(best.shape[1], device=best.device) >= top_k, 0.0)
    if top_p is not None:
        cumulative = best.cumsum(-1, dtype=torch.float64)
        reached = cumulative - best >= top_p * cumulative[:, -1:]
        best = best.masked_fill(reached & (top_p < 1), 0.0)
    return torch.zeros_like(weights).scatter_(1, order, best)
