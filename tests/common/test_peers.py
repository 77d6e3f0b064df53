"""Files that come through peers: over real sockets, a real Redis, and node folders of their own."""

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from io import BufferedRandom
from pathlib import Path

import pytest
import redis
from structlog.testing import capture_logs

from common.bus.bus import Bus
from common.bus.streams import Cell
from common.cancellation import running
from common.errors import CorruptObject, StoreUnavailable
from common.peers import chain, server
from common.peers.chain import Relay
from common.peers.folder import NodeFolder, read_right, write_part
from common.peers.holders import STORE, Holders
from common.peers.server import Offer
from common.store.adapters import OPTIMIZER_FILE, PEFT_FILES, AdapterStore
from common.store.objects import Objects
from common.store.parts import PARTED_BYTES, StoredFile, part_bytes, stored_file
from harness.proxy import Proxy
from tests.common.test_store import V1, manifest

CELL = Cell("tiny")
DATA = random.Random(0).randbytes(2 * PARTED_BYTES + 17)
FILE = stored_file(DATA, in_parts=True)
HALF = 8
PATH = "adapters/x"


class GatedObjects(Objects):
    """A store in memory that may be away, and that stops a reader at half of an object until the gate is open."""

    def __init__(self) -> None:
        super().__init__(Objects.open("memory:///")._backend)  # pyright: ignore[reportPrivateUsage]
        self.gate = asyncio.Event()
        self.gate.set()
        self.away = False
        self.starts: list[int] = []

    async def stream(self, path: str, start: int, least_bytes: int) -> AsyncIterator[bytes]:
        if self.away:
            raise StoreUnavailable("the store is away")
        self.starts.append(start)
        async for piece in super().stream(path, start, least_bytes):
            for at in range(0, len(piece), least_bytes):
                if start + at >= FILE.span(HALF)[0]:
                    await self.gate.wait()
                yield piece[at : at + least_bytes]


@dataclass
class World:
    """Workers of one cell, each on a machine of its own unless it names another's."""

    url: str
    folder: Path
    objects: GatedObjects = field(default_factory=GatedObjects)
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def worker(
        self, name: str, *, machine: str = "", proxy: Proxy | None = None, max_bytes: int = 1 << 30
    ) -> Relay:
        """`proxy`: others reach it through that."""
        bus = Bus.connect(self.url, CELL)
        self.stack.push_async_callback(bus.close)
        holders = Holders(bus, name, store_places=1)
        relay = Relay(self.objects, NodeFolder(self.folder / (machine or name) / "files", max_bytes), holders)
        await relay.open("127.0.0.1", 0)
        self.stack.push_async_callback(relay.close)
        if proxy is not None:
            proxy.target_port = int(holders.address.rpartition(":")[2])
            await proxy.open()
            self.stack.push_async_callback(proxy.shut)
            holders.address = f"127.0.0.1:{proxy.port}"
        await self.stack.enter_async_context(running(relay.run()))
        return relay

    def cached(self, name: str, file: StoredFile = FILE) -> Path:
        return self.folder / name / "files" / file.sha256


async def until_parts(path: Path, num_parts: int) -> None:
    while not path.exists() or path.stat().st_size < FILE.span(num_parts)[0]:
        await asyncio.sleep(0.01)


def bytes_of(relay: Relay) -> tuple[float, float]:
    """Bytes from the store, and from peers."""
    return relay.counters()["store_bytes"], relay.counters()["peer_bytes"]


async def test_a_chain_forms_and_the_store_is_read_once(world: World) -> None:
    relays = [await world.worker(f"w{number}") for number in range(5)]
    assert await asyncio.gather(*(relay.read(FILE, PATH) for relay in relays)) == [DATA] * 5
    late = await world.worker("late")
    assert await late.read(FILE, PATH) == DATA
    assert [sum(bytes_of(relay)) for relay in [*relays, late]] == [len(DATA)] * 6
    assert sum(bytes_of(relay)[0] for relay in relays) == len(DATA) and world.objects.starts == [0]


async def test_parts_are_passed_on_before_the_file_is_whole(world: World) -> None:
    world.objects.gate.clear()
    first, second = await world.worker("first"), await world.worker("second")
    reads = [asyncio.create_task(relay.read(FILE, PATH)) for relay in (first, second)]
    await until_parts(world.cached("first"), HALF)
    await until_parts(world.cached("second"), HALF)
    world.objects.gate.set()
    assert await asyncio.gather(*reads) == [DATA, DATA]


