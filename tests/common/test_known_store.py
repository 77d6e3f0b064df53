"""The store that a cell knows: services take no other folder for it."""

import asyncio
import re
import shutil
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from common.bus.bus import Bus
from common.bus.streams import Cell
from common.children.processes import ChildProcess
from common.errors import StoreUnavailable
from common.store.known_store import recognise, remember
from common.store.objects import Objects
from common.store.store_folder import IDENTITY, StoreFolder
from common.wire.messages import WorkerReport
from harness.redis_server import RedisServer
from tests.support.forked import begun


async def take(folder: Path, *buses: Bus) -> None:
    """Fails where it would wait."""

    def tell(reason: str) -> None:
        raise AssertionError(reason)

    await recognise(StoreFolder(folder), buses, tell)


@asynccontextmanager
async def waiting(folder: Path, *buses: Bus) -> AsyncGenerator[str]:
    """The block runs while it waits, and gets the reason; it has ended afterwards."""
    told = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(recognise(StoreFolder(folder), buses, told.set_result))
    await asyncio.wait([task, told], return_when=asyncio.FIRST_COMPLETED)
    assert told.done(), "it did not wait"
    yield told.result()
    await task


async def test_a_cell_knows_the_store_that_its_first_service_finds(tmp_path: Path, bus: Bus) -> None:
    await take(tmp_path / "a" / "store", bus)
    identity = (tmp_path / "a" / "store" / IDENTITY).read_text().strip()
    assert len(identity) == 32 and await bus.client.get(bus.cell.store) == identity.encode()
    await take(tmp_path / "a" / "store", bus)
    async with waiting(tmp_path / "b", bus) as reason:
        assert f"no folder {tmp_path / 'b'}" in reason and f"write {identity} into" in reason
        assert not (tmp_path / "b").exists(), "whoever puts the store there needs the place"
        shutil.copytree(tmp_path / "a" / "store", tmp_path / "b")


async def test_many_services_that_start_at_once_make_one_identity(tmp_path: Path, bus: Bus) -> None:
    await asyncio.gather(*(take(tmp_path / "store", bus) for _ in range(20)))
    assert [file.name for file in (tmp_path / "store").iterdir()] == [IDENTITY]
    assert (tmp_path / "store" / IDENTITY).stat().st_mode & 0o777 == 0o600


async def test_a_folder_of_the_version_before_is_the_store(tmp_path: Path, bus: Bus) -> None:
    await Objects.open(tmp_path.as_uri()).write("adapters/a", b"1")
    await take(tmp_path, bus)
    assert await Objects.open(tmp_path.as_uri()).get("adapters/a") == b"1"


@pytest.mark.parametrize("empty", [True, False])
async def test_a_folder_in_its_place_is_left_as_it_is(tmp_path: Path, bus: Bus, *, empty: bool) -> None:
    folder, away = tmp_path / "store", tmp_path / "away"
    await take(folder, bus)
    folder.rename(away)
    folder.mkdir()
    if not empty:
        (folder / "file").touch()
    async with waiting(folder, bus) as reason:
        assert "holds no store" in reason
        assert [file.name for file in folder.iterdir()] == ([] if empty else ["file"])
        shutil.rmtree(folder)
        away.rename(folder)


async def test_a_store_that_is_lost_for_good_begins_anew_under_its_name(tmp_path: Path, bus: Bus) -> None:
    folder = tmp_path / "store"
    await take(folder, bus)
    shutil.rmtree(folder)
    async with waiting(folder, bus) as reason:
        name, file = re.findall(r"write (\w+) into (\S+)", reason)[0]
        folder.mkdir()
        Path(file).write_text(name)


async def test_a_redis_that_lost_all_takes_the_store_that_is_there(tmp_path: Path, bus: Bus) -> None:
    await take(tmp_path, bus)
    known = await bus.client.get(bus.cell.store)
    await bus.client.delete(bus.cell.store)
    await take(tmp_path, bus)
    assert await bus.client.get(bus.cell.store) == known


