"""Deterministic mode on whole clusters (I8): a job has the same bits alone and among whatever else, whoever is killed on the way."""

import asyncio
import signal
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from examples.new_skill import as_example, questions
from harness.live import Api, adapter_hashes, is_balanced, jsonl
from manager_service.local.supervisor import LocalCluster
from tests.support.forked import running
from tests.support.tinker_sdk import run_sdk

pytestmark = [pytest.mark.exact, pytest.mark.slow, pytest.mark.timeout(900)]
DETERMINISTIC = {"MARLAAS_DETERMINISTIC": "1", "MARLAAS_LEASE_S": "2"}

WATCHED: dict[str, dict[str, Any]] = {
    "sort": {"batch_size": 4, "group_size": 4, "max_steps": 4},
    "calc": {"batch_size": 4, "group_size": 4, "max_steps": 3},
}
OTHERS = ("add", "sort", "reverse", "calc")
"""Jobs that differ from the watched ones in everything that a neighbour may differ in."""
SUPERVISED = {"batch_size": 8, "n_epochs": 2, "eval_interval": 4, "keep_versions": 3}
NUM_EXAMPLES, NUM_STEPS = 48, 12
VICTIMS = ("trainer-0", "env-0", "manager", "rollout-1")

ENDLESS = """
import tinker
from tinker import types
def datum(n):
    tokens = [(7 * n + i) % 200 for i in range(12)]
    inputs = {"target_tokens": tokens[1:] + [0], "weights": [1.0] * 12}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
prompt = types.ModelInput.from_ints([259, *b"add 37+58", 256, 260])
client = tinker.ServiceClient().create_lora_training_client("tiny", rank=8, seed=3).result()
while True:
    sampler = client.save_weights_and_get_sampling_client().result()
    sampler.sample(prompt, 8, types.SamplingParams(max_tokens=32, stop=[])).result()
    client.forward_backward([datum(part) for part in range(4)], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
"""


async def test_jobs_have_the_same_bits_alone_and_among_others_whatever_is_killed(tmp_path: Path) -> None:
    """One worker of a kind or two; other jobs, a run and a chat, or none; every kind of process killed on the way, Redis apart."""
    async with running(tmp_path / "alone", environment=DETERMINISTIC) as (cluster, api):
        alone = {skill: await finished(cluster, api, await api.submit(skill, **WATCHED[skill])) for skill in WATCHED}
        supervised = await finished_supervised(cluster, api, await submit_supervised(api))
    shape = {"rollout": 2, "trainer": 2}
    async with (
        running(tmp_path / "among", environment=DETERMINISTIC, **shape) as (cluster, api),
        other_tenants(cluster, api),
    ):
        others = [await api.submit(skill, seed=100 + n, **others_shape(n)) for n, skill in enumerate(OTHERS)]
        jobs = {skill: await api.submit(skill, **hyper) for skill, hyper in WATCHED.items()}
        examples = await submit_supervised(api)
        for victim in VICTIMS:
            await asyncio.sleep(0.5)
            cluster.kill(victim, signal.SIGKILL)
        assert {job["status"] for job in await api.until_done(*others, seconds=600)} == {"succeeded"}
        assert {skill: await finished(cluster, api, job) for skill, job in jobs.items()} == alone
        assert await finished_supervised(cluster, api, examples) == supervised


def others_shape(number: int) -> dict[str, Any]:
    return {
        "batch_size": 2 + number % 3,
        "group_size": 4 + 2 * (number % 3),
        "max_steps": 3,
        "lora_rank": (4, 8, 16)[number % 3],
        "learning_rate_multiplier": 1 + number % 2,
        "loss": ("grpo", "dapo", "rloo", "cispo")[number % 4],
        "max_tokens": 24 + 8 * (number % 3),
    }


async def finished(cluster: LocalCluster, api: Api, job: str) -> dict[str, str]:
    """The newest version's hashes."""
    (done,) = await api.until_done(job, seconds=600)
    assert done["status"] == "succeeded", done["error"]
    return await adapter_hashes(cluster, "default", job, done["version"])


async def submit_supervised(api: Api) -> str:
    rows = [as_example(item) for item in questions(0, NUM_EXAMPLES, held_out=False)]
    held_out = [as_example(item) for item in questions(0, 16, held_out=True)]
    body: dict[str, Any] = {
        "model": "tiny",
        "seed": 7,
        "training_file": await api.upload("min.jsonl", jsonl(rows)),
        "validation_file": await api.upload("held-out.jsonl", jsonl(held_out)),
        "method": {"type": "supervised", "supervised": {"hyperparameters": SUPERVISED}},
    }
    return (await api.post("/fine_tuning/jobs", body))["id"]


async def finished_supervised(cluster: LocalCluster, api: Api, job: str) -> tuple[dict[str, str], list[Any]]:
    """The newest version's hashes, and the losses of its evaluations."""
    hashes = await finished(cluster, api, job)
    assert await api.steps(job) == list(range(1, NUM_STEPS + 1))
    ledger = await api.ledger(job)
    assert is_balanced(ledger) and ledger["trained"] == ledger["issued"] == 2 * NUM_EXAMPLES
    done = await api.get(f"/fine_tuning/jobs/{job}")
    losses = [e["data"]["eval_loss"] for e in await api.events(job) if "eval_loss" in e["data"]]
    assert len(losses) == 4 and losses[-1] == done["last_eval_loss"] < losses[0]
    assert (await api.get(f"/fine_tuning/jobs/{job}/usage"))["trained_tokens"] == done["trained_tokens"] > 0
    return hashes, losses


@asynccontextmanager
async def other_tenants(cluster: LocalCluster, api: Api) -> AsyncGenerator[None]:
    """A run and a chat of tenants of their own, which sample before the block begins and until it has ended."""
    admin = Api(cluster.base_url, cluster.admin_key)
    run, chat = tenants = [await admin.tenant(name) for name in ("run", "chat")]
    programs: Sequence[Coroutine[Any, Any, Any]] = (
        run_sdk(ENDLESS, url=cluster.base_url, key=run.key),
        keep_chatting(cluster, chat.key),
    )
    tasks = [asyncio.create_task(program) for program in programs]
    try:
        while not all([(await tenant.get("/usage"))["total"]["sampled_tokens"] for tenant in tenants]):
            await asyncio.sleep(0.2)
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(each.close() for each in (admin, *tenants)))


async def keep_chatting(cluster: LocalCluster, key: str) -> None:
    asked: Any = [{"role": "user", "content": "reverse cabin"}]
    async with AsyncOpenAI(base_url=f"{cluster.base_url}/v1", api_key=key, max_retries=100) as client:
        while True:
            await client.chat.completions.create(model="tiny", messages=asked, max_tokens=16, n=4)
            await asyncio.sleep(0.1)
