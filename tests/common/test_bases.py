"""Base models in the store, and on their way from it into node folders: a real store, real Redis and sockets, the files of `tiny`."""

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from common.bus.bus import Bus
from common.errors import InvalidInput, StoreUnavailable
from common.models.base_digest import base_digest
from common.peers.base_fetch import BaseFetch
from common.peers.chain import Relay
from common.peers.folder import NodeFolder
from common.peers.holders import Holders
from common.settings import MODEL_FILES, TINY
from common.store.bases import base_path, push_base, stored_bases
from common.store.objects import Objects
from common.store.parts import part_bytes

WEIGHTS = "model.safetensors"
SIZE = (TINY / WEIGHTS).stat().st_size
TINY_DIGEST = base_digest(TINY)


class Store(Objects):
    """A store in memory. It goes away, for one call, at a piece of the weights; it spoils bytes on the way `wrong` times."""

    def __init__(self) -> None:
        super().__init__(Objects.open("memory:///")._backend)  # pyright: ignore[reportPrivateUsage]
        self.breaks_at: int | None = None
        self.wrong = 0
        self.starts: list[int] = []
        """Bytes at which reads of weights began."""

    async def stream(self, path: str, start: int, least_bytes: int) -> AsyncIterator[bytes]:
        is_weights = path.endswith(WEIGHTS)
        self.starts += [start] if is_weights else []
        async for piece in super().stream(path, start, least_bytes):
            for at in range(0, len(piece), least_bytes):
                if is_weights and self.breaks_at is not None and start + at >= self.breaks_at:
                    self.breaks_at = None
                    raise StoreUnavailable("the store is away")
                part = piece[at : at + least_bytes]
                if is_weights and self.wrong and start + at >= SIZE // 2:
                    self.wrong -= 1
                    part = b"?" + part[1:]
                yield part

    async def write_parts(self, path: str, parts: AsyncIterator[bytes]) -> None:
        if path.endswith(WEIGHTS) and self.breaks_at is not None:
            self.breaks_at = None
            raise StoreUnavailable("the store is away")
        await super().write_parts(path, parts)


@pytest.fixture
def store() -> Store:
    return Store()


async def pushed(store: Objects, folder: Path = TINY) -> tuple[str, list[str]]:
    told: list[str] = []
    return await push_base(store, "t", folder, told.append), told


def fetch(store: Objects, machine: Path, where: str, *, with_weights: bool = True) -> BaseFetch:
    return BaseFetch(store, machine, where, with_weights=with_weights)


def content(folder: Path) -> dict[str, str]:
    files = {file for pattern in MODEL_FILES for file in folder.glob(pattern)}
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


async def test_what_was_pushed_is_the_same_plain_folder_elsewhere(store: Store, tmp_path: Path) -> None:
    where, _ = await pushed(store)
    assert where == f"store:t@{TINY_DIGEST}" and await stored_bases(store) == [where]
    folder = await fetch(store, tmp_path, where).run()
    assert content(folder) == content(TINY) and base_digest(folder) == TINY_DIGEST
    assert await fetch(store, tmp_path, where, with_weights=False).run() == folder, "texts lie there too"
    # and where the store is away, it is there
    empty = Store()
    assert await fetch(empty, tmp_path, where).run() == folder


async def test_who_needs_no_weights_gets_none(store: Store, tmp_path: Path) -> None:
    where, _ = await pushed(store)
    folder = await fetch(store, tmp_path, where, with_weights=False).run()
    assert content(folder) == {name: sha for name, sha in content(TINY).items() if name != WEIGHTS}
    assert not store.starts
    assert content(await fetch(store, tmp_path, where).run()) == content(TINY)


# ---- a push ---------------------------------------------------------------------------------------------------------


