"""The checks at the end of chaos find what they look for."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import redis

from chaos import verify
from chaos.cluster import shared_memory
from chaos.tenants import RECIPES, STEPS, Run
from common.bus.streams import Cell
from common.store.adapters import Manifest, StoredFile
from common.wire.messages import AdapterRef
from harness.redis_server import RedisServer
from manager_service.records.keys import GLOBAL

CELL = Cell("tiny")
LEDGER = {"issued": 32, "trained": 32, "filtered": 0, "stale": 0, "failed": 0, "cancelled": 0, "in_flight": 0}


def manifest(version: int, **changes: Any) -> Manifest:
    found = Manifest(
        adapter=AdapterRef("acme", "job-a", version),
        base_model="tiny",
        attempt=f"attempt-{version}",
        files={"adapter_model.safetensors": StoredFile(f"sha-{version}", 1)},
        parent=version - 1 if version else None,
        batch=f"batch-{version}",
        seed=7,
        next_group=version,
        trajectories=tuple(f"{version}/{sample}" for sample in range(2)) if version else (),
    )
    return msgspec.structs.replace(found, **changes)


WHOLE = [manifest(version) for version in range(STEPS + 1)]


def versions(found: list[Manifest]) -> list[str]:
    return verify.versions_once("job-a", found, trajectories=2)


def test_a_whole_job_is_right() -> None:
    assert versions(WHOLE) == []
    assert verify.same_bytes("job-a", WHOLE, WHOLE) == []
    assert verify.ledger_balances("job-a", LEDGER) == []


def test_a_version_that_is_missing_or_made_of_the_batch_of_another_is_found() -> None:
    assert "versions [0, 1, 2, 4]" in versions([*WHOLE[:3], WHOLE[4]])[0]
    assert versions([*WHOLE, manifest(STEPS + 1)])
    assert "trained twice" in versions([*WHOLE[:4], manifest(4, batch="batch-3")])[0]


def test_a_trajectory_that_was_trained_twice_or_not_at_all_is_found() -> None:
    assert "trajectories trained twice: ['3/0']" in versions([*WHOLE[:4], manifest(4, trajectories=("3/0", "4/1"))])[0]
    assert "trajectories by version: {4: 1}" in versions([*WHOLE[:4], manifest(4, trajectories=("4/1",))])[0]


def test_other_bytes_are_found_with_their_version() -> None:
    other = [*WHOLE[:2], manifest(2, files={"adapter_model.safetensors": StoredFile("sha-x", 1)}), *WHOLE[3:]]
    assert verify.same_bytes("job-a", other, WHOLE) == ["job-a: other bytes than undisturbed from version 2 on"]


@pytest.mark.parametrize("changes", [{"trained": 31}, {"issued": 31}, {"in_flight": 1, "trained": 31}])
def test_a_ledger_that_does_not_balance_is_found(changes: dict[str, int]) -> None:
    assert verify.ledger_balances("job-a", LEDGER | changes)


def test_a_trajectory_that_had_to_be_replaced_is_found() -> None:
    run = Run(RECIPES[0], "job-a")
    events = [{"data": {"step": 2, "failed_reason": "grader: it was killed"}}, *told(1)]
    assert verify.trained_once(run, LEDGER, events) == []
    (found,) = verify.trained_once(run, LEDGER | {"issued": 36, "failed": 4}, events)
    assert "'failed': 4" in found and found.endswith("grader: it was killed")


def told(*steps: int) -> list[dict[str, Any]]:
    """Events of these steps, newest first, with others between them."""
    figures = [{"type": "metrics", "data": {"step": step, "loss": 0.5}} for step in reversed(steps)]
    return [
        {"type": "message", "data": None},
        *figures,
        {"type": "metrics", "data": {"step": 0, "eval_reward_mean": 0.5}},
    ]


@pytest.mark.parametrize("steps", [(), (1, 2, 3), (1, 2, 2, 3, 4), (1, 3, 2, 4), (1, 2, 3, 4, 5)])
def test_a_step_that_is_told_of_twice_or_not_at_all_is_found(steps: tuple[int, ...]) -> None:
    assert verify.steps_once("job-a", told(1, 2, 3, 4)) == []
    assert verify.steps_once("job-a", told(*steps)) == [f"job-a: its events tell of the steps {list(steps)}"]


@pytest.fixture
def cluster(redis_server: RedisServer, redis_url: str, tmp_path: Path) -> Iterator[Any]:
    client = redis.Redis.from_url(redis_url, decode_responses=True)
    (tmp_path / "tmp").mkdir()
    yield SimpleNamespace(redis=SimpleNamespace(client=lambda: client), client=client, folder=tmp_path)
    client.close()


def test_keys_work_and_files_that_are_left_are_found(cluster: Any) -> None:
    client = cluster.client
    client.hset(CELL.job("job-a"), "spec", "{}")
    client.set(CELL.lease(1), "token", px=60_000)
    client.xdel(CELL.env, client.xadd(CELL.env, {"a": 1}))
    assert verify.left_keys(cluster) == [] == verify.left_files(cluster.folder)
    client.hset(CELL.open("job-a"), "0/0", "x")
    client.set(CELL.lease(2), "token")
    client.xadd(CELL.scored(3), {"a": 1})
    client.xadd(CELL.dead, {"a": 1})
    (cluster.folder / "tmp" / "rest").touch()
    found = "\n".join(verify.left_keys(cluster))
    assert {"open:job-a", "lease:2", "scored:3 holds 1", "dead holds 1"} == {
        name for name in ("open:job-a", "lease:2", "scored:3 holds 1", "dead holds 1") if name in found
    }
    assert len(found.splitlines()) == 4
    assert verify.left_files(cluster.folder) == ["file tmp/rest is left"]


def test_keys_outside_of_the_cell_that_are_left_are_found(cluster: Any) -> None:
    client = cluster.client
    client.hset(f"{GLOBAL}tenants", "acme", "{}")
    client.set(f"{GLOBAL}session:ses-1", "{}", ex=60)
    assert verify.left_keys(cluster) == []
    client.zadd(f"{GLOBAL}files:acme", {"file-1": 1})
    client.set(f"{GLOBAL}exporter", "token")
    client.set("tenants", "of somebody else")
    left = (f"{GLOBAL}exporter", f"{GLOBAL}files:acme", "tenants")
    assert verify.left_keys(cluster) == [f"key {key} is left" for key in left]


def test_runs_that_are_left_are_found(cluster: Any) -> None:
    client = cluster.client
    client.zadd(CELL.tenant_runs("hostile"), {"run-1-0": 1})
    client.set(CELL.use("run-1-0", 3), "", ex=3600)
    client.set(CELL.session("ses-1"), "hostile", ex=300)
    assert verify.runs(cluster) == ["run-1-0"]
    assert not client.exists(CELL.use("run-1-0", 3)), "as after an hour"
    assert verify.left_keys(cluster) == ["key tenant-runs:hostile (zset) is left"]


def test_shared_memory_that_is_left_is_found(cluster: Any) -> None:
    libc = ctypes.CDLL(None)
    cluster.shared_memory = shared_memory()
    segment = libc.shmget(0, 4096, 0o1600)
    try:
        assert f"shared memory {segment} is left" in verify.left_memory(cluster)
    finally:
        libc.shmctl(segment, 0, None)
    assert f"shared memory {segment} is left" not in verify.left_memory(cluster)
