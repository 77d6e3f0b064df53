"""Deterministic mode on whole clusters (I8): jobs and a run have the same bits alone and among whatever else, whoever is killed on the
way; and workers of default mode leave alone what it has begun."""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.wire.messages import AdapterRef
from examples.new_skill import as_example, questions
from harness.live import Api, adapter_hashes, is_balanced, jsonl
from manager_service.launcher.supervisor import LocalCluster, ServiceCommand, Services, service_commands
from tests.support.forked import running
from tests.support.whole import workers
from tests.system.tinker_kills import differences, either, kill, left, train

pytestmark = [pytest.mark.exact, pytest.mark.slow, pytest.mark.timeout(900)]
DETERMINISTIC = {"MARLAAS_DETERMINISTIC": "1", "MARLAAS_LEASE_S": "2", "MARLAAS_OWN_STREAMS": "1", "MARLAAS_PEERS": "1"}

WATCHED: dict[str, dict[str, Any]] = {
    "sort": {"batch_size": 4, "group_size": 4, "max_steps": 3, "lora_rank": 32},  # peers pass on such a large one
    "calc": {"batch_size": 4, "group_size": 4, "max_steps": 2},
}
OTHERS = ("add", "reverse", "calc")
"""Jobs that differ from the watched ones in everything that a neighbour may differ in."""
SUPERVISED = {"batch_size": 8, "n_epochs": 2, "eval_interval": 2, "keep_versions": 3}
NUM_EXAMPLES, NUM_STEPS = 16, 4
VICTIMS = ("trainer-0", "trainer-1", "env-0", "rollout-0", "manager", "rollout-1", "redis")


async def test_jobs_and_a_run_have_the_same_bits_alone_and_among_others_whatever_is_killed(tmp_path: Path) -> None:
    """One worker of a kind or two; other jobs and a chat, or none; every kind of process killed on the way."""
    stop, told = tmp_path / "stop", tmp_path / "told"
    # Given jobs and a run of the Tinker protocol among others, under kills of which each comes after an answer to the run
    shape: Any = {"rollout": 2, "trainer": 2, "services": on_machines(tmp_path / "nodes")}
    async with running(tmp_path / "among", environment=DETERMINISTIC, **shape) as (cluster, api):
        async with a_chat(cluster):
            others = [await api.submit(skill, seed=100 + n, **others_shape(n)) for n, skill in enumerate(OTHERS)]
            jobs = {skill: await api.submit(skill, **hyper) for skill, hyper in WATCHED.items()}
            examples = await submit_supervised(api)
            training = asyncio.create_task(train(cluster, api, 10**9, stop, told))
            await either(kill(cluster, VICTIMS, random.Random(1), told), training)
            stop.touch()
            run_among = await training
            assert {job["status"] for job in await api.until_done(*others, seconds=600)} == {"succeeded"}
            among = {skill: await finished(cluster, api, job) for skill, job in jobs.items()}
            supervised_among = await finished_supervised(cluster, api, examples)
        await nothing_is_left(cluster)
    assert [*(tmp_path / "nodes").glob("rollout-*/files/*")], "no adapter came through peers"
    # When each is done by itself
    async with running(tmp_path / "alone", environment=DETERMINISTIC) as (cluster, api):
        alone = {skill: await finished(cluster, api, await api.submit(skill, **WATCHED[skill])) for skill in WATCHED}
        supervised = await finished_supervised(cluster, api, await submit_supervised(api))
        run = await train(cluster, api, len(run_among.steps), tmp_path / "none", tmp_path / "told alone")
        unfinished = await begun_job(cluster, api)
    # Then it has the same bits
    assert among == alone and supervised_among == supervised
    assert [*run_among.faults, *run.faults, *differences(run_among, run)] == []
    # And workers of default mode wait until the jobs of deterministic mode have ended
    await default_mode_waits(tmp_path / "alone", *unfinished)


