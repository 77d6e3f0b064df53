"""Triton kernels and plain products: in Triton's interpreter on a CPU, which multiplies no bfloat16, compiled on CUDA. Axes as in
`lora_kernels` and `head_kernel`."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer_service.backbone import head

INPUTS, OUTPUTS = 80, 144
CUTS = (70, 71, 71, 140)
"""Ends of adapters' tokens: more than a tile, one token, none, and others."""
CLOSE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process whose Triton interprets: it decides so when it is imported."""
    with ProcessPoolExecutor(1, get_context("spawn"), _interpret) as process:
        yield process


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


@pytest.fixture
def run(device: str, request: pytest.FixtureRequest) -> Run:
    """Calls a function where the device's kernels run."""
    if device == "cuda":
        return _directly
    process: ProcessPoolExecutor = request.getfixturevalue("interpreter")

    def elsewhere(function: Run, *args: Any) -> Any:
        return process.submit(function, *args).result()

    return elsewhere


def _directly(function: Run, *args: Any) -> Any:
    return function(*args)


def dtypes_of(device: str) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16,) if device == "cuda" else (torch.float32, torch.float16)


# ---- products of adapters -------------------------------------------------------------------------------------------


def drawn(rank: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(rank)
    num, tokens = len(CUTS), CUTS[-1]
    shapes = {"x": (tokens, INPUTS), "y": (tokens, OUTPUTS), "a": (num, rank, INPUTS), "b": (num, rank, OUTPUTS)}
    return {name: torch.randn(shape, generator=made).to(device, dtype) for name, shape in shapes.items()}


def products(given: dict[str, Tensor], cuts: tuple[int, ...]) -> dict[str, Tensor]:
    """Products by the kernels of x, y and factors; y stands for its own gradient too."""
    from trainer_service.backbone.device_kernels import lora_kernels as lora

    x, y, a, b = (given[name] for name in ("x", "y", "a", "b"))
    segments, tiles = lora.segments_and_tiles(cuts, x.device)
    low, dlow = lora.lora_shrink(x, a, tiles), lora.lora_shrink(y, b, tiles)
    expanded, dx = y.clone(), x.clone()
    lora.lora_expand_(expanded, low, b, tiles)
    lora.lora_expand_(dx, dlow, a, tiles)
    da, db = lora.lora_gradients(x, dlow, y, low, segments)
    return {"low": low, "dlow": dlow, "y": expanded, "dx": dx, "da": da, "db": db}


def written_out(given: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same products, an adapter at a time in float64, of the rounded low that was found."""
    x, y, a, b = (given[name].double() for name in ("x", "y", "a", "b"))
    low, dlow = found["low"].double(), found["dlow"].double()
    parts = [slice(first, stop) for first, stop in zip((0, *CUTS), CUTS, strict=False)]
    each = list(zip(parts, a, b, strict=True))
    return {
        "low": torch.cat([x[own] @ a_RI.T for own, a_RI, _ in each]),
        "dlow": torch.cat([y[own] @ b_RO.T for own, _, b_RO in each]),
        "y": torch.cat([y[own] + low[own] @ b_RO for own, _, b_RO in each]),
        "dx": torch.cat([x[own] + dlow[own] @ a_RI for own, a_RI, _ in each]),
        "da": torch.stack([dlow[own].T @ x[own] for own in parts]),
        "db": torch.stack([low[own].T @ y[own] for own in parts]),
    }


@pytest.mark.parametrize("rank", [1, 8, 20, 64])
def test_kernels_multiply_each_adapters_tokens_by_its_own_factors(rank: int, run: Run, device: str) -> None:
    for dtype in dtypes_of(device):
        given = drawn(rank, dtype, device)
        found = run(products, given, CUTS)
        for name, expected in written_out(given, found).items():
            assert (found[name].double() - expected).norm() <= CLOSE[dtype] * expected.norm(), (name, dtype)


def test_an_adapter_gets_the_same_bits_alone_and_among_others_that_are_not_finite(run: Run, device: str) -> None:
    # Given the last adapter's tokens, alone and after those of others which are no numbers
    given = drawn(8, dtypes_of(device)[0], device)
    last = slice(CUTS[-2], CUTS[-1])
    alone = {name: given[name][last] for name in ("x", "y")} | {name: given[name][-1:] for name in ("a", "b")}
    others = {name: given[name].clone() for name in given}
    for name in ("x", "y"):
        others[name][: last.start] = float("nan")
    # When both are computed
    apart, again = (run(products, alone, (last.stop - last.start,)) for _ in range(2))
    among = run(products, others, CUTS)
    # Then the adapter's results are the same, also of a kernel that was compiled before, and the gradient of one without tokens is 0
    assert all(apart[name].equal(among[name][last]) for name in ("low", "dlow", "y", "dx"))
    assert all(apart[name][0].equal(among[name][-1]) for name in ("da", "db"))
    assert all(apart[name].equal(again[name]) for name in apart)
    assert not among["da"][2].any()


# ---- keys -----------------------------------------------------------------------------------------------------------


def sums_of_uses(*args: Tensor) -> tuple[Tensor, Tensor]:
    from trainer_service.backbone.device_kernels.uses_kernel import sum_uses

    return sum_uses(*args)


def test_keys_gradients_are_summed_over_their_uses(run: Run, device: str) -> None:
    # Given 40 uses of 12 positions, the last of which has none
    made, dtype = torch.Generator().manual_seed(0), dtypes_of(device)[0]
    positions_m = torch.cat([torch.arange(11), torch.randint(0, 3, (29,), generator=made)]).to(device)
    cuts_N = F.pad(torch.bincount(positions_m, minlength=12).cumsum(0), (1, 0)).int()
    given = [torch.randn(40, 2, 24, generator=made).to(device, dtype) for _ in range(2)]
    # Then both sums are those of adding by index
    found = run(sums_of_uses, *given, cuts_N, positions_m.argsort(stable=True).int())
    for uses_mKD, sums_NKD in zip(given, found, strict=True):
        expected_NKD = torch.zeros(12, 2, 24, device=device, dtype=torch.float64)
        expected_NKD.index_add_(0, positions_m, uses_mKD.double())
        assert (sums_NKD.double() - expected_NKD).norm() <= CLOSE[dtype] * expected_NKD.norm()


# ---- head -----------------------------------------------------------------------------------------------------------


class About(NamedTuple):
    head_VE: Tensor
    targets_M: Tensor
    temperatures_M: Tensor
    learned_M: Tensor | None
    max_scores: int


def log_probs(by_kernel: bool, hidden_ME: Tensor, about: About) -> tuple[Tensor, Any]:
    """Log-probs [M] and their sum's gradient [M, E], by the kernel or plainly."""
    hidden_ME = hidden_ME.clone().requires_grad_()
    found_M = head.target_logprobs(hidden_ME, *about, fused=by_kernel)
    found_M.sum().backward()
    return found_M.detach(), hidden_ME.grad


@pytest.mark.parametrize("learned", [None, [0, 3, 4, 39], []])
@pytest.mark.parametrize("vocab", [30, 5000])
def test_the_heads_kernel_gives_the_plain_paths_log_probs(
    vocab: int, learned: list[int] | None, run: Run, device: str
) -> None:
    made = torch.Generator().manual_seed(vocab)
    learned_M = None if learned is None else torch.tensor(learned, dtype=torch.int64, device=device)
    targets_M = torch.randint(0, vocab, (40,), generator=made).to(device)
    temperatures_M = (0.5 + torch.rand(40, generator=made)).to(device)
    for dtype in dtypes_of(device):
        hidden_ME, head_VE = (torch.randn(n, 16, generator=made).to(device, dtype) for n in (40, vocab))
        about = About(head_VE, targets_M, temperatures_M, learned_M, 17 * vocab)
        found_M, found_ME = run(log_probs, True, hidden_ME, about)
        expected_M, expected_ME = log_probs(False, hidden_ME, about)
        torch.testing.assert_close(found_M, expected_M, rtol=0.0, atol=1e-5)
        assert (found_ME - expected_ME).norm() <= 2 * CLOSE[dtype] * expected_ME.norm()


# ---- without running ------------------------------------------------------------------------------------------------


def test_the_heads_kernel_is_one_operator_where_shapes_alone_are_known() -> None:
    hidden_ME, head_VE = (torch.empty(size, 16, dtype=torch.bfloat16, device="meta") for size in (40, 30))
    targets_M, temperatures_M = (torch.empty(40, dtype=dtype, device="meta") for dtype in (torch.int64, torch.float32))
    with torch.profiler.profile() as noted:
        found_M = head.target_logprobs(hidden_ME.requires_grad_(), head_VE, targets_M, temperatures_M, None, fused=True)
    assert found_M.shape == (40,)
    assert [event.name for event in noted.events() or ()].count("marlaas::head_logprobs_") == 1


@pytest.mark.parametrize("rank", [8, 64])
def test_kernels_compile_for_hopper_without_a_gpu(rank: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from trainer_service.backbone.device_kernels import head_kernel, lora_kernels, uses_kernel

    sizes = {"rank": rank, "RANK": max(16, rank), "ROWS": 64, "COLS": 128}
    cases: list[tuple[Any, dict[str, Any]]] = [
        *((getattr(lora_kernels, f"{name}_kernel"), sizes) for name in ("shrink", "expand", "gradients")),
        (uses_kernel.sum_uses_kernel, {"width": 1024, "COLS": 1024}),
        (head_kernel.logprobs_kernel, {"SLOPES": True, "COLS": head_kernel.COLUMNS}),
    ]
    kinds = {
        "spans_ptr": "*i32",
        "targets_ptr": "*i64",
        **dict.fromkeys(("width", "inputs", "outputs", "vocab"), "i32"),
    }
    kinds |= {"cuts_ptr": "*i32", "uses_ptr": "*i32", "temperatures_ptr": "*fp32", "out_ptr": "*fp32"}
    for kernel, constants in cases:
        kinds_of = {name: "constexpr" if name in constants else kinds.get(name, "*bf16") for name in kernel.arg_names}
        source, options = (
            ASTSource(kernel, kinds_of, constants),
            {"enable_fp_fusion": True},
        )  # its default, which Triton 3.9 warns of
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.asm["cubin"]
