"""Kernels of the transformers backbone beside its plain path: on a CPU what runs there, on CUDA all of them, with gradients."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import structlog
import torch
from torch import Tensor

from common.errors import InvalidInput
from tests.support import flash
from tests.support.families import FAMILIES, save_family
from tests.support.trainer_cases import TINY
from tests.trainer.test_modules_backbone import APART, ROUNDED_GRADIENT, ROUNDED_LOGPROB, SHARING, Case, make_case, ours
from tests.trainer.test_packed_attention import PACK, H, K, tree, written_out
from trainer_service.__main__ import load_trainer
from trainer_service.backbone import head
from trainer_service.backbone.attention import Pack
from trainer_service.backbone.choice import load_backbone
from trainer_service.backbone.device_kernels import kernel_choice, lora_kernels, varlen
from trainer_service.backbone.device_kernels.kernel_choice import chosen_kernels, refuse_kernels
from trainer_service.backbone.loading import load_modules
from trainer_service.backbone.modules import ModulesBackbone
from trainer_service.settings import DEVICE_KERNELS, TrainerSettings

D = 16
"""A head's size that kernels take on CUDA."""
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
BY_WINDOW = [None, 1, 6, 37, 500]
RANKS = ((8, 0.7), (8, 1.3), (64, 1.0))
"""Adapters' ranks, with temperatures."""


# ---- attention ------------------------------------------------------------------------------------------------------


