"""Whole layers as one graph: it computes what the plain path does, whatever the tokens and adapters of a pass.

`aot_eager` makes the graphs that a device compiles, and computes them operator by operator.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks._gpu_bases import SHAPES_OF_BASES, Shape, random_decoder, random_modules
from tests.support import flash
from tests.support.families import save_family
from tests.support.launches import Launches, counting
from tests.trainer.test_modules_backbone import APART, SHARING, assert_alike, make_case, ours
from trainer_service.backbone.device_kernels import varlen
from trainer_service.backbone.device_kernels.kernel_choice import compile_layers
from trainer_service.backbone.loading import load_modules
from trainer_service.backbone.modules import ModulesBackbone
from trainer_service.packing import trees

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # torch's compiler hides its own only while they are no errors
]
KINDS_OF_LAYERS = {"qwen2": 1, "qwen3": 1, "gemma3": 2}
"""Biases; norms of queries and keys; a window in some layers, and four norms. The others' layers have less, or experts."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.compiler.reset()
    counters.clear()


def compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModulesBackbone:
    flash.use(monkeypatch)
    backbone = load_modules(folder)
    backbone.model.set_attn_implementation(varlen.NAME)
    compile_layers(backbone, "aot_eager")
    return backbone


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("family", KINDS_OF_LAYERS)
def test_a_kind_of_layer_is_one_graph_for_passes_of_all_shapes(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_family(family, tmp_path)
    plain, changed = load_modules(folder), compiled(folder, monkeypatch)
    cases = [make_case(plain, seed, rank, 1.0) for seed, rank in enumerate((8, 8, 64, 1))]
    cases.append(make_case(plain, 9, 3, 0.7, targets=("q_proj", "o_proj")))

    for some, cost in (
        (cases, SHARING),
        (cases[:1], SHARING),
        (cases[:2], APART),
        (cases[4:], APART),
        (cases[1:], APART),
    ):
        for backbone in (changed, changed.checkpointing(1)):
            for one, other in zip(ours(backbone, some, cost), ours(plain, some, cost), strict=True):
                assert_alike(one, other)
    assert graphs() == KINDS_OF_LAYERS[family]


LAUNCHES = {
    "marlaas.lora_linear.default": 3,  # product, shrink, expand
    "marlaas.lora_linear_backward.default": 4,  # product, shrink, expand, gradients
    "marlaas.attend_runs.default": 3,  # keys, values, attention
    "marlaas.attend_runs_backward.default": 9,  # keys, values, 6 of flash attention with grouped heads, sums of gathered keys
}
"""Kernels of each operator on CUDA."""
TOKENS, NUM_LAYERS, OUTSIDE = 7432, 28, 20e9
"""Tokens of a fused step of 8 jobs of Qwen3-0.6B, its layers, and bytes beyond them."""


def test_a_layer_of_qwen3_launches_few_kernels_that_move_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    flash.use(monkeypatch)
    qwen = SHAPES_OF_BASES["qwen3-0.6b"]
    shape = Shape(replace(qwen.config, num_layers=2, vocab=256), qwen.inner)
    backbone = random_modules(random_decoder(shape, torch.device("cpu"), torch.bfloat16))
    assert isinstance(backbone, ModulesBackbone)
    backbone.model.set_attn_implementation(varlen.NAME)
    found: list[Launches] = []
    compile_layers(backbone, counting(found, monkeypatch))
    case = make_case(backbone, 0, 8, 1.0)
    ours(backbone, [case], SHARING)

    assert len(found) == 2 and graphs() == 1  # forward and backward, of both layers
    operators = sum(LAUNCHES[name] for graph in found for name in graph.operators)
    assert operators == 7 * (3 + 4) + 3 + 9
    assert sum(len(graph.fused) for graph in found) <= 20
    tokens = sum(len(tree) for tree in trees(case.batch, np.ones(len(case.batch.inputs), bool), SHARING))
    fused = sum(sum(graph.fused) for graph in found) / tokens
    linears = backbone.linear_shapes().values()
    products = sum(2 * (5 * width + 6 * out) + 2 * 2 * out * width / TOKENS for out, width in linears) / 2
    assert NUM_LAYERS * TOKENS * (fused + products) + OUTSIDE < 150e9
