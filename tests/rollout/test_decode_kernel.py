"""Compiled attention of a decode step: it is that of torch, whatever the heads and lengths, and no row meets another."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from common.messages import TurnRequest
from rollout_service.embedded import batch, kv
from rollout_service.embedded.backbone.compiling import compiling, quick_attend
from rollout_service.embedded.batch import RunningRows
from rollout_service.embedded.pools import EngineLimits, Pool
from rollout_service.embedded.seats import TurnRow
from tests.support.rollout_cases import BASE, model, request

POSITIONS = (0, 1, 31, 63, 40)


def attended(kernel: kv.DecodeKernel | None, qkv: Tensor, num_heads: int, **asked: float | int | None) -> Tensor:
    """Attention of five rows in two pools, whose keys and values are always the same, and of a row that only fills up the forward."""
    kv_heads = (qkv.shape[1] - num_heads) // 2
    shape = SimpleNamespace(num_layers=1, num_heads=num_heads, num_kv_heads=kv_heads, head_dim=qkv.shape[2])
    pools, drawn = [Pool(shape, length, qkv) for length in (64, 128)], torch.Generator().manual_seed(1)  # pyright: ignore
    for pool, seats in zip(pools, ([0, 1, 2], [3, 4]), strict=True):
        pool.resize(4)
        pool.layers[0].normal_(generator=drawn)
        pool.seats += seats
    parts = kv.slices(pools, torch.tensor(POSITIONS), [32, 64])
    attend = kv.DecodeAttend(shape, parts, exact=False, kernel=kernel)  # pyright: ignore
    return attend(0, qkv, **asked)  # pyright: ignore


@pytest.mark.parametrize("asked", [{}, {"window": 8}, {"scale": 0.5}], ids=str)
@pytest.mark.parametrize(("num_heads", "kv_heads", "size"), [(4, 2, 32), (6, 1, 16), (8, 8, 64)])
def test_it_is_what_torch_computes(num_heads: int, kv_heads: int, size: int, asked: dict[str, float | int]) -> None:
    compiling().wait()
    qkv = torch.randn(6, num_heads + 2 * kv_heads, size, generator=torch.Generator().manual_seed(2))
    qkv[4] *= 20  # a row whose weights are nearly all on one position
    expected, found = attended(None, qkv, num_heads, **asked), attended(compiling().attend, qkv, num_heads, **asked)
    assert compiling().attend and torch.allclose(found[:5], expected[:5], rtol=1e-5, atol=1e-5)
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(odd: float) -> None:
    compiling().wait()
    qkv = torch.randn(6, 8, 32, generator=torch.Generator().manual_seed(3))
    whole = attended(compiling().attend, qkv, 4)
    qkv[1, 5] = odd  # a key
    found = attended(compiling().attend, qkv, 4)
    assert found[[0, 2, 3, 4]].equal(whole[[0, 2, 3, 4]]) and bool(found[1].isnan().any())


def test_turns_have_the_same_tokens_and_logprobs_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling().wait()
    tokens, logprobs = generated()
    monkeypatch.setattr(compiling(), "attend", None)  # as before it is compiled
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
    assert quick_attend(torch.zeros(1, dtype=dtype), exact=exact)() is None
