"""Captured steps of decoding, without a GPU: here a step runs again where CUDA would replay its graph. They sample what other steps
sample, read only tensors that keep their address, and wait for nothing."""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils._pytree import tree_leaves

from base_model.adapter import Adapter
from base_model.decoder import Decoder
from base_model.stacked import FusedAdapter, fuse
from benchmarks._gpu_bases import SHAPES_OF_BASES, Shape, random_decoder
from benchmarks._gpu_parts import random_adapters, rows_of
from common.wire.messages import BASE
from rollout_service.embedded.backbone.captured import CapturedSteps
from rollout_service.embedded.backbone.fused import FusedDecoder
from rollout_service.embedded.batch import RunningRows
from rollout_service.embedded.pools import EngineLimits
from rollout_service.embedded.row_states import TurnRow
from rollout_service.embedded.sampler import Sampled
from tests.support.rollout_cases import adapter_of, ref, request
from tests.support.trainer_cases import load_shallow

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_p": 0.8},
    {"top_k": 3},
    {"num_top_logprobs": 2},
)
LANES = 1 << 26
WAITS = {"_local_scalar_dense", "nonzero", "item", "masked_select", "lift_fresh", "unique", "equal"}


class Watch(TorchDispatchMode):
    """Counts operations, and notes the addresses that they read without having written them."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.read, self._made = list[str](), set[int](), dict[int, Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before, after = (
            {each.untyped_storage().data_ptr(): each for each in tree_leaves(tree) if isinstance(each, Tensor)}
            for tree in ((args, kwargs), result)
        )
        self.read |= before.keys() - self._made.keys()
        self._made |= {
            at: each for at, each in after.items() if at not in self.read
        }  # kept, so that no address returns
        is_view = after.keys() <= before.keys() and not func._schema.is_mutable
        if not is_view:
            self.names.append(func._schema.name.split("::")[1])
        return result


def at_address(address: int, shape: Sequence[int]) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * int(np.prod(shape))).from_address(address)).reshape(shape)


def by_address(qkv: Tensor, addresses: Tensor, positions: Tensor, num_heads: int) -> Tensor:
    """Computes as `decode_kernel.attend` does, in float32, row by row; unwatched, as a kernel is."""
    out = torch.empty(len(qkv), num_heads * qkv.shape[2])
    with _disable_current_modes():
        out.copy_(_by_address(qkv, addresses, positions, num_heads))
    return out


def _by_address(qkv: Tensor, addresses: Tensor, positions: Tensor, num_heads: int) -> Tensor:
    out = torch.zeros(len(qkv), num_heads, qkv.shape[2])
    for row, (address, position) in enumerate(zip(addresses.tolist(), positions.tolist(), strict=True)):
        if address:
            cache = torch.from_numpy(at_address(address, (position + 1, *qkv[row, num_heads:].shape)))
            cache[position] = qkv[row, num_heads:]
            k, v = cache.transpose(0, 1).chunk(2)
            q = qkv[row, :num_heads, None]
            out[row] = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[:, 0]
    return out.flatten(1)


def no_attention(qkv: Tensor, addresses: Tensor, positions: Tensor, num_heads: int) -> Tensor:
    """Takes one operation, as the kernel does."""
    return torch.relu(qkv[:, :num_heads]).flatten(1)


def of_sampled(sampled: Sampled) -> list[Tensor]:
    return [sampled.tokens, sampled.logprobs, *(sampled.top or ()), sampled.both]


class Again:
    """The function once more where CUDA replays a graph, with results in the tensors of its first run."""

    def __init__(self) -> None:
        self.watched: list[list[Watch]] = []  # of each step, its runs

    def fresh(self) -> "Again":
        return self

    def __call__(self, run: Callable[[], Sampled]) -> tuple[Sampled, Callable[[], None]]:
        runs = list[Watch]()
        self.watched.append(runs)

        def watched() -> Sampled:
            with Watch() as watch:
                found = run()
            runs.append(watch)
            return found

        sampled = watched()

        def replay() -> None:
            for own, new in zip(of_sampled(sampled), of_sampled(watched()), strict=True):
                own.copy_(new)

        return sampled, replay


@cache
def base() -> Decoder:
    return load_shallow()


def model() -> FusedDecoder:
    """The base model with torch's own norms, as on CUDA."""
    return FusedDecoder(base(), exact=True)


def fused(seed: int, rank: int) -> FusedAdapter:
    shapes, whole = base().linear_shapes(), adapter_of(seed, rank=rank)
    a, b = ({name: factors[name] for name in shapes} for factors in (whole.a, whole.b))
    return fuse(Adapter(whole.spec, a, b), shapes, base().config.num_layers, like=base().embedding)


def turns(kinds: Sequence[dict[str, Any]]) -> list[TurnRow]:
    """40 turns of all lengths and kinds, of two adapters of rank 8, one of rank 16, and the bare base model."""
    adapters = [fused(1, 8), fused(2, 8), fused(3, 16), None]
    rows: list[TurnRow] = []
    for number in range(40):
        kind = kinds[number % len(kinds)]
        name = ref(f"job{number % 4}") if number % 4 < 3 else BASE
        tokens = [97 + number % 26] * (1 + number * 5 % 90)
        asked = request(name, tokens=tokens, group=number, name=f"{number:02}", max_tokens=2 + number % 13, **kind)
        rows.append(TurnRow(asked, adapters[number % 4], None))
    return rows


