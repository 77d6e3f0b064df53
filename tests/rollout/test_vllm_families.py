"""vLLM beside transformers with PEFT: the same log-probs of every row, for families of base models that it is meant for."""

import asyncio
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from base_model.adapter import Adapter, init_adapter, save_adapter
from common.settings import TINY
from common.wire.messages import BASE, AdapterRef, LoraSpec
from rollout_service.engine import Generated
from rollout_service.process import vllm_engine
from rollout_service.process.adapter_files import AdapterFiles, linear_shapes
from rollout_service.process.process_engine import ProcessEngine, Shape
from rollout_service.process.vllm_engine import VllmCore, check_installed
from rollout_service.settings import RolloutSettings
from tests.support.engines_under_test import needs_vllm
from tests.support.families import VOCAB, save_family
from tests.support.rollout_cases import NoEnd, one, peft_model, ref, request

pytestmark = [pytest.mark.vllm, needs_vllm, pytest.mark.timeout(600)]

SIZES = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32}
"""The families for which vLLM has kernels on a CPU."""
CONTEXT, RANK, MAX_LORAS = 128, 8, 2
PROMPT = list(range(5, 15))
CLOSE = 1e-4


def files_of(folder: Path, seed: int) -> dict[str, bytes]:
    """An adapter whose B is not zero, so that it matters."""
    initial = init_adapter(LoraSpec(RANK, 16.0), linear_shapes(folder), seed)
    random = torch.Generator().manual_seed(seed)
    b = {name: 0.1 * torch.randn(factor.shape, generator=random) for name, factor in initial.b.items()}
    return save_adapter(Adapter(initial.spec, initial.a, b), "base")


@asynccontextmanager
async def running(folder: Path) -> AsyncGenerator[ProcessEngine]:
    settings = RolloutSettings(
        engine="vllm",
        rollout_slots=8,
        rollout_kv_bytes=1 << 26,
        vllm_max_loras=MAX_LORAS,
        vllm_max_known_loras=MAX_LORAS,
        vllm_max_lora_rank=RANK,
    )
    check_installed(settings)
    shape = Shape(VOCAB, CONTEXT, settings.engine_slots, MAX_LORAS, MAX_LORAS, max_temperature=2.0)
    files = AdapterFiles(linear_shapes(folder), RANK)
    engine = ProcessEngine(lambda: VllmCore(settings, folder, CONTEXT), files, NoEnd(), shape)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def sampled(engine: ProcessEngine, adapters: dict[AdapterRef, dict[str, bytes]]) -> list[Generated]:
    """Two rows of the base and of each adapter, all in one batch."""
    for adapter, files in adapters.items():
        await engine.load_files(adapter, files)
    asked = [request(name, tokens=PROMPT, sample=i, max_tokens=20) for i in range(2) for name in (BASE, *adapters)]
    return await asyncio.gather(*[one(engine, each) for each in asked])


@torch.no_grad()
def expected(folder: Path, files: dict[str, bytes] | None, tokens: list[int], scratch: Path) -> np.ndarray:
    """The tokens' log-probs by transformers and PEFT. `files`: of the adapter; None: the bare base model."""
    model: Any = peft_model(scratch, files, folder)
    logits_TV = model(input_ids=torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1).numpy()


async def assert_logprobs_are_pefts(engine: ProcessEngine, folder: Path, scratch: Path) -> None:
    adapters = {ref("a"): files_of(folder, 1), ref("b"): files_of(folder, 2)}
    for found in await sampled(engine, adapters):
        theirs = expected(folder, adapters.get(found.adapter), found.tokens, scratch)
        assert np.allclose(found.logprobs, theirs, atol=CLOSE), found.adapter
        if not found.adapter.is_base:
            bare = expected(folder, None, found.tokens, scratch)
            assert not np.allclose(found.logprobs, bare, atol=0.1), "the adapter does not matter"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama3", "gemma3", "mistral", "qwen3_moe"])
async def test_log_probs_are_pefts(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if family == "qwen3_moe":
        compute_experts_on_a_cpu(monkeypatch)
    folder = save_family(family, tmp_path / "base", **SIZES)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    async with running(folder) as engine:
        await assert_logprobs_are_pefts(engine, folder, tmp_path)


def compute_experts_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has vLLM take its CPU build's own kernels for experts beside adapters, as nobody else can."""
    arguments: Any = vllm_engine._arguments  # pyright: ignore[reportPrivateUsage]
    extended = {"worker_extension_cls": "tests.support.experts_on_cpu.ExpertsOnCpu"}

    def asked(*choices: Any) -> dict[str, Any]:
        return {**arguments(*choices), **extended}

    monkeypatch.setattr(vllm_engine, "_arguments", asked)
