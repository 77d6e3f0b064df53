"""Triton kernels beside the products that they stand for: in its interpreter on a CPU, which knows no bfloat16 products, compiled
on CUDA. Axes as in `lora_kernels` and `head_kernel`."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer_service.backbone import head

INPUTS, OUTPUTS = 80, 144
CUTS = (70, 71, 71, 140)
"""Where adapters' tokens end: more than a tile, one token, none, and others."""
STRANGERS = 5
"""Tokens before and after those of adapters."""
CLOSE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton interprets: it decides so when it is imported."""
    with ProcessPoolExecutor(1, get_context("spawn"), _interpret) as process:
        yield process


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


@pytest.fixture
def run(device: str, request: pytest.FixtureRequest) -> Run:
    """Calls a function where the device's kernels run."""
    if device == "cuda":
        return lambda function, *args: function(*args)
    process: ProcessPoolExecutor = request.getfixturevalue("interpreter")
    return lambda function, *args: process.submit(function, *args).result()


def dtypes_of(device: str) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16,) if device == "cuda" else (torch.float32, torch.float16)


# ---- products of adapters -------------------------------------------------------------------------------------------


def drawn(rank: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(rank)
    num, tokens = len(CUTS), STRANGERS + CUTS[-1] + STRANGERS
    shapes = {
        "x": (tokens, INPUTS),
        "y": (tokens, OUTPUTS),
        "a": (num, rank, INPUTS),
        "b": (num, OUTPUTS, rank),
        "scales": (num,),
    }
    found = {name: torch.randn(shape, generator=made).to(device, dtype) for name, shape in shapes.items()}
    return found | {"scales": found["scales"].float()}


def products(given: dict[str, Tensor], cuts: tuple[int, ...], start: int) -> dict[str, Tensor]:
    """What the kernels make of x, y and factors, y standing for its own gradient too."""
    from trainer_service.backbone.device_kernels.lora_kernels import segments_and_tiles

    lora, (x, y, a, scales) = torch.ops.marlaas, (given[name] for name in ("x", "y", "a", "scales"))
    b = given["b"].transpose(1, 2)
    segments, tiles = segments_and_tiles([start + cut for cut in cuts], x.device, start)
    low, dlow = lora.lora_shrink(x, a, scales, tiles), lora.lora_shrink(y, b, scales, tiles)
    expanded, dx = y.clone(), x.clone()
    lora.lora_expand_(expanded, low, b, tiles)
    lora.lora_expand_(dx, dlow, a, tiles)
    da, db = (torch.ones(given[name].shape, device=x.device) for name in ("a", "b"))
    lora.lora_gradient_(da, dlow, x, segments)
    lora.lora_gradient_(db.transpose(1, 2), low, y, segments)
    return {"low": low, "dlow": dlow, "y": expanded, "dx": dx, "da": da, "db": db}


def written_out(given: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, an adapter at a time in float64, of the kernels' own rounded low."""
    x, y, a, b, scales = (given[name].double() for name in ("x", "y", "a", "b", "scales"))
    low, dlow = found["low"].double(), found["dlow"].double()
    made = {"low": low.clone(), "dlow": dlow.clone(), "y": y.clone(), "dx": x.clone()}
    made |= {"da": torch.ones_like(a), "db": torch.ones_like(b)}
    for adapter, (first, stop) in enumerate(zip((0, *CUTS), CUTS, strict=False)):
        own = slice(STRANGERS + first, STRANGERS + stop)
        made["low"][own] = scales[adapter] * x[own] @ a[adapter].T
        made["dlow"][own] = scales[adapter] * y[own] @ b[adapter]
        made["y"][own] += low[own] @ b[adapter].T
        made["dx"][own] += dlow[own] @ a[adapter]
        made["da"][adapter] += dlow[own].T @ x[own]
        made["db"][adapter] += y[own].T @ low[own]
    return made


@pytest.mark.parametrize("rank", [1, 8, 20, 64])
def test_kernels_multiply_each_adapters_tokens_by_its_own_factors(rank: int, run: Run, device: str) -> None:
    for dtype in dtypes_of(device):
        given = drawn(rank, dtype, device)
        found = run(products, given, CUTS, STRANGERS)
        own = slice(STRANGERS, STRANGERS + CUTS[-1])
        for name, expected in written_out(given, found).items():
            got = found[name].double()
            if name in ("y", "dx"):  # of no adapter
                assert got[:STRANGERS].equal(expected[:STRANGERS])
                assert got[own.stop :].equal(expected[own.stop :])
            if name not in ("da", "db"):
                got, expected = got[own], expected[own]
            assert (got - expected).norm() <= CLOSE[dtype] * expected.norm(), (name, dtype)


def test_an_adapter_gets_the_same_bits_alone_and_among_others_that_are_not_finite(run: Run, device: str) -> None:
    # Given an adapter's tokens, alone and after those of others which are no numbers
    given = drawn(8, dtypes_of(device)[0], device)
    last = slice(STRANGERS + CUTS[-2], STRANGERS + CUTS[-1])
    alone = {name: given[name][last] for name in ("x", "y")} | {name: given[name][-1:] for name in ("a", "b", "scales")}
    others = {name: given[name].clone() for name in given}
    for name in ("x", "y"):
        others[name][: last.start] = float("nan")
        others[name][last.stop :] = float("nan")
    # When both are computed
    apart, among = run(products, alone, (last.stop - last.start,), 0), run(products, others, CUTS, STRANGERS)
    # Then the adapter's results are the same
    for name in ("low", "dlow", "y", "dx"):
        assert apart[name].equal(among[name][last]), name
    assert all(apart[name][0].equal(among[name][-1]) for name in ("da", "db"))


def test_an_adapters_matrix_that_lies_in_pieces_is_refused(run: Run, device: str) -> None:
    given = drawn(8, dtypes_of(device)[0], device)
    given["a"] = given["a"].repeat(1, 1, 2)[:, :, ::2]
    with pytest.raises(ValueError, match="must be contiguous"):
        run(products, given, CUTS, STRANGERS)


# ---- head -----------------------------------------------------------------------------------------------------------


def log_probs(by_kernel: bool, max_scores: int, learned_M: Tensor | None, hidden_ME: Tensor, *about: Tensor) -> Any:
    """Log-probs [M] and their sum's gradient [M, E], by the kernel or plainly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "has_kernel", lambda _: by_kernel)
        hidden_ME = hidden_ME.clone().requires_grad_()
        found_M = head.target_logprobs(hidden_ME, *about, learned_M, max_scores)
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
        about = (17 * vocab, learned_M, hidden_ME, head_VE, targets_M, temperatures_M)
        (found_M, found_ME), (expected_M, expected_ME) = run(log_probs, True, *about), log_probs(False, *about)
        torch.testing.assert_close(found_M, expected_M, rtol=0.0, atol=1e-5)
        assert (found_ME - expected_ME).norm() <= 2 * CLOSE[dtype] * expected_ME.norm()


# ---- operators ------------------------------------------------------------------------------------------------------


def _check_operators() -> list[str]:
    from trainer_service.backbone.device_kernels import head_kernel, lora_kernels

    given, checks = drawn(8, torch.float32, "cpu"), ("test_schema", "test_faketensor")
    segments, tiles = lora_kernels.segments_and_tiles(CUTS, torch.device("cpu"))
    low = lora_kernels.lora_shrink(given["x"], given["a"], given["scales"], tiles)
    about = (torch.tensor([3]), torch.ones(1), True)
    cases = {
        "lora_shrink": (given["x"], given["a"], given["scales"], tiles),
        "lora_expand_": (given["x"], low, given["a"], tiles),
        "lora_gradient_": (torch.zeros(given["a"].shape), low, given["x"], segments),
        "head_logprobs_": (torch.randn(1, 50), *about),
    }
    assert head_kernel.__name__
    for name, args in cases.items():
        torch.library.opcheck(getattr(torch.ops.marlaas, name).default, args, test_utils=checks)
    return list(cases)


def test_operators_have_the_shapes_and_write_what_they_declare(interpreter: ProcessPoolExecutor) -> None:
    assert len(interpreter.submit(_check_operators).result()) == 4


@pytest.mark.parametrize("rank", [8, 64])
def test_kernels_compile_for_hopper_without_a_gpu(rank: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from trainer_service.backbone.device_kernels import head_kernel, lora_kernels

    sizes = {"rank": rank, "RANK": max(16, rank), "INNER": True, "ROWS": 64, "COLS": 128}
    cases: list[tuple[Any, dict[str, Any]]] = [
        *((getattr(lora_kernels, f"{name}_kernel"), sizes) for name in ("shrink", "expand", "gradient")),
        (head_kernel.logprobs_kernel, {"GRADIENT": True, "COLS": head_kernel.COLUMNS}),
    ]
    kinds = {"tiles_ptr": "*i32", "segments_ptr": "*i32", "targets_ptr": "*i64", "width": "i32", "apart": "i32"}
    kinds |= {"vocab": "i32"} | dict.fromkeys(("scales_ptr", "grads_ptr", "temperatures_ptr", "out_ptr"), "*fp32")
    for kernel, constants in cases:
        kinds_of = {name: "constexpr" if name in constants else kinds.get(name, "*bf16") for name in kernel.arg_names}
        source, options = (
            ASTSource(kernel, kinds_of, constants),
            {"enable_fp_fusion": True},
        )  # its default, which Triton 3.9 warns of
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.asm["cubin"]
