"""The exporter as a process beside a real owner: every step of a job reaches its loggers once, however often it is killed."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from common.cancellation import running
from common.children.processes import ChildProcess
from common.outgoing import Caller
from manager_service.export import __main__ as exporter_main
from manager_service.export.__main__ import installed, tell_loggers
from manager_service.export.cells import JobCell
from manager_service.export.exporter import Exporter
from manager_service.export.rows import named
from manager_service.records.archive import Archive
from manager_service.records.receivers import Receivers
from manager_service.records.sample_records import Limits
from tests.common.test_worker import until
from tests.support.api_server import ApiServer, method, running_api, running_jobs, upload
from tests.support.forked import begun
from tests.support.loggers import Logger, environment_with_loggers, logger
from tests.support.owning import is_archived

STANDIN = (sys.executable, "-m", "tests.support.standin_exporter")
STEPS = 10
FINAL = ("succeeded", "failed", "cancelled")


@pytest.fixture
async def server(redis_url: str, tmp_path: Path) -> AsyncGenerator[ApiServer]:
    async with running_api(redis_url, tmp_path / "data") as running:
        await Receivers(running.api.redis).tell_installed(["trackio", "wandb"])
        yield running


@asynccontextmanager
async def exporter(
    server: ApiServer, command: Sequence[str] = STANDIN, **settings: Any
) -> AsyncGenerator[ChildProcess]:
    """Runs an exporter on the server's records; kills it with SIGKILL at the end."""
    own = server.api.settings
    environment = {
        "MARLAAS_REDIS_URL": own.redis_url,
        "MARLAAS_DATA_DIR": str(own.data_dir),
        "MARLAAS_EXPORT_EVERY_S": "0.1",
        "MARLAAS_LEASE_S": "1",
        **{f"MARLAAS_{name.upper()}": str(value) for name, value in settings.items()},
    }
    if command == STANDIN:
        process = await begun(STANDIN[-1], own.data_dir / "exporter.log", **environment)
    else:
        process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **environment})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()


async def create(client: AsyncOpenAI, logger: str, *more: str, **hyper: Any) -> str:
    integrations = [{"type": name, name: {"project": "p"}} for name in (logger, *more)]
    body: dict[str, Any] = {"method": method(batch_size=1, group_size=2, **hyper), "integrations": integrations}
    made = await client.fine_tuning.jobs.create(model="tiny", training_file=await upload(client), **body)
    return made.id


async def nothing_waits(server: ApiServer) -> bool:
    return not await server.api.redis.exists(server.bus.cell.exports)


async def figures(server: ApiServer, job: str) -> list[tuple[int, dict[str, float]]]:
    """The figures of the events."""
    told = reversed(await events(server, job))
    return [(event["data"]["step"], named(event["data"])) for event in told if event["type"] == "metrics"]


async def test_every_step_reaches_its_loggers_once_though_the_exporter_is_killed(server: ApiServer) -> None:
    loggers = {"wandb": logger("standin"), "trackio": logger("standin")}
    await killed(server, STANDIN, loggers, times=1, step_s=0.3)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_wandb_offline_and_trackio_hold_every_step_once(server: ApiServer) -> None:
    # Their writers are killed in `test_loggers.py`
    command = (str(environment_with_loggers()), "-m", "manager_service.export")
    loggers = {"wandb": logger("wandb"), "trackio": logger("trackio")}
    await killed(server, command, loggers, times=0, step_s=0.0)


async def killed(
    server: ApiServer, command: Sequence[str], loggers: dict[str, Logger], *, times: int, step_s: float
) -> None:
    """`step_s`: seconds of a step, until the last kill."""
    folder = server.api.settings.data_dir / "loggers" / "default"

    def amounts(job: str) -> list[int]:
        return [one.amount(folder / name, job) for name, one in loggers.items()]

    async with running_jobs(server) as env:
        env.delay_s = step_s
        job = await create(server.openai, *loggers, max_steps=STEPS)
        for _ in range(times):
            before = amounts(job)
            async with exporter(server, command), asyncio.timeout(100):
                while not all(now > then for now, then in zip(amounts(job), before, strict=True)):
                    await asyncio.sleep(0.02)
        env.delay_s = 0.0
        await until(lambda: has_ended(server, job))
        async with exporter(server, command):
            await until(lambda: nothing_waits(server))
    expected = await figures(server, job)
    assert [step for step, _ in expected if step] == list(range(1, STEPS + 1))
    for name, one in loggers.items():
        assert one.read(folder / name, job) == expected, name


async def test_jobs_of_tenants_are_written_into_folders_of_their_own(server: ApiServer) -> None:
    beta = await server.new_tenant("beta")
    async with running_jobs(server), exporter(server):
        mine = await create(server.openai, "wandb", max_steps=2)
        theirs = await create(beta, "wandb", max_steps=1)
        await until(lambda: nothing_waits(server))
    folder = server.api.settings.data_dir / "loggers"
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.jsonl")} == {
        f"default/wandb/{mine}.jsonl",
        f"beta/wandb/{theirs}.jsonl",
    }


