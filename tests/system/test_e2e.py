"""Whole clusters of real processes: learning, usage, kills, and pauses; `test_same_bits.py` has what deterministic mode promises."""

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.bus.bus import Bus
from common.bus.streams import Cell
from common.cancellation import cancel_all
from harness.bases import FIRST_WORD, make_random_base
from harness.live import Api, adapter_hashes, is_balanced
from manager_service.launcher.supervisor import LocalCluster
from rollout_service.handler import PROGRESS_BODY, PROGRESS_HEAD
from tests.common.test_worker import until
from tests.support.forked import running
from tests.support.processes import restart
from tests.support.tinker_client import TinkerClient
from tests.support.whole import until_whole, workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
USED = {
    "sampled_tokens": ("rollout", "sampled_tokens"),
    "trained_tokens": ("trainer", "trained_tokens"),
    "rollout_s": ("rollout", "busy_s"),
    "train_s": ("trainer", "busy_s"),
}
"""A figure of the usage -> the service and the counter that tell of it."""


async def test_rewards_rise_usage_is_what_was_spent_and_a_paused_job_goes_on_where_it_was(tmp_path: Path) -> None:
    """Usage (I11): tokens exactly, busy seconds within what a float sum and the last second's report may miss."""
    async with running(tmp_path) as (cluster, api):
        steps = {"sort": 8, "calc": 4}
        quick: dict[str, Any] = {"batch_size": 8, "learning_rate_multiplier": 5, "evaluate": True, "eval_samples": 4}
        jobs = [await api.submit(skill, max_steps=num, **quick) for skill, num in steps.items()]
        for job, last in zip(await api.until_done(*jobs), steps.values(), strict=True):
            assert job["status"] == "succeeded", job["error"]
            evaluations = [e["data"] for e in await api.events(job["id"]) if "eval_reward_mean" in e["data"]]
            before, after = (evaluations[n]["eval_reward_mean"] for n in (0, -1))
            assert after > before + 0.15, (before, after)
            assert is_balanced(await api.ledger(job["id"]))
            path = f"/fine_tuning/jobs/{job['id']}/samples"
            # they are written beside the owner's passes
            await until(lambda path=path, last=last: newest_is(api, path, last))
            answers = (await api.get(path, evaluation=True))["data"]
            assert [(one["version"], one["item"]) for one in answers] == [(last, item) for item in range(4)]
            whole = await api.get(f"{path}/0/1/0", evaluation=True)
            assert whole["sample"]["prompt"] == answers[1]["prompt"], "the same items for every version"
        usage = [row for row in (await api.get("/usage"))["data"] if row["job"] in jobs]
        used = {name: sum(row[name] for row in usage) for name in USED}
        await until(lambda: is_spent(cluster, used))
        await pause_and_resume(cluster, api)


async def is_spent(cluster: LocalCluster, used: dict[str, Any]) -> bool:
    """Have the workers told of all that was used, and of nothing else?"""
    spent = {worker["service"]: worker["counters"] for worker in await workers(cluster)}
    told = {name: spent[service].get(counter, 0) for name, (service, counter) in USED.items()}
    tokens = [name for name in USED if name.endswith("tokens")]
    return [told[name] for name in tokens] == [used[name] for name in tokens] and told == pytest.approx(used, rel=0.01)


async def newest_is(api: Api, samples: str, version: int) -> bool:
    """Are these the answers of the evaluation of this version?"""
    return any(one["version"] == version for one in (await api.get(samples, evaluation=True))["data"])


async def pause_and_resume(cluster: LocalCluster, api: Api) -> None:
    """Pausing frees the workers, and resuming goes on where it was."""
    job = await api.submit("calc", max_steps=8, batch_size=2)
    while not await api.steps(job):
        await asyncio.sleep(0.05)
    await api.post(f"/fine_tuning/jobs/{job}/pause")
    await until(lambda: has_status(api, job, "paused"))
    await until(lambda: all_are_idle(cluster))
    before = await api.steps(job)
    assert is_balanced(await api.ledger(job))
    await api.post(f"/fine_tuning/jobs/{job}/resume")
    (done,) = await api.until_done(job)
    assert done["status"] == "succeeded"
    assert before == list(range(1, len(before) + 1)) and await api.steps(job) == list(range(1, 9))
    assert (await api.ledger(job))["trained"] == 8 * 2 * 8


async def has_status(api: Api, job: str, status: str) -> bool:
    return (await api.get(f"/fine_tuning/jobs/{job}"))["status"] == status


async def all_are_idle(cluster: LocalCluster) -> bool:
    return {worker["state"] for worker in await workers(cluster)} == {"idle"}


async def test_a_kill_of_every_process_loses_nothing(tmp_path: Path) -> None:
    rng = random.Random(11)
    shape: dict[str, Any] = {"rollout": 2, "env": 1, "trainer": 2}
    environment = {"MARLAAS_LEASE_S": "2"}
    async with running(tmp_path, environment=environment, **shape) as (cluster, api):
        hyper: dict[str, Any] = {"max_steps": 8, "batch_size": 2, "group_size": 4}
        jobs = [await api.submit(skill, **hyper) for skill in ("sort", "calc")]
        victims = ["rollout-0", "rollout-1", "env-0", "trainer-0", "trainer-1", "manager", "redis"]
        rng.shuffle(victims)
        for victim in victims:
            await asyncio.sleep(rng.uniform(0.1, 0.5))
            cluster.kill(victim, signal.SIGKILL)
        await until_whole(cluster, api, jobs, steps=8, trajectories=8 * 2 * 4)
        assert sum(cluster.num_exits.values()) >= 7
        for job in jobs:
            checkpoints = await api.get(f"/fine_tuning/jobs/{job}/checkpoints", limit=100)
            assert sorted(c["step_number"] for c in checkpoints["data"]) == list(range(1, 9))
            for version in range(9):
                assert await adapter_hashes(cluster, "default", job, version)


