"""Compiled functions: they compute what torch and numpy do. Attention, whatever the heads, the lengths and the new tokens of a row,
where no row meets another; rotary embedding; random numbers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from common.wire.messages import TurnRequest
from rollout_service.embedded import batch, kv
from rollout_service.embedded.backbone.compiling import Compiled, compiled_for, compiling
from rollout_service.embedded.batch import RunningRows
from rollout_service.embedded.pools import EngineLimits, Pool
from rollout_service.embedded.row_states import TurnRow
from tests.support.rollout_cases import BASE, model, request

POSITIONS = np.array([0, 1, 31, 63, 40])
SPANS = ((0, 3, 5, 7), (1, 2, 60, 1), (1, 3, 0, 20))
"""Pool, row, first position and number of new tokens of rows that have several; in order of kind."""


def attended(compiled: Compiled | None, qkv: Tensor, num_heads: int, **asked: float | int | None) -> Tensor:
    """Attention of several new tokens of three rows, of one of five rows, in two pools whose keys and values are always the same, and
    of a row that only fills up the forward."""
    kv_heads = (qkv.shape[1] - num_heads) // 2
    shape = SimpleNamespace(num_layers=1, num_heads=num_heads, num_kv_heads=kv_heads, head_dim=qkv.shape[2])
    pools, drawn = [Pool.empty(shape, length, qkv) for length in (64, 128)], torch.Generator().manual_seed(1)  # pyright: ignore
    for pool, slots in zip(pools, ([0, 1, 2], [3, 4]), strict=True):
        pool.resize(4)
        pool.layers[0].normal_(generator=drawn)
        pool.slots += slots
    spans = [kv.NewTokens(pools[pool], *span) for pool, *span in SPANS]
    if compiled:
        attend = kv.CompiledAttend(shape, compiled.attend, kv.new_rows(pools, POSITIONS, spans))  # pyright: ignore
        return attend(0, qkv, **asked)  # pyright: ignore
    several = kv.ExtendAttend(shape, spans)  # pyright: ignore
    one = kv.DecodeAttend(shape, kv.slices(pools, torch.from_numpy(POSITIONS), [32, 64]), exact=False)  # pyright: ignore
    return torch.cat([several(0, qkv[:NUM], **asked), one(0, qkv[NUM:], **asked)])  # pyright: ignore


NUM = sum(span[-1] for span in SPANS)


@pytest.mark.parametrize("asked", [{}, {"window": 8}, {"scale": 0.5}], ids=str)
@pytest.mark.parametrize(("num_heads", "kv_heads", "size"), [(4, 2, 32), (6, 1, 16), (8, 8, 64)])
def test_it_is_what_torch_computes(num_heads: int, kv_heads: int, size: int, asked: dict[str, float | int]) -> None:
    compiling().wait()
    qkv = torch.randn(NUM + 6, num_heads + 2 * kv_heads, size, generator=torch.Generator().manual_seed(2))
    qkv[NUM + 4] *= 20  # a row whose weights are nearly all on one position
    expected, found = attended(None, qkv, num_heads, **asked), attended(compiling().found, qkv, num_heads, **asked)
    assert compiling().found and torch.allclose(found[:-1], expected[:-1], rtol=1e-5, atol=1e-5)
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(odd: float) -> None:
    compiling().wait()
    qkv = torch.randn(NUM + 6, 8, 32, generator=torch.Generator().manual_seed(3))
    whole = attended(compiling().found, qkv, 4)
    qkv[NUM + 1, 5] = odd  # a key
    found = attended(compiling().found, qkv, 4)
    others = [row for row in range(len(qkv)) if row != NUM + 1]
    assert found[others].equal(whole[others]) and bool(found[NUM + 1].isnan().any())


def test_turns_have_the_same_tokens_and_logprobs_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling().wait()
    tokens, logprobs = generated()
    monkeypatch.setattr(compiling(), "found", None)  # as before it is compiled
    assert (slow := generated())[0] == tokens
    assert np.allclose(slow[1], logprobs, atol=1e-5)


def generated() -> tuple[list[int], list[float]]:
    """The tokens of twelve turns of one to 120 tokens."""
    rows, ended = RunningRows(model(), end_ids=(), decode=lambda _: "", limits=EngineLimits()), dict[str, batch.Ended]()
    asked: list[TurnRequest] = [
        request(BASE, tokens=[97 + i] * (i + 1), group=i, max_tokens=1 + 10 * i, name=f"{i:02}") for i in range(12)
    ]
    with torch.inference_mode():
        for each in asked:
            rows.add(TurnRow(each, None, None))
        while rows.has_work:
            ended |= {end.row.request.id: end for end in rows.advance()}
    partials = [ended[name].partial for name in sorted(ended)]
    return [t for partial in partials for t in partial.tokens], [p for partial in partials for p in partial.logprobs]


@pytest.mark.parametrize(("dtype", "exact"), [(torch.bfloat16, False), (torch.float32, True)])
def test_other_numbers_and_deterministic_mode_keep_torchs(dtype: torch.dtype, exact: bool) -> None:
    compiling().wait()
    assert compiled_for(torch.zeros(1, dtype=dtype), exact=exact)() is None
