"""Memory on several ranks: as much as the fullest one has, and what happens when it runs out on one of them."""

import contextlib
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from tests.support.families import NUM_LAYERS, save_family
from tests.trainer.test_modules_backbone import SHARING, Case, make_case, ours
from tests.trainer.test_ranks import assert_alike, ranks
from tests.trainer.test_trainer_fused import job, together
from trainer_service.backbone.loading import load_modules
from trainer_service.backbone.modules import ModulesBackbone
from trainer_service.backbone.sharding import bytes_held
from trainer_service.fusion import Fusion
from trainer_service.memory import kept_bytes
from trainer_service.open_step import Trained
from trainer_service.packing import Budget
from trainer_service.ranks.backbone import RankedBackbone
from trainer_service.training import DoesNotFit, Trainer

LITTLE = 24 << 20
"""Bytes."""


# ---- the fullest rank -----------------------------------------------------------------------------------------------


# ---- two ranks ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> ModulesBackbone:
    return load_modules(folder)


@pytest.fixture(scope="module")
def two(folder: Path) -> Generator[RankedBackbone]:
    with ranks(folder, 2) as backbone:
        yield backbone


@pytest.fixture
def cases(alone: ModulesBackbone) -> list[Case]:
    return [make_case(alone, seed, rank, 1.0) for seed, rank in enumerate((2, 8))]


class Narrow(torch.nn.Module):
    """A part of a layer in which memory runs out, going forward or backward, beyond so many tokens."""

    def __init__(self, inner: Any, most: int, *, backward: bool) -> None:
        super().__init__()
        self.inner, self.most, self.backward = inner, most, backward

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.most and self.backward and x.requires_grad:
            x.register_hook(self._fail)
        elif x.shape[1] > self.most and not self.backward:
            raise MemoryError("no room")
        return self.inner(x)

    def _fail(self, _: Tensor) -> Tensor:
        raise MemoryError("no room")


@contextlib.contextmanager
def narrow(layer: Any, most: int, *, backward: bool) -> Generator[None]:
    inner = layer.mlp
    layer.mlp = Narrow(inner, most, backward=backward)
    try:
        yield
    finally:
        layer.mlp = inner


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("num_checkpointed", [0, 1, NUM_LAYERS])
def test_a_rank_that_runs_out_of_memory_stays_in_step(
    two: RankedBackbone, alone: ModulesBackbone, cases: list[Case], backward: bool, num_checkpointed: int
) -> None:
    backbone = replace(two, own=two.own.checkpointing(num_checkpointed))
    for layer in two.own.layers:
        with narrow(layer, 1, backward=backward), pytest.raises(MemoryError, match="on rank 0: no room"):
            ours(backbone, cases, SHARING)
        assert bytes_held(two.own) == two.ranks.bytes_held[0]
        assert_alike(backbone, alone, cases, SHARING)


@contextlib.contextmanager
def little_memory(process: psutil.Process, num_bytes: int) -> Generator[None]:
    """Lets the kernel give a process no more than so many bytes."""
    _, hard = process.rlimit(psutil.RLIMIT_AS)
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms + num_bytes, hard))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_AS, (hard, hard))


async def test_a_rank_to_which_the_kernel_gives_no_more_ends_nothing(
    two: RankedBackbone, alone: ModulesBackbone
) -> None:
    # Given a step that needs more on each rank than the second one may take
    fusion = Fusion(Trainer(two, Budget(1 << 30), share_prefixes=False))
    one = job(fusion.trainer, 0, num_groups=300)
    single = Trainer(alone, Budget(1 << 30), share_prefixes=False)
    made: list[Trained] = []
    assert kept_bytes(lambda: made.extend(together(single, [one]))) > 5 * LITTLE
    together(fusion.trainer, [job(fusion.trainer, 1)])  # what a first pass makes is there: tensors are refused then

    # When the kernel refuses what the first layer needs, the pass alone ends
    with (
        little_memory(psutil.Process(two.ranks.processes[0].pid), LITTLE),
        pytest.raises(DoesNotFit, match="on rank 1"),
    ):
        fusion.trainer.micro_batch([fusion.trainer.begin(*one).opened])
    found = await fusion.train(*one, lambda: None)

    torch.testing.assert_close(found.state.values_P, made[0].state.values_P, atol=1e-5, rtol=1e-5)
    assert two.ranks.processes[0].poll() is None
