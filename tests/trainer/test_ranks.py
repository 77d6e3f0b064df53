"""Several ranks of one trainer: what one computes, with a part of the base model each, and an end together."""

import contextlib
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from common.errors import InvalidInput
from tests.support.families import NUM_LAYERS, save_family
from tests.support.forked_ranks import forked_ranks
from tests.support.ranked_trainer import forked
from tests.support.trainer_cases import TINY, load_tiny
from tests.trainer.test_modules_backbone import APART, CLOSE, SHARING, Case, make_case, ours
from tests.trainer.test_trainer_fused import assert_each_learned_alone, job, together
from trainer_service.__main__ import load_trainer
from trainer_service.backbone.loading import load_modules
from trainer_service.backbone.modules import ModulesBackbone
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.backbone.sharding import bytes_held
from trainer_service.memory import fit
from trainer_service.packing import Budget, Cost
from trainer_service.ranks.backbone import RankedBackbone, load_ranks
from trainer_service.settings import TrainerSettings
from trainer_service.training import Trainer


@contextlib.contextmanager
def ranks(folder: Path, number: int, device: str = "cpu") -> Generator[RankedBackbone]:
    torch.set_num_threads(1)
    settings = TrainerSettings(trainer_ranks=number, trainer_device=device, trainer_dtype="float32")
    with forked_ranks():
        backbone = load_ranks(settings, folder)
    try:
        yield backbone
    finally:
        backbone.ranks.close()


# ---- shares ---------------------------------------------------------------------------------------------------------


# ---- the same results -----------------------------------------------------------------------------------------------

ALIKE = (
    ("qwen3", 2),
    pytest.param("llama3", 4, marks=pytest.mark.slow),
    pytest.param("gemma3", 2, marks=pytest.mark.slow),
    pytest.param("qwen3_moe", 4, marks=pytest.mark.slow),
)
"""Families with one table for input and output and with two, with a window, with experts; and numbers of ranks."""


def cases_on(backbone: ModulesBackbone) -> list[Case]:
    cases = [make_case(backbone, seed, *about) for seed, about in enumerate(((1, 1.0), (8, 0.7), (8, 1.3)))]
    return [*cases, make_case(backbone, 9, 3, 0.7, targets=("q_proj", "o_proj"))]


@pytest.mark.parametrize(("family", "number"), ALIKE)
def test_ranks_compute_the_log_probs_and_gradients_of_one_with_a_part_of_the_base_each(
    tmp_path: Path, device: str, family: str, number: int
) -> None:
    if device == "cuda" and torch.cuda.device_count() < number:
        pytest.skip(f"{number} ranks need as many CUDA devices")
    folder = save_family(family, tmp_path)
    alone = load_modules(folder)
    cases = cases_on(alone)
    whole_bytes = bytes_held(alone)

    with ranks(folder, number, device) as backbone:
        assert sum(backbone.ranks.bytes_held) == whole_bytes
        assert max(backbone.ranks.bytes_held) <= 1.01 * whole_bytes / number
        for cost in (SHARING, APART):
            for num_checkpointed in (0, 1, NUM_LAYERS):
                some = replace(backbone, own=backbone.own.checkpointing(num_checkpointed))
                assert_alike(some, alone, cases, cost)
        assert_alike(backbone, alone, cases[:1], SHARING)  # two sequences, for all ranks
        assert bytes_held(backbone.own) == backbone.ranks.bytes_held[0]


def assert_alike(found: RankedBackbone, expected: ModulesBackbone, cases: Sequence[Case], cost: Cost | None) -> None:
    for (logprobs, grads), (their_logprobs, their_grads) in zip(
        ours(found, cases, cost), ours(expected, cases, cost), strict=True
    ):
        torch.testing.assert_close(logprobs, their_logprobs, atol=CLOSE, rtol=CLOSE)
        for name, grad in their_grads.items():
            torch.testing.assert_close(grads[name], grad, atol=CLOSE, rtol=CLOSE)
        assert max(float(grad.abs().max()) for grad in their_grads.values()) > 1e-3


