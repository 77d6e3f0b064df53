"""Runs several jobs at once on MARLaaS, start and end included: `python -m benchmarks.peers.marlaas_jobs FOLDER NAME...`.

What `marlaas up` starts (one rollout worker, one env worker, one trainer), and one tenant a job, who uploads items, submits
and downloads the adapter through the HTTP API, as any customer would.
"""

import asyncio
import io
import json
import sys
import time
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks.peers.settings import Job, Settings, read_job, read_settings, write_ends
from harness.live import GRADER, Api
from manager_service.launcher.supervisor import LocalCluster

BASE = "base"
LIMIT_S = 3600.0


def hyperparameters(settings: Settings) -> dict[str, Any]:
    """The settings under the names of the job API."""
    return {
        "batch_size": settings.batch_size,
        "group_size": settings.group_size,
        "max_steps": settings.num_steps,
        "learning_rate": settings.learning_rate,
        "lora_rank": settings.lora_rank,
        "lora_alpha": settings.lora_alpha,
        "lora_targets": list(settings.lora_targets),
        "loss": "grpo",
        "clip_low": settings.clip,
        "clip_high": settings.clip,
        "temperature": settings.temperature,
        "max_tokens": settings.max_tokens,
        "max_staleness": 0,
        "grad_clip": 1e6,  # none
    }


async def train(admin: Api, folder: Path, job: Job, settings: Settings) -> None:
    api, home = await admin.tenant(f"tenant-{job.name}"), folder / job.name
    grader = {**GRADER, "operation": settings.operation}
    body = {
        "model": BASE,
        "seed": job.seed,
        "training_file": await api.upload("items.jsonl", (home / "items.jsonl").read_bytes()),
        "method": {
            "type": "reinforcement",
            "reinforcement": {"grader": grader, "hyperparameters": hyperparameters(settings)},
        },
    }
    created = (await api.post("/fine_tuning/jobs", body))["id"]
    write_ends(folder, job, [end async for end in step_ends(api, created)])
    (ended,) = await api.until_done(created, seconds=LIMIT_S)
    assert ended["status"] == "succeeded", ended["error"]
    content = await api.http.get(f"/fine_tuning/jobs/{created}/checkpoints/{settings.num_steps}/content")
    zipfile.ZipFile(io.BytesIO(content.content)).extractall(home / "marlaas")
    await api.close()


async def step_ends(api: Api, job: str) -> AsyncIterator[float]:
    """Seconds of the wall clock at which its steps are told."""
    events = f"/fine_tuning/jobs/{job}/events?stream=true"
    async with api.http.stream("GET", events, timeout=LIMIT_S) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and "reward_mean" in (json.loads(line[6:]).get("data") or {}):
                yield time.time()


async def run(folder: Path, names: list[str]) -> None:
    settings = read_settings(folder)
    environment = {"MARLAAS_BASE_MODELS": f"{BASE}={settings.model}", "MARLAAS_MAX_CONTEXT": "2048"}
    async with LocalCluster(data_dir=folder / "marlaas", environment=environment) as cluster:
        admin = Api(cluster.base_url, cluster.admin_key)
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(train(admin, folder, read_job(folder, name), settings))
        await admin.close()


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), sys.argv[2:]))