def inputs(pack: Pack, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    size, like = len(pack.tokens_N), pack.tokens_N.device
    q, k, v = (torch.randn(1, heads, size, D, generator=made).to(like, dtype) for heads in (H, K, K))
    return q, k, v


def on_a_processor(values: Sequence[Tensor]) -> list[Tensor]:
    return [each.detach().cpu().float().requires_grad_(each.requires_grad) for each in values]


@pytest.mark.parametrize("pack", [PACK, (tree(70), tree(3))], ids=["trees", "rows"])
@pytest.mark.parametrize("window", BY_WINDOW)
def test_varlen_attention_sees_what_the_plain_path_sees(
    window: int | None, pack: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash.use(monkeypatch)
    packed = Pack.of(pack, torch.device(device))
    given = inputs(packed, torch.float32 if device == "cpu" else torch.bfloat16)
    for each in given:
        each.requires_grad_()

    found = varlen.varlen_packed(packed, *given, window, 0.3)
    assert_as_written_out(found, given, window, pack)


def assert_as_written_out(found: Tensor, given: Sequence[Tensor], window: int | None, trees: Any = PACK) -> None:
    """Compares what attention has made, and its gradients, with all pairs of positions on a processor."""
    close = CLOSE[given[0].dtype]
    plain = on_a_processor(given)
    expected = written_out(trees, window, *plain)
    torch.testing.assert_close(found.cpu().float(), expected, atol=close, rtol=close)
    if not given[0].requires_grad:
        return
    seed = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    theirs = torch.autograd.grad(expected, plain, seed)
    for one, other in zip(torch.autograd.grad(found, given, seed.to(found)), theirs, strict=True):
        torch.testing.assert_close(one.cpu().float(), other, atol=10 * close, rtol=close)


# ---- a base model ---------------------------------------------------------------------------------------------------


def cases_of(backbone: ModulesBackbone) -> list[Case]:
    cases = [make_case(backbone, seed, *about) for seed, about in enumerate(RANKS)]
    return [*cases, make_case(backbone, 9, 3, 0.7, targets=("q_proj", "o_proj"))]


def assert_computes_alike(changed: ModulesBackbone, plain: ModulesBackbone) -> None:
    """Compares log-probs and gradients of mixed adapters, with shared beginnings and without, checkpointed and not."""
    cases = cases_of(plain)
    for cost in (SHARING, APART):
        expected = ours(plain, cases, cost)
        for num_checkpointed in (0, 1):
            for one, other in zip(ours(changed.checkpointing(num_checkpointed), cases, cost), expected, strict=True):
                if plain.model.dtype == torch.float32:
                    torch.testing.assert_close(one, other, atol=CLOSE[torch.float32], rtol=CLOSE[torch.float32])
                    continue
                assert float((one[0] - other[0]).abs().mean()) < ROUNDED_LOGPROB
                found_P, exact_P = (torch.cat([grad.flatten() for grad in each[1].values()]) for each in (one, other))
                assert float((found_P - exact_P).norm() / exact_P.norm()) < ROUNDED_GRADIENT


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # torch's compiler hides its own only while they are no errors
@pytest.mark.parametrize("kernel", DEVICE_KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_kernel_trains_as_the_plain_path_does(family: str, kernel: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device here")
    if (family, kernel) == ("qwen3_moe", "compile"):
        pytest.skip("experts are chosen by the tokens: no one graph")
    folder = save_family(family, tmp_path, head_dim=D)
    plain, changed = (load_modules(folder, device="cuda", dtype=torch.bfloat16, kernels=k) for k in ((), (kernel,)))
    assert_computes_alike(changed, plain)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["flash", "varlen,liger", "varlen,varlen"])
def test_unknown_kernels_and_repeated_ones_are_refused(names: str) -> None:
    with pytest.raises(ValueError, match="some of varlen, lora, compile"):
        TrainerSettings(trainer_kernels=names)


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({}, "MARLAAS_TRAINER_KERNELS=varlen, lora is for the transformers backbone on CUDA"),
        ({"trainer_backbone": "transformers"}, "MARLAAS_TRAINER_KERNELS=varlen: it runs on CUDA only"),
        ({"deterministic": True}, "no trainer_kernels"),
        ({"trainer_ranks": 2}, "MARLAAS_TRAINER_KERNELS=varlen: it runs on CUDA only"),
    ],
)
def test_kernels_are_refused_where_they_cannot_run(others: dict[str, Any], reason: str) -> None:
    settings = TrainerSettings.model_validate({"trainer_kernels": "varlen, lora", **others})
    assert settings.kernels == ("varlen", "lora")
    with pytest.raises(InvalidInput, match=reason):
        load_trainer(settings)


@pytest.mark.parametrize(
    ("capability", "settings", "expected"),
    [
        ((9, 0), {}, DEVICE_KERNELS),
        ((7, 5), {}, ()),
        ((9, 0), {"trainer_dtype": "float32"}, ()),
        ((9, 0), {"trainer_kernels": ""}, ()),
        ((9, 0), {"trainer_kernels": "compile"}, ("compile",)),
    ],
)
def test_kernels_are_chosen_where_they_run(
    capability: tuple[int, int], settings: dict[str, Any], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", Mock(return_value=capability))
    given = TrainerSettings.model_validate({"trainer_device": "cuda", **settings})
    assert chosen_kernels(given, torch.device("cuda")) == expected


@pytest.mark.parametrize(
    ("attends", "reason"), [(None, "KERNELS=varlen: it does not run here"), (torch.zeros_like, "log-probs")]
)
def test_flash_attention_that_fails_when_a_base_model_loads_is_left_out(
    attends: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attends:  # wrongly
        flash.use(monkeypatch, lambda q, *_: attends(q))  # pyright: ignore
    assert_left_out("varlen", reason, monkeypatch)


def _raises(*_: Any) -> Any:
    raise Exception("no PTX")  # as compilers do


@pytest.mark.parametrize(("shrinks", "reason"), [(_raises, r"does not run here \(no PTX"), (None, "off by")])
def test_adapters_products_that_fail_when_a_base_model_loads_are_left_out(
    shrinks: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(x: Tensor, a: Tensor, *_: Any) -> Tensor:
        return x.new_zeros(len(x), a.shape[1])

    def wrongly(x: Tensor, dlow: Tensor, dy: Tensor, *_: Any) -> list[Tensor]:
        return [each.new_zeros(2, dlow.shape[1], each.shape[1]) for each in (x, dy)]

    monkeypatch.setattr(lora_kernels, "lora_shrink", shrinks or nothing)
    monkeypatch.setattr(lora_kernels, "lora_expand_", lambda *_: None)  # pyright: ignore
    monkeypatch.setattr(lora_kernels, "lora_gradients", wrongly)
    monkeypatch.setattr(head, "_by_kernel", head._plainly)  # pyright: ignore[reportPrivateUsage]
    assert_left_out("lora", reason, monkeypatch)


def _wrong(graph: Any, _: Any) -> Any:
    def run(*given: Any) -> list[Any]:
        return [1.5 * each for each in graph(*given)]

    return run


@pytest.mark.filterwarnings("default")  # torch's compiler hides its own only while they are no errors
@pytest.mark.parametrize(("backend", "reason"), [(_raises, "does not run here"), (_wrong, "off by")])
def test_layers_that_do_not_compile_when_a_base_model_loads_stay_plain(
    backend: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash.use(monkeypatch)
    monkeypatch.setattr(kernel_choice, "compile_layers", partial(kernel_choice.compile_layers, backend=backend))
    torch.compiler.reset()
    assert_left_out("compile", reason, monkeypatch)


def assert_left_out(kernel: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "_hindrance", Mock(return_value=""))
    monkeypatch.setattr(kernel_choice, "DEVICE_KERNELS", (kernel,))
    with structlog.testing.capture_logs() as logs:
        backbone = load_backbone(TrainerSettings(trainer_backbone="transformers"), TINY)
    assert isinstance(backbone, ModulesBackbone) and backbone.model.config._attn_implementation == "marlaas_packed"
    assert not backbone.current.fused and not backbone.current.one_graph
    (left_out,) = [line for line in logs if line["event"] == "device_kernels_left_out"]
    assert re.search(reason, left_out["reason"]), left_out


@pytest.mark.parametrize("kernel", DEVICE_KERNELS)
def test_what_a_kernel_lacks_is_said(kernel: str) -> None:
    with pytest.raises(InvalidInput, match=rf"KERNELS={kernel}: .*TRAINER_DTYPE=bfloat16"):
        refuse_kernels([kernel], torch.device("cuda"), torch.float32)