async def test_a_push_that_was_interrupted_goes_on_and_nobody_sees_half_of_it(store: Store, tmp_path: Path) -> None:
    store.breaks_at = 0
    with pytest.raises(StoreUnavailable):
        await pushed(store)
    with pytest.raises(InvalidInput, match=r"is not in the store; there are: none. `marlaas base push"):
        await fetch(store, tmp_path, f"store:t@{TINY_DIGEST}").run()
    where, told = await pushed(store)
    before = [f"{name} is there" for name in sorted(content(TINY)) if name < WEIGHTS]
    assert told[: len(before) + 1] == [*before, f"{WEIGHTS}, 3,295,472 bytes, goes up"]
    assert content(await fetch(store, tmp_path, where).run()) == content(TINY)


async def test_what_a_killed_push_left_goes_with_the_next_one_and_what_another_writes_now_stays(tmp_path: Path) -> None:
    store = Objects.open((tmp_path / "store").as_uri())
    dead, live = (tmp_path / "store" / base_path(TINY_DIGEST, f"{WEIGHTS}#{number}") for number in (1, 2))
    dead.parent.mkdir(parents=True)
    dead.write_bytes(b"half")
    os.utime(dead, (0, 0))
    live.write_bytes(b"half")
    os.utime(live, (2**32, 2**32))
    where, _ = await pushed(store)
    assert (dead.exists(), live.exists()) == (False, True)
    assert content(await fetch(store, tmp_path, where).run()) == content(TINY)