async def test_a_killed_rollout_worker_costs_turns_and_answers_only_what_was_not_kept_of_them(tmp_path: Path) -> None:
    """E5: what the worker after it samples and what was kept are the turns' tokens together."""
    base = make_random_base(tmp_path / "base", last_word=FIRST_WORD, vocab_size=8192)  # its turns hardly ever stop
    environment = {"MARLAAS_BASE_MODELS": f"base={base}", "MARLAAS_LEASE_S": "2"}
    async with running(tmp_path / "data", environment=environment) as (cluster, api):
        bus = Bus.connect(cluster.redis_url, Cell("base"))
        await kill_under_a_job(cluster, api, bus)
        await kill_under_answers(cluster, api, bus)
        await bus.close()


async def test_a_chat_is_answered_while_samples_have_every_slot(tmp_path: Path) -> None:
    base = make_random_base(tmp_path / "base", last_word=FIRST_WORD, vocab_size=8192)
    environment = {"MARLAAS_BASE_MODELS": f"base={base}", "MARLAAS_ROLLOUT_SLOTS": "4"}
    async with (
        running(tmp_path / "data", environment=environment) as (cluster, api),
        httpx.AsyncClient(base_url=cluster.base_url, trust_env=False) as http,
    ):
        client = TinkerClient(http, api.key)
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [104, 105]}]}
        endless = {"max_tokens": 2000, "temperature": 0}  # the likeliest tokens go round in a circle
        body: dict[str, Any] = {"prompt": prompt, "num_samples": 4, "sampling_params": endless}
        asked = await client.post("asample", **body, base_model="base")
        sampling = asyncio.create_task(client.retrieve(asked.json()["request_id"]))
        await until(lambda: has_turns(cluster, 4))
        messages = [{"role": "user", "content": "hi"}]
        await api.post("/chat/completions", {"model": "base", "messages": messages, "max_tokens": 2})
        await api.post("/completions", {"model": "base", "prompt": "hi", "max_tokens": 2})
        await until(lambda: has_turns(cluster, 4))  # a report may be of the moment of the chat
        assert not sampling.done()
        await cancel_all([sampling])


async def has_turns(cluster: LocalCluster, number: int) -> bool:
    return [each["in_use"] for each in await workers(cluster) if each["service"] == "rollout"] == [number]


async def kill_under_a_job(cluster: LocalCluster, api: Api, bus: Bus) -> None:
    # Given long turns of which some tokens are kept
    hyper: dict[str, Any] = {"max_steps": 1, "batch_size": 1, "group_size": 4, "max_tokens": 900}
    job = await api.submit("sort", model="base", **hyper)
    while (kept := await tokens_kept(bus, bus.cell.rollout)) < 4 * 100:
        await asyncio.sleep(0.02)
    # When their worker is killed
    await restart(cluster, "rollout-0", signal.SIGKILL)
    (done,) = await api.until_done(job)
    assert done["status"] == "succeeded", done["error"]
    # Then the next one samples the others alone
    sampled = await tokens_sampled(cluster)
    (usage,) = [row for row in (await api.get("/usage"))["data"] if row["job"] == job]
    assert 0 < sampled <= usage["sampled_tokens"] - kept, (sampled, usage, kept)


async def kill_under_answers(cluster: LocalCluster, api: Api, bus: Bus) -> None:
    """The same of turns that an API replica asked for without a stream."""
    body = {"model": "base", "prompt": "count", "max_tokens": 900, "n": 4}
    asking = asyncio.create_task(api.post("/completions", body))
    while await tokens_kept(bus, bus.cell.rollout_chat) < 4 * 100 and not asking.done():
        await asyncio.sleep(0.02)
    assert not asking.done(), "too fast to be killed"
    cluster.kill("rollout-0", signal.SIGKILL)
    kept = await tokens_kept(bus, bus.cell.rollout_chat)
    whole = (await asking)["usage"]["completion_tokens"]
    sampled = await tokens_sampled(cluster)
    assert 0 < sampled <= whole - kept, (sampled, whole, kept)


async def tokens_sampled(cluster: LocalCluster) -> int:
    """Tokens that the rollout worker has sampled since it started."""
    before = -1.0
    while before != (sampled := await told_sampled(cluster)) or not sampled:
        before = sampled
        await asyncio.sleep(2.5)
    return int(sampled)


async def told_sampled(cluster: LocalCluster) -> float:
    """0 before its first report."""
    pid = cluster.pids["rollout-0"]
    return sum(w["counters"].get("sampled_tokens", 0) for w in await workers(cluster) if w["pid"] == pid)


async def tokens_kept(bus: Bus, stream: str) -> int:
    """Tokens of all turns under way."""
    found: list[Any] = await bus.client.keys(bus.cell.partial(stream, "*"))
    keys = [key for key in found if not key.endswith(b":by")]
    sizes = [size for key in keys if (size := await bus.client.strlen(key))]
    return sum((size - PROGRESS_HEAD.size) // PROGRESS_BODY.itemsize for size in sizes)
