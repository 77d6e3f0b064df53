"""The contract of object storage and of the adapter store on it: the same for a local folder and for memory."""

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.errors import AlreadyExists, CorruptObject, InvalidInput, NotFound, StoreUnavailable, Unavailable
from common.models.base_digest import BaseIdentity
from common.store.adapters import OPTIMIZER_FILE, PEFT_FILES, AdapterStore, Manifest
from common.store.objects import Objects
from common.store.store_folder import SMALL_BYTES
from common.wire.messages import AdapterRef

ROOT = Path(__file__).resolve().parents[2]
V1 = AdapterRef("acme", "job-1", 1)
FILES = {PEFT_FILES[0]: b"weights", PEFT_FILES[1]: b"{}", OPTIMIZER_FILE: b"moments"}


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    url = (tmp_path / "a store").as_uri() if request.param == "folder" else "memory:///"
    return Objects.open(url)


@pytest.fixture
def store(storage: Objects) -> AdapterStore:
    return AdapterStore(storage)


def manifest(adapter: AdapterRef = V1, *, seed: int = 0) -> Manifest:
    return Manifest(
        adapter=adapter,
        base_model="tiny",
        attempt="",
        files={},
        parent=adapter.version - 1,
        batch="job-1/step1",
        seed=seed,
        next_group=8,
        trajectories=("0/0", "0/1"),
        metrics={"loss": 0.5, "kl": None},
    )


async def replace(storage: Objects, path: str, data: bytes) -> None:
    await storage.delete(path)
    await storage.create(path, data)