def spoilt(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"<html>")


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (without("config.json"), "config.json"),
        (without("tokenizer.json"), "needs tokenizer.json and weights"),
        (without(WEIGHTS), "no .safetensors file"),
        (without("chat_template.jinja"), "no chat template"),
        (spoilt, WEIGHTS),
    ],
)
async def test_a_folder_that_is_no_base_model_is_not_pushed(
    store: Store, tmp_path: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    folder = Path(shutil.copytree(TINY, tmp_path / "base"))
    spoil(folder)
    with pytest.raises(InvalidInput, match=reason):
        await pushed(store, folder)
    assert not await store.paths("bases")


async def test_another_file_under_the_same_digest_is_refused(store: Store, tmp_path: Path) -> None:
    await pushed(store)
    folder = Path(shutil.copytree(TINY, tmp_path / "base"))
    (folder / "generation_config.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"with another generation_config.json than .* delete bases/"):
        await pushed(store, folder)


# ---- a fetch --------------------------------------------------------------------------------------------------------


async def test_a_fetch_that_was_interrupted_goes_on_behind_what_it_has(store: Store, tmp_path: Path) -> None:
    where, _ = await pushed(store)
    store.breaks_at = SIZE // 2
    fetching = fetch(store, tmp_path, where)
    with pytest.raises(StoreUnavailable):
        await fetching.run()
    assert fetching.progress().startswith("fetching store:t@") and "% of 0.0 GB, 2 MB are here" in fetching.progress()
    assert content(await fetch(store, tmp_path, where).run()) == content(TINY)
    first, second = store.starts
    assert (first, second) == (0, -(-SIZE // 2 // part_bytes(SIZE)) * part_bytes(SIZE))


async def test_a_wrong_byte_is_named_and_fetched_again(store: Store, tmp_path: Path) -> None:
    where, _ = await pushed(store)
    store.wrong = 1
    with capture_logs() as logs:
        assert content(await fetch(store, tmp_path, where).run()) == content(TINY)
    (line,) = logs
    assert (line["event"], line["file"]) == ("base_file_wrong", WEIGHTS) and "part 1" in line["reason"]
    assert store.starts[0] == 0 and store.starts[1] > 0, "what was right is not fetched again"


async def test_a_wrong_byte_that_stays_is_named_until_it_is_pushed_again(store: Store, tmp_path: Path) -> None:
    where, _ = await pushed(store)
    path = base_path(TINY_DIGEST, WEIGHTS)
    right = await store.get(path)
    await store.write(path, right[:-1] + b"!")
    with pytest.raises(InvalidInput, match=rf"damaged in the store: {path}: part \d+ .* push it again"):
        await fetch(store, tmp_path, where).run()
    _, told = await pushed(store)
    assert [line for line in told if "goes up" in line] == [f"{WEIGHTS}, 3,295,472 bytes, goes up"]
    assert content(await fetch(store, tmp_path, where).run()) == content(TINY)


async def test_what_a_disk_has_lost_of_a_whole_folder_is_fetched_again(store: Store, tmp_path: Path) -> None:
    where, _ = await pushed(store)
    folder = await fetch(store, tmp_path, where).run()
    with (folder / WEIGHTS).open("r+b") as weights:
        weights.seek(SIZE // 2)
        weights.write(bytes(SIZE - SIZE // 2))
    assert content(await fetch(store, tmp_path, where).run()) == content(TINY)
    assert store.starts[1] > 0


@pytest.mark.parametrize("fault", ["is a file", "is open to others", "is full"])
async def test_a_node_folder_that_cannot_hold_it_is_told_of(
    store: Store, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, _ = await pushed(store)
    if fault == "is a file":
        (tmp_path / "bases").touch()
    elif fault == "is open to others":
        (tmp_path / "bases").mkdir()
        (tmp_path / "bases").chmod(0o777)
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # pyright: ignore
    with pytest.raises(InvalidInput, match=r"bases cannot hold it: .*; see MARLAAS_CACHE_DIR"):
        await fetch(store, tmp_path, where).run()


async def test_one_that_is_not_there_is_told_with_what_there_is(store: Store, tmp_path: Path) -> None:
    where, _ = await pushed(store)
    other = f"store:t@{'0' * 32}-{'1' * 32}"
    with pytest.raises(InvalidInput, match=f"{other} is not in the store; there are: {where}"):
        await fetch(store, tmp_path, other).run()


async def test_a_manifest_names_no_file_outside_of_the_folder(store: Store, tmp_path: Path) -> None:
    where, _ = await pushed(store)
    path = base_path(TINY_DIGEST, "manifest")
    await store.write(path, (await store.get(path)).replace(b'"marlaas.json"', b'"../marlaas.json"'))
    with pytest.raises(InvalidInput, match=r"'../marlaas.json' is no file of a base model"):
        await fetch(store, tmp_path, where).run()


async def test_loaders_of_one_machine_take_turns(store: Store, tmp_path: Path) -> None:
    where, _ = await pushed(store)
    found = await asyncio.gather(*(fetch(store, tmp_path, where).run() for _ in range(3)))
    assert len(set(found)) == 1 and content(found[0]) == content(TINY) and store.starts == [0]


async def test_weights_come_through_peers_and_the_store_is_read_once(store: Store, tmp_path: Path, bus: Bus) -> None:
    where, _ = await pushed(store)

    async def worker(name: str) -> Path:
        relay = Relay(store, NodeFolder(tmp_path / name / "files", 0), Holders(bus, name, store_places=1))
        await relay.open("127.0.0.1", 0)
        relays.append(relay)
        tasks.append(asyncio.create_task(relay.run()))
        return await BaseFetch(store, tmp_path / name, where, with_weights=True, relay=relay).run()

    relays, tasks = list[Relay](), list[asyncio.Task[None]]()
    async with asyncio.timeout(60):
        found = await asyncio.gather(*(worker(name) for name in "abcdefg"))
        # and so it goes on once the store has none, and one that began with it has left
        await store.delete(base_path(TINY_DIGEST, WEIGHTS))
        await relays[0].close()
        found.append(await worker("h"))
    assert all(content(folder) == content(TINY) for folder in found) and store.starts == [0]
    assert sorted(each.counters()["store_bytes"] for each in relays) == [*[0] * 7, SIZE]
    for relay, task in zip(relays, tasks, strict=True):
        task.cancel()
        await relay.close()
