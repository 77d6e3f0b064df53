"""Trains two jobs of two tenants on a base with the shape of Qwen3-0.6B and random weights, on the CPU, through all four services.

    python -m benchmarks.real_shape [--steps 3] [--engine vllm] [--json FILE]

596 M weights in float32: 28 layers of 1,024, 16 heads, 8 key heads of 128, a vocabulary of 151,936 and a context of 40,960, of which
`marlaas up` serves what fits. The tokenizer is that of `tiny` with a word for two thirds of the other ids; those beyond have none, and
decode to nothing. Each job trains steps of 2 groups of 4 answers of 16 tokens; its grader draws a number from the text, so that
rewards differ.

    seconds    from the start of the services to the end of both jobs, and of the services' start alone
    PSS        the most of all processes together, in one look a second; pages that processes share count once
    gap        between the log-probs of a token in a rollout and in the trainer, the mean of a step
    PEFT       the largest difference between the rollout's log-probs of the likeliest tokens and transformers' with PEFT, of the
               adapters trained here
    words      the mean of an answer; the rest of its tokens have none
"""

import asyncio
import io
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._report import Goal, Report, make_table, parser, show
from common.skills import generate
from common.text.tokens import ChatTokenizer
from harness.bases import LAST_WORD, QWEN3_06B, make_random_base
from harness.live import Api, running
from harness.processes import memory_below
from manager_service.local.supervisor import LocalCluster

LIMIT_S, LIMIT_GAP = 600.0, 1e-3
LIMIT_MB = {"torch": 10_000.0, "vllm": 16_000.0}
SOURCE = "def grade(sample, item):\n    return sum(map(ord, sample['output_text'])) % 5 / 4\n"
GRADER = {"type": "python", "name": "sum", "source": SOURCE}
HYPER: dict[str, Any] = {"batch_size": 2, "group_size": 4, "max_tokens": 16, "lora_rank": 8}
NUM_ASKED, NUM_TOP = 4, 5


@dataclass(frozen=True, slots=True)
class Job:
    """The figures and answers of a job that has ended."""

    metrics: list[Any]  # of each step
    words: list[int]  # of each answer that was kept
    adapter: bytes  # the last version, a zip
    asked: list[list[float]]  # the log-probs of the likeliest next tokens after each of some prompts, falling


@dataclass(frozen=True, slots=True)
class Figures:
    start_s: float
    whole_s: float
    pss_mb: float
    rewards_std: list[float]
    grad_norms: list[float]
    gaps: list[float]
    peft_difference: float
    words: float


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


async def measure(base: Path, steps: int, engine: str) -> Figures:
    began = time.monotonic()
    environment = {"MARLAAS_BASE_MODELS": f"base={base}", "MARLAAS_ENGINE": engine}
    async with running(environment=environment, notify=print) as (cluster, _):
        start_s = time.monotonic() - began
        admin = Api(cluster.base_url, cluster.admin_key)
        tenants = [await admin.tenant(name) for name in ("a", "b")]
        seen: list[float] = []
        watching = asyncio.create_task(keep_looking(cluster, seen))
        ids = [await submit(api, steps, seed) for seed, api in enumerate(tenants)]
        ended = [(await api.until_done(job, seconds=3600))[0] for api, job in zip(tenants, ids, strict=True)]
        whole_s = time.monotonic() - began
        if failed := [job["error"] for job in ended if job["status"] != "succeeded"]:
            raise SystemExit(f"error: a job failed: {failed[0]}")
        jobs = [await left_by(api, job) for api, job in zip(tenants, ended, strict=True)]
        watching.cancel()
        for api in (admin, *tenants):
            await api.close()
    metrics = [row for job in jobs for row in job.metrics]
    words = [number for job in jobs for number in job.words]
    return Figures(
        start_s=start_s,
        whole_s=whole_s,
        pss_mb=max(seen),
        rewards_std=[row["reward_std"] for row in metrics],
        grad_norms=[row["grad_norm"] for row in metrics],
        gaps=[row["sampling_gap"] for row in metrics],
        peft_difference=peft_difference(base, jobs),
        words=sum(words) / len(words),
    )


