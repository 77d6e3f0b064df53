"""Whole layers as one graph: it computes what the plain path does, whatever the tokens and adapters of a pass.

`aot_eager` makes the graphs that a device compiles, and computes them operator by operator.
"""

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support import flash
from tests.support.families import FAMILIES, save_family
from tests.trainer.test_modules_backbone import APART, SHARING, assert_alike, make_case, ours
from trainer_service.backbone.device_kernels import varlen
from trainer_service.backbone.device_kernels.kernel_choice import compile_layers
from trainer_service.backbone.loading import load_modules
from trainer_service.backbone.modules import ModulesBackbone

pytestmark = pytest.mark.filterwarnings("default")  # torch's compiler hides its own only while they are no errors
KINDS_OF_LAYERS = {"gemma3": 2}
NOT_COMPILED = {"qwen3_moe"}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    counters.clear()


def compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModulesBackbone:
    flash.use(monkeypatch)
    backbone = load_modules(folder)
    backbone.model.set_attn_implementation(varlen.NAME)
    compile_layers(backbone, "aot_eager")
    return backbone


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NOT_COMPILED])
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
    assert graphs() == KINDS_OF_LAYERS.get(family, 1)
