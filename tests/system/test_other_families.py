"""Base models that our decoder does not compute: transformers' modules sample and train them, through all services."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from common.settings import TINY
from harness.live import Api, jsonl
from tests.support.families import save_family
from tests.support.forked import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

FAMILIES = ("llama3", "gemma3")
SOURCE = "def grade(sample, item):\n    return sum(map(ord, sample['output_text'])) % 5 / 4\n"
GRADER = {"type": "python", "name": "sum", "source": SOURCE}
HYPER = {"batch_size": 2, "group_size": 4, "max_tokens": 16, "max_steps": 2, "lora_rank": 4}


def base_of(family: str, folder: Path) -> Path:
    """A tiny base model with the tokenizer of `tiny`."""
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "README.md"))
    return save_family(family, folder, vocab_size=272, max_position_embeddings=512)


async def job(api: Api, base: str, text: str = "words", **changes: Any) -> dict[str, Any]:
    """The body of a job on four such prompts."""
    rows = [{"messages": [{"role": "user", "content": f"{number} {text}"}]} for number in range(4)]
    file = await api.upload("items.jsonl", jsonl(rows))
    how = {"grader": GRADER, "hyperparameters": HYPER | changes}
    method = {"type": "reinforcement", "reinforcement": how}
    return {"model": base, "seed": 1, "training_file": file, "method": method}


async def test_llama_3_and_gemma_3_are_sampled_and_trained_with_the_same_log_probs(tmp_path: Path) -> None:
    bases = ",".join(f"{family}={base_of(family, tmp_path / family)}" for family in FAMILIES)
    async with running(tmp_path / "data", environment={"MARLAAS_BASE_MODELS": bases}) as (_, api):
        jobs = [(await api.post("/fine_tuning/jobs", await job(api, family)))["id"] for family in FAMILIES]
        for ended in await api.until_done(*jobs):
            assert ended["status"] == "succeeded", ended["error"]
            steps: list[Any] = [e["data"] for e in await api.events(ended["id"]) if "grad_norm" in e["data"]]
            assert len(steps) == HYPER["max_steps"]
            assert all(step["reward_std"] > 0 and step["grad_norm"] > 0 for step in steps)
            assert max(step["sampling_gap"] for step in steps) < 1e-5
    logs = [log.read_text() for log in (tmp_path / "data" / "logs").glob("*.log")]
    chosen = [line for log in logs for line in log.splitlines() if "backbone_chosen" in line]
    assert len(chosen) == 2 * len(FAMILIES) and all("transformers" in line for line in chosen)
