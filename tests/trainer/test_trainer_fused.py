"""Steps of several jobs in the same forwards and backwards: each learns what it learns alone."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given, settings

from base_model.decoder import Decoder
from common.errors import InvalidInput, TrainingFailed
from common.wire.messages import LoraSpec, LossSpec, OptimSpec, TrainStep
from tests.support.trainer_cases import load_shallow, load_tiny, make_init, make_rows, make_step, measured, nothing
from trainer_service.backbone.sequences import DecoderBackbone, checkpointed
from trainer_service.fusion import Fusion
from trainer_service.memory import kept_bytes
from trainer_service.open_step import OpenBatch, Trained, TrainState
from trainer_service.packing import Budget
from trainer_service.training import Trainer

LORAS = (
    LoraSpec(rank=4, alpha=8.0),
    LoraSpec(rank=4, alpha=2.0),
    LoraSpec(rank=1, alpha=1.0),
    LoraSpec(rank=7, alpha=3.0, targets=("q_proj", "up_proj")),
    LoraSpec(rank=4, targets=("down_proj", "v_proj")),
)
LOSSES = (
    LossSpec(),
    LossSpec(name="gspo", temperature=0.7),
    LossSpec(name="cispo", kl_coef=0.1),
    LossSpec(name="rloo", is_clip=1.5),
    LossSpec(name="dr_grpo", max_tokens=20, clip_high=0.1),
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_shallow()


def job(trainer: Trainer, number: int, *, num_groups: int = 3, group_size: int = 4) -> tuple[TrainStep, TrainState]:
    """A job that differs from its neighbours in all that may differ, its adapter not at zero any more."""
    spec, loss = LORAS[number % len(LORAS)], LOSSES[number // 2 % len(LOSSES)]
    state = trainer.init(make_init(f"job{number}", lora=spec))
    noise_P = torch.randn(len(state.values_P), generator=torch.Generator().manual_seed(number))
    rows = make_rows(number, num_groups=num_groups, group_size=group_size)
    optim = OptimSpec(1e-3 * (1 + number), weight_decay=0.1 * (number % 2), grad_clip=0.5 + number % 3)
    step = make_step(0, rows, f"job{number}", lora=spec, loss=loss, optim=optim)
    return step, replace(state, values_P=state.values_P + 0.02 * noise_P)


def together(trainer: Trainer, jobs: list[tuple[TrainStep, TrainState]]) -> list[Trained]:
    opened = [trainer.begin(*one) for one in jobs]
    while open_steps := [step for step in opened if not step.done]:
        trainer.micro_batch([step.opened for step in open_steps])
    return [trainer.finish(step) for step in opened]


def same_bytes(one: TrainState, other: TrainState) -> bool:
    pairs = ((one.values_P, other.values_P), (one.moments.mean_P, other.moments.mean_P))
    return all(torch.equal(a, b) for a, b in (*pairs, (one.moments.square_P, other.moments.square_P)))


def nearly(one: float | None, other: float | None) -> bool:
    """None: the step has no such metric."""
    return one is other or one == pytest.approx(other, rel=1e-3, abs=1e-6)


def assert_each_learned_alone(jobs: list[tuple[TrainStep, TrainState]], found: list[Trained], decoder: Trainer) -> None:
    """Compares what jobs learned with what each learns alone over our decoder."""
    for one, result in zip(jobs, found, strict=True):
        alone = decoder.step(*one, nothing)
        change = (alone.state.values_P - one[1].values_P).norm()
        assert float((result.state.values_P - alone.state.values_P).norm() / change) < 2e-3
        for name in ("loss", "kl", "clip_fraction", "sampling_gap", "grad_norm"):
            assert nearly(result.metrics[name], alone.metrics[name]), name


@pytest.mark.exact
@settings(max_examples=8, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True),
    num_groups=st.integers(1, 4),
    tokens=st.sampled_from([1, 150, 700, 4096]),
    share=st.booleans(),
)
def test_in_deterministic_mode_they_are_the_same_bytes(
    numbers: list[int], num_groups: int, tokens: int, share: bool
) -> None:
    decoder = load_shallow()
    alone = Trainer(DecoderBackbone(decoder), deterministic=True, share_prefixes=share)
    fused = Trainer(DecoderBackbone(decoder), Budget(tokens), deterministic=True, share_prefixes=share)
    jobs = [job(alone, number, num_groups=num_groups, group_size=2 + number % 4) for number in numbers]

    for one, (step, state) in zip(together(fused, jobs), jobs, strict=True):
        lone = alone.step(step, state, nothing)
        assert same_bytes(one.state, lone.state)


def poisoned(trainer: Trainer) -> tuple[TrainStep, TrainState]:
    """Its adapter is finite, its logits are not."""
    step, state = job(trainer, 0)
    return step, replace(state, values_P=torch.full_like(state.values_P, 1e30))


@pytest.mark.exact
def test_a_job_that_joins_late_and_one_that_leaves_change_nothing(decoder: Decoder) -> None:
    trainer = Trainer(DecoderBackbone(decoder), Budget(128), deterministic=True)
    jobs = [job(trainer, number, num_groups=6) for number in (0, 5, 1)]
    lone = [trainer.step(*one, nothing) for one in jobs]

    first, dropped = (trainer.begin(*one) for one in jobs[:2])
    trainer.micro_batch([first.opened, dropped.opened])
    trainer.discard(dropped.opened)
    late = trainer.begin(*jobs[2])
    while open_steps := [step for step in (first, late) if not step.done]:
        trainer.micro_batch([step.opened for step in open_steps])

    assert same_bytes(trainer.finish(first).state, lone[0].state)
    assert same_bytes(trainer.finish(late).state, lone[2].state)


@pytest.mark.exact
async def test_every_caller_gets_its_own_result_or_error(decoder: Decoder) -> None:
    fusion = Fusion(Trainer(DecoderBackbone(decoder), deterministic=True))
    jobs = [job(fusion.trainer, number) for number in (5, 0, 1)]
    wrong = [(replace_optim(jobs[0][0], float("inf")), jobs[0][1]), poisoned(fusion.trainer)]

    results = await asyncio.gather(
        *(fusion.train(*one, nothing) for one in (jobs[0], *wrong, *jobs[1:])), return_exceptions=True
    )

    assert isinstance(results.pop(1), InvalidInput) and isinstance(results.pop(1), TrainingFailed)
    for result, one in zip(results, jobs, strict=True):
        assert isinstance(result, Trained)
        assert same_bytes(result.state, Trainer(DecoderBackbone(decoder), deterministic=True).step(*one, nothing).state)


@pytest.mark.exact
async def test_steps_computed_at_once_have_the_bytes_of_each_alone(decoder: Decoder) -> None:
    fusion = Fusion(Trainer(DecoderBackbone(decoder), deterministic=True))
    step, state = job(fusion.trainer, 1, num_groups=100)
    small = [job(fusion.trainer, number) for number in (2, 3, 5)]
    computing = asyncio.Event()
    large = asyncio.create_task(fusion.train(msgspec.structs.replace(step, tenant="large"), state, computing.set))
    await computing.wait()

    results = [await fusion.train(*one, nothing) for one in small]

    assert fusion._express is not None and fusion._express.compute_s > 0  # pyright: ignore
    for result, one in zip([*results, await large], [*small, (step, state)], strict=True):
        assert same_bytes(result.state, Trainer(DecoderBackbone(decoder), deterministic=True).step(*one, nothing).state)


def replace_optim(step: TrainStep, rate: float) -> TrainStep:
    return make_step(0, make_rows(), step.job, optim=OptimSpec(rate))


class Breaking(Trainer):
    """Raises what nobody expects whenever a certain job takes part."""

    def micro_batch(self, opened: Sequence[OpenBatch], budget: Budget | None = None) -> None:
        Trainer.micro_batch(self, opened, budget)
        if any(one.state.spec == LORAS[1] for one in opened):
            raise MemoryError("no room for this one")


@pytest.mark.exact
async def test_an_unexpected_error_is_the_fault_of_one_job_alone(decoder: Decoder) -> None:
    fusion = Fusion(Breaking(DecoderBackbone(decoder), deterministic=True))
    jobs = [job(fusion.trainer, number) for number in (0, 1, 2)]

    first, broken, last = await asyncio.gather(*(fusion.train(*one, nothing) for one in jobs), return_exceptions=True)

    assert isinstance(broken, MemoryError)
    for result, one in ((first, jobs[0]), (last, jobs[2])):
        assert isinstance(result, Trained)
        assert same_bytes(result.state, Trainer(DecoderBackbone(decoder), deterministic=True).step(*one, nothing).state)


async def test_a_caller_that_is_cancelled_takes_its_step_out(decoder: Decoder) -> None:
    fusion = Fusion(Trainer(DecoderBackbone(decoder), Budget(32)))
    beats: list[int] = []
    stays, leaves = (
        asyncio.create_task(fusion.train(*job(fusion.trainer, number, num_groups=8), lambda: beats.append(1)))
        for number in (0, 5)
    )
    while not beats:
        await asyncio.sleep(0.001)

    leaves.cancel()

    assert (await stays).metrics["grad_norm"]
    assert leaves.cancelled()
    (stack,) = fusion.trainer._stacks.values()  # pyright: ignore[reportPrivateUsage]
    while not stack.empty:
        await asyncio.sleep(0.001)


def test_checkpointing_gives_the_same_gradient_for_less_memory() -> None:
    decoder = load_tiny()  # the less, the more layers
    plain, saving = Trainer(DecoderBackbone(decoder)), Trainer(DecoderBackbone(decoder, checkpointed))
    one = job(plain, 0)

    results = [trainer.step(*one, nothing) for trainer in (plain, saving)]

    assert torch.allclose(results[0].state.values_P, results[1].state.values_P, rtol=1e-4, atol=1e-6)
    budgets = [measured(trainer, 10**9) for trainer in (plain, saving)]
    assert budgets[1].bytes_per_token < 0.5 * budgets[0].bytes_per_token


def test_the_budget_is_what_a_micro_batch_keeps(decoder: Decoder) -> None:
    trainer = Trainer(DecoderBackbone(decoder), share_prefixes=False)
    budget = measured(trainer, 50_000_000)
    step = trainer.begin(*job(trainer, 0, num_groups=20))
    num_tokens = sum(len(tree) for tree in step.opened.queue)
    trainer.budget = Budget(1 << 30)

    kept = kept_bytes(lambda: trainer.micro_batch([step.opened]))

    assert kept == pytest.approx(step.opened.sums.num_forward * budget.bytes_per_token, rel=0.25)
    assert step.opened.sums.num_forward >= num_tokens
    assert not budget.holds(2, 25_000_000 // int(budget.bytes_per_token) + 32, branched=False)
