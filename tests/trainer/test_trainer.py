"""The trainer's handler: each version once, whatever happens."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from base_model.adapter import Adapter, init_adapter, save_adapter
from base_model.decoder import Decoder
from common.bus.streams import Cell
from common.errors import Unavailable
from common.models.base_digest import BaseIdentity
from common.store.adapters import OPTIMIZER_FILE, PEFT_FILES, AdapterStore, Manifest
from common.store.objects import Objects
from common.wire.messages import (
    AdapterRef,
    AdapterUpdate,
    Failure,
    Init,
    LoraSpec,
    LossSpec,
    OptimSpec,
    TrainStep,
    f32,
    i32,
)
from common.wire.operations import Forget, Forgotten
from common.wire.transcript import shown
from tests.support.trainer_cases import (
    LORA,
    NO_ROWS,
    FullDisk,
    load_shallow,
    make_init,
    make_rows,
    make_step,
    nothing,
    steps,
)
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.handler import TrainHandler
from trainer_service.open_step import OpenStep, TrainState
from trainer_service.optimiser import Moments, save_moments
from trainer_service.training import Trainer


class CountingTrainer(Trainer):
    """Also counts the steps that it began."""

    num_steps = 0

    def begin(self, message: TrainStep, state: TrainState) -> OpenStep:
        self.num_steps += 1
        return Trainer.begin(self, message, state)


class System:
    """A store on disk and the trainers that use it."""

    def __init__(self, decoder: Decoder, folder: Path) -> None:
        self.folder = folder
        self.decoder = decoder
        self.objects = FullDisk(Objects.open(folder.as_uri())._backend)  # pyright: ignore[reportPrivateUsage]
        self.store = AdapterStore(self.objects)
        self.first = self.handler()

    def handler(self, bits: str = "") -> TrainHandler:
        """One more trainer, with nothing in memory. `bits`: its fingerprint, in deterministic mode."""
        self.trainer = CountingTrainer(DecoderBackbone(self.decoder))
        fingerprints = {"trainer": bits} if bits else {}
        return TrainHandler(self.trainer, self.store, "tiny", retry_delays_s=(0.0, 0.0), fingerprints=fingerprints)

    async def run(self, *messages: Init | TrainStep, handler: TrainHandler | None = None) -> AdapterUpdate:
        """The update that follows the last message."""
        outs = [await (handler or self.first)(message, nothing) for message in messages]
        [(stream, update)] = outs[-1]
        assert stream == Cell("tiny").adapters(3) and isinstance(update, AdapterUpdate)
        return update

    async def manifest(self, version: int, job: str = "j") -> Manifest:
        found = await self.store.manifest(AdapterRef("t", job, version))
        assert found is not None
        return found

    async def weights(self, version: int, job: str = "j") -> bytes:
        return (await self.store.read(AdapterRef("t", job, version)))[PEFT_FILES[0]]

    def attempts(self, version: int, job: str = "j") -> list[Path]:
        return [p for p in (self.folder / f"adapters/t/{job}/{version:08d}").iterdir() if p.is_dir()]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_shallow()


@pytest.fixture
def system(decoder: Decoder, tmp_path: Path) -> System:
    return System(decoder, tmp_path)


async def test_init_makes_version_0_and_a_step_makes_version_1(system: System) -> None:
    started = await system.run(make_init())
    update = await system.run(make_step(0, make_rows()))

    assert started.adapter == AdapterRef("t", "j", 0) and started.failure is None
    assert update.adapter == AdapterRef("t", "j", 1) and update.failure is None
    assert (update.batch, update.next_group) == ("j/1", 4)
    manifest = await system.manifest(1)
    assert (manifest.parent, manifest.batch, manifest.trajectories) == (0, "j/1", ("j/0/0",))
    assert manifest.metrics == update.metrics and manifest.usage == update.usage
    assert update.usage.trained_tokens == len(make_rows().tokens)
    assert await system.weights(0) != await system.weights(1)


async def test_a_first_step_draws_the_version_0_that_an_init_makes_and_commits_it_before_its_own(
    system: System,
) -> None:
    step = replace(make_step(0, make_rows()), untrained=True)
    made = await system.run(step)
    found = [await system.manifest(version) for version in (0, 1)]
    assert made.failure is None and made.batch == "j/1" and found[0].created_at <= found[1].created_at
    assert (found[0].parent, found[0].batch, found[0].next_group) == (None, "j/init", 0)

    await system.run(make_init("same"), make_step(0, make_rows(), "same"))
    assert [await system.weights(v) for v in (0, 1)] == [await system.weights(v, "same") for v in (0, 1)]


async def test_a_first_step_goes_on_from_the_version_0_of_a_trainer_that_died(system: System) -> None:
    step, killed = replace(make_step(0, make_rows()), untrained=True), system.handler()

    async def die(*_: object) -> None:
        raise KeyboardInterrupt

    killed._fusion.train = die  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    with pytest.raises(KeyboardInterrupt):
        await killed(step, nothing)
    attempt = (await system.manifest(0)).attempt
    assert await system.store.manifest(AdapterRef("t", "j", 1)) is None

    both = await asyncio.gather(system.run(step), system.run(step, handler=system.handler()))
    assert both[0] == both[1] and both[0].failure is None
    assert [(await system.manifest(0)).attempt] == [path.name for path in system.attempts(0)] == [attempt]


async def test_a_version_of_a_base_model_whose_files_were_changed_is_not_trained(system: System) -> None:
    system.store.base = BaseIdentity("tiny", "t-1")
    await system.run(make_init())
    files = await system.store.read(AdapterRef("t", "j", 0))
    assert (
        json.loads(files["adapter_config.json"])["base_model_digest"] == (await system.manifest(0)).base_digest == "t-1"
    )
    system.store = AdapterStore(system.objects, BaseIdentity("tiny", "t-2"))
    update = await system.run(make_step(0, make_rows()), handler=system.handler())
    assert update.failure and "was trained on other files of 'tiny'" in update.failure.reason
    assert await system.store.manifest(AdapterRef("t", "j", 1)) is None


@pytest.mark.parametrize("began,late", [("aaa", ""), ("", "aaa"), ("aaa", "bbb")])
async def test_the_last_step_of_a_cancelled_job_is_not_trained_on_other_bits(
    system: System, began: str, late: str
) -> None:
    # Given a version trained in one mode, and a step that was under way when its job was cancelled
    await system.run(make_init(), make_step(0, make_rows()), handler=system.handler(began))
    last = make_step(1, make_rows())
    # When the cell is of another mode by now, the step fails
    refused = await system.run(last, handler=system.handler(late))
    assert refused.failure is not None and refused.failure.kind == "invalid"
    assert await system.store.manifest(AdapterRef("t", "j", 2)) is None
    # Then a trainer of the same bits still trains it
    assert (await system.run(last, handler=system.handler(began))).failure is None


async def test_a_message_delivered_twice_is_answered_from_the_manifest(system: System) -> None:
    first = await system.run(make_init(), make_step(0, make_rows()))

    other = system.handler()
    second = await system.run(make_init(), make_step(0, make_rows()), handler=other)

    assert second == first
    assert system.trainer.num_steps == 0


async def test_two_trainers_with_one_batch_commit_once_and_the_loser_cleans_up(system: System) -> None:
    await system.run(make_init())
    step, other = make_step(0, make_rows()), system.handler()

    one, two = await asyncio.gather(system.run(step), system.run(step, handler=other))

    assert one == two and one.failure is None
    assert [p.name for p in system.attempts(1)] == [(await system.manifest(1)).attempt]


async def test_a_version_that_another_batch_made_is_reported_with_that_batch(system: System) -> None:
    await system.run(make_init(), make_step(0, make_rows()))

    update = await system.run(make_step(0, make_rows(5), id="another"))

    assert update.batch == "j/1"


PLAIN = make_rows().transcript
INFINITE = replace(PLAIN, scores=np.full(PLAIN.num_written, np.inf, np.float32).tobytes())


@pytest.mark.parametrize(
    "step",
    [
        make_step(0, make_rows(rewards=f32([float("nan")] + [1.0] * 15))),
        make_step(0, make_rows(transcript=INFINITE)),
        make_step(0, make_rows(), optim=OptimSpec(1e3, weight_decay=1e37)),  # weights that overflow
    ],
)
async def test_what_is_not_finite_is_not_committed(system: System, step: TrainStep) -> None:
    await system.run(make_init())

    update = await system.run(step)

    assert update.failure is not None and update.failure.kind == "non_finite"
    assert update.adapter.version == 1 and update.batch == "j/1"
    assert await system.store.manifest(AdapterRef("t", "j", 1)) is None
    assert (await system.run(make_step(0, make_rows()))).failure is None


@pytest.mark.parametrize("name", [PEFT_FILES[0], OPTIMIZER_FILE])
async def test_a_corrupt_parent_is_a_failure_and_harms_no_other_job(system: System, name: str) -> None:
    await system.run(make_init(), make_init("other"))
    path = system.attempts(0)[0] / name
    path.write_bytes(path.read_bytes()[:-1] + b"!")

    handler = system.handler()
    update = await system.run(make_step(0, make_rows()), handler=handler)

    assert update.failure is not None and update.failure.kind == "corrupt_adapter"
    assert (await system.run(make_step(0, make_rows(), "other"), handler=handler)).failure is None


@pytest.mark.parametrize("change", ["wider", "without a module"])
async def test_an_adapter_of_another_base_fails_alone(system: System, change: str) -> None:
    shapes = system.decoder.linear_shapes()
    other = {name: (out, width + 8) for name, (out, width) in shapes.items()} if change == "wider" else shapes
    adapter = init_adapter(LORA, other, seed=1)
    if change != "wider":
        gone = adapter.names()[3]
        adapter = Adapter(LORA, *({n: t for n, t in side.items() if n != gone} for side in (adapter.a, adapter.b)))
    await system.run(make_init("good"))
    good = await system.store.manifest(AdapterRef("t", "good", 0))
    assert good is not None
    moments = Moments.zeros(sum(t.numel() for t in (*adapter.a.values(), *adapter.b.values())), torch.device("cpu"))
    files = save_adapter(adapter, "tiny") | {OPTIMIZER_FILE: save_moments(moments)}
    await system.store.commit(replace(good, adapter=AdapterRef("t", "bad", 0)), files)

    handler = system.handler()  # whose first adapter is the bad one
    bad = await system.run(make_step(0, make_rows(), "bad"), handler=handler)
    update = await system.run(make_step(0, make_rows(), "good"), handler=handler)

    assert bad.failure is not None and bad.failure.kind == "corrupt_adapter"
    assert "does not fit the base model" in bad.failure.reason and update.failure is None


async def test_a_batch_without_rows_commits_the_version_unchanged(system: System) -> None:
    update = await system.run(make_init(), make_step(0, NO_ROWS, trajectories=()))

    assert update.failure is None and update.metrics["no_signal"] == 1
    assert await system.weights(0) == await system.weights(1)


async def test_groups_of_equal_rewards_count_as_trained_but_need_no_forward(system: System) -> None:
    await system.run(make_init())

    update = await system.run(make_step(0, make_rows(rewards=f32([1.0] * 16))))

    assert update.failure is None and update.metrics["forward_tokens"] == 0
    assert update.usage.trained_tokens > 0 and update.metrics["num_groups"] == 4


async def test_optimiser_state_is_kept_for_the_newest_two_versions(system: System) -> None:
    await system.run(make_init(), *steps(3))

    kept = [(path / OPTIMIZER_FILE).exists() for version in range(4) for path in system.attempts(version)]

    assert kept == [False, False, True, True]
    assert all((path / PEFT_FILES[0]).exists() for version in range(4) for path in system.attempts(version))


async def test_versions_that_are_forgotten_lose_their_files_and_are_not_made_again(system: System) -> None:
    first, *later = steps(3)
    await system.run(make_init(), first, *later)
    forget = Forget(id="f", **first.about(), adapter=later[-1].adapter.next(), versions=(0, 1))
    [(_, done)] = await system.handler()(forget, lambda: None)
    assert isinstance(done, Forgotten) and done.forget == "f"

    assert [len(system.attempts(version)) for version in range(4)] == [0, 0, 1, 1]
    again = await system.run(first, handler=system.handler())
    assert again.failure is None and system.trainer.num_steps == 0, "answered from the manifest"


async def test_a_full_disk_loses_nothing(system: System) -> None:
    await system.run(make_init())
    system.objects.num_failures = 3

    with pytest.raises(Unavailable):
        await system.run(make_step(0, make_rows()))

    assert (await system.run(make_step(0, make_rows()))).failure is None


@pytest.mark.parametrize(
    "step",
    [
        make_step(0, make_rows(), loss=LossSpec(temperature=0.0)),
        make_step(0, make_rows(), optim=OptimSpec(float("inf"))),
        make_step(0, make_rows(version=1)),
        make_step(0, make_rows(lengths=i32([1] * 16))),
        make_step(0, make_rows(transcript=shown([100_000] * len(make_rows().tokens)))),
        make_init("other", lora=LoraSpec(targets=("nonsense",))),
    ],
)
async def test_what_cannot_be_trained_is_refused(system: System, step: Init | TrainStep) -> None:
    update = await system.run(make_init(), step)

    assert update.failure is not None and update.failure.kind == "invalid"


async def test_metrics_say_what_happened(system: System) -> None:
    await system.run(make_init())
    rows = make_rows(versions=i32([0] * 8 + [0] * 8))

    update = await system.run(make_step(0, rows, loss=LossSpec(kl_coef=0.1)))
    stale = await system.run(make_step(1, make_rows(1), loss=LossSpec()))

    assert update.metrics["kl"] == pytest.approx(0.0, abs=1e-6)  # B is zero: the policy still is the base
    assert update.metrics["reward_mean"] == pytest.approx(float(rows.rewards.numpy().mean()))
    assert update.metrics["staleness"] == 0 and update.metrics["sampling_gap"] is not None
    assert stale.metrics["kl"] is None and stale.metrics["sampling_gap"] is None and stale.metrics["staleness"] == 1
    assert_off_policy(stale.metrics)  # of stale rows too


def assert_off_policy(metrics: Mapping[str, float | None]) -> None:
    """The rows' log-probs at sampling are made up, so the trained policy is another, and the weights are unequal."""
    kl, ess_share = metrics["sampling_kl"], metrics["ess_share"]
    assert kl is not None and kl > 0.1
    assert ess_share is not None and 0 < ess_share < 0.9


def test_what_is_given_up_says_so_to_the_owner(system: System) -> None:
    [(stream, update)] = system.first.failed(make_step(2, make_rows()), Failure("dead_letter", "why"))

    assert stream == Cell("tiny").adapters(3) and isinstance(update, AdapterUpdate)
    assert (update.adapter.version, update.batch, update.failure) == (3, "j/3", Failure("dead_letter", "why"))