@pytest.fixture(scope="module")
def two() -> Generator[RankedBackbone]:
    with ranks(TINY, 2) as backbone:
        yield backbone


def test_jobs_on_two_ranks_learn_what_each_learns_alone_on_one(two: RankedBackbone) -> None:
    # Given jobs of several ranks, targets, losses, temperatures, one of them with KL to the base
    decoder = Trainer(DecoderBackbone(load_tiny()))
    jobs = [job(decoder, number) for number in range(6)]

    # When two ranks train them in micro-batches of some sequences, after one that was given up
    trainer = Trainer(two, Budget(200))
    left = trainer.begin(*jobs[0])
    trainer.micro_batch([left.opened])
    trainer.discard(left.opened)
    found = together(trainer, jobs)
    counters = two.counters()

    # Then each has learned what it learns alone, and both have done their part
    assert_each_learned_alone(jobs, found, decoder)
    shares = [counters["rank_0_tokens"], counters["rank_1_tokens"]]
    assert min(shares) > 0.3 * sum(shares) and counters["ranks_s"] > 0


def test_a_token_takes_as_much_memory_on_its_rank_as_on_one_alone(two: RankedBackbone) -> None:
    alone = Trainer(load_modules(TINY), Budget(500))
    fit(alone, 1 << 30)
    trainer = Trainer(two, Budget(1000))
    fit(trainer, 1 << 30)
    assert trainer.budget.bytes_per_token == pytest.approx(alone.budget.bytes_per_token, rel=0.01)

    # When there is room for less than the half of a micro-batch on each rank
    fit(trainer, int(0.7 * 500 * trainer.budget.bytes_per_token))

    assert isinstance(trainer.backbone, RankedBackbone)
    assert 0 < trainer.backbone.own.num_checkpointed < len(two.own.layers)


# ---- refusals -------------------------------------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "deterministic mode needs .*trainer_ranks=1": {"deterministic": True},
    "deterministic mode needs .*trainer_backbone not transformers": {
        "deterministic": True,
        "trainer_ranks": 1,
        "trainer_backbone": "transformers",
    },
    "trainer_ranks above 1 needs trainer_backbone=transformers": {"trainer_backbone": "decoder"},
    "no trainer_kernels=compile": {"trainer_kernels": "compile"},
    "trainer_ranks=2 needs trainer_device=cpu or cuda": {"trainer_device": "cuda:1"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_settings_of_which_ranks_can_make_nothing_are_refused_by_name(reason: str) -> None:
    settings = TrainerSettings.model_validate({"trainer_ranks": 2, **REFUSED[reason]})
    with pytest.raises(InvalidInput, match=reason):
        load_trainer(settings)


# ---- an end together ------------------------------------------------------------------------------------------------


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("mode", ["busy", pytest.param("idle", marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_trainer_with_one_line(tmp_path: Path, mode: str) -> None:
    with forked(tmp_path, 60, busy=mode == "busy") as trainer:
        psutil.Process(trainer.other).kill()
        status, errors = trainer.ended()

    lines = [line for line in errors.splitlines() if line.startswith("trainer: ")]
    assert status == 1
    assert lines == ["trainer: rank 1 ended with status -9; the trainer ends, and its work is delivered again"], errors


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_trainer_and_goes_with_it(tmp_path: Path) -> None:
    with forked(tmp_path, 5, busy=True) as trainer:
        (other := psutil.Process(trainer.other)).suspend()
        status, errors = trainer.ended()

        (line,) = [line for line in errors.splitlines() if line.startswith("trainer: ")]
        assert status == 1
        assert "the ranks are out of step" in line
        while not is_gone(other):
            time.sleep(0.02)


@pytest.mark.slow
def test_ranks_end_with_the_first(tmp_path: Path) -> None:
    with forked(tmp_path, 60, busy=False) as trainer:
        other = psutil.Process(trainer.other)
        trainer.process.kill()
        while not is_gone(other):
            time.sleep(0.02)