async def some(num_bytes: int, size: int) -> AsyncIterator[bytes]:
    for at in range(0, num_bytes, size):
        yield bytes([at // size % 256]) * min(size, num_bytes - at)


async def test_an_object_is_written_and_read_in_parts(storage: Objects) -> None:
    await storage.write_parts("a", some(20_000_001, 1_000_000))
    assert len(await storage.get("a")) == 20_000_001
    assert await storage.get_part("a", 4_999_999, 3) == b"\4\5\5"
    assert await storage.get_part("a", 20_000_000, 1) == b"\x14"
    with pytest.raises(NotFound):
        await storage.get_part("b", 0, 1)


# ---- objects --------------------------------------------------------------------------------------------------------


async def test_nothing_is_missing_while_a_local_stores_folder_is_away(tmp_path: Path) -> None:
    folder, away = tmp_path / "store", tmp_path / "away"
    storage = Objects.open(folder.as_uri())
    await storage.create("a", b"1")
    folder.rename(away)
    calls = [
        storage.get,
        storage.exists,
        storage.paths,
        storage.folders,
        storage.delete,
        partial(storage.write, data=b"2"),
    ]
    for in_its_place in (False, True):
        if in_its_place:
            folder.mkdir()
        for call in calls:
            with pytest.raises(StoreUnavailable, match="no longer the folder"):
                await call("a")
    assert not list(folder.iterdir())
    folder.rmdir()
    away.rename(folder)
    assert await storage.get("a") == b"1"


async def test_a_small_object_of_a_local_folder_needs_no_thread_and_no_other_turn(tmp_path: Path) -> None:
    storage = Objects.open((tmp_path / "a store").as_uri())
    sizes = {"empty": 0, "small": 1, "largest.json": SMALL_BYTES, "too-large": SMALL_BYTES + 1, "odd name#": 1}
    for name, num_bytes in sizes.items():
        await storage.write(f"a/{name}", bytes(num_bytes))
    (tmp_path / "a store" / "a" / "link").symlink_to("small")
    (tmp_path / "beside").write_bytes(b"not of the store")
    at_once = {name: first_step(storage.get(f"a/{name}")) for name in [*sizes, "link"]}
    assert {name: len(data) for name, data in at_once.items() if data is not None} == {
        "empty": 0,
        "small": 1,
        "largest.json": SMALL_BYTES,
    }
    assert {name: len(await storage.get(f"a/{name}")) for name in sizes} == sizes
    with pytest.raises(NotFound):
        await storage.get("a/absent")
    with pytest.raises(Exception, match="beside"):
        await storage.get("a/../../beside")


def first_step(call: Coroutine[Any, Any, bytes]) -> bytes | None:
    """The result, if the call does not wait for anything."""
    try:
        call.send(None)
    except StopIteration as done:
        return done.value
    call.close()
    return None


async def test_an_object_is_created_once_and_keeps_its_first_content(storage: Objects) -> None:
    await storage.create("a", b"first")
    with pytest.raises(AlreadyExists):
        await storage.create("a", b"second")
    assert await storage.get("a") == b"first"


async def test_of_many_that_create_the_same_object_at_once_one_wins(storage: Objects) -> None:
    bodies = [f"{n}".encode() * 1000 for n in range(20)]
    outcomes = await asyncio.gather(*(storage.create("a", body) for body in bodies), return_exceptions=True)
    winners = [body for body, outcome in zip(bodies, outcomes, strict=True) if outcome is None]
    assert [await storage.get("a")] == winners
    assert sum(isinstance(outcome, AlreadyExists) for outcome in outcomes) == 19


async def test_what_is_not_there_is_not_found_and_may_be_deleted(storage: Objects) -> None:
    with pytest.raises(NotFound):
        await storage.get("a/b")
    assert not await storage.exists("a/b")
    await storage.delete("a/b")
    await storage.delete_folder("a")
    assert (await storage.paths("a"), await storage.folders("a")) == ([], [])


async def test_a_folder_lists_what_is_below_it_and_nothing_beside_it(storage: Objects) -> None:
    for path in ("a/2/x", "a/1/y", "a/1/z", "ab/3/x", "a/file"):
        await storage.create(path, b".")
    assert await storage.paths("a") == ["a/1/y", "a/1/z", "a/2/x", "a/file"]
    assert await storage.folders("a") == ["1", "2"]


async def test_a_deleted_folder_is_gone_with_all_below_it_and_may_be_made_again(storage: Objects) -> None:
    for path in ("a/1/y", "a/2/x", "ab/3"):
        await storage.create(path, b".")
    await storage.delete_folder("a")
    assert (await storage.paths("a"), await storage.paths("ab")) == ([], ["ab/3"])
    await storage.create("a/1/y", b"again")


async def test_a_local_folder_keeps_no_empty_folders(tmp_path: Path) -> None:
    storage = Objects.open(tmp_path.as_uri())
    await storage.create("a/b/c/d", b".")
    await storage.delete("a/b/c/d")
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("url", ["", "store", "ftp://host/x", "s3://"])
def test_a_url_that_names_no_storage_is_refused_with_what_to_write(url: str) -> None:
    with pytest.raises(InvalidInput, match="file:///folder or s3://bucket/prefix"):
        Objects.open(url)


def test_a_full_disk_is_unavailable_and_leaves_no_half_object(tmp_path: Path) -> None:
    # Given a process that may write files of at most 1,000 bytes, which a write sees as it sees a full disk
    code = f"""
import asyncio, resource
from common.store.adapters import AdapterStore
from common.errors import Unavailable
from common.store.objects import Objects
from tests.common.test_store import FILES, V1, manifest
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

async def main():
    storage = Objects.open({tmp_path.as_uri()!r})
    for write in (storage.create("big", bytes(5000)), AdapterStore(storage).commit(manifest(), FILES | {{"z": bytes(5000)}})):
        try:
            await write
        except Unavailable as error:
            print("unavailable")
    print(await storage.paths(""), await storage.exists("big"))

asyncio.run(main())
"""
    # When it creates an object, and commits a version, that are larger
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    # Then both are told so, and nothing is there, the version's files that did fit included
    assert (done.stdout.splitlines(), done.stderr) == (["unavailable", "unavailable", "[] False"], "")


# ---- adapters -------------------------------------------------------------------------------------------------------


async def test_a_committed_version_is_read_back_with_its_record(store: AdapterStore) -> None:
    record = await store.commit(manifest(), FILES)
    assert await store.manifest(V1) == record
    assert await store.read(V1) == {name: FILES[name] for name in PEFT_FILES}
    assert await store.read(V1, [OPTIMIZER_FILE]) == {OPTIMIZER_FILE: b"moments"}
    assert {name: file.sha256 for name, file in record.files.items()} == {
        name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()
    }
    assert (record.batch, record.next_group, record.metrics) == ("job-1/step1", 8, {"loss": 0.5, "kl": None})


async def test_a_version_of_another_base_model_is_not_read_and_one_without_a_digest_by_its_name(
    storage: Objects,
) -> None:
    await AdapterStore(storage).commit(msgspec.structs.replace(manifest(), base_digest="t-1"), FILES)
    await AdapterStore(storage).commit(manifest(V1.next()), FILES)
    assert await AdapterStore(storage, BaseIdentity("tiny", "t-1")).read(V1) == await AdapterStore(storage).read(V1)
    for digest in ("t-2", "u-1"):
        other = AdapterStore(storage, BaseIdentity("tiny", digest))
        with pytest.raises(InvalidInput, match=f"adapter .*1 was trained on other files of 'tiny' .* here .{digest}"):
            await other.read(V1)
        assert await other.read(V1.next()), "it was written before versions had a digest"
    with pytest.raises(InvalidInput, match="was trained on 'tiny', not on 'small'"):
        await AdapterStore(storage, BaseIdentity("small", "t-1")).read(V1.next())


async def test_a_version_without_a_manifest_does_not_exist(storage: Objects, store: AdapterStore) -> None:
    await storage.create(f"{V1.path()}/someattempt/{PEFT_FILES[0]}", b"weights")
    assert await store.manifest(V1) is None
    with pytest.raises(NotFound):
        await store.read(V1)


async def test_of_two_commits_at_once_one_wins_and_the_losers_folder_is_gone(
    storage: Objects, store: AdapterStore
) -> None:
    commits = [store.commit(manifest(seed=n), {"f": f"{n}".encode()}) for n in range(2)]
    outcomes = await asyncio.gather(*commits, return_exceptions=True)
    (winner,) = [outcome for outcome in outcomes if isinstance(outcome, Manifest)]
    assert sum(isinstance(outcome, AlreadyExists) for outcome in outcomes) == 1
    assert await store.manifest(V1) == winner
    assert await storage.folders(V1.path()) == [winner.attempt]
    assert await store.read(V1, ["f"]) == {"f": f"{winner.seed}".encode()}


async def test_a_version_that_exists_is_not_made_again(storage: Objects, store: AdapterStore) -> None:
    first = await store.commit(manifest(), FILES)
    with pytest.raises(AlreadyExists):
        await store.commit(manifest(), FILES)
    assert (await store.manifest(V1), await storage.folders(V1.path())) == (first, [first.attempt])


async def test_a_changed_byte_is_noticed(storage: Objects, store: AdapterStore) -> None:
    record = await store.commit(manifest(), FILES)
    await replace(storage, f"{V1.path()}/{record.attempt}/{PEFT_FILES[0]}", b"weightz")
    with pytest.raises(CorruptObject, match="does not match its sha256"):
        await store.read(V1)


async def test_a_file_that_is_gone_is_corruption_and_one_that_never_was_is_not_found(
    storage: Objects, store: AdapterStore
) -> None:
    record = await store.commit(manifest(), FILES)
    await storage.delete(f"{V1.path()}/{record.attempt}/{PEFT_FILES[0]}")
    with pytest.raises(CorruptObject, match="is gone"):
        await store.read(V1)
    with pytest.raises(NotFound, match="has no file"):
        await store.read(V1, ["other"])


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"adapter": 3}', b"\xff\xfe"])
async def test_a_manifest_that_is_none_is_corruption_not_absence(
    storage: Objects, store: AdapterStore, content: bytes
) -> None:
    await storage.create(f"{V1.path()}/manifest.json", content)
    with pytest.raises(CorruptObject):
        await store.manifest(V1)
    with pytest.raises(CorruptObject):
        await store.commit(manifest(), FILES)


async def test_the_optimiser_state_may_be_dropped_twice_and_the_adapter_stays(store: AdapterStore) -> None:
    await store.commit(manifest(), FILES)
    await store.drop_optimizer(V1)
    await store.drop_optimizer(V1)
    await store.drop_optimizer(V1.next())
    assert await store.read(V1) == {name: FILES[name] for name in PEFT_FILES}
    with pytest.raises(CorruptObject):
        await store.read(V1, [OPTIMIZER_FILE])


async def test_deleting_a_job_leaves_its_neighbours(storage: Objects, store: AdapterStore) -> None:
    others = [AdapterRef("acme", "job-10", 1), AdapterRef("other", "job-1", 1)]
    for adapter in (V1, V1.next(), *others):
        await store.commit(manifest(adapter), FILES)
    await store.delete_job("acme", "job-1")
    assert [await store.manifest(adapter) is None for adapter in (V1, V1.next(), *others)] == [True, True, False, False]


# ---- a network between ----------------------------------------------------------------------------------------------


class Unreliable(Objects):
    """Storage behind a network. Manifests are created, but the reply is lost, and the client's own retry is refused."""

    async def create(self, path: str, data: bytes) -> None:
        await super().create(path, data)
        if path.endswith("manifest.json"):
            await super().create(path, data)


class Full(Objects):
    room = 1
    """Files that it takes."""

    async def write(self, path: str, data: bytes) -> None:
        if not self.room:
            raise Unavailable(f"{path}: full")
        self.room -= 1
        await super().write(path, data)


async def test_a_commit_whose_reply_was_lost_and_which_was_retried_has_won() -> None:
    storage = Unreliable.open("memory:///")
    record = await AdapterStore(storage).commit(manifest(), FILES)
    assert await AdapterStore(storage).manifest(V1) == record
    assert await AdapterStore(storage).read(V1, FILES) == FILES


async def test_a_commit_that_did_not_fit_leaves_nothing_and_may_be_tried_again() -> None:
    storage = Full(Objects.open("memory:///")._backend)  # pyright: ignore[reportPrivateUsage]
    store = AdapterStore(storage)
    with pytest.raises(Unavailable):
        await store.commit(manifest(), FILES)
    assert await storage.paths("") == []
    storage.room = len(FILES)
    await store.commit(manifest(), FILES)
    assert await store.read(V1, FILES) == FILES