async def test_a_logger_that_is_installed_while_the_exporter_runs_is_found_and_a_job_says_where_its_figures_lie(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(exporter_main, "LOOK_EVERY_S", 0.1)
    receivers = Receivers(server.api.redis)

    async def found(loggers: list[str]) -> bool:
        return await receivers.installed() == loggers

    async with running(tell_loggers(receivers, server.bus, installed)), running_jobs(server):
        await until(lambda: found([]))
        for name in ("trackio", "wandb"):
            (tmp_path / f"{name}.py").touch()
        await until(lambda: found(["trackio", "wandb"]))
        job = await create(server.openai, "wandb", "trackio", max_steps=1)
        await until(lambda: has_ended(server, job))
        await receivers.set_key("default", "wandb", "k" * 40, "https://wandb.example.org")
        with_key = await create(server.openai, "wandb", "trackio", max_steps=1)
        await until(lambda: has_ended(server, with_key))
    said = [event["message"] for event in await events(server, job)][-4:]
    assert said[3] == "Job queued" and "no key is set" in said[2] and f"loggers/default/wandb/{job} " in said[2]
    assert said[1].startswith("trackio: ") and "loggers/default/trackio " in said[1] and said[0] == "Job started"
    assert [
        event["message"] for event in await events(server, with_key) if event["message"].startswith("wandb: no")
    ] == []


async def test_what_came_while_no_exporter_ran_is_written_later_from_the_archive(server: ApiServer) -> None:
    async with running_jobs(server, archive_after_s=0.0):
        job = await create(server.openai, "wandb", max_steps=3)
        await until(lambda: is_archived(server.bus, job))
    async with exporter(server):
        await until(lambda: nothing_waits(server))
    folder = server.api.settings.data_dir / "loggers" / "default" / "wandb"
    assert logger("standin").read(folder, job) == await figures(server, job)


async def test_last_rows_that_a_logger_did_not_keep_are_sent_again(server: ApiServer) -> None:
    folder = server.api.settings.data_dir / "loggers" / "default" / "wandb"
    folder.mkdir(parents=True)
    (folder / "forgets").touch()
    data = server.api.settings.data_dir
    async with running_jobs(server), running(exporter_here(server, data, give_up_s=3600).run()):
        job = await create(server.openai, "wandb", max_steps=2)
        await until(lambda: nothing_waits(server))
    assert not (folder / "forgets").exists()
    assert logger("standin").read(folder, job) == await figures(server, job)


async def test_a_logger_that_takes_nothing_is_told_once_in_the_jobs_events_and_given_up_in_the_end(
    server: ApiServer, tmp_path: Path
) -> None:
    why = "https://wandb.example.org: the operator does not allow the host wandb.example.org"
    await Receivers(server.api.redis).set_key("default", "wandb", "secret-of-mine", "https://wandb.example.org")
    async with running_jobs(server), running(exporter_here(server, tmp_path, give_up_s=3600).run()):
        job = await create(server.openai, "wandb", max_steps=3)

        async def told() -> bool:
            status = (await server.openai.fine_tuning.jobs.retrieve(job)).status
            return status in FINAL and bool(await warnings(server, job))

        await until(told)
        await asyncio.sleep(0.5)
    assert await warnings(server, job) == [f"wandb: nothing can be written: {why}"]
    async with running(exporter_here(server, tmp_path, give_up_s=0).run()):
        await until(lambda: nothing_waits(server))
    given_up = f"wandb: given up, its last figures are not written: {why}"
    assert (await warnings(server, job))[0] == given_up


async def test_more_exports_than_may_wait_are_given_up(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("manager_service.export.exporter.MAX_WAITING", 1)
    async with running_jobs(server):
        jobs = [await create(server.openai, "wandb", max_steps=1) for _ in range(2)]
        for job in jobs:
            await until(lambda job=job: has_ended(server, job))
    async with running(exporter_here(server, tmp_path, give_up_s=3600).run()):
        await until(lambda: nothing_waits(server))
    folder = tmp_path / "loggers" / "default" / "wandb"
    said = "wandb: given up, its last figures are not written: more than 1 of your jobs wait for it"
    told = {job: await warnings(server, job) for job in jobs}
    assert sorted(told.values()) == [[], [said]]
    assert [bool(logger("standin").read(folder, job)) for job in jobs] == [told[job] == [] for job in jobs]


async def test_servers_that_hang_keep_no_file_waiting(server: ApiServer, tmp_path: Path) -> None:
    folder = tmp_path / "loggers"

    async with running_jobs(server), running(exporter_here(server, tmp_path, give_up_s=3600, hosts="127.0.0.1").run()):
        for tenant in ("beta", "gamma"):
            await Receivers(server.api.redis).set_key(tenant, "wandb", "hangs", "http://127.0.0.1")
            await create(await server.new_tenant(tenant), "wandb", max_steps=1)
        await until(lambda: all((folder / name / "wandb" / ".home").exists() for name in ("beta", "gamma")))
        job = await create(server.openai, "trackio", max_steps=1)
        await until(lambda: has_ended(server, job))

        async def is_written() -> bool:
            return logger("standin").read(folder / "default" / "trackio", job) == await figures(server, job)

        await until(is_written)


def exporter_here(server: ApiServer, folder: Path, *, give_up_s: float, hosts: str = "") -> Exporter:
    return Exporter(
        [JobCell(server.bus, Archive(server.api.objects, "tiny"))],
        Receivers(server.api.redis),
        folder=folder / "loggers",
        passes=logger("standin").passes,
        servers=Caller(hosts),
        every_s=0.1,
        processes=1,
        give_up_s=give_up_s,
        disk_bytes=1 << 20,
        limits=Limits(),
    )


async def warnings(server: ApiServer, job: str) -> list[str]:
    """Newest first."""
    return [event["message"] for event in await events(server, job) if event["level"] == "warn"]


async def events(server: ApiServer, job: str) -> list[dict[str, Any]]:
    """Newest first."""
    return (await server.http.get(f"/v1/fine_tuning/jobs/{job}/events?limit=100")).json()["data"]


async def has_ended(server: ApiServer, job: str) -> bool:
    return (await server.openai.fine_tuning.jobs.retrieve(job)).status in FINAL
