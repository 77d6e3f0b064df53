"""The benchmark for GPUs, tried on a CPU."""

import json
import math
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from base_model.decoder import Decoder
from benchmarks import _gpu_parts, gpu
from benchmarks._gpu_bases import SHAPES_OF_BASES, Shape, random_decoder, random_modules, sampling_backbone
from benchmarks._gpu_kernels import measure_kernels
from benchmarks._gpu_parts import PROMPT, bytes_read, measure_gap, measure_training, random_adapters, rows_of
from benchmarks._gpu_plan import measure_plan
from benchmarks._lengths import answer_tokens
from benchmarks.fused import SHAPES, make_jobs
from benchmarks.gpu import Parts, goals, notes
from common.messages import TrajectoryRef
from common.settings import TINY
from manager_service.local.supervisor import LocalCluster
from tests.support import forked
from trainer_service.backbone.interface import Sequences
from trainer_service.backbone.modules import ModulesBackbone
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.packing import Budget, Tree
from trainer_service.training import Trainer


def tiny(dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Decoder:
    torch.set_num_threads(1)
    return random_decoder(SHAPES_OF_BASES["tiny"], torch.device(device), dtype)


def test_the_shape_tiny_is_that_of_the_model() -> None:
    assert tiny().linear_shapes() == Decoder.load(TINY).linear_shapes()


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_modules_have_the_decoders_weights(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given both over the same weights in float32
    shape = SHAPES_OF_BASES["tiny"]
    monkeypatch.setitem(SHAPES_OF_BASES, "tiny", replace(shape, config=replace(shape.config, tied=tied)))
    decoder = tiny(torch.float32)
    tokens = np.arange(20)
    tree = Tree(0, (0,), tokens, tokens, np.zeros(20, np.int64), (np.arange(5, 19),))
    sequences = Sequences([tree], [tokens[6:]], [1.0])

    # When both compute the same row, then their log-probs agree
    found = [each.logprobs(sequences, None) for each in (DecoderBackbone(decoder), random_modules(decoder))]
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_bytes_of_a_row_are_weights_adapter_and_its_own_keys_and_values_at_each_step() -> None:
    decoder = tiny()
    (adapter,) = random_adapters(decoder, 1)
    row = rows_of([adapter])[0]
    steps = answer_tokens(TrajectoryRef("train", 1, 0, 0)) - 1
    weights = 2 * (sum(out * width for out, width in decoder.linear_shapes().values()) + 272 * 128)
    keys_and_values = 2 * 2 * 4 * 2 * 32 * sum(PROMPT + t for t in range(1, steps + 1))
    assert (
        bytes_read(sampling_backbone(decoder, "decoder"), [row])
        == (weights + adapter.num_bytes) * steps + keys_and_values
    )


def test_it_says_why_columns_are_empty_and_goals_are_not_judged() -> None:
    unknown, unjudged = notes((math.nan, 1e12), judged=False)
    assert "--peak-tflops" in unknown and "GPU with 32 jobs" in unjudged
    assert notes((1e12, 1e12), judged=True) == []


def test_a_part_that_fails_keeps_the_others_and_says_why(tmp_path: Path) -> None:
    def lacks() -> dict[str, float]:
        raise ImportError("No module named 'peft'\nat all")

    run = Parts(time.monotonic() + 1000, tmp_path / "found.json")
    run.run("base, peft, N = 8", lacks)
    run.run("base, decoding, N = 32", lambda: {"bytes_per_s": 3e11, "to_one_adapter": 0.95})
    late = Parts(time.monotonic() - 1, None)
    late.run("base, gap", lacks)

    assert run.failures == ["base, peft, N = 8: failed, ImportError: No module named 'peft'"]
    assert json.loads((tmp_path / "found.json").read_text()) == run.figures
    assert late.failures == ["base, gap: left out, the time is up"]
    reached = {goal.what: goal.reached for goal in goals(run.found, ["base"], (1e12, 1e12))}
    assert reached == {
        "base: bandwidth used in decoding": False,
        "base: decoding with 32 adapters to one": True,
    }


def test_transformers_modules_train_without_padding() -> None:
    trainer = Trainer(random_modules(tiny()))
    found = measure_training(trainer, make_jobs(trainer, SHAPES[0], 2), 1)
    assert found["padding"] == 0 and found["flops_per_s"] > 0 and math.isnan(found["peak_bytes"])


def planned(shape: Shape, device: str, *, num_checkpointed: int = 0) -> dict[str, float]:
    """The plan of micro-batches of four rows on transformers' modules."""
    backbone = random_modules(random_decoder(shape, torch.device(device), torch.bfloat16))
    assert isinstance(backbone, ModulesBackbone)
    return measure_plan(Trainer(backbone.checkpointing(num_checkpointed), Budget(16_384)), shape)


def test_a_plan_counts_the_layers_that_keep_all() -> None:
    shape = SHAPES_OF_BASES["tiny"]
    whole, least = planned(shape, "cpu"), planned(shape, "cpu", num_checkpointed=4)
    assert whole["planned_bytes"] > 2 * least["planned_bytes"] > 0 and math.isnan(whole["peak_bytes"])


def test_kernels_are_measured_beside_those_that_a_trainer_takes() -> None:
    decoder = tiny()
    trainer = Trainer(random_modules(decoder))
    found = measure_kernels(trainer, decoder, (), make_jobs(trainer, SHAPES[0], 1), 1)
    assert found["flops_per_s"] > 0 and found["to_default"] > 0
    with pytest.raises(NotImplementedError, match="backward"):
        measure_kernels(trainer, decoder, ["flex"], make_jobs(trainer, SHAPES[0], 1), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("num_checkpointed", [0, 2])
def test_the_memory_of_a_step_is_what_was_planned(num_checkpointed: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device here")
    known = SHAPES_OF_BASES["qwen3-0.6b"]
    shape = replace(known, config=replace(known.config, num_layers=2))
    found = planned(shape, "cuda", num_checkpointed=num_checkpointed)
    assert abs(found["planned_bytes"] / found["peak_bytes"] - 1) < 0.15


def test_the_gap_in_float32_is_rounding_and_in_bfloat16_is_not(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROWS", "PROMPT"):
        monkeypatch.setattr(_gpu_parts, name, 8)
    gaps = [
        measure_gap(Trainer(random_modules(decoder)), sampling_backbone(decoder, "transformers"))
        for decoder in (tiny(torch.float32, device), tiny(torch.bfloat16, device))
    ]
    assert gaps[0]["gap"] < 1e-4 and gaps[1]["gap"] < 0.1
    assert gaps[1]["gap"] > 1e-4 or device == "cuda"  # there both ends round alike in a model as small as this
    assert gaps[0]["tokens"] > 32


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("--kernels flex foo", "flex or varlen"),
        ("--kernels flex,varlen", "flex or varlen"),
        ("--device foo", "error: --device=foo: torch finds no such device here"),
        ("--json /nowhere/found.json", "is no file that can be written"),
    ],
)
def test_what_cannot_be_measured_or_written_is_refused_before_anything_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: str, said: str
) -> None:
    def measure(*_: object) -> None:
        raise AssertionError("it measured something")

    monkeypatch.setattr(gpu, "report", measure)
    monkeypatch.setattr(sys, "argv", ["gpu", *(wrong if "--device" in wrong else f"--device cpu {wrong}").split()])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert said in f"{ended.value.code} {capsys.readouterr().err}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_measures_all_parts_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.live.LocalCluster", partial(LocalCluster, start=forked.start))
    file, few, tiny_shape = tmp_path / "found.json", 8, SHAPES_OF_BASES["tiny"]
    shallow = replace(tiny_shape, config=replace(tiny_shape.config, num_layers=1))
    monkeypatch.setitem(SHAPES_OF_BASES, "tiny", shallow)
    for name in ("ROWS", "PROMPT"):
        monkeypatch.setattr(_gpu_parts, name, few)
    line = f"gpu --device cpu --shapes tiny --jobs 1 --repetitions 1 --beside --kernels --json {file}"
    monkeypatch.setattr(sys, "argv", line.split())
    gpu.main()

    found = json.loads(file.read_text())["figures"]
    assert found["failures"] == []
    kinds = [name.split(", ")[1] for name in found["parts"]]
    assert kinds == ["plan", "training", "small steps", "peft", "decoding", "gap", *["busiest"] * 2, "whole job"]
    assert found["parts"]["tiny, training, N = 1"]["tokens"] >= 32 * few
    assert found["parts"]["tiny, decoding, N = 1"]["bytes_per_s"] > 0
    assert found["parts"]["tiny, peft, N = 1"]["to_peft"] > 0
