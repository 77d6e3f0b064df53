"""`marlaas up` serves as much of a base model's context as its memory holds, and says so."""

import json
from pathlib import Path
from typing import Literal

import pytest
import torch

from base_model.decoder import DecoderConfig
from common.errors import InvalidInput
from common.settings import TINY
from harness.bases import QWEN3_06B
from manager_service.launcher.commands.plan_command import plan_for, settings_of
from manager_service.launcher.devices import arrange
from manager_service.launcher.engines import parse_gpu
from manager_service.launcher.gpus import Gpu, LocalWorker
from manager_service.launcher.memory_shares import Chosen, choose
from rollout_service.embedded.backbone.interface import ModelShape
from rollout_service.embedded.pools import EngineLimits, Pools

GIB = 1 << 30


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    """A configuration with the sizes of Qwen3-0.6B."""
    config = json.loads((TINY / "config.json").read_text()) | QWEN3_06B | {"layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def pools(folder: Path, kv_bytes: int, context: int | None, dtype: torch.dtype = torch.float32) -> Pools:
    limits = EngineLimits(kv_bytes=kv_bytes)
    return Pools(ModelShape.of(DecoderConfig.load(folder, context)), torch.zeros(1, dtype=dtype), limits.pools)


def told(bases: str, context: str) -> list[str]:
    return arrange({"MARLAAS_BASE_MODELS": bases, "MARLAAS_MAX_CONTEXT": context}, []).lines


def test_a_context_above_every_base_models_own_is_told_in_a_line(qwen: Path) -> None:
    (line,) = told("tiny", "100000")
    assert line.startswith("MARLAAS_MAX_CONTEXT=100000 is above 2048")
    assert told("tiny", "2048") == told(f"tiny,qwen={qwen}", "40960") == []
    _, memory = chosen(qwen, 128, MAX_CONTEXT="100000").lines
    assert memory.startswith("context 40,960;"), "memory is for what is served"


# ---- by the memory at hand ------------------------------------------------------------------------------------------

GB = 1_000_000_000
WORKERS = [LocalWorker("rollout-0", "rollout", "qwen"), LocalWorker("trainer-0", "trainer", "qwen")]
ON_GPU = {"MARLAAS_ROLLOUT_DEVICE": "cuda", "MARLAAS_TRAINER_DEVICE": "cuda"}
BOTH_ON_0 = {"rollout-0": (0,), "trainer-0": (0,)}


def chosen(qwen: Path, free_gb: float, **settings: str) -> Chosen:
    environment = {"MARLAAS_BASE_MODELS": f"qwen={qwen}"} | {
        f"MARLAAS_{name}": value for name, value in settings.items()
    }
    return choose(environment, WORKERS, {}, [], free=lambda: int(free_gb * GB))


def test_more_memory_serves_a_longer_context_which_the_engine_takes(qwen: Path) -> None:
    served = list[int]()
    for free_gb in (12, 16, 24, 32, 48, 64, 128, 256, 512):
        found = chosen(qwen, free_gb)
        served.append(int(found.settings.get("MARLAAS_MAX_CONTEXT", "40960")))
        assert pools(qwen, int(found.settings["MARLAAS_ROLLOUT_KV_BYTES"]), served[-1]).tokens >= served[-1]
        (line,) = found.lines
        assert f"{served[-1]:,}" in line and "MARLAAS_MAX_CONTEXT" in line and "this machine" in line
    assert served == sorted(served) and len(set(served)) > 2 and served[-1] == 40_960


def test_what_somebody_has_chosen_stays(qwen: Path) -> None:
    assert chosen(qwen, 64, MAX_CONTEXT="2048").settings.keys() == {
        "MARLAAS_ROLLOUT_KV_BYTES",
        "MARLAAS_TRAINER_MEMORY_BYTES",
        "MARLAAS_TRAINER_CACHE_BYTES",
    }


@pytest.mark.parametrize(("dtype", "fits"), [("float32", 3072), ("bfloat16", 6144)])
def test_memory_for_keys_and_values_that_somebody_has_chosen_chooses_the_context(
    qwen: Path, dtype: str, fits: int
) -> None:
    trainer = {"TRAINER_MEMORY_BYTES": "1000", "TRAINER_CACHE_BYTES": "1000"}
    found = chosen(qwen, 64, ROLLOUT_KV_BYTES="1GiB", ROLLOUT_DTYPE=dtype, **trainer)
    assert found.settings == {"MARLAAS_MAX_CONTEXT": str(fits)}
    assert pools(qwen, GIB, fits, getattr(torch, dtype)).tokens >= fits
    assert not chosen(qwen, 512, ROLLOUT_KV_BYTES=str(16 * GIB), **trainer).settings, "all fits"


def test_nothing_is_chosen_where_a_base_is_small_or_something_is_wrong(qwen: Path) -> None:
    tiny = [LocalWorker("rollout-0", "rollout", "tiny"), LocalWorker("trainer-0", "trainer", "tiny")]
    assert choose({}, tiny, {}, [], free=lambda: 1) == Chosen()
    assert choose({"MARLAAS_BASE_MODELS": f"qwen={qwen}"} | ON_GPU, WORKERS, {}, []) == Chosen(), "no GPU is known"
    for name, value in (("BASE_MODELS", "x"), ("ROLLOUT_KV_BYTES", "much"), ("BASE_MODELS", "x=/nowhere")):
        assert chosen(qwen, 64, **{name: value}) == Chosen(), "its service says what is wrong"
    assert chosen(qwen, 64, ROLLOUT_SHARE="2") == Chosen()
    assert chosen(qwen, 64, MAX_CONTEXT="0") == chosen(qwen, 64, MAX_CONTEXT="-1") == Chosen()


def test_two_copies_that_do_not_fit_are_refused_with_both_numbers(qwen: Path) -> None:
    with pytest.raises(InvalidInput, match=r"this machine: 2 copies take 5\.\d GB, and it has 4\.0 GB"):
        chosen(qwen, 4)
    with pytest.raises(
        InvalidInput, match=r"2 copies take 5\.\d GB of its 5\.8 GB.*no context of 1,024 tokens.*MARLAAS_ROLLOUT_SHARE"
    ):
        chosen(qwen, 5.8)
    assert chosen(qwen, 5.8, MAX_CONTEXT="512") == Chosen(), "somebody answers for it"
    with pytest.raises(InvalidInput, match="no context of 1,024 tokens"):
        chosen(qwen, 24, ROLLOUT_SHARE="0.9")


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_a_gpu_is_split_between_rollouts_and_training_and_a_share_moves_the_split(qwen: Path, engine: str) -> None:
    environment = {"MARLAAS_BASE_MODELS": f"qwen={qwen}", "MARLAAS_ENGINE": engine} | ON_GPU
    gpus = [Gpu("0", 24 * GB)]
    even = choose(environment, WORKERS, BOTH_ON_0, gpus)
    less = choose(environment | {"MARLAAS_ROLLOUT_SHARE": "0.4"}, WORKERS, BOTH_ON_0, gpus)
    for found in (even, less):
        assert int(found.settings["MARLAAS_TRAINER_MEMORY_BYTES"]) > 0
        taken = int(found.settings["MARLAAS_ROLLOUT_KV_BYTES"])
        assert 24e9 * float(found.settings["MARLAAS_TRAINER_MEMORY_FRACTION"]) < 24e9 - taken, "the trainer is capped"
    assert float(less.settings["MARLAAS_ROLLOUT_KV_BYTES"]) < float(even.settings["MARLAAS_ROLLOUT_KV_BYTES"])
    assert "24.0 GB of GPU 0" in even.lines[0]
    with pytest.raises(InvalidInput, match=r"GPU 0: 2 copies take \d\.\d GB, and it has 3\.0 GB"):
        choose(environment, WORKERS, BOTH_ON_0, [Gpu("0", 3 * GB)])


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_a_memory_without_rollouts_or_without_workers_has_no_share(qwen: Path, engine: str) -> None:
    environment = {"MARLAAS_BASE_MODELS": f"qwen={qwen}", "MARLAAS_ENGINE": engine} | ON_GPU
    apart, gpus = {"rollout-0": (0,), "trainer-0": (1,)}, [Gpu("0", 80 * GB), Gpu("1", 80 * GB)]
    alone, full = choose(environment, WORKERS, apart, gpus), Gpu("2", 80 * GB, held=80 * GB)
    assert len(alone.lines) == 2
    assert choose(environment | {"MARLAAS_ROLLOUT_SHARE": "0.9"}, WORKERS, apart, gpus) == alone
    by_fraction = environment | {"MARLAAS_VLLM_MEMORY_FRACTION": "0.9"}
    assert len(choose(by_fraction, WORKERS, apart, [*gpus, full]).lines) == 2
    with pytest.raises(InvalidInput, match=r"and it has 0\.0 GB"):
        choose(by_fraction, WORKERS, apart, [full, *gpus])


@pytest.mark.parametrize("engine", ["torch", "vllm"])
@pytest.mark.parametrize("gpu", ["12GB", "24GB", "h200"])
def test_what_plan_prints_is_taken_as_it_is(qwen: Path, gpu: str, engine: Literal["torch", "vllm"]) -> None:
    plan = plan_for(str(qwen), gpu=gpu, engine=engine)
    assert plan.chosen is not None
    printed = settings_of(plan, plan.chosen) | {"MARLAAS_BASE_MODELS": f"qwen={qwen}"}
    found = choose(printed, WORKERS, BOTH_ON_0, [Gpu("0", parse_gpu(gpu).memory)])
    assert found.settings.keys().isdisjoint(printed)


def test_a_worker_that_cannot_hold_the_context_says_what_it_can(qwen: Path) -> None:
    with pytest.raises(InvalidInput, match=r"40960 tokens.*or set MARLAAS_MAX_CONTEXT=3072 for all services"):
        pools(qwen, GIB, None)
    with pytest.raises(InvalidInput, match=r"MARLAAS_ROLLOUT_KV_BYTES$"):
        pools(qwen, 1 << 20, None)