def sampled_by(rows: Sequence[TurnRow], captured: CapturedSteps | None, slots: int) -> dict[str, Any]:
    limits = EngineLimits(slots=slots)
    batch = RunningRows(model(), end_ids=(), decode=lambda _: "", limits=limits, captured=captured)
    found: dict[str, Any] = {}
    with torch.inference_mode():
        for row in rows:
            batch.add(row)
        while batch.has_work:
            found |= {end.row.request.id: (end.partial, end.row.top_logprobs) for end in batch.advance()}
    return found


@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS], ids=["plain", "all kinds"])
def test_turns_have_the_same_tokens_and_logprobs_with_it(kinds: Sequence[dict[str, Any]]) -> None:
    steps = CapturedSteps(model(), by_address, (again := Again()).fresh, LANES)
    expected, found = sampled_by(turns(kinds), None, 20), sampled_by(turns(kinds), steps, 20)
    assert sorted(found) == sorted(expected)
    for name, (partial, top) in expected.items():
        assert found[name][0].tokens == partial.tokens
        assert np.allclose(found[name][0].logprobs, partial.logprobs, atol=1e-5)
        assert [[token for token, _ in best] for best in found[name][1]] == [
            [token for token, _ in best] for best in top
        ]
    assert sum(map(len, again.watched)) > 20


def test_a_step_reads_the_same_addresses_while_rows_join_and_leave_and_waits_for_nothing() -> None:
    again = Again()
    sampled_by(turns(KINDS[:2]), CapturedSteps(model(), by_address, again.fresh, LANES), 8)
    longest = max(again.watched, key=len)
    assert len(longest) > 20, [len(x) for x in again.watched]
    for runs in again.watched:
        assert {frozenset(run.read) for run in runs} == {frozenset(runs[0].read)}
        assert not WAITS & {name for run in runs for name in run.names}
        assert len({tuple(run.names) for run in runs}) == 1


def test_a_chat_joins_the_captured_step_of_all() -> None:
    steps = CapturedSteps(model(), by_address, (again := Again()).fresh, LANES)
    batch = RunningRows(model(), end_ids=(), decode=lambda _: "", limits=EngineLimits(), captured=steps)
    bulk, chat = (TurnRow(request(name=name, max_tokens=9), None, None) for name in ("bulk", "chat"))
    chat.request = msgspec.structs.replace(chat.request, chat=True)
    with torch.inference_mode():
        for number, row in enumerate((bulk, chat), start=1):
            batch.add(row)
            batch.advance()
            assert sum(map(len, again.watched)) == number
    assert [found.num_sampled for row in (bulk, chat) if (found := batch.progress(row))] == [2, 1]


def test_a_step_takes_few_operations() -> None:
    """28 layers, 64 rows of 8 adapters: views aside, as many kernels on CUDA. With transformers' modules it takes 2,711."""
    shape = Shape(replace(SHAPES_OF_BASES["tiny"].config, num_layers=28, hidden=64, head_dim=8), 128)
    small = random_decoder(shape, torch.device("cpu"), torch.float32)
    own = FusedDecoder(small, exact=True)
    steps, limits = CapturedSteps(own, no_attention, (again := Again()).fresh, LANES), EngineLimits(slots=64)
    batch = RunningRows(own, end_ids=(), decode=lambda _: "", limits=limits, captured=steps)
    with torch.inference_mode():
        for row in rows_of(random_adapters(small, 8)):
            batch.add(row)
        batch.advance()
    assert len(again.watched[0][0].names) <= 775


def test_the_kernel_computes_attention_on_keys_and_values_at_any_address(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda":
        check_kernel(device)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # Triton reads it when it is imported: in a process of its own
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            process.submit(check_kernel, device).result()


def check_kernel(device: str) -> None:
    for heads in ((4, 2, 32), (14, 2, 16), (3, 3, 24)):
        check_heads(*heads, device)


def check_heads(num_heads: int, kv_heads: int, size: int, device: str) -> None:
    """A row of no number, and rows of other lengths, in two pools; the last row only fills up."""
    from rollout_service.embedded.backbone.decode_kernel import attend

    drawn = torch.Generator().manual_seed(1)
    qkv = torch.randn(5, num_heads + 2 * kv_heads, size, generator=drawn)
    qkv[1, num_heads] = float("nan")
    pools = [torch.randn(2, length, 2 * kv_heads, size, generator=drawn).to(device) for length in (96, 160)]
    rows, positions = [row for pool in pools for row in pool], [0, 5, 64, 130]
    expected = [row.clone() for row in rows]
    addresses = torch.tensor([*(row.data_ptr() for row in rows), 0], device=device)
    found = attend(qkv.to(device), addresses, torch.tensor([*positions, 0], device=device), num_heads).cpu()
    for row, seen, position, own, out in zip(rows, expected, positions, qkv, found, strict=False):
        seen[position] = own[num_heads:]
        assert row.equal(seen) or bool(own.isnan().any())
        k, v = seen[: position + 1].cpu().transpose(0, 1).chunk(2)
        attended = F.scaled_dot_product_attention(own[:num_heads, None], k, v, enable_gqa=True).flatten()
        assert out.allclose(attended, atol=1e-5, equal_nan=True)
    assert bool(found[[0, 2, 3, 4]].isfinite().all()), "a row that is no number stays alone"
