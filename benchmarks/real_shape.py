"""Trains two jobs of two tenants on a base with the shape of Qwen3-0.6B and random weights, on the CPU, through all four services.

    python -m benchmarks.real_shape [--steps 3] [--json FILE]

596 M weights in float32: 28 layers of 1,024, 16 heads, 8 key heads of 128, a vocabulary of 151,936 and a context of 40,960, of which
`marlaas up` serves what fits. The tokenizer is that of `tiny` with a word for most other ids; some ids have none, and decode to
nothing. Each job trains steps of 2 groups of 4 answers of 16 tokens; its grader draws a number from the text, so that rewards differ.

    seconds    from the start of the services to the end of both jobs, and of the services' start alone
    PSS        the most of all processes together, in one look a second; pages that processes share count once
"""

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._report import Goal, Report, make_table, run
from common.settings import TINY
from harness.live import Api, running
from harness.processes import memory_below
from manager_service.local.supervisor import LocalCluster

SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "layer_types": ["full_attention"] * 28,
}
FIRST_WORD, LAST_WORD = 300, 151_000
LIMIT_S, LIMIT_MB = 600.0, 10_000.0
SOURCE = "def grade(sample, item):\n    return sum(map(ord, sample['output_text'])) % 5 / 4\n"
GRADER = {"type": "python", "name": "sum", "source": SOURCE}
HYPER: dict[str, Any] = {"batch_size": 2, "group_size": 4, "max_tokens": 16, "lora_rank": 8}


@dataclass(frozen=True, slots=True)
class Figures:
    start_s: float
    whole_s: float
    pss_mb: float
    rewards_std: list[float]
    grad_norms: list[float]


def make_base(folder: Path) -> Path:
    """Writes the base: weights in bfloat16, which load as float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors", "README.md"))
    torch.manual_seed(0)
    known: dict[str, Any] = Qwen3Config.from_pretrained(TINY).to_dict() | SIZES
    model: Any = Qwen3ForCausalLM(Qwen3Config(**known))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {f"w{number}": number for number in range(FIRST_WORD, LAST_WORD)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


async def submit(api: Api, steps: int, seed: int) -> str:
    body = {
        "model": "base",
        "seed": seed,
        "training_file": await api.file("sort", "train", 32),
        "method": {
            "type": "reinforcement",
            "reinforcement": {"grader": GRADER, "hyperparameters": HYPER | {"max_steps": steps}},
        },
    }
    return (await api.post("/fine_tuning/jobs", body))["id"]


async def measure(base: Path, steps: int) -> Figures:
    began = time.monotonic()
    async with running(environment={"MARLAAS_BASE_MODELS": f"base={base}"}, notify=print) as (cluster, _):
        start_s = time.monotonic() - began
        admin = Api(cluster.base_url, cluster.admin_key)
        tenants = [await admin.tenant(name) for name in ("a", "b")]
        seen: list[float] = []
        watching = asyncio.create_task(keep_looking(cluster, seen))
        jobs = [await submit(api, steps, seed) for seed, api in enumerate(tenants)]
        ended = [(await api.until_done(job, seconds=3600))[0] for api, job in zip(tenants, jobs, strict=True)]
        whole_s = time.monotonic() - began
        watching.cancel()
        failed = [job["error"] for job in ended if job["status"] != "succeeded"]
        if failed:
            raise SystemExit(f"error: a job failed: {failed[0]}")
        metrics = [row for api, job in zip(tenants, jobs, strict=True) for row in await steps_of(api, job)]
        for api in (admin, *tenants):
            await api.close()
    return Figures(
        start_s, whole_s, max(seen), [row["reward_std"] for row in metrics], [row["grad_norm"] for row in metrics]
    )


async def keep_looking(cluster: LocalCluster, seen: list[float]) -> None:
    """Adds the memory of all processes once a second."""
    while True:
        seen.append(await asyncio.to_thread(pss_mb, list(cluster.pids.values())))
        await asyncio.sleep(1)


def pss_mb(pids: Sequence[int]) -> float:
    return sum(memory_below(pid).pss_mb for pid in pids)


async def steps_of(api: Api, job: str) -> list[Any]:
    return [e["data"] for e in await api.events(job) if e["type"] == "metrics" and "loss" in e["data"]]


def report(given: Any) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(make_base(Path(folder) / "base"), given.steps))
    columns = ("start s", "whole s", "PSS MB", "reward_std", "grad_norm")
    rows = [
        (found.start_s, found.whole_s, found.pss_mb, f"{min(found.rewards_std):.3g}", f"{min(found.grad_norms):.3g}")
    ]
    goals = [
        Goal("seconds", found.whole_s, LIMIT_S, more_is_better=False),
        Goal("PSS, MB", found.pss_mb, LIMIT_MB, more_is_better=False),
        Goal("least reward_std", min(found.rewards_std), 1e-6),
        Goal("least grad_norm", min(found.grad_norms), 1e-9),
    ]
    return Report([make_table("The shape of Qwen3-0.6B", columns, rows)], asdict(found), goals)


if __name__ == "__main__":
    run(__doc__, report, steps=3)
