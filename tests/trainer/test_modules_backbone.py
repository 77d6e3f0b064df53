"""The transformers backbone beside transformers + PEFT: the same log-probs and gradients, for all its families.

Axes: M trained tokens.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, OPTConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from base_model.adapter import PEFT_PREFIX, Adapter, init_adapter, save_adapter
from common.errors import InvalidInput
from common.wire.messages import LoraSpec, LossSpec
from manager_service.http.server import weights_of
from rollout_service.process.adapter_files import linear_shapes
from tests.support.families import FAMILIES, NUM_LAYERS, VOCAB, save_family
from tests.support.trainer_cases import make_rows
from trainer_service import lora
from trainer_service.backbone.attention import NAME
from trainer_service.backbone.interface import Backbone, Sequences
from trainer_service.backbone.loading import load_modules
from trainer_service.batch import Batch, parse_rows
from trainer_service.losses import batch_of, row_terms
from trainer_service.memory import kept_bytes
from trainer_service.packing import Cost, trees

SHARING, APART = Cost(per_token=1000, per_pair=1), None
CLOSE = 1e-5
ROUNDED_LOGPROB, ROUNDED_GRADIENT = 0.05, 0.1
"""Tolerances of a base in bfloat16: the mean difference of a log-prob, and the gradient's distance over its norm."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save_family(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@dataclass(frozen=True)
class Case:
    """One adapter with the rows that it trains."""

    adapter: Adapter
    batch: Batch
    temperature: float

    def coefficients(self, row: int) -> Tensor:
        """The weight of each target's log-prob, [M]."""
        drawn_M = np.random.default_rng(row).normal(size=len(self.batch.targets[row]))
        return torch.from_numpy(drawn_M.astype(np.float32) / 50)


def make_case(backbone: Backbone, seed: int, rank: int, temperature: float, targets: tuple[str, ...] = ()) -> Case:
    adapter = init_adapter(LoraSpec(rank, 2.0 * rank, targets), backbone.linear_shapes(), seed)
    generator = torch.Generator().manual_seed(seed)
    b = {name: 0.1 * torch.randn(factor.shape, generator=generator) for name, factor in adapter.b.items()}
    rows = parse_rows(make_rows(seed, num_groups=2, group_size=3), version=0, vocab=VOCAB, context=128)
    loss = LossSpec()
    return Case(Adapter(adapter.spec, adapter.a, b), batch_of(rows, row_terms(rows, loss), loss, 0), temperature)


Found = tuple[Tensor, dict[str, Tensor]]
"""Log-probs of all targets, row by row; the gradients of a random sum of them, by the factor's name."""


def ours(backbone: Backbone, cases: Sequence[Case], cost: Cost | None) -> list[Found]:
    """All cases in one pass."""
    stacks: dict[lora.AdapterLayout, lora.AdapterStack] = {}
    placed: list[tuple[Case, lora.AdapterStack, int]] = []
    for case in cases:
        layout = lora.AdapterLayout.of(case.adapter)
        stack = stacks.get(layout) or stacks.setdefault(layout, backbone.stack(layout))
        placed.append((case, stack, stack.put(lora.flatten(case.adapter), case.adapter.scale)))
    placed.sort(key=lambda each: id(each[1]))
    packed = [
        (case, tree, (stack, place))
        for case, stack, place in placed
        for tree in trees(case.batch, np.ones(len(case.batch.inputs), bool), cost)
    ]
    rows = [(case, row) for case, tree, _ in packed for row in tree.rows]
    targets = [case.batch.targets[row] for case, row in rows]
    sequences = Sequences([tree for _, tree, _ in packed], targets, [case.temperature for case, _ in rows])
    logprobs_M = backbone.logprobs(sequences, [adapter for *_, adapter in packed])
    with torch.no_grad():  # as for a loss with KL, between forward and backward
        backbone.logprobs(sequences, None)
    coefficients_M = torch.cat([case.coefficients(row) for case, row in rows]).to(backbone.device)
    (logprobs_M * coefficients_M).sum().backward()  # pyright: ignore
    by_row = zip(rows, logprobs_M.detach().cpu().split([*map(len, targets)]), strict=True)
    known = {(id(case), row): values_M for (case, row), values_M in by_row}
    grads = {id(case): named(case, stack.gradient(place).cpu().clone()) for case, stack, place in placed}
    return [
        (torch.cat([known[id(case), row] for row in range(len(case.batch.inputs))]), grads[id(case)]) for case in cases
    ]


