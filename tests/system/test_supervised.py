"""Supervised jobs on whole clusters of real processes: a new skill, and the same bits whatever is killed."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from examples.new_skill import as_example, client_of, learn, questions
from harness.live import Api, adapter_hashes, is_balanced, jsonl
from manager_service.local.supervisor import LocalCluster
from tests.support.forked import running

pytestmark = pytest.mark.slow

HYPER = {"batch_size": 8, "n_epochs": 2, "eval_interval": 8, "keep_versions": 3}
NUM_EXAMPLES, NUM_STEPS = 96, 24


@pytest.mark.timeout(1800)
async def test_a_new_skill_is_learned_from_examples_and_then_from_rewards(tmp_path: Path) -> None:
    async with running(tmp_path) as (cluster, _), client_of(cluster) as client:
        shares = await learn(client)
    assert shares.base <= 0.05 and shares.supervised >= 0.6, shares
    assert shares.reinforced >= 0.9 and shares.reinforced > shares.supervised, shares


async def submit(api: Api) -> str:
    rows = [as_example(item) for item in questions(0, NUM_EXAMPLES, held_out=False)]
    held_out = [as_example(item) for item in questions(0, 16, held_out=True)]
    body: dict[str, Any] = {
        "model": "tiny",
        "seed": 7,
        "training_file": await api.upload("min.jsonl", jsonl(rows)),
        "validation_file": await api.upload("held-out.jsonl", jsonl(held_out)),
        "method": {"type": "supervised", "supervised": {"hyperparameters": HYPER}},
    }
    return (await api.post("/fine_tuning/jobs", body))["id"]


async def finished(cluster: LocalCluster, api: Api, job: str) -> tuple[dict[str, str], list[Any]]:
    """The newest version's hashes, and the losses of its evaluations."""
    (done,) = await api.until_done(job, seconds=600)
    assert done["status"] == "succeeded", done["error"]
    assert await api.steps(job) == list(range(1, NUM_STEPS + 1))
    ledger = await api.ledger(job)
    assert is_balanced(ledger) and ledger["trained"] == ledger["issued"] == 2 * NUM_EXAMPLES
    losses = [e["data"]["eval_loss"] for e in await api.events(job) if "eval_loss" in e["data"]]
    assert len(losses) == 4 and losses[-1] == done["last_eval_loss"] < losses[0]
    assert (await api.get(f"/fine_tuning/jobs/{job}/usage"))["trained_tokens"] == done["trained_tokens"] > 0
    return await adapter_hashes(cluster, "default", job, NUM_STEPS), losses


@pytest.mark.exact
@pytest.mark.timeout(1500)
async def test_a_supervised_job_is_the_same_bits_alone_and_whatever_is_killed(tmp_path: Path) -> None:
    deterministic = {"MARLAAS_DETERMINISTIC": "1", "MARLAAS_LEASE_S": "2"}
    async with running(tmp_path / "alone", environment=deterministic) as (cluster, api):
        alone = await finished(cluster, api, await submit(api))
    shape = {"rollout": 2, "env": 2, "trainer": 2}
    async with running(tmp_path / "among", environment=deterministic, **shape) as (cluster, api):
        others = [await api.submit(skill, max_steps=4, batch_size=4, seed=n) for n, skill in enumerate(("sort", "add"))]
        job = await submit(api)
        for victim in ("trainer-0", "env-0", "manager", "rollout-1", "trainer-1"):
            await asyncio.sleep(1.0)
            cluster.kill(victim, signal.SIGKILL)
        await api.until_done(*others, seconds=600)
        assert await finished(cluster, api, job) == alone