async def left_by(api: Api, job: Any) -> Job:
    route, version = f"/fine_tuning/jobs/{job['id']}", job["hyperparameters"]["max_steps"]
    samples = [row for v in range(1, version + 1) for row in (await api.get(f"{route}/samples", version=v))["data"]]
    content = await api.http.get(f"{route}/checkpoints/{version}/content")
    asked = [await likeliest(api, job["fine_tuned_model"], messages) for messages in prompts()]
    words = [row["text"].count("w") for row in samples]
    return Job(await steps_of(api, job["id"]), words, content.content, asked)


async def keep_looking(cluster: LocalCluster, seen: list[float]) -> None:
    """Adds the memory of all processes once a second."""
    while True:
        seen.append(await asyncio.to_thread(pss_mb, list(cluster.pids.values())))
        await asyncio.sleep(1)


def pss_mb(pids: Sequence[int]) -> float:
    return sum(memory_below(pid).pss_mb for pid in pids)


async def steps_of(api: Api, job: str) -> list[Any]:
    return [e["data"] for e in await api.events(job) if e["type"] == "metrics" and "loss" in e["data"]]


# ---- the same by transformers and PEFT ------------------------------------------------------------------------------


def prompts() -> list[Any]:
    return [row["messages"] for row in generate("sort", 2, NUM_ASKED, "held_out")]


async def likeliest(api: Api, model: str, messages: Any) -> list[float]:
    """Log-probs of the likeliest next tokens, falling."""
    body = {"model": model, "messages": messages, "max_tokens": 1, "logprobs": True, "top_logprobs": NUM_TOP}
    (choice,) = (await api.post("/chat/completions", body))["choices"]
    return [top["logprob"] for top in choice["logprobs"]["content"][0]["top_logprobs"]]


def peft_difference(base: Path, jobs: Sequence[Job]) -> float:
    """The largest difference between what the rollout worker said of the jobs' adapters and what PEFT says."""
    import torch  # here: once the services have ended
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tokenizer, largest = ChatTokenizer.load(base), 0.0
    for number, job in enumerate(jobs):
        folder = base.parent / f"adapter-{number}"
        zipfile.ZipFile(io.BytesIO(job.adapter)).extractall(folder)
        model: Any = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(folder)
        )
        for messages, asked in zip(prompts(), job.asked, strict=True):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([tokenizer.render(messages)])).logits[0, -1]
            found = logits.log_softmax(-1).topk(NUM_TOP).values.tolist()
            largest = max(largest, *(abs(one - other) for one, other in zip(asked, found, strict=True)))
    return largest


# ---- the report -----------------------------------------------------------------------------------------------------


def report(given: Any) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        base = make_random_base(Path(folder) / "base", last_word=LAST_WORD, **QWEN3_06B)
        found = asyncio.run(measure(base, given.steps, given.engine))
    columns = ("start s", "whole s", "PSS MB", "reward_std", "grad_norm", "gap", "PEFT", "words")
    least, gap = (min(found.rewards_std), min(found.grad_norms)), max(found.gaps)
    shown = [f"{value:.2g}" for value in (*least, gap, found.peft_difference)]
    rows = [(found.start_s, found.whole_s, found.pss_mb, *shown, found.words)]
    goals = [
        Goal("seconds", found.whole_s, LIMIT_S, more_is_better=False),
        Goal("PSS, MB", found.pss_mb, LIMIT_MB[given.engine], more_is_better=False),
        Goal("least reward_std", least[0], 1e-6),
        Goal("least grad_norm", least[1], 1e-9),
        Goal("largest gap between rollout and trainer", gap, LIMIT_GAP, more_is_better=False),
        Goal("largest difference from PEFT", found.peft_difference, LIMIT_GAP, more_is_better=False),
        Goal("words of an answer of 16 tokens", found.words, 15.0, more_is_better=False),
    ]
    return Report([make_table("The shape of Qwen3-0.6B", columns, rows)], asdict(found), goals)


if __name__ == "__main__":
    options = parser(__doc__, steps=3)
    options.add_argument("--engine", choices=list(LIMIT_MB), default="torch", help="default torch")
    asked = options.parse_args()
    show(report(asked), asked.json)