async def test_a_manager_tells_redis_again_only_while_the_folder_is_there(tmp_path: Path, bus: Bus) -> None:
    folder = tmp_path / "store"
    await take(folder, bus)
    objects = Objects.open(folder.as_uri())
    known = await bus.client.getdel(bus.cell.store)
    folder.rename(tmp_path / "away")
    await remember(await objects.identity(), [bus])
    assert await bus.client.get(bus.cell.store) is None
    (tmp_path / "away").rename(folder)
    await remember(await objects.identity(), [bus])
    assert await bus.client.get(bus.cell.store) == known
    assert await Objects.open("memory:///").identity() == ""


async def test_a_new_cell_does_not_take_a_folder_that_another_cell_does_not_know(tmp_path: Path, bus: Bus) -> None:
    new = Bus(bus.client, Cell("new"))
    await take(tmp_path / "store", bus)
    async with waiting(tmp_path / "other", new, bus) as reason:
        assert f"the store of {bus.cell.base_model}" in reason
        assert await new.client.get(new.cell.store) is None
        shutil.copytree(tmp_path / "store", tmp_path / "other")
    assert await new.client.get(new.cell.store) == await bus.client.get(bus.cell.store)


async def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path, bus: Bus) -> None:
    (tmp_path / "file").touch()
    async with waiting(tmp_path / "file" / "store", bus) as reason:
        assert "cannot be used: Not a directory" in reason
        (tmp_path / "file").unlink()


async def test_a_store_may_move_to_another_disk_while_services_run(tmp_path: Path) -> None:
    folder, away = tmp_path / "store", tmp_path / "away"
    StoreFolder(folder).identified()
    storage = Objects.open(folder.as_uri())
    await storage.write("a", b"1")
    shutil.copytree(folder, away)
    shutil.rmtree(folder)
    with pytest.raises(StoreUnavailable, match="put it back"):
        await storage.get("a")
    away.rename(folder)
    assert await storage.get("a") == b"1"


@pytest.mark.parametrize("module", ["env_service", "manager_service", "manager_service.export"])
async def test_a_service_that_starts_while_its_store_is_away_says_so_and_goes_on_when_it_is_back(
    module: str, tmp_path: Path
) -> None:
    server = RedisServer.start(tmp_path)
    bus, folder = Bus.connect(server.url, Cell("tiny")), tmp_path / "store"
    # Given a cell that has a store
    await take(folder, bus)
    folder.rename(tmp_path / "away")
    own = {"MARLAAS_DATA_DIR": str(tmp_path), "MARLAAS_REDIS_URL": server.url, "MARLAAS_PORT": "0"}
    service = await begun(module, tmp_path / "log", **own)
    try:
        # When a service starts without it
        await said(tmp_path / "log", "waits_for_store")
        # Then it makes none
        assert not folder.exists()
        # And goes on when it is back
        (tmp_path / "away").rename(folder)
        await said(
            tmp_path / "log",
            {"manager_service": "api_starts", "manager_service.export": "exporter_starts"}.get(module, ""),
        )
        if module == "env_service":
            await joined(bus)
        # And ends when told to
        service.send_signal(signal.SIGTERM)
        async with asyncio.timeout(120):
            assert await service.wait() == 0
    finally:
        await killed(service)
        await bus.close()
        server.stop()


async def killed(service: ChildProcess) -> None:
    if service.returncode is None:
        service.send_signal(signal.SIGKILL)
        await service.wait()


async def said(log: Path, words: str) -> None:
    async with asyncio.timeout(60):
        while not log.exists() or words not in log.read_text():
            await asyncio.sleep(0.05)


async def joined(bus: Bus) -> None:
    async with asyncio.timeout(60):
        while True:
            for _, report in await bus.follow(bus.cell.telemetry, "0", block_ms=None):
                if isinstance(report, WorkerReport) and report.state == "idle":
                    return
            await asyncio.sleep(0.05)