def named(case: Case, grad_P: Tensor) -> dict[str, Tensor]:
    grads = lora.unflatten(grad_P, lora.AdapterLayout.of(case.adapter), case.adapter.spec)
    return {f"{name}.lora_{kind}": f for kind, side in (("A", grads.a), ("B", grads.b)) for name, f in side.items()}


def theirs(folder: Path, case: Case, adapter_folder: Path) -> Found:
    """The same by PEFT, a row at a time."""
    from peft import PeftModel  # here: it takes each process that collects tests a second

    adapter_folder.mkdir()
    for name, data in save_adapter(case.adapter, "base").items():
        (adapter_folder / name).write_bytes(data)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, str(adapter_folder), is_trainable=True)
    by_row: list[Tensor] = []
    batch = case.batch
    for inputs, predictors, targets in zip(batch.inputs, batch.predictors, batch.targets, strict=True):
        logits_TV = model(input_ids=torch.from_numpy(inputs)[None], use_cache=False).logits[0] / case.temperature
        logprobs_MV = logits_TV[torch.from_numpy(predictors)].log_softmax(-1)
        by_row.append(logprobs_MV.gather(1, torch.from_numpy(targets)[:, None]).squeeze(1))
    coefficients = [case.coefficients(row) for row in range(len(by_row))]
    (torch.cat(by_row) * torch.cat(coefficients)).sum().backward()  # pyright: ignore
    grads = {
        name.removeprefix(PEFT_PREFIX).removesuffix(".default.weight"): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return torch.cat(by_row).detach(), grads


def assert_alike(found: Found, expected: Found) -> None:
    torch.testing.assert_close(found[0], expected[0], atol=CLOSE, rtol=CLOSE)
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        torch.testing.assert_close(found[1][name], grad, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_of_mixed_adapters_are_pefts(
    bases: dict[str, Path], tmp_path: Path, device: str, family: str
) -> None:
    # Given adapters of several ranks, two of one rank, one with some targets alone, at several temperatures
    backbone = load_modules(bases[family], device=device)
    ranks = ((1, 1.0), (64, 0.7), (64, 1.3))
    cases = [make_case(backbone, seed, rank, temperature) for seed, (rank, temperature) in enumerate(ranks)]
    cases.append(make_case(backbone, 9, 3, 0.7, targets=("q_proj", "o_proj")))

    # When they go through the base in one pass, with shared beginnings or without
    shared, apart = (ours(backbone, cases, cost) for cost in (SHARING, APART))

    # Then each is as if PEFT had it alone, row by row
    for number, case in enumerate(cases):
        expected = theirs(bases[family], case, tmp_path / str(number))
        assert_alike(shared[number], expected)
        assert_alike(apart[number], expected)
        assert max(float(grad.abs().max()) for grad in expected[1].values()) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bfloat16_base_computes_what_a_float32_one_does_but_for_rounding(
    bases: dict[str, Path], device: str, family: str
) -> None:
    exact, rounded = (load_modules(bases[family], device=device, dtype=d) for d in (torch.float32, torch.bfloat16))
    cases = [make_case(exact, seed, rank, 1.0) for seed, rank in enumerate((1, 8))]

    for (logprobs_M, grads), (expected_M, their_grads) in zip(
        ours(rounded, cases, SHARING), ours(exact, cases, SHARING), strict=True
    ):
        assert logprobs_M.dtype == torch.float32
        assert float((logprobs_M - expected_M).abs().mean()) < ROUNDED_LOGPROB
        found_P, exact_P = (torch.cat([each[name].flatten() for name in grads]) for each in (grads, their_grads))
        assert float((found_P - exact_P).norm() / exact_P.norm()) < ROUNDED_GRADIENT


def test_layers_of_odd_widths_train_alike(tmp_path: Path, device: str) -> None:
    # Given a base that no grouped product serves: rows of 18 floats are no multiple of 16 bytes
    folder = save_family(
        "llama3", tmp_path / "base", hidden_size=18, num_attention_heads=3, num_key_value_heads=1, head_dim=6
    )
    backbone = load_modules(folder, device=device)
    cases = [make_case(backbone, seed, 4, 1.0) for seed in range(2)]

    found = ours(backbone, cases, SHARING)

    for number, (case, one) in enumerate(zip(cases, found, strict=True)):
        assert_alike(one, theirs(folder, case, tmp_path / str(number)))


def drop_out(layer: Any, _: Any, out: Tensor) -> Tensor:
    return F.dropout(out, 0.5, layer.training)


@pytest.mark.parametrize(("family", "num_layers"), [("gemma3", 1), ("qwen3_moe", NUM_LAYERS)])
def test_checkpointed_layers_give_the_same_gradients(
    bases: dict[str, Path], device: str, family: str, num_layers: int
) -> None:
    plain = load_modules(bases[family], device=device)
    for layer in plain.layers:  # as some families drop out by themselves
        layer.register_forward_hook(drop_out)
    saving = plain.checkpointing(num_layers)
    cases = [make_case(plain, seed, rank, 1.0) for seed, rank in enumerate((2, 8))]

    expected = ours(plain, cases, SHARING)
    kept = [kept_bytes(lambda each=each: compute(each, cases)) for each in (plain, saving)]
    found = ours(saving, cases, SHARING)

    for one, other in zip(found, expected, strict=True):
        assert_alike(one, other)
    assert kept[1] < kept[0]


def compute(backbone: Backbone, cases: Sequence[Case]) -> None:
    ours(backbone, cases, SHARING)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "quantization_config 'bitsandbytes'": ("llama3", {"quantization_config": {"quant_method": "bitsandbytes"}}),
    "rope_parameters of type 'dynamic'": (
        "llama3",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}},
    ),
    "layer_types chunked_attention": ("qwen3", {"layer_types": ["chunked_attention", "full_attention"]}),
    "final_logit_softcapping 30.0": ("gemma3", {"final_logit_softcapping": 30.0}),
    "attn_logit_softcapping 20.0": ("gemma3", {"attn_logit_softcapping": 20.0}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_computed_is_refused_by_name(bases: dict[str, Path], tmp_path: Path, reason: str) -> None:
    family, changes = REFUSED[reason]
    folder = shutil.copytree(bases[family], tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))

    with pytest.raises(InvalidInput, match=reason):
        load_modules(folder)