# ---- faults ---------------------------------------------------------------------------------------------------------


async def test_who_loses_its_holder_goes_on_from_its_part_at_the_store(world: World) -> None:
    world.objects.gate.clear()
    proxy = Proxy(0)
    first = await world.worker("first", proxy=proxy)
    lost = asyncio.create_task(first.read(FILE, PATH))
    await until_parts(world.cached("first"), HALF)
    second = await world.worker("second")
    read = asyncio.create_task(second.read(FILE, PATH))
    await until_parts(world.cached("second"), HALF)
    await proxy.shut()
    while len(world.objects.starts) < 2:
        await asyncio.sleep(0.01)
    world.objects.gate.set()
    assert await read == await lost == DATA
    half = FILE.span(HALF)[0]
    assert world.objects.starts == [0, half]
    assert bytes_of(second) == (len(DATA) - half, half)


async def test_a_follower_of_a_dead_one_follows_that_ones_holder(world: World) -> None:
    world.objects.gate.clear()
    proxy, reads = Proxy(0), list[asyncio.Task[bytes | None]]()
    for name, way in (("first", None), ("second", proxy), ("third", None)):
        reads.append(asyncio.create_task((await world.worker(name, proxy=way)).read(FILE, PATH)))
        await until_parts(world.cached(name), HALF)
    await proxy.shut()
    world.objects.gate.set()
    assert await asyncio.gather(*reads) == [DATA] * 3
    assert world.objects.starts == [0]


async def test_a_part_that_is_not_the_manifests_is_neither_used_nor_passed_on(world: World) -> None:
    liar, honest = await world.worker("liar"), await world.worker("honest")
    assert await liar.read(FILE, PATH) == DATA
    with world.cached("liar").open("r+b") as file:
        file.seek(FILE.span(HALF)[0])
        file.write(b"lies")
    assert await honest.read(FILE, PATH) == DATA
    assert world.objects.starts == [0, FILE.span(HALF)[0]]
    assert await liar.read(FILE, PATH) == DATA, "what is not right in its folder it gets again, from the other"
    assert len(world.objects.starts) == 2


async def test_a_holder_that_falls_silent_is_left_and_one_that_waits_itself_is_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "HEAR_S", 0.5)
    monkeypatch.setattr(server, "BEAT_S", 0.05)
    world.objects.gate.clear()
    proxy = Proxy(0)
    first, second = await world.worker("first", proxy=proxy), await world.worker("second")
    reads = [asyncio.create_task(first.read(FILE, PATH))]
    await until_parts(world.cached("first"), HALF)
    reads.append(asyncio.create_task(second.read(FILE, PATH)))
    await until_parts(world.cached("second"), HALF)
    await asyncio.sleep(1.0)
    assert world.objects.starts == [0], "it beats"
    proxy.fall_silent()
    while len(world.objects.starts) < 2:
        await asyncio.sleep(0.01)
    world.objects.gate.set()
    assert await asyncio.gather(*reads) == [DATA, DATA]


async def test_while_the_store_is_away_holders_serve_and_others_hear_of_it(world: World) -> None:
    first, second = await world.worker("first"), await world.worker("second")
    world.objects.away = True
    with pytest.raises(StoreUnavailable):
        await first.read(FILE, PATH)
    world.objects.away = False
    assert await second.read(FILE, PATH) == DATA, "the place at the store is free again"
    world.objects.away = True
    assert await first.read(FILE, PATH) == DATA


async def test_a_store_that_gives_other_bytes_is_told_of(world: World) -> None:
    relay = await world.worker("w")
    await world.objects.write(PATH, DATA[:-1] + b"!")
    with pytest.raises(CorruptObject, match="does not match its sha256"):
        await relay.read(FILE, PATH)
    await world.objects.write(PATH, DATA[:-5])
    with pytest.raises(CorruptObject, match="too short"):
        await relay.read(FILE, PATH)


