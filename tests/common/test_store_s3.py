"""The store's contract against an S3 server over HTTP, and a service's error at its start when S3 is set up wrongly."""

# pyright: reportUnusedImport=false
# (tests that are imported run here)

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from common.errors import REFUSED, InvalidInput, Unavailable
from common.store.objects import PART_BYTES, Objects, patiently
from harness.proxy import Proxy
from harness.s3_server import BUCKET, S3Server, environment
from tests.common.test_store import (  # noqa: F401  (pytest collects them here, with this file's `storage`)
    manifest,
    store,
    test_a_changed_byte_is_noticed,
    test_a_committed_version_is_read_back_with_its_record,
    test_a_deleted_folder_is_gone_with_all_below_it_and_may_be_made_again,
    test_a_file_that_is_gone_is_corruption_and_one_that_never_was_is_not_found,
    test_a_folder_lists_what_is_below_it_and_nothing_beside_it,
    test_a_manifest_that_is_none_is_corruption_not_absence,
    test_a_version_that_exists_is_not_made_again,
    test_a_version_without_a_manifest_does_not_exist,
    test_an_object_is_created_once_and_keeps_its_first_content,
    test_deleting_a_job_leaves_its_neighbours,
    test_of_many_that_create_the_same_object_at_once_one_wins,
    test_of_two_commits_at_once_one_wins_and_the_losers_folder_is_gone,
    test_the_optimiser_state_may_be_dropped_twice_and_the_adapter_stays,
    test_what_is_not_there_is_not_found_and_may_be_deleted,
)

ROOT = Path(__file__).resolve().parents[2]
URL = f"s3://{BUCKET}/some/prefix"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server.start()
    yield server
    server.stop()


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An empty bucket, and the variables that lead to it."""
    server.reset()
    for name, value in environment(server.endpoint).items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def storage(s3: S3Server) -> Objects:
    return Objects.open(URL)


@pytest.fixture
async def gate(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    gate = Proxy(s3.port)
    await gate.open()
    monkeypatch.setenv("AWS_ENDPOINT_URL", gate.endpoint)
    yield gate
    await gate.shut()


async def test_a_large_object_goes_up_in_parts_and_comes_back_whole(storage: Objects) -> None:
    data = bytes(range(256)) * (5 * PART_BYTES // 512)
    await storage.write("large", data)
    await storage.write("large", data)
    assert await storage.get("large") == data


async def test_two_prefixes_of_a_bucket_do_not_see_each_other(storage: Objects) -> None:
    await storage.create("a", b"mine")
    other = Objects.open(f"s3://{BUCKET}/some/prefix2")
    assert (await other.paths(""), await other.exists("a")) == ([], False)


async def test_an_outage_is_unavailable_and_over_when_it_is_over(gate: Proxy) -> None:
    storage = Objects.open(URL)
    await storage.create("a", b"before")
    await gate.shut()
    for call in (
        storage.get("a"),
        storage.create("b", b"."),
        storage.write("c", b"."),
        storage.paths(""),
        storage.probe(),
    ):
        with pytest.raises(Unavailable):
            await call
    heard: list[int] = []

    async def alive() -> None:
        heard.append(1)

    waiting = asyncio.create_task(patiently(lambda: storage.get("a"), meanwhile=alive))
    await asyncio.sleep(2.5)
    assert not waiting.done() and heard
    await gate.open()
    assert await waiting == b"before"


async def test_a_probe_leaves_nothing_behind(storage: Objects) -> None:
    await storage.probe()
    assert await storage.paths("") == []


async def test_each_wrong_setting_is_refused_with_what_to_do(s3: S3Server) -> None:
    async def advice(url: str = URL) -> str:
        with pytest.raises(InvalidInput) as refusal:
            await Objects.open(url).probe()
        return str(refusal.value)

    assert "create it" in await advice("s3://no-such-bucket/x")
    s3.check_keys(after=0)
    assert "AWS_ACCESS_KEY_ID" in await advice()
    s3.check_keys(after=1_000_000)


class Careless(Objects):
    """An S3 server that does not know `If-None-Match`."""

    async def create(self, path: str, data: bytes) -> None:
        await self.write(path, data)


async def test_a_server_without_conditional_put_is_refused(s3: S3Server) -> None:
    with pytest.raises(InvalidInput, match="If-None-Match"):
        await Careless.open(URL).probe()


def test_a_service_with_a_wrong_bucket_ends_with_one_line(s3: S3Server, redis_url: str, tmp_path: Path) -> None:
    settings = {
        "MARLAAS_STORE_URL": "s3://no-such-bucket/x",
        "MARLAAS_REDIS_URL": redis_url,
        "MARLAAS_DATA_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-m", "env_service"],
        cwd=ROOT,
        env={**environment(s3.endpoint), **settings, "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == REFUSED
    assert "the bucket of MARLAAS_STORE_URL does not exist; create it" in last