def test_missing_and_surplus_weights_are_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(bases["qwen2"], tmp_path / "base")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.surplus.weight"] = weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(
        InvalidInput, match=r"1 missing weights, such as model\.norm\.weight, nor .* 1 unexpected weights"
    ):
        load_modules(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_manager_trainer_and_vllm_know_the_same_layers_that_an_adapter_may_target(
    bases: dict[str, Path], family: str, tmp_path: Path
) -> None:
    trained = load_modules(bases[family]).linear_shapes()
    shutil.copy(bases[family] / "config.json", tmp_path)  # all that a manager has of a base from the hub
    assert trained == weights_of(bases[family]).shapes == weights_of(tmp_path).shapes == linear_shapes(bases[family])
    assert ("layers.1.mlp.up_proj" in trained) == (family != "qwen3_moe")


def change_attention(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Has layers call our attention with other arguments than their own."""
    known: Any = ALL_ATTENTION_FUNCTIONS
    ours: Any = known[NAME]

    def changed(*given: Any, **named: Any) -> Any:
        return ours(*given, **named | changes)

    monkeypatch.setitem(known._global_mapping, NAME, changed)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"scaling": 3.0}, r"log-probs of .* are off by"), ({"sliding_window": None}, "do not say their sliding window")],
)
def test_layers_that_call_their_attention_otherwise_than_transformers_are_refused_when_they_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str
) -> None:
    folder = save_family("mistral", tmp_path, sliding_window=64)  # wider than the rows that are compared
    change_attention(monkeypatch, **changes)
    with pytest.raises(InvalidInput, match=rf"model_type 'mistral': .*{reason}"):
        load_modules(folder)


def test_a_base_model_whose_adapters_would_have_other_names_is_refused(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_attention_heads": 4}
    config = OPTConfig(vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=128, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)  # pyright: ignore
    with pytest.raises(InvalidInput, match=r"'opt' \(its layers are not"):
        load_modules(tmp_path)


def test_a_model_type_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobodys"}')
    with pytest.raises(InvalidInput, match="nobodys"):
        load_modules(tmp_path)
