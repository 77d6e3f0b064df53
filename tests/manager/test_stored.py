"""The bytes that tenants keep in object storage: what is counted, what a tenant without room left may do, and what waits."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from redis.exceptions import RedisError

from common.bus.bus import Bus
from common.bus.redis_connection import make_client
from common.bus.streams import Cell, partition_of
from common.store.objects import Objects
from common.wire.messages import AdapterRef
from harness.redis_server import free_port
from harness.standin import StandInTrainer, commit, create_job, state_of, until_status
from manager_service.owner.archiver import Archiver
from manager_service.owner.jobs.changes import Changes, commands
from manager_service.records.archive import Archive, SampleFiles
from manager_service.records.job_records import DELETED
from manager_service.records.keys import JSON
from manager_service.records.stored import COUNTED, TOTAL, StoredBytes, file_sizes, records_of
from manager_service.records.tenants import TENANTS, TenantRecord
from manager_service.records.usage import ARCHIVED
from tests.common.test_worker import until
from tests.manager.test_supervised import supervised
from tests.support.api_server import item, jsonl, method, running_api, upload
from tests.support.forked import running
from tests.support.owning import LEASE_S, System
from tests.support.run_world import World
from tests.support.tinker_client import client_of

TENANT = "acme"
AT_ONCE = {"MARLAAS_ARCHIVE_AFTER_S": "0"}


async def may_store(bus: Bus, num_bytes: int | None) -> None:
    record = TenantRecord(id=TENANT, created_at=0, max_stored_bytes=num_bytes)
    await bus.client.hset(TENANTS, TENANT, JSON.encode(record))


async def total(bus: Bus) -> int:
    return (await StoredBytes(bus.client, {bus.cell: bus.client}, 0).totals([TENANT]))[TENANT]


async def is_counted(bus: Bus) -> bool:
    return bool(await bus.client.hexists(bus.cell.stored(TENANT), COUNTED))


@pytest.mark.slow
async def test_what_is_counted_is_what_the_store_has_and_goes_with_it(tmp_path: Path) -> None:
    async with running(tmp_path, environment=AT_ONCE) as (cluster, api):
        store = Objects.open((cluster.data_dir / "store").as_uri())

        async def there() -> int:
            kept = [await store.sizes(folder) for folder in ("files", "adapters", "records")]
            return sum(n for sizes in kept for path, n in sizes.items() if not path.endswith("/manifest.json"))

        async def agrees() -> bool:
            return (await api.get("/usage"))["stored_bytes"] == await there()

        quick: dict[str, Any] = {"max_steps": 5, "batch_size": 2, "group_size": 2, "evaluate": True}
        jobs = [await api.submit("sort", **quick), await api.submit("sort", keep_versions=2, **quick)]
        done = await api.until_done(*jobs)
        assert [job["status"] for job in done] == ["succeeded", "succeeded"]
        await until(agrees, 30)
        whole = await there()
        answer = await api.http.delete(f"/models/{done[0]['fine_tuned_model']}")
        assert answer.status_code == 200
        assert (await api.get(f"/fine_tuning/jobs/{jobs[0]}/samples"))["data"] == []
        await until(agrees, 30)
        assert await there() < whole and not await store.paths(f"records/default/tiny/{jobs[0]}/samples")


# ---- jobs and runs --------------------------------------------------------------------------------------------------

VERSION_BYTES = 100_000


@dataclass
class HeavyTrainer(StandInTrainer):
    """Commits versions of VERSION_BYTES."""

    async def _commit(self, target: AdapterRef, batch: str, seed: int) -> Any:
        files = {"adapter_model.safetensors": b"1" * VERSION_BYTES}
        return await commit(self.store, self.cell.base_model, target, files, batch=batch, seed=seed)


async def test_a_job_without_room_says_once_that_it_waits_stores_one_version_at_most_and_goes_on_by_itself(
    bus: Bus, objects: Objects
) -> None:
    system, limit = System(bus, objects), 10 * VERSION_BYTES
    system.trainer = HeavyTrainer(bus.cell, system.store)
    await may_store(bus, limit)
    await bus.client.hset(file_sizes(TENANT), "file-a", int(5.5 * VERSION_BYTES))
    await system.start()
    spec = supervised(num_steps=20)
    await create_job(bus, spec)

    async def told() -> list[str]:
        return [event.message for event in await system.events(spec.id) if "The job waits" in event.message]

    async def has_told() -> bool:
        return len(await told()) == 1

    await until(has_told)
    trained = len(system.trainer.seen)
    await asyncio.sleep(4 * LEASE_S)
    assert len(system.trainer.seen) == trained == 4
    assert limit <= await total(bus) < limit + VERSION_BYTES + 20_000, "samples too"
    assert (await state_of(bus, spec.id)).status == "running"
    await bus.client.hdel(file_sizes(TENANT), "file-a")  # as its deletion does
    await until(lambda: len(system.trainer.seen) > trained)
    await may_store(bus, None)
    await until_status(bus, spec.id, "succeeded")
    assert len(await told()) in (1, 2), "it filled the tenant's room once more"
    await system.stop()


async def test_a_runs_step_waits_for_room_and_nothing_else_of_it_does(bus: Bus, objects: Objects) -> None:
    await may_store(bus, 1)
    await bus.client.hset(file_sizes(TENANT), "file-a", 1)
    world = World(bus, objects)
    world.start_owner()
    async with world.hashing_trainer() as trainer:
        run = await world.create()
        await world.send(run, (1, "forward_backward"))
        await world.result(run, 1)
        await world.send(run, (2, "forward_backward"))
        await world.result(run, 2)
        await world.send(run, (3, "optim_step"))
        await asyncio.sleep(2 * LEASE_S)
        assert not await world.sent(run) and len(trainer.seen) == 2
        await may_store(bus, None)
        assert (await world.result(run, 3)).failure is None
        assert (await world.state(run)).size == (34, 7)
        counted: Any = await bus.client.hget(bus.cell.stored(TENANT), run)
        assert int(counted) == 41 + 10, "version 0 has a shorter content"
    await world.stop()


async def test_what_was_stored_before_it_was_counted_is_listed_once(bus: Bus, objects: Objects) -> None:
    """And what is counted meanwhile stays."""
    key = bus.cell.stored(TENANT)
    for path, num_bytes in {
        f"adapters/{TENANT}/job-old/00000001/a/adapter_model.safetensors": 300,
        f"adapters/{TENANT}/job-old/00000001/manifest.json": 7,
        f"adapters/{TENANT}/job-of-another-base/00000001/a/adapter_model.safetensors": 5000,
        f"records/{TENANT}/tiny/job-old/record.json": 40,
        f"records/{TENANT}/other/job-of-another-base/record.json": 6000,
    }.items():
        await objects.write(path, b"x" * num_bytes)
    await SampleFiles(objects, "tiny").write(TENANT, "job-old", 1, b"y" * 60)
    await bus.client.hset(key, mapping={"job-old": 100, "job-new": 9, TOTAL: 109})
    await may_store(bus, None)
    system = System(bus, objects)
    await system.start()
    await until(lambda: is_counted(bus))
    found: dict[Any, Any] = await bus.client.hgetall(key)
    assert {name.decode(): int(size) for name, size in found.items()} == {
        "job-old": 300,
        records_of("job-old"): 60,
        ARCHIVED: 40,
        "job-new": 9,
        TOTAL: 409,
        COUNTED: 1,
    }
    await system.stop()


async def test_a_job_that_is_archived_counts_what_the_store_has_of_it(bus: Bus, objects: Objects) -> None:
    """And of a deleted one goes what a step under way has made since: nothing stays of it but what all archived jobs count together."""
    system, key = System(bus, objects), bus.cell.stored(TENANT)
    await system.start()
    whole, deleted = (replace(supervised(num_steps=2), id=f"ftjob-{name}") for name in ("whole", "deleted"))
    for spec in (whole, deleted):
        await system.run_job(spec, "succeeded")
    await system.stop()
    await bus.client.hset(bus.cell.job(deleted.id), DELETED, 1)
    for job in (whole.id, deleted.id):  # samples that were never written, and versions that are counted as gone twice
        await bus.client.hset(key, mapping={job: -5, records_of(job): 10**9})
    await bus.client.hset(key, TOTAL, 2 * (10**9 - 5))
    for files in (SampleFiles(objects, "tiny"), SampleFiles(objects, "tiny", "answers")):
        await files.delete(TENANT, deleted.id)  # as the API does
    moved = [await Archiver(bus, objects).copy([whole.id, deleted.id]) for _ in range(2)][-1]
    await bus.pipelined(commands(Changes(moved=moved), bus.cell, partition_of(TENANT), [], 0.0))
    kept = {folder: sum((await objects.sizes(f"{folder}/{TENANT}")).values()) for folder in ("adapters", "records")}
    assert not await objects.paths(f"adapters/{TENANT}/{deleted.id}")
    fields: dict[Any, Any] = await bus.client.hgetall(key)
    found = {name.decode(): int(size) for name, size in fields.items()}
    manifests = [f"adapters/{TENANT}/{whole.id}/{version:08d}/manifest.json" for version in (0, 1, 2)]
    assert found[whole.id] == kept["adapters"] - sum([len(await objects.get(path)) for path in manifests]) > 0
    assert found[records_of(whole.id)] + found[ARCHIVED] == kept["records"] > found[ARCHIVED] > 0
    assert found[TOTAL] == found[whole.id] + kept["records"]
    assert not [name for name in found if name.startswith(deleted.id)]
    # And to note the deletion of the other changes no count
    archive = Archive(objects, "tiny")
    archived = await archive.find(TENANT, whole.id)
    assert archived is not None
    await archive.mark_deleted(archived)
    assert sum((await objects.sizes(f"records/{TENANT}")).values()) == kept["records"]


async def test_a_cell_whose_redis_is_away_keeps_nobody_from_counting_in_others(bus: Bus) -> None:
    away, cell = make_client(f"redis://127.0.0.1:{free_port()}/0", "away"), Cell("away")
    await bus.client.hset(bus.cell.stored(TENANT), TOTAL, 7)
    await bus.client.hset(file_sizes(TENANT), "file-a", 2)
    stored = StoredBytes(bus.client, {cell: away, bus.cell: bus.client}, 0)
    assert await stored.totals([TENANT, "other"], own=bus.cell) == {TENANT: 9, "other": 0}
    with pytest.raises(RedisError):
        await stored.totals([TENANT], own=cell)
    await away.aclose()


# ---- the API --------------------------------------------------------------------------------------------------------


async def test_a_tenant_without_room_is_told_what_to_delete(redis_url: str, tmp_path: Path) -> None:
    rows = jsonl(*(item("x" * 1000) for _ in range(30)))
    async with running_api(redis_url, tmp_path / "data", max_stored_bytes=len(rows) + 500) as server:
        file = await upload(server.openai, rows)
        await server.bus.client.hset(server.bus.cell.stored("default"), mapping={"ftjob-a": 500, TOTAL: 500})
        body = {"model": "tiny", "training_file": file, "method": method()}
        refused = [
            await server.http.post("/v1/fine_tuning/jobs", json=body),
            await server.http.post(
                "/v1/files", files={"file": ("b.jsonl", jsonl(item()))}, data={"purpose": "fine-tune"}
            ),
        ]
        for answer in refused:
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "storage_exceeded")
            assert f"the largest are {file} ({len(rows):,}), ftjob-a (500)" in answer.json()["error"]["message"]
        client = await client_of(server)
        session = await client.session()
        created = await client.post("create_model", session_id=session, model_seq_id=0, base_model="tiny")
        assert (created.status_code, created.json()["error"]["code"]) == (400, "storage_exceeded")
        usage = (await server.http.get("/v1/usage")).json()
        assert (usage["stored_bytes"], usage["max_stored_bytes"]) == (len(rows) + 500, len(rows) + 500)
        await server.openai.files.delete(file)
        assert (
            await client.post("create_model", session_id=session, model_seq_id=0, base_model="tiny")
        ).status_code == 200


async def test_an_operator_gives_a_tenant_room_of_its_own(redis_url: str, tmp_path: Path) -> None:
    async with running_api(redis_url, tmp_path / "data", max_stored_bytes=10) as server:
        admin: dict[str, Any] = {"headers": {"Authorization": f"Bearer {server.admin_key}"}}
        content: dict[str, Any] = {"files": {"file": ("b.jsonl", jsonl(item()))}, "data": {"purpose": "fine-tune"}}
        assert (await server.http.post("/v1/files", **content)).status_code == 429
        for given, status in ((1 << 20, 200), (None, 429)):
            changed = await server.http.post("/v1/admin/tenants/default", json={"max_stored_bytes": given}, **admin)
            assert changed.json()["max_stored_bytes"] == given
            assert (await server.http.post("/v1/files", **content)).status_code == status