@pytest.mark.parametrize("fault", ["is a file", "is open to others", "is too small"])
async def test_without_a_node_folder_all_comes_straight_from_the_store(world: World, fault: str) -> None:
    folder = world.folder / "w" / "files"
    if fault == "is a file":
        folder.parent.mkdir()
        folder.touch()
    elif fault == "is open to others":
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    relay = await world.worker("w", max_bytes=1000 if fault == "is too small" else 1 << 30)
    store = AdapterStore(world.objects, relay=relay)
    await store.commit(manifest(), {PEFT_FILES[0]: DATA, PEFT_FILES[1]: b"{}"})
    with capture_logs() as logs:
        assert (await store.read(V1))[PEFT_FILES[0]] == DATA
        assert (await store.read(V1))[PEFT_FILES[0]] == DATA
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert warning["event"] == "node_folder_unusable" and "MARLAAS_CACHE_" in warning["reason"]


async def test_a_redis_that_lost_the_holders_hears_of_them_again(world: World, redis_client: redis.Redis) -> None:
    first, second = await world.worker("first"), await world.worker("second")
    await first.read(FILE, PATH)
    redis_client.flushall()
    while not redis_client.exists(CELL.holders(FILE.sha256)):
        await asyncio.sleep(0.05)
    assert await second.read(FILE, PATH) == DATA
    assert bytes_of(second) == (0, len(DATA))


async def test_all_files_of_a_large_base_model_are_told_of(world: World, redis_client: redis.Redis) -> None:
    relay, path = await world.worker("w"), world.folder / "file"
    path.touch()
    files = [StoredFile(f"{number:064}", 1, ("x",)) for number in range(chain.MAX_OFFERS + 6)]
    for file in files:
        relay.offer(file, path).has(1)
    while redis_client.exists(*(CELL.holders(file.sha256) for file in files)) < len(files):
        await asyncio.sleep(0.05)


async def test_who_does_not_know_the_key_gets_nothing(world: World) -> None:
    relay = await world.worker("w")
    await relay.read(FILE, PATH)
    holders = relay.holders
    for key, expected in ((holders.key, b"+"), ("", b""), ("é" * 20, b""), ("0" * 64, b""), ("0" * 9999, b"")):
        reader, writer = await asyncio.open_connection(*holders.address.split(":"))
        writer.write(f"{key} {FILE.sha256} 0\n".encode())
        with contextlib.suppress(ConnectionError):
            assert await reader.read(1) == expected
        writer.close()


# ---- the node folder ------------------------------------------------------------------------------------------------


async def test_workers_of_one_machine_share_what_one_of_them_fetched(world: World) -> None:
    world.objects.gate.clear()
    both = [await world.worker(name, machine="node") for name in ("a", "b")]
    reads = [asyncio.create_task(relay.read(FILE, PATH)) for relay in both]
    await until_parts(world.cached("node"), HALF)
    world.objects.gate.set()
    assert await asyncio.gather(*reads) == [DATA, DATA]
    assert sum(sum(bytes_of(relay)) for relay in both) == len(DATA)
    assert world.cached("node").parent.stat().st_mode & 0o777 == 0o700


async def test_what_a_killed_worker_left_is_gone_on_with_as_far_as_it_is_right(world: World) -> None:
    world.cached("w").parent.mkdir(parents=True, mode=0o700)
    world.cached("w").write_bytes(DATA[: FILE.span(HALF)[0]] + b"torn")
    assert await (await world.worker("w")).read(FILE, PATH) == DATA
    assert world.objects.starts == [FILE.span(HALF)[0]]
    again = await world.worker("next", machine="w")
    assert await again.read(FILE, PATH) == DATA
    assert sum(bytes_of(again)) == 0


async def test_two_workers_that_find_a_file_wrong_do_not_cut_what_the_other_writes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, go_on = threading.Event(), threading.Event()

    def read_late(handle: BufferedRandom, file: StoredFile) -> bytes | None:
        data = read_right(handle, file)
        if data is None and not found.is_set():
            found.set()
            go_on.wait(60)
        return data

    monkeypatch.setattr(chain, "read_right", read_late)
    world.cached("node").parent.mkdir(parents=True, mode=0o700)
    world.cached("node").write_bytes(bytes(FILE.size))
    world.objects.gate.clear()
    late, soon = [await world.worker(name, machine="node") for name in ("late", "soon")]
    # Given one that has found it wrong, while another, which has too, has written half of it
    reads = [asyncio.create_task(late.read(FILE, PATH))]
    await asyncio.to_thread(found.wait)
    reads.append(asyncio.create_task(soon.read(FILE, PATH)))
    while bytes_of(soon)[0] < FILE.span(HALF)[0]:
        await asyncio.sleep(0.01)
    # When the first goes on, then both have the file
    go_on.set()
    await asyncio.sleep(0.1)
    world.objects.gate.set()
    assert await asyncio.gather(*reads) == [DATA, DATA]
    assert world.objects.starts == [0]


