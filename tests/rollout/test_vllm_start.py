"""The arguments that vLLM is started with, and the base models that it is not started for; without its process."""

import importlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from common.errors import InvalidInput, Unavailable
from common.models.families import HEAD_DIMS
from common.settings import TINY
from rollout_service.__main__ import load_vllm
from rollout_service.process import vllm_engine
from rollout_service.settings import RolloutSettings
from tests.support.families import save_family


@pytest.fixture
def started_with(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Fills with the arguments of the next vLLM that is started, which does not come up."""
    given: dict[str, Any] = {}

    def launch(*choices: Any) -> None:
        given.update(vllm_engine._arguments(*choices))  # pyright: ignore[reportPrivateUsage]
        raise RuntimeError("that is all")

    monkeypatch.setattr(vllm_engine, "check_installed", lambda settings: None)  # pyright: ignore
    monkeypatch.setattr(vllm_engine, "_launch", launch)
    return given


async def start(folder: Path, **settings: Any) -> None:
    with pytest.raises(Unavailable, match="that is all"):
        await load_vllm(RolloutSettings(engine="vllm", **settings), folder).start()


async def test_on_cuda_it_has_graphs_chunks_and_room_for_many_adapters(started_with: dict[str, Any]) -> None:
    await start(TINY, rollout_device="cuda", vllm_tensor_parallel=4, vllm_memory_fraction=0.6, max_context=1024)
    expected = {
        "dtype": "bfloat16",
        "tensor_parallel_size": 4,
        "gpu_memory_utilization": 0.6,
        "enforce_eager": False,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 8192,
        "max_model_len": 1024,
        "max_num_seqs": 544,  # 256, as many for the turns of workers that died, and an eighth for chats
        "max_loras": 33,  # with the one of the base
        "max_cpu_loras": 65,
        "max_lora_rank": 32,
    }
    assert {name: started_with.get(name) for name in expected} == expected
    assert started_with["kv_cache_memory_bytes"] is None, "it measures"


async def test_chosen_memory_for_keys_and_values_needs_no_free_part_of_a_shared_device(
    started_with: dict[str, Any],
) -> None:
    await start(TINY, rollout_device="cuda", rollout_kv_bytes=1 << 32)
    assert (started_with["kv_cache_memory_bytes"], started_with["gpu_memory_utilization"]) == (1 << 32, 0.01)
    await start(TINY)
    assert started_with["kv_cache_memory_bytes"] == 1 << 30, "a CPU's, where nobody has chosen"


def test_a_device_that_vllm_would_not_take_is_refused_with_what_chooses_one() -> None:
    with pytest.raises(ValidationError, match=r"rollout_device=cuda:1: .*CUDA_VISIBLE_DEVICES"):
        RolloutSettings(engine="vllm", rollout_device="cuda:1")
    assert RolloutSettings(rollout_device="cuda:1").rollout_device == "cuda:1", "the embedded engine does"


async def test_a_mixture_of_experts_is_refused_on_a_cpu_alone(tmp_path: Path, started_with: dict[str, Any]) -> None:
    folder = save_family("qwen3_moe", tmp_path / "base", vocab_size=320)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    with pytest.raises(InvalidInput, match="on a CPU vLLM does not compute a mixture of experts"):
        load_vllm(RolloutSettings(engine="vllm"), folder)
    await start(folder, rollout_device="cuda")
    assert started_with["model"] == str(folder)


async def test_heads_of_a_size_that_vllm_has_none_of_are_refused_on_a_cpu_alone(
    tmp_path: Path, started_with: dict[str, Any]
) -> None:
    folder = shutil.copytree(TINY, tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 16}))
    with pytest.raises(InvalidInput, match=r"on a CPU vLLM does not compute head_dim 16 \(only 32, 64"):
        load_vllm(RolloutSettings(engine="vllm"), folder)
    await start(folder, rollout_device="cuda")
    assert started_with["model"] == str(folder)


@pytest.mark.vllm
def test_vllm_has_the_way_back_to_its_other_model_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    envs: Any = importlib.import_module("vllm.envs")
    assert envs.environment_variables["VLLM_USE_V2_MODEL_RUNNER"]() is False


@pytest.mark.vllm
def test_vllm_has_heads_of_the_sizes_that_are_said() -> None:
    backend: Any = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
    assert tuple(backend.CPUAttentionBackend.get_supported_head_sizes()) == HEAD_DIMS


def test_outputs_that_vllm_joined_still_name_the_sampled_token_among_the_best() -> None:
    """A token that is sampled and among the best stands once in them, as `FlatLogprobs.extend` leaves it."""
    flat = SimpleNamespace(
        token_ids=[7, 7, 3, 9, 7, 3],
        logprobs=[-0.1, -0.1, -3.0, -4.0, -0.5, -2.0],
        start_indices=[0, 3],
        end_indices=[3, 6],
    )
    output = SimpleNamespace(
        outputs=[SimpleNamespace(logprobs=flat, token_ids=[7, 9])],
        finished=False,
        prompt_logprobs=None,
        num_cached_tokens=None,
    )
    chunk = vllm_engine._chunk(output, 2)  # pyright: ignore[reportPrivateUsage]
    assert chunk.top_logprobs == [[(7, -0.1), (3, -3.0)], [(7, -0.5), (3, -2.0)]] and chunk.logprobs == [-0.1, -4.0]
