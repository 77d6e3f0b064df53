"""Deterministic mode: what a run learns and is told depends on its operations in order, not on how they were sent, or beside whom."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from base_model.decoder import Decoder
from common.store.adapters import OPTIMIZER_FILE, PEFT_FILES, AdapterStore
from common.store.objects import Objects
from common.wire.messages import AdapterRef, LossSpec
from common.wire.operations import OperationResult, Operations, OperationsDone, RunOperation
from tests.support.run_cases import (
    carry_out,
    forward,
    forward_backward,
    make_datum,
    make_run,
    noisy,
    optim_step,
    segment,
)
from tests.support.trainer_cases import load_shallow, make_init, make_rows, make_step, nothing
from tests.trainer.test_trainer_fused import same_bytes
from trainer_service import run_step
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.handler import TrainHandler
from trainer_service.open_step import TrainState
from trainer_service.packing import Budget
from trainer_service.run_step import Gradient
from trainer_service.training import Trainer

pytestmark = pytest.mark.exact
ALIKE = tuple(
    replace(make_datum("ppo", 7, num_prompt=40), advantages=make_datum("ppo", i, num_prompt=40).advantages)
    for i in range(5)
)
LOG = (
    forward_backward(1, "cross_entropy"),
    forward_backward(2, "ppo", *ALIKE),
    forward(3, "gspo"),
    forward_backward(4, "gspo"),
    forward_backward(5, "dro", make_datum("dro", 9, num_prompt=70), make_datum("dro", 1, num_prompt=1, num_answer=1)),
    optim_step(6),
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_shallow()


def in_segments(trainer: Trainer, cuts: Sequence[int], state: TrainState) -> tuple[TrainState, list[OperationResult]]:
    """The log sent in segments that end before these operations, and the results of all."""
    results: list[OperationResult] = []
    gradient, ends = None, [*cuts, len(LOG)]
    for start, stop in zip([0, *cuts], ends, strict=True):
        computed = carry_out(trainer, LOG[start:stop], state, gradient)
        results += computed.results
        gradient = computed.gradient
        if computed.state is not None:
            return computed.state, results
    raise AssertionError("the log ends with an optim_step")


@pytest.mark.parametrize("cuts", [(3,), (1, 2, 3, 4, 5), (5,)], ids=str)
@pytest.mark.parametrize("tokens", [1, 150, 4096])
def test_one_segment_or_several_give_the_same_bits(decoder: Decoder, cuts: Sequence[int], tokens: int) -> None:
    trainer = Trainer(DecoderBackbone(decoder), deterministic=True)
    state = noisy(trainer)
    whole, expected = in_segments(trainer, (), state)

    parts, results = in_segments(Trainer(DecoderBackbone(decoder), Budget(tokens), deterministic=True), cuts, state)

    assert same_bytes(whole, parts)
    assert results == expected


@pytest.mark.parametrize("num_answered", [1, 3, 5])
def test_a_replay_of_what_was_answered_gives_the_same_bits(decoder: Decoder, num_answered: int) -> None:
    trainer = Trainer(DecoderBackbone(decoder), Budget(100), deterministic=True)
    state = noisy(trainer)
    whole, expected = in_segments(trainer, (), state)
    replayed = [replace(one, answered=one.seq <= num_answered) for one in LOG]

    computed = carry_out(trainer, replayed, state)

    assert computed.state is not None and same_bytes(whole, computed.state)
    assert list(computed.results) == expected[num_answered:]


def test_another_order_gives_other_bits(decoder: Decoder) -> None:
    trainer = Trainer(DecoderBackbone(decoder), deterministic=True)
    state = noisy(trainer)
    one, other = (carry_out(trainer, [*fbs, LOG[-1]], state).state for fbs in ([*LOG[:5]], [*LOG[:5]][::-1]))

    assert one is not None and other is not None
    assert not same_bytes(one, other) and torch.allclose(one.values_P, other.values_P, atol=1e-2)


@pytest.mark.parametrize("tokens", [1, 150, 4096])
def test_runs_and_jobs_in_the_same_forwards_have_the_bits_that_each_has_alone(decoder: Decoder, tokens: int) -> None:
    # Given two runs with the shape of a job's adapter, and a job whose loss asks for the base too
    alone = Trainer(DecoderBackbone(decoder), deterministic=True)
    states = [noisy(alone, "run-1"), noisy(alone, "run-22")]
    job = make_step(0, make_rows(num_groups=3), loss=LossSpec("gspo", kl_coef=0.1))
    start = alone.init(make_init())
    expected = [carry_out(alone, LOG, state) for state in states]
    lone = alone.step(job, start, nothing)

    # When they are computed together
    fused = Trainer(DecoderBackbone(decoder), Budget(tokens), deterministic=True)
    runs = [run_step.begin(fused, LOG, state, Gradient(1, 0)) for state in states]
    step = fused.begin(job, start)
    while company := [one.opened for one in (runs[0], step, runs[1]) if not one.opened.done]:
        fused.micro_batch(company)

    # Then each has its own bits
    assert same_bytes(fused.finish(step).state, lone.state)
    for run, alone_ in zip(runs, expected, strict=True):
        found = run_step.finish(fused, run)
        assert found.state is not None and alone_.state is not None and same_bytes(found.state, alone_.state)
        assert found.results == alone_.results


async def versions(store: AdapterStore, job: str) -> list[dict[str, bytes]]:
    return [await store.read(AdapterRef("t", job, version), (*PEFT_FILES, OPTIMIZER_FILE)) for version in (1, 2)]


def log_of(version: int, operations: Sequence[RunOperation], job: str = "run-1") -> Operations:
    """The log as one message, moved on by as many numbers as the versions before took."""
    moved = [replace(one, seq=one.seq + 6 * version) for one in operations]
    return segment(*moved, version=version, job=job)


async def test_handlers_give_the_same_versions_however_the_log_was_sent_and_beside_whom(
    decoder: Decoder, tmp_path: Path
) -> None:
    found: list[tuple[list[dict[str, bytes]], dict[str, bytes]]] = []
    for kind in ("whole", "in segments, by two trainers, beside others"):
        (tmp_path / kind).mkdir()
        store = AdapterStore(Objects.open((tmp_path / kind).as_uri()))
        one, other = (
            TrainHandler(Trainer(DecoderBackbone(decoder), deterministic=True), store, "tiny", worker=w) for w in "ab"
        )
        for init in (make_run(), make_run("run-2"), make_init()):
            await one(init, nothing)
        if kind == "whole":
            for version in (0, 1):
                await one(log_of(version, LOG), nothing)
            await one(make_step(0, make_rows()), nothing)
        else:
            beside = [other(make_step(0, make_rows()), nothing)]
            beside += [other(log_of(0, LOG, "run-2"), nothing)]
            await asyncio.gather(one(segment(*LOG[:2]), nothing), *beside)
            [(_, absent)] = await other(segment(*LOG[2:], first=2), nothing)
            assert isinstance(absent, OperationsDone) and absent.absent
            replayed = [replace(each, answered=each.seq <= 2) for each in LOG]
            await asyncio.gather(
                other(segment(*replayed), nothing),
                one(log_of(1, LOG, "run-2"), nothing),
            )
            await other(log_of(1, LOG), nothing)
        found.append((await versions(store, "run-1"), await store.read(AdapterRef("t", "j", 1))))

    assert found[0] == found[1]


async def test_outputs_after_the_commit_are_the_bits_that_were_lost(decoder: Decoder, tmp_path: Path) -> None:
    store = AdapterStore(Objects.open(tmp_path.as_uri()))
    first, again = (
        TrainHandler(Trainer(DecoderBackbone(decoder), deterministic=True), store, "tiny") for _ in range(2)
    )
    await first(make_run(), nothing)

    answers = [await handler(segment(*LOG), nothing) for handler in (first, again)]

    assert answers[0] == answers[1]
