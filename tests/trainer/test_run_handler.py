"""The trainer's handler and the operations of runs: each version once, whatever happens, and a gradient that goes on."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from base_model.adapter import load_adapter
from base_model.decoder import Decoder
from common.bus.streams import Cell
from common.errors import CorruptObject, Unavailable
from common.models.base_digest import BaseIdentity
from common.store.adapters import OPTIMIZER_FILE, PEFT_FILES, AdapterStore, Manifest
from common.store.objects import Objects
from common.wire.messages import AdapterRef, AdapterUpdate, Failure, Init, LoraSpec, OptimSpec, f32, i32
from common.wire.operations import Forget, Forgotten, Operations, OperationsDone
from tests.support.run_cases import ADAM, forward, forward_backward, make_datum, make_run, optim_step, outputs, segment
from tests.support.trainer_cases import FullDisk, load_shallow, nothing
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.handler import TrainHandler
from trainer_service.optimiser import load_moments
from trainer_service.training import Trainer

RUN = AdapterRef("t", "run-1", 0)


class System:
    """A store on disk and the trainers that use it."""

    def __init__(self, decoder: Decoder, folder: Path) -> None:
        self.decoder = decoder
        self.objects = FullDisk(Objects.open(folder.as_uri())._backend)  # pyright: ignore[reportPrivateUsage]
        self.store = AdapterStore(self.objects)
        self.first = self.handler("first")

    def handler(self, worker: str = "another", **options: Any) -> TrainHandler:
        """One more trainer, with nothing in memory."""
        return TrainHandler(
            Trainer(DecoderBackbone(self.decoder)),
            self.store,
            "tiny",
            worker=worker,
            retry_delays_s=(0.0, 0.0),
            **options,
        )

    async def begin(self, *inits: Init) -> None:
        for init in inits or (make_run(),):
            await self.first(init, nothing)

    async def run(self, message: Operations, handler: TrainHandler | None = None) -> OperationsDone:
        [(stream, done)] = await (handler or self.first)(message, nothing)
        assert stream == Cell("tiny").adapters(3) and isinstance(done, OperationsDone)
        return done

    async def manifest(self, version: int) -> Manifest:
        found = await self.store.manifest(replace(RUN, version=version))
        assert found is not None
        return found

    async def files(self, version: int, job: str = "run-1") -> dict[str, bytes]:
        return await self.store.read(AdapterRef("t", job, version), (*PEFT_FILES, OPTIMIZER_FILE))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_shallow()


@pytest.fixture
async def system(decoder: Decoder, tmp_path: Path) -> System:
    system = System(decoder, tmp_path)
    await system.begin()
    return system


async def test_operations_are_answered_one_by_one_and_an_optim_step_commits_a_version(system: System) -> None:
    done = await system.run(
        segment(forward_backward(1), forward(2), forward_backward(3, "ppo"), optim_step(4), attempt=2)
    )

    assert (done.adapter, done.attempt, done.held, done.absent) == (replace(RUN, version=1), 2, 0, False)
    assert [result.seq for result in done.results] == [1, 2, 3, 4]
    first, _, _, last = (outputs(result) for result in done.results)
    assert [array.shape for array in first.logprobs] == [(13,), (14,), (15,)]
    assert set(first.metrics) == {"loss:sum"}
    assert set(last.metrics) == {"grad_norm", "learning_rate", "version"} and last.metrics["version"] == 1
    manifest = await system.manifest(1)
    assert (manifest.parent, manifest.batch, manifest.usage) == (0, "run-1:1-4", done.usage)
    assert (done.usage.trained_tokens, done.usage.prompt_tokens) == (84, 42)
    assert system.first.counters()["trained_tokens"] == 84


async def test_a_gradient_goes_on_in_the_trainer_that_has_it(system: System) -> None:
    first = await system.run(segment(forward_backward(1), forward(2)))
    assert (first.adapter, first.held, first.holder) == (RUN, 2, "first")

    second = await system.run(segment(forward_backward(3), first=2))
    last = await system.run(segment(optim_step(5), first=3))

    assert second.held == 3 and (last.adapter.version, last.held) == (1, 0)
    assert (await system.manifest(1)).batch == "run-1:1-5"


async def test_a_trainer_without_the_gradient_says_so_and_gets_the_whole_log(system: System) -> None:
    await system.run(segment(forward_backward(1)))
    rest = segment(forward_backward(2), optim_step(3), first=1)

    absent = await system.run(rest, system.handler())
    assert absent.absent and absent.results == () and await system.store.manifest(replace(RUN, version=1)) is None

    whole = segment(forward_backward(1, answered=True), forward_backward(2), optim_step(3), attempt=1)
    done = await system.run(whole, system.handler())
    assert [result.seq for result in done.results] == [2, 3] and done.adapter.version == 1
    assert done.usage.trained_tokens == 42, "what was answered was charged before"


@pytest.mark.parametrize("first", [2, 4])
async def test_a_gradient_of_another_length_of_the_log_is_absent(system: System, first: int) -> None:
    await system.run(segment(forward_backward(1), forward_backward(2), forward_backward(3)))

    assert (await system.run(segment(optim_step(9), first=first))).absent


async def test_gradients_are_bounded_and_one_that_went_is_absent(system: System) -> None:
    size = 1024 + 4 * sum(t.numel() for t in values_of(await system.files(0)))
    handler = system.handler(cache_bytes=size)
    await system.begin(make_run("run-2"))

    await system.run(segment(forward_backward(1)), handler)
    await system.run(segment(forward_backward(1), job="run-2"), handler)

    assert (await system.run(segment(optim_step(2), first=1), handler)).absent
    assert not (await system.run(segment(optim_step(2), job="run-2", first=1), handler)).absent


def values_of(files: dict[str, bytes]) -> list[torch.Tensor]:
    adapter = load_adapter(files)
    return [*adapter.a.values(), *adapter.b.values()]


async def test_a_log_without_gradient_takes_room_too(system: System) -> None:
    handler = system.handler(cache_bytes=1024)
    await system.begin(make_run("run-2"))

    await system.run(segment(forward(1)), handler)
    await system.run(segment(forward(1), job="run-2"), handler)

    assert (await system.run(segment(forward(2), first=1), handler)).absent
    assert not (await system.run(segment(forward(2), job="run-2", first=1), handler)).absent


async def test_redelivery_after_the_commit_is_answered_from_the_manifest_and_a_forward(system: System) -> None:
    message = segment(forward_backward(1), forward(2), forward_backward(3, "gspo"), optim_step(4))
    first = await system.run(message)
    files = await system.files(1)

    again = await system.run(message, system.handler("first"))
    partly = [replace(one, answered=one.seq < 3) for one in message.operations]
    rest = await system.run(replace(message, operations=tuple(partly)), system.handler("first"))

    assert again.adapter == first.adapter and again.usage == first.usage
    assert [result.seq for result in again.results] == [1, 2, 3, 4] and [r.seq for r in rest.results] == [3, 4]
    assert again.results[3] == first.results[3] == rest.results[1]
    for one, other in zip(first.results[:3], again.results[:3], strict=True):
        for ours, theirs in zip(outputs(one).logprobs, outputs(other).logprobs, strict=True):
            assert np.allclose(ours.numpy(), theirs.numpy(), atol=1e-5)
    assert await system.files(1) == files


async def test_two_trainers_with_one_log_commit_once_and_the_loser_adopts(system: System) -> None:
    message, other = segment(forward_backward(1), optim_step(2)), system.handler()

    one, two = await asyncio.gather(system.run(message), system.run(message, other))

    assert one.results[-1] == two.results[-1] and one.adapter == two.adapter == replace(RUN, version=1)
    follow = [await system.run(segment(forward_backward(3), version=1), handler) for handler in (system.first, other)]
    assert np.allclose(*(outputs(done.results[0]).logprobs[0].numpy() for done in follow), atol=1e-5)


async def test_a_version_that_another_log_led_to_is_no_result_of_this_one(system: System) -> None:
    await system.run(segment(forward_backward(1), optim_step(2)))

    done = await system.run(segment(forward_backward(3), optim_step(4)))

    failure = done.results[-1].failure
    assert failure is not None and "operations 1-2" in failure.reason and done.adapter.version == 1


async def test_a_full_disk_loses_neither_the_gradient_nor_the_step(system: System) -> None:
    await system.run(segment(forward_backward(1)))
    system.objects.num_failures = 3
    message = segment(forward_backward(2), optim_step(3), first=1)

    with pytest.raises(Unavailable):
        await system.run(message)

    done = await system.run(message)
    assert not done.absent and done.adapter.version == 1 and (await system.manifest(1)).batch == "run-1:1-3"


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "a target outside the vocabulary": ("invalid", {"targets": i32([70_000] * 13)}),
    "a token below 0": ("invalid", {"tokens": i32([-1] * 13)}),
    "arrays of unlike length": ("invalid", {"logprobs": f32([0.0] * 12)}),
    "no advantages": ("invalid", {"advantages": None}),
    "numbers as tokens": ("invalid", {"tokens": f32([1.0] * 13)}),
    "an infinite advantage": ("non_finite", {"advantages": f32([float("inf")] * 13)}),
    "log-probs that are no numbers": ("non_finite", {"logprobs": f32([float("nan")] * 13)}),
    "a loss that overflows": ("non_finite", {"advantages": f32([-3e38] * 13), "logprobs": f32([-99.0] * 13)}),
}


@pytest.mark.parametrize("kind", BAD)
async def test_a_datum_that_cannot_be_trained_fails_its_operation_and_the_step_by_name(
    system: System, kind: str
) -> None:
    expected, changes = BAD[kind]
    wrong = forward_backward(2, "ppo", make_datum("ppo", 1), make_datum("ppo", 0, **changes))

    done = await system.run(segment(forward_backward(1), wrong, forward_backward(3), optim_step(4)))

    good, failed, later, step = done.results
    assert outputs(good).logprobs and outputs(later).logprobs
    assert failed.failure is not None and failed.failure.kind == expected
    assert step.failure is not None and "operation 2" in step.failure.reason
    assert (done.adapter, done.held) == (RUN, 0) and await system.store.manifest(replace(RUN, version=1)) is None
    assert (await system.run(segment(optim_step(5), first=4))).absent
    assert (await system.run(segment(forward_backward(5), optim_step(6)))).adapter.version == 1


async def test_a_datum_longer_than_the_context_fails_its_operation(system: System) -> None:
    datum = make_datum("ppo", 1, num_prompt=2040, num_answer=9)

    done = await system.run(segment(forward_backward(1, "ppo", datum)))

    failure = done.results[0].failure
    assert failure is not None and "2049 tokens" in failure.reason and "context" in failure.reason


async def test_a_failure_in_an_earlier_segment_fails_the_step_too(system: System) -> None:
    await system.run(segment(forward_backward(1, "ppo", make_datum("ppo", 0, advantages=None))))
    await system.run(segment(forward_backward(2), first=1))

    done = await system.run(segment(optim_step(3), first=2))

    assert done.results[0].failure is not None and "operation 1" in done.results[0].failure.reason


async def test_a_forward_that_fails_does_not_harm_the_step(system: System) -> None:
    wrong = forward(2, "ppo", make_datum("ppo", 0, advantages=None))

    done = await system.run(segment(forward_backward(1), wrong, optim_step(3)))

    assert done.results[1].failure is not None and done.adapter.version == 1


@pytest.mark.parametrize(
    "optim", [OptimSpec(float("nan")), OptimSpec(-1.0), OptimSpec(1e-3, beta1=1.0), OptimSpec(1e-3, grad_clip=-1.0)]
)
async def test_an_optim_step_that_makes_no_sense_fails_and_drops_the_gradient(system: System, optim: OptimSpec) -> None:
    done = await system.run(segment(forward_backward(1), optim_step(2, optim)))

    assert done.results[1].failure is not None and done.results[1].failure.kind == "invalid"
    assert (done.adapter, done.held) == (RUN, 0)


async def test_a_payload_that_nobody_can_read_fails_its_operation(system: System) -> None:
    broken = replace(forward_backward(1), payload=b"\xc1")

    done = await system.run(segment(broken, forward_backward(2)))

    assert done.results[0].failure is not None and outputs(done.results[1]).logprobs


async def test_an_optim_step_without_gradient_is_adamw_with_none(system: System) -> None:
    await system.run(segment(forward_backward(1), optim_step(2)))
    before = load_moments((await system.files(1))[OPTIMIZER_FILE], await num_values(system), torch.device("cpu"))

    done = await system.run(segment(optim_step(3), version=1))

    after = load_moments((await system.files(2))[OPTIMIZER_FILE], await num_values(system), torch.device("cpu"))
    assert outputs(done.results[0]).metrics["grad_norm"] == 0 and after.num_steps == 2
    assert torch.allclose(after.mean_P, before.mean_P * ADAM.beta1)
    assert (await system.files(2))[PEFT_FILES[0]] != (await system.files(1))[PEFT_FILES[0]]


async def num_values(system: System) -> int:
    return sum(tensor.numel() for tensor in values_of(await system.files(0)))


async def test_what_its_owner_has_forgotten_is_deleted_and_is_not_made_again(system: System) -> None:
    for version in range(3):
        await system.run(segment(optim_step(version + 1), version=version))
    forget = Forget(
        id="run-1/forget-1",
        tenant="t",
        job="run-1",
        partition=3,
        adapter=replace(RUN, version=3),
        versions=(0, 7),
        optimizers=(1,),
    )

    for handler in (system.first, system.first, system.handler()):  # a repeat is harmless
        [(stream, answer)] = await handler(forget, nothing)
        assert stream == Cell("tiny").adapters(3) and isinstance(answer, Forgotten) and answer.forget == forget.id

    with pytest.raises(CorruptObject):
        await system.store.read(RUN)
    assert await system.store.read(replace(RUN, version=1))
    with pytest.raises(CorruptObject):
        await system.files(1)
    await system.files(2)
    assert "run-1@0" not in system.first.resident()
    again = await system.run(segment(optim_step(1)))
    assert again.adapter.version == 1 and (await system.manifest(1)).batch == "run-1:1-1"


async def test_nothing_is_left_of_a_forgotten_run(system: System) -> None:
    for version in range(2):
        await system.run(segment(optim_step(version + 1), version=version))
    about: dict[str, Any] = {"tenant": "t", "job": "run-1", "partition": 3}
    forget = Forget(id="f", **about, adapter=replace(RUN, version=2), versions=(1, 2), everything=True)
    for _ in range(2):
        [(_, answer)] = await system.first(forget, nothing)
        assert isinstance(answer, Forgotten)
    assert [await system.store.manifest(replace(RUN, version=version)) for version in range(3)] == [None] * 3


async def test_a_version_with_a_strange_manifest_keeps_its_files(system: System, tmp_path: Path) -> None:
    await system.run(segment(optim_step(1)))
    forget = Forget(
        id="f", tenant="t", job="run-1", partition=3, adapter=replace(RUN, version=1), versions=(0,), optimizers=(1,)
    )
    (tmp_path / RUN.path() / "manifest.json").write_bytes(b"{")

    [(_, answer)] = await system.first(forget, nothing)
    assert isinstance(answer, Forgotten)
    assert [type(message) for _, message in system.first.failed(forget, Failure("dead_letter", "why"))] == [Forgotten]
    assert system.first.hand_back(forget) is None


async def test_operations_drop_no_version(system: System) -> None:
    for version in range(4):
        await system.run(segment(optim_step(version + 1), version=version))

    for version in range(5):
        await system.files(version)


async def test_a_corrupt_version_fails_the_operations_alone(system: System, tmp_path: Path) -> None:
    manifest = await system.manifest(0)
    path = tmp_path / RUN.path() / manifest.attempt / PEFT_FILES[0]
    path.write_bytes(path.read_bytes()[:-1] + b"!")

    done = await system.run(segment(forward_backward(1), optim_step(2)), system.handler())

    assert [result.failure and result.failure.kind for result in done.results] == ["corrupt_adapter"] * 2
    assert done.adapter == RUN


async def test_what_is_given_up_says_so_and_a_gradient_cannot_be_handed_on(system: System) -> None:
    message = segment(forward_backward(1, answered=True), forward_backward(2), first=3)

    [(_, failed)] = system.first.failed(message, Failure("dead_letter", "why"))
    [(stream, absent)] = system.first.hand_back(message) or []

    assert isinstance(failed, OperationsDone) and isinstance(absent, OperationsDone)
    assert [(result.seq, result.failure) for result in failed.results] == [(2, Failure("dead_letter", "why"))]
    assert stream == Cell("tiny").adapters(3) and absent.absent
    assert system.first.hand_back(segment(forward_backward(1))) is None


# ---- where a run starts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_optimizer", [False, True])
async def test_a_run_starts_from_another_version(system: System, with_optimizer: bool) -> None:
    await system.run(segment(forward_backward(1), optim_step(2)))
    source = replace(RUN, version=1)

    await system.begin(make_run("run-2", source=source, with_optimizer=with_optimizer))

    found, theirs = await system.files(0, "run-2"), await system.files(1)
    assert found[PEFT_FILES[0]] == theirs[PEFT_FILES[0]]
    assert (found[OPTIMIZER_FILE] == theirs[OPTIMIZER_FILE]) == with_optimizer


async def test_a_run_goes_on_from_what_it_loads(system: System) -> None:
    await system.run(segment(forward_backward(1), optim_step(2)))
    await system.begin(make_run("run-2"))
    load = replace(make_run("run-2", source=replace(RUN, version=1), with_optimizer=True), id="run-2:1/1")
    load = replace(load, adapter=AdapterRef("t", "run-2", 1))

    for handler in (system.first, system.handler()):
        [(_, update)] = await handler(load, nothing)
        assert isinstance(update, AdapterUpdate) and (update.batch, update.adapter) == (load.id, load.adapter)

    assert await system.files(1, "run-2") == await system.files(1)
    await system.run(segment(forward_backward(3), optim_step(4), version=1))
    done = await system.run(segment(forward_backward(3), optim_step(4), version=1, job="run-2"))
    assert done.adapter.version == 2
    assert await system.files(2, "run-2") == await system.files(2)


@pytest.mark.parametrize("kind", ["missing", "corrupt", "of another rank", "of other targets", "of another base"])
async def test_a_source_that_cannot_be_had_is_a_failure_with_a_reason(
    system: System, tmp_path: Path, kind: str
) -> None:
    source = replace(RUN, version=7 if kind == "missing" else 0)
    if kind == "corrupt":
        path = tmp_path / RUN.path() / (await system.manifest(0)).attempt / PEFT_FILES[0]
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    if kind == "of another base":
        system.store.base = BaseIdentity("other")
    targets = ("q_proj",) if kind == "of other targets" else ()
    lora = LoraSpec(rank=8 if kind == "of another rank" else 32, alpha=32.0, targets=targets)

    [(_, update)] = await system.first(make_run("run-2", lora, source=source), nothing)

    assert update.failure is not None and "run-1@" in update.failure.reason  # pyright: ignore
    assert await system.store.manifest(AdapterRef("t", "run-2", 0)) is None
