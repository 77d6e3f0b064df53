"""Several base models on one pool: a worker of each service serves all of them in turn."""

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.settings import TINY
from harness.live import ALIKE, Api, adapter_hashes
from manager_service.launcher.supervisor import LocalCluster, ServiceCommand, service_commands
from tests.support.dying_pool import POINTS
from tests.support.forked import running
from tests.support.whole import until_whole

sys.path.insert(0, str(TINY.parent))
import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SHAPE: dict[str, Any] = {"batch_size": 2, "group_size": 4, "max_steps": 3}
TRAJECTORIES = 2 * 4 * 3


def twins(folder: Path, *names: str) -> dict[str, Path]:
    """Base models of one shape, each with weights of its own that still answer."""
    made = {name: copytree(TINY, folder / name) for name in names}
    for seed, base in enumerate(made.values()):
        torch.manual_seed(seed)
        weights = load_file(base / "model.safetensors")
        save_file({name: w + 1e-3 * torch.randn_like(w) for name, w in weights.items()}, base / "model.safetensors")
    return made


def untrained(folder: Path, **shapes: str) -> dict[str, Path]:
    """Base models of random weights."""
    for name, shape in shapes.items():
        make_tiny.save(make_tiny.make_model(5, make_tiny.Shape.parse(shape)), folder / name)
    return {name: folder / name for name in shapes}


def served(bases: Mapping[str, Path], **settings: str) -> dict[str, str]:
    return {"MARLAAS_BASE_MODELS": ",".join(f"{name}={path}" for name, path in bases.items()), **settings}


def pinned(counts: Mapping[str, int], environment: Mapping[str, str]) -> list[ServiceCommand]:
    """Workers of their own for each base model."""
    names = [part.partition("=")[0] for part in environment["MARLAAS_BASE_MODELS"].split(",")]
    return [
        replace(command, name=f"{command.name}-{name}", environment={"MARLAAS_BASE_MODEL": name})
        if command.name.endswith("-0")
        else command
        for command in service_commands(counts, environment)
        for name in (names if command.name.endswith("-0") else names[:1])
    ]


def dying(folder: Path, counts: Mapping[str, int], environment: Mapping[str, str]) -> list[ServiceCommand]:
    """A pool whose workers with weights die at each point of a switch."""
    argv = (sys.executable, "-m", "tests.support.dying_pool")
    return [
        replace(
            command,
            argv=argv,
            environment={
                **command.environment,
                "MARLAAS_TEST_SERVICE": service,
                "MARLAAS_TEST_DEATHS": str(folder / service),
            },
        )
        if (service := command.name.partition("-")[0]) in ("rollout", "trainer")
        else command
        for command in service_commands(counts, environment)
    ]


async def versions(cluster: LocalCluster, api: Api, bases: Mapping[str, Path]) -> dict[str, dict[str, str]]:
    """The bytes of the last version of a job of each base model, all at the same time."""
    shape: dict[str, Any] = {**SHAPE, "max_steps": 2, "max_tokens": 16}
    jobs = {name: await api.submit("add", model=name, grader=ALIKE, **shape) for name in bases}
    await until_whole(cluster, api, list(jobs.values()), steps=2, trajectories=2 * 4 * 2)
    return {name: await adapter_hashes(cluster, "default", job, 2) for name, job in jobs.items()}


@pytest.mark.exact
async def test_jobs_of_four_base_models_have_the_bytes_of_pinned_workers_wherever_a_switch_is_killed(
    tmp_path: Path,
) -> None:
    bases = twins(tmp_path / "bases", "a", "b") | untrained(tmp_path / "bases", c="64x2", d="96x3")
    environment = served(bases, MARLAAS_DETERMINISTIC="1", MARLAAS_LEASE_S="2", MARLAAS_SLICE_MAX_S="2")
    deaths = tmp_path / "deaths"
    deaths.mkdir()

    def services(counts: Mapping[str, int], variables: Mapping[str, str]) -> list[ServiceCommand]:
        return dying(deaths, counts, variables)

    async with running(tmp_path / "pool", environment=environment, services=services) as (cluster, api):
        pooled = await versions(cluster, api, bases)
        assert {file.name: file.read_text().split() for file in deaths.iterdir()} == {
            "rollout": list(POINTS),
            "trainer": list(POINTS),
        }
    async with running(tmp_path / "pinned", environment=environment, services=pinned) as (cluster, api):
        assert await versions(cluster, api, bases) == pooled


@pytest.mark.parametrize("placement", ["isolated", "backfill"])
async def test_a_base_model_without_a_place_waits_if_they_are_isolated_and_else_takes_turns(
    tmp_path: Path, placement: str
) -> None:
    bases = twins(tmp_path / "bases", "a", "b")
    environment = served(bases, MARLAAS_PLACEMENT=placement, MARLAAS_SLICE_MAX_S="1")
    async with running(tmp_path / "pool", environment=environment) as (cluster, api):

        async def until_steps(job: str, num: int) -> None:
            while len(await api.steps(job)) < num:
                await asyncio.sleep(0.2)

        first = await api.submit("add", model="a", batch_size=2, group_size=4, max_steps=2000)
        await until_steps(first, 2)
        second = await api.submit("add", model="b", **SHAPE)
        if placement == "isolated":
            await until_steps(first, len(await api.steps(first)) + 4)
            assert await api.steps(second) == []
            await api.post(f"/fine_tuning/jobs/{first}/cancel")
        await until_whole(cluster, api, [second], steps=3, trajectories=TRAJECTORIES)
        (found,) = (
            await api.until_done(first) if placement == "isolated" else [await api.get(f"/fine_tuning/jobs/{first}")]
        )
        assert found["status"] == ("cancelled" if placement == "isolated" else "running")


async def test_a_chat_with_a_closed_base_model_answers(tmp_path: Path) -> None:
    bases = twins(tmp_path / "bases", "a", "b", "c")
    async with running(tmp_path / "pool", environment=served(bases)) as (cluster, api):
        asked = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4, "temperature": 0}
        answers = await asyncio.gather(*(api.post("/chat/completions", {"model": name, **asked}) for name in bases))
        assert all(answer["choices"][0]["message"]["content"] for answer in answers)
        assert sum(name.startswith("rollout") for name in cluster.pids) == 1
