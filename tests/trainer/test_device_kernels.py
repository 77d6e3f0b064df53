"""Kernels of the transformers backbone beside its plain path: on a CPU what runs there, on CUDA all of them, with gradients."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import structlog
import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import InvalidInput
from tests.support.families import FAMILIES, save_family
from tests.support.trainer_cases import TINY
from tests.trainer.test_modules_backbone import APART, ROUNDED_GRADIENT, ROUNDED_LOGPROB, SHARING, Case, make_case, ours
from tests.trainer.test_packed_attention import PACK, H, K, tree, written_out
from trainer_service.__main__ import load_trainer
from trainer_service.backbone.attention import Pack
from trainer_service.backbone.choice import load_backbone
from trainer_service.backbone.device_kernels import kernel_choice, varlen
from trainer_service.backbone.device_kernels.kernel_choice import chosen_kernels, compile_layers, refuse_kernels
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


def by_runs(q: Tensor, k: Tensor, v: Tensor, query_cuts: Tensor, key_cuts: Tensor, *most: int, **about: Any) -> Tensor:
    """Computes what `varlen_attn` does, a run at a time: for a machine without CUDA."""
    before, _ = about["window_size"]
    found: list[Tensor] = []
    for own, keys in zip(_runs(query_cuts), _runs(key_cuts), strict=True):
        num_queries, num_keys = own.stop - own.start, keys.stop - keys.start
        assert num_queries <= most[0] and num_keys <= most[1]
        ahead = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
        seen = (ahead >= 0) & ((ahead <= before) | (before < 0))
        row = (each.transpose(0, 1)[None] for each in (q[own], k[keys], v[keys]))
        attended = F.scaled_dot_product_attention(*row, attn_mask=seen, scale=about["scale"], enable_gqa=True)
        found.append(attended[0].transpose(0, 1))
    return torch.cat(found)


def _runs(cuts: Tensor) -> list[slice]:
    assert cuts.dtype == torch.int32
    return [slice(*pair) for pair in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)]


@pytest.mark.parametrize("pack", [PACK, (tree(70), tree(3))], ids=["trees", "rows"])
@pytest.mark.parametrize("window", BY_WINDOW)
def test_varlen_attention_sees_what_the_plain_path_sees(
    window: int | None, pack: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        monkeypatch.setattr(varlen, "varlen_attn", by_runs)
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
    if kernel == "liger":
        pytest.importorskip("liger_kernel")
    folder = save_family(family, tmp_path, head_dim=D)
    dtype = torch.bfloat16 if kernel == "varlen" else torch.float32
    plain, changed = (load_modules(folder, device="cuda", dtype=dtype, kernels=names) for names in ((), (kernel,)))
    assert_computes_alike(changed, plain)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # torch's compiler hides its own only while they are no errors
def test_blocks_are_compiled_once_for_packs_of_all_kinds(tmp_path: Path) -> None:
    """Computes graphs as they are traced, which torch's compiler would make faster."""
    graphs: list[Any] = []

    def traced(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    folder = save_family("gemma3", tmp_path)
    plain, changed = load_modules(folder), load_modules(folder)
    compile_layers(changed.layers[:1], traced)  # the other computes with it
    ours(changed, cases_of(plain)[:2], SHARING)
    num_graphs = len(graphs)
    assert num_graphs > 5

    assert_computes_alike(changed, plain)
    assert len(graphs) == num_graphs


class Written:
    """liger's functions, written out, for a machine without CUDA."""

    class LigerRMSNormFunction:
        @staticmethod
        def apply(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str, in_place: bool) -> Tensor:
            assert casting == ("gemma" if offset else "llama") and not in_place
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + weight)

    class LigerSiLUMulFunction:
        @staticmethod
        def apply(gate: Tensor, up: Tensor) -> Tensor:
            return F.silu(gate) * up

    class LigerGELUMulFunction:
        @staticmethod
        def apply(gate: Tensor, up: Tensor) -> Tensor:
            return F.gelu(gate, approximate="tanh") * up


@pytest.fixture
def written_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(ops=Written))


@pytest.mark.usefixtures("written_liger")
@pytest.mark.parametrize("family", ["llama3", "gemma3", "qwen3_moe"])
def test_ligers_kernels_stand_in_one_model_alone(family: str, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path)
    changed, plain = load_modules(folder, kernels=("liger",)), load_modules(folder)

    assert_computes_alike(changed, plain)
    replaced = {name for name, module in changed.model.named_modules() if "forward" in vars(module)}
    assert {"model.norm", "model.layers.0.input_layernorm"} < replaced
    assert ("model.layers.1.mlp" in replaced) == (family != "qwen3_moe")
    assert not any("forward" in vars(module) for module in plain.model.modules())


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["flash", "liger,compile", "varlen,varlen"])
def test_unknown_kernels_and_two_for_one_thing_are_refused(names: str) -> None:
    with pytest.raises(ValueError, match="varlen, and liger or compile"):
        TrainerSettings(trainer_kernels=names)


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({}, "MARLAAS_TRAINER_KERNELS=varlen, liger is for the transformers backbone on CUDA"),
        ({"trainer_backbone": "transformers"}, "MARLAAS_TRAINER_KERNELS=varlen: it runs on CUDA only"),
        ({"deterministic": True}, "no trainer_kernels"),
        ({"trainer_ranks": 2}, "MARLAAS_TRAINER_KERNELS=varlen: it runs on CUDA only"),
    ],
)
def test_kernels_are_refused_where_they_cannot_run(others: dict[str, Any], reason: str) -> None:
    settings = TrainerSettings.model_validate({"trainer_kernels": "varlen, liger", **others})
    assert settings.kernels == ("varlen", "liger")
    with pytest.raises(InvalidInput, match=reason):
        load_trainer(settings)


@pytest.mark.parametrize(
    ("capability", "settings", "expected"),
    [
        ((9, 0), {}, ("varlen",)),
        ((7, 5), {}, ()),
        ((9, 0), {"trainer_dtype": "float32"}, ()),
        ((9, 0), {"trainer_kernels": ""}, ()),
        ((9, 0), {"trainer_kernels": "compile"}, ("compile",)),
    ],
)
def test_flash_attention_is_chosen_where_it_runs(
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
    monkeypatch.setattr(kernel_choice, "_hindrance", Mock(return_value=""))
    if attends:  # wrongly
        monkeypatch.setattr(varlen, "varlen_attn", lambda q, *_, **about: attends(q))  # pyright: ignore
    with structlog.testing.capture_logs() as logs:
        backbone = load_backbone(TrainerSettings(trainer_backbone="transformers"), TINY)
    assert isinstance(backbone, ModulesBackbone) and backbone.model.config._attn_implementation == "marlaas_packed"
    (left_out,) = [line for line in logs if line["event"] == "device_kernels_left_out"]
    assert reason in left_out["reason"]


@pytest.mark.parametrize(("kernel", "reason"), [("varlen", "TRAINER_DTYPE=bfloat16"), ("liger", "marlaas.liger")])
def test_what_a_kernel_lacks_is_said(kernel: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(InvalidInput, match=rf"KERNELS={kernel}: .*{reason}"):
        refuse_kernels([kernel], torch.device("cuda"), torch.float32)