def on_machines(nodes: Path) -> Services:
    """Commands of services of which each has a machine, and so a node folder, of its own."""

    def services(*given: Any) -> list[ServiceCommand]:
        made = service_commands(*given)
        return [replace(s, environment={**s.environment, "MARLAAS_CACHE_DIR": str(nodes / s.name)}) for s in made]

    return services


def others_shape(number: int) -> dict[str, Any]:
    return {
        "batch_size": 2 + number % 3,
        "group_size": 4 + 2 * (number % 3),
        "max_steps": 2,
        "lora_rank": (4, 8, 16)[number % 3],
        "learning_rate_multiplier": 1 + number % 2,
        "loss": ("dapo", "rloo", "cispo")[number % 3],
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
    assert len(losses) == 3 and losses[-1] == done["last_eval_loss"] < losses[0]
    assert (await api.get(f"/fine_tuning/jobs/{job}/usage"))["trained_tokens"] == done["trained_tokens"] > 0
    return hashes, losses


@asynccontextmanager
async def a_chat(cluster: LocalCluster) -> AsyncGenerator[None]:
    """A tenant of its own, who samples before the block begins and until it has ended."""
    admin = Api(cluster.base_url, cluster.admin_key)
    tenant = await admin.tenant("chat")
    task = asyncio.create_task(keep_chatting(cluster, tenant.key))
    try:
        while not (await tenant.get("/usage"))["total"]["sampled_tokens"]:
            await asyncio.sleep(0.2)
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.gather(admin.close(), tenant.close())


async def keep_chatting(cluster: LocalCluster, key: str) -> None:
    asked: Any = [{"role": "user", "content": "reverse cabin"}]
    async with AsyncOpenAI(base_url=f"{cluster.base_url}/v1", api_key=key, max_retries=100) as client:
        while True:
            await client.chat.completions.create(model="tiny", messages=asked, max_tokens=16, n=4)
            await asyncio.sleep(0.1)


async def nothing_is_left(cluster: LocalCluster) -> None:
    """Returns once no work and no dead letter is left."""
    async with asyncio.timeout(60):
        while await left(cluster.redis_url):
            await asyncio.sleep(0.2)


# ---- a cluster that goes on in default mode --------------------------------------------------------------------------


async def begun_job(cluster: LocalCluster, api: Api) -> tuple[str, dict[str, str]]:
    """A job with a step and no end in sight, and the fingerprints of what computes it, which its manifests have."""
    job = await api.submit("sort", max_steps=1000, batch_size=2, group_size=4)
    while not (steps := await api.steps(job)):
        await asyncio.sleep(0.2)
    fingerprints = {worker["service"]: f for worker in await workers(cluster) if (f := worker["fingerprint"])}
    assert set(fingerprints) == {"rollout", "trainer"}
    assert await fingerprints_of(cluster, job, steps) == [fingerprints] * len(steps)
    return job, fingerprints


async def default_mode_waits(folder: Path, job: str, fingerprints: Any) -> None:
    # Its workers do not join, and `up` says why
    told: list[str] = []
    async with running(folder, notify=told.append) as (cluster, api):
        assert any("rollout (tiny): this rollout worker runs in default mode" in line for line in told)
        assert {worker["state"] for worker in await workers(cluster)} == {"refused"}
        # Once the job has been cancelled, they join by themselves, and other jobs are trained
        await api.post(f"/fine_tuning/jobs/{job}/cancel")
        other = await api.submit("sort", max_steps=1, batch_size=2, group_size=4)
        (done,) = await api.until_done(other)
        assert done["status"] == "succeeded"
        steps = await api.steps(job)  # one may have been made before the end, and heard of since
        assert await fingerprints_of(cluster, job, steps) == [fingerprints] * len(steps)


async def fingerprints_of(cluster: LocalCluster, job: str, steps: Sequence[int]) -> list[Any]:
    store = AdapterStore(Objects.open((cluster.data_dir / "store").as_uri()))
    manifests = [await store.manifest(AdapterRef("default", job, step)) for step in steps]
    return [manifest and dict(manifest.fingerprints) for manifest in manifests]
