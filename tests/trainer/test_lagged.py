"""Rows of older versions: the trainer compares them under the version that sampled them."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from base_model.adapter import load_adapter
from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.wire.messages import AdapterRef, AdapterUpdate, LossSpec, OptimSpec, Rows, TrainStep, f32, i32
from common.wire.transcript import transcript
from tests.support.trainer_cases import make_init, make_step, nothing
from tests.trainer.test_trainer_learns import as_rows, random_decoder, sample
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.handler import TrainHandler
from trainer_service.lagged import MAX_ROWS, lagged_batch
from trainer_service.training import Trainer
from trainer_service.versions import Versions

RATE = OptimSpec(0.02)


class Asynchronous:
    """A job whose rows are each sampled by the version `lag` before the trained one."""

    def __init__(self, folder: Path, lag: int) -> None:
        self.folder, self.lag = folder, lag
        self.decoder, self.generator = random_decoder(), torch.Generator().manual_seed(1)
        self.store = AdapterStore(Objects.open(folder.as_uri()))
        self.trainer = self.fresh()

    def fresh(self) -> TrainHandler:
        return TrainHandler(Trainer(DecoderBackbone(self.decoder)), self.store, "tiny", retry_delays_s=())

    async def rows(self, version: int) -> Rows:
        files = await self.store.read(AdapterRef("t", "j", version))
        return as_rows(*sample(self.decoder, load_adapter(files), self.generator), version)

    async def run(self, message: TrainStep) -> AdapterUpdate:
        [(_, update)] = await self.trainer(message, nothing)
        assert isinstance(update, AdapterUpdate) and update.failure is None
        return update

    async def steps(self, number: int, *, remembers: bool = True) -> list[dict[str, float | None]]:
        """The metrics of its first steps. `remembers`: one trainer makes them all."""
        await self.trainer(make_init(), nothing)
        found: list[dict[str, float | None]] = []
        for version in range(number):
            rows = await self.rows(max(0, version - self.lag))
            found.append((await self.run(make_step(version, rows, optim=RATE))).metrics)
            self.trainer = self.trainer if remembers else self.fresh()
        return found


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("remembers", [True, False], ids=["one trainer", "each step by another"])
async def test_every_step_that_trains_sampled_rows_measures_a_gap(tmp_path: Path, lag: int, remembers: bool) -> None:
    found = await Asynchronous(tmp_path, lag).steps(5, remembers=remembers)

    measured = [(step.get("sampling_gap"), step.get("lagged_gap")) for step in found]
    assert [sorted(gap is None for gap in both) for both in measured] == [[False, True]] * 5
    assert all((gap or 0.0) < 1e-5 for both in measured for gap in both), "sampler and trainer compute the same"
    assert all((step["sampling_kl"] or 0.0) > 1e-4 for step in found[1:]), "but the trained version is another"


async def test_an_engine_that_computes_something_else_shows_in_rows_of_older_versions(tmp_path: Path) -> None:
    job = Asynchronous(tmp_path, 1)
    await job.steps(1)
    rows = await job.rows(0)
    off = transcript(rows.tokens.numpy(), rows.logprobs.numpy() - 0.05 * rows.written.numpy(), rows.written.numpy())
    update = await job.run(make_step(1, msgspec.structs.replace(rows, transcript=off), optim=RATE))
    assert update.metrics["lagged_gap"] == pytest.approx(0.05, abs=1e-5)


async def test_a_version_that_is_gone_leaves_the_gap_unmeasured_and_the_step_whole(tmp_path: Path) -> None:
    job = Asynchronous(tmp_path, 1)
    await job.steps(1)
    rows = await job.rows(0)
    await job.store.drop_files(AdapterRef("t", "j", 0))
    job.trainer = job.fresh()
    assert (await job.run(make_step(1, rows, optim=RATE))).metrics.get("lagged_gap") is None


async def test_an_older_version_that_memory_does_not_hold_leaves_the_gap_unmeasured_and_the_step_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Asynchronous(tmp_path, 1)
    await job.steps(1)
    rows = await job.rows(0)

    async def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Versions, "weights", full)
    assert (await job.run(make_step(1, rows, optim=RATE))).metrics.get("lagged_gap") is None


def test_few_rows_are_compared_all_of_the_older_version_that_sampled_most() -> None:
    decoder, generator = random_decoder(), torch.Generator().manual_seed(1)
    base = DecoderBackbone(decoder)
    state = Trainer(base).init(make_init())
    rows = as_rows(*sample(decoder, state.adapter, generator), 0)
    number = len(rows.lengths.numpy())
    versions = np.repeat([3, 2, 1], [number // 4, number // 2, number - number // 4 - number // 2])
    step = make_step(3, msgspec.structs.replace(rows, versions=i32(versions)))

    older, batch = lagged_batch(step, base) or (0, None)

    assert older == 2 and batch is not None and batch.wanted_R.sum() == MAX_ROWS
    assert set(versions[batch.wanted_R]) == {2} and not batch.learned_R.any()
    equal = msgspec.structs.replace(step, rows=msgspec.structs.replace(step.rows, rewards=f32([1.0] * number)))
    assert lagged_batch(equal, base) is None, "rows without an advantage are not trained"
    assert lagged_batch(msgspec.structs.replace(equal, loss=LossSpec(kl_coef=0.1)), base), "unless for their KL"