async def test_a_file_that_another_worker_of_the_machine_drove_out_comes_again(world: World) -> None:
    relay = await world.worker("w")
    await relay.read(FILE, PATH)
    world.cached("w").unlink()
    assert await relay.read(FILE, PATH) == DATA
    assert world.objects.starts == [0, 0]


def test_the_least_recently_used_files_go_and_one_process_writes_a_file(tmp_path: Path) -> None:
    files = [stored_file(bytes([number]) * (2 * PARTED_BYTES), in_parts=True) for number in range(4)]
    folder = NodeFolder(tmp_path / "files", 3 * files[0].size)
    (tmp_path / "files").mkdir(mode=0o700)
    (tmp_path / "files" / "gone").symlink_to("nowhere")  # as one that another worker removes just now
    for number, file in enumerate([*files[:3], files[0], files[3]]):
        handle = folder.open(file)
        assert handle is not None and folder.open(file) is None
        for part in range(len(file.parts) if number < 3 else 0):
            write_part(handle, file, part, bytes([number]) * file.span(part)[1])
        handle.close()
    assert [(tmp_path / "files" / file.sha256).exists() for file in files] == [True, False, True, True]


# ---- who follows whom -----------------------------------------------------------------------------------------------


async def test_workers_that_come_and_die_never_follow_each_other_in_a_ring_and_all_end(redis_url: str) -> None:
    chance, total = random.Random(7), len(FILE.parts)
    async with contextlib.AsyncExitStack() as stack:
        bus = Bus.connect(redis_url, CELL)
        stack.push_async_callback(bus.close)
        alive: dict[str, tuple[Holders, Offer, set[str]]] = {}
        at_store = 0

        async def join(name: str) -> None:
            nonlocal at_store
            holders, offer, left_out = alive[name]
            source, _ = await holders.join(offer, left_out)
            at_store += source == STORE

        for number in range(120):
            if number < 80 and (len(alive) < 4 or chance.random() < 0.2):
                name = f"w{number}"
                alive[name] = Holders(bus, name, store_places=1), Offer(FILE, Path()), set()
                alive[name][0].address = "a:1"
                await join(name)
            name = chance.choice(sorted(alive))
            _, offer, left_out = alive[name]
            if number < 80 and chance.random() < 0.15:
                alive.pop(name)  # its entry stays for a while
            elif offer.source == STORE:
                offer.has(min(total, offer.num_parts + 4))
            elif offer.source in alive:
                offer.has(max(offer.num_parts, alive[offer.source][1].num_parts))
            elif not offer.is_whole:
                left_out |= {offer.source} - {""}
                await join(name)
            if offer.is_whole:
                offer.source = ""
            for holders, offer, _ in alive.values():
                await holders.renew([offer])
            for follower in alive:
                seen = list[str]()
                while (source := alive[follower][1].source) in alive:
                    assert follower not in seen
                    seen.append(follower)
                    follower = source
        assert all(offer.is_whole for _, offer, _ in alive.values())
        assert at_store < 20


# ---- parts ----------------------------------------------------------------------------------------------------------


def test_a_part_is_a_512th_within_bounds_and_parts_make_the_file() -> None:
    assert [part_bytes(size) for size in (1, 100_000_000, 700 << 20, 140 << 30)] == [
        128 << 10,
        195_313,
        1_433_600,
        8 << 20,
    ]
    spans = [FILE.span(part) for part in range(len(FILE.parts))]
    assert b"".join(DATA[start : start + size] for start, size in spans) == DATA
    assert stored_file(DATA, in_parts=False) == StoredFile(FILE.sha256, FILE.size)


async def test_only_the_large_files_that_rollout_workers_load_have_parts() -> None:
    store = AdapterStore(Objects.open("memory:///"))
    record = await store.commit(manifest(), {PEFT_FILES[0]: DATA, PEFT_FILES[1]: b"{}", OPTIMIZER_FILE: DATA})
    assert {name: bool(file.parts) for name, file in record.files.items()} == {
        PEFT_FILES[0]: True,
        PEFT_FILES[1]: False,
        OPTIMIZER_FILE: False,
    }
    assert await store.manifest(V1) == record
