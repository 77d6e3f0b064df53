"""A Redis above its memory limit: what is under way ends and makes room, and nothing new comes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from common.bus.bus import Bus
from common.bus.fullness import MAX_USED_FOR_NEW
from common.bus.streams import GROUP_ENV, Cell, partition_of
from common.store.objects import Objects
from common.wire.messages import Cancel
from common.worker.handlers import Beat
from harness.redis_server import RedisServer, find_valkey
from harness.standin import StandInEnv, create_job, job_spec, state_of
from manager_service.export.lease import Lease
from manager_service.http.errors import ApiError
from manager_service.http.sampling.cell_share import CellShare
from manager_service.http.sampling.inference import time_for_redis
from manager_service.launcher.embedded_redis import find_server
from manager_service.owner import owner
from manager_service.owner.leases import Leases
from manager_service.owner.surroundings import bound
from tests.common.test_worker import until
from tests.support.api_server import ApiServer, item, jsonl, method, running_api, running_jobs, upload
from tests.support.owning import LEASE_S, System, is_archived

BALLAST = 16 << 20
SMALL: dict[str, Any] = {"batch_size": 2, "group_size": 2}
FULL = 1
"""A limit of one byte."""


@pytest.fixture(params=[find_server, find_valkey], ids=["6.2", "valkey"])
async def bus(request: pytest.FixtureRequest, tmp_path: Path, objects: Objects) -> AsyncIterator[Bus]:
    """A Redis of its own."""
    server = RedisServer.start(tmp_path, program=request.param(), durable=False)
    bus = Bus.connect(server.url, Cell("tiny"), objects)
    yield bus
    await bus.close()
    server.stop()


class GatedEnv(StandInEnv):
    """Answers once it may."""

    may: asyncio.Event
    num_asked = 0

    async def __call__(self, message: Any, beat: Beat) -> Any:
        self.num_asked += 1
        await self.may.wait()
        return await super().__call__(message, beat)


async def test_a_full_redis_drains_through_its_owner(
    bus: Bus, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "STALL_S", 0.1)
    system, cell = System(bus, objects), bus.cell
    system.env = env = GatedEnv(cell)
    env.may = asyncio.Event()
    env.may.set()
    await system.start()
    # Given a job that has ended, and one whose first groups are under way, when Redis is full
    ended, open_one = job_spec("ended", num_steps=1, **SMALL), job_spec("open", num_steps=1000, **SMALL)
    await system.run_job(ended)
    env.may.clear()
    env.num_asked = 0
    await create_job(bus, open_one)
    await until(lambda: env.num_asked >= 2)
    await bus.client.config_set("maxmemory", FULL)
    env.may.set()
    async with asyncio.timeout(60):
        # Then they are trained, and their results go
        await until(lambda: _has_version(bus, open_one.id, 1))
        # And the job says what it waits for
        await until(lambda: _says(system, open_one.id, "nothing is issued; give it more memory"))
        # And what has ended goes to the archive
        await until(lambda: is_archived(bus, ended.id))
        # And the next owner takes over and keeps its leases
        await system.kill_owner()
        system.start_owner()
        await until(lambda: _held_for(bus, partition_of("acme")))
        await asyncio.sleep(2 * LEASE_S)
        await system.stop()
    await bus.client.config_set("maxmemory", 0)


async def _has_version(bus: Bus, job: str, version: int) -> bool:
    return (await state_of(bus, job)).version >= version


async def _says(system: System, job: str, text: str) -> bool:
    return any(text in event.message for event in await system.events(job))


async def _held_for(bus: Bus, partition: int) -> bool:
    return await bus.client.pttl(bus.cell.lease(partition)) > 0


async def test_what_keeps_a_cell_together_needs_no_memory(bus: Bus) -> None:
    cell, bulk = bus.cell, {"payload": b"x" * 10_000}
    for _ in range(20):
        await bus.client.xadd(cell.dead, bulk)  # pyright: ignore[reportArgumentType]
    share = CellShare(bus, "replica", dict, slots=lambda: 1, most_for_chat=0.5)
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: bus.ensure_group(cell.env, GROUP_ENV),
        lambda: bus.ensure_group(cell.env, GROUP_ENV),
        lambda: bus.find_idle(cell.env, GROUP_ENV, min_idle_ms=0, every_ms=1000),
        lambda: bus.broadcast(cell.control, Cancel(id="c", tenant="acme", job="job", partition=0), keep_s=60),
        lambda: Leases(bus, "owner", 60).round({0: 1.0}),
        share.exchange,
        lambda: bound(bus, cell.dead, 100_000),
        lambda: Lease(bus.client, bus, 60)._round(),  # pyright: ignore[reportPrivateUsage]
    ]
    await bus.client.config_set("maxmemory", FULL)
    for call in calls:
        async with asyncio.timeout(60):
            await call()
    assert 0 < await bus.client.xlen(cell.dead) < 10
    assert await bus.client.hgetall(cell.dropped) == {b"dead": str(20 - await bus.client.xlen(cell.dead)).encode()}
    assert (await bus.client.xlen(cell.control), await bus.client.exists(cell.lease(0), cell.inference)) == (1, 2)


async def test_while_redis_is_almost_full_the_api_takes_no_new_work_and_says_what_to_do(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_api(redis_url, tmp_path) as server, running_jobs(server):
        file = await upload(server.openai, jsonl(item()))
        body: dict[str, Any] = {"model": "tiny", "training_file": file, "method": method(**SMALL, max_steps=1)}
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        client = server.bus.client

        await client.set("ballast", bytes(BALLAST))  # beside which clients' buffers, which do not count, are small

        async def is_almost_full() -> bool:
            used = int((await client.info("memory"))["used_memory"])
            await client.config_set("maxmemory", int(used / 0.9))
            return await _refuses(server)

        try:
            await until(is_almost_full)
            for path, asked in (("/v1/fine_tuning/jobs", body), ("/v1/chat/completions", chat)):
                refused = await server.http.post(path, json=asked)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "memory_full")
                assert "try again in a minute" in refused.text and int(refused.headers["retry-after"]) > 0
            assert (await server.http.get("/v1/fine_tuning/jobs")).json()["data"] == []
        finally:
            await client.config_set("maxmemory", 0)
            await client.delete("ballast")
        async with asyncio.timeout(60):
            while (await server.http.post("/v1/fine_tuning/jobs", json=body)).status_code == 503:
                await asyncio.sleep(0.1)


async def test_while_redis_disk_is_full_only_reads_deletes_and_cancels_are_served(
    redis_url: str, tmp_path: Path
) -> None:
    async with running_api(redis_url, tmp_path) as server, running_jobs(server) as env:
        jobs, client = server.openai.fine_tuning.jobs, server.bus.client
        file, other = [await upload(server.openai, jsonl(item())) for _ in range(2)]
        how: Any = method(**SMALL, max_steps=10_000)
        going = await jobs.create(model="tiny", training_file=file, method=how)
        body: dict[str, Any] = {"model": "tiny", "training_file": file, "method": method(**SMALL, max_steps=1)}
        await client.set(server.bus.cell.disk_full, 1)
        await until(lambda: _refuses(server))
        for call in (jobs.create(**body), upload(server.openai, jsonl(item()))):
            with pytest.raises(openai.InternalServerError) as refused:
                await call
            assert (refused.value.status_code, refused.value.code) == (503, "disk_full")
        assert [one.id for one in (await jobs.list()).data] == [going.id]
        assert (await server.openai.files.delete(other)).deleted
        await until(lambda: _rests(server, going.id))
        num_steps = (await state_of(server.bus, going.id)).version
        await client.delete(server.bus.cell.disk_full)
        await until(lambda: _is_beyond(server, going.id, num_steps))
        await client.set(server.bus.cell.disk_full, 1)
        assert (await jobs.cancel(going.id)).status == "cancelled"
        assert env


async def _refuses(server: ApiServer) -> bool:
    return await server.api.bases["tiny"].gauge.used() > MAX_USED_FOR_NEW


async def _rests(server: ApiServer, job: str) -> bool:
    """Is nothing of the job under way?"""
    state = await state_of(server.bus, job)
    return not await server.bus.client.hlen(server.bus.cell.open(job)) and state.training is None


async def _is_beyond(server: ApiServer, job: str, version: int) -> bool:
    return (await state_of(server.bus, job)).version > version


async def test_a_full_redis_and_a_silent_one_are_told_apart(tmp_path: Path) -> None:
    server = RedisServer.start(tmp_path)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    try:
        async with running_api(server.url, tmp_path / "data") as api, running_jobs(api):
            await api.bus.client.config_set("maxmemory", FULL)
            # a write of the API's own, and one of a completion past the gauge
            refused = await api.http.post("/v1/admin/tenants", json={"id": "new"}, headers=api.as_admin())
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "memory_full")
            assert "is full" in refused.text
            with pytest.raises(ApiError) as late:
                async with time_for_redis(api.bus, 1.0):
                    cancel = Cancel(id="c", tenant="acme", job="job", partition=0)
                    await api.bus.publish([(api.bus.cell.control, cancel)])
            assert (late.value.status_code, late.value.code) == (503, "memory_full")
            await api.bus.client.config_set("maxmemory", 0)
            os.kill(server.pid, signal.SIGSTOP)
            asked = [api.http.get("/v1/files"), api.http.post("/v1/chat/completions", json=chat)]
            for answer in await asyncio.gather(*asked):
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "redis_away")
                assert "does not answer" in answer.text
            os.kill(server.pid, signal.SIGCONT)
    finally:
        os.kill(server.pid, signal.SIGCONT)
        server.stop()
