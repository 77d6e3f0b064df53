"""The supervisor, with real processes: a real Redis, and small stand-ins for the services."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from common.bus.streams import Cell
from common.children.processes import describe, last_error, rotate
from common.errors import REFUSED
from common.store.disk_room import free_bytes
from harness.redis_server import RedisServer
from manager_service.launcher import supervisor
from manager_service.launcher.embedded_redis import KEPT_BYTES
from manager_service.launcher.supervisor import (
    LocalCluster,
    ServiceCommand,
    StartError,
    read_cluster_file,
    service_commands,
)
from tests.common.test_worker import until
from tests.support.processes import alive, descendants, restart

API = """
import http.server, os
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
    def log_message(self, *args): pass
print("listening", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["MARLAAS_PORT"])), Ready).serve_forever()
"""
SLEEP = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
WITH_GRANDCHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
BROKEN = "raise SystemExit('no such model')"


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def stand_ins(worker: str = SLEEP) -> list[ServiceCommand]:
    return [ServiceCommand("manager", python(API)), ServiceCommand("rollout-0", python(worker))]


def cluster(data_dir: Path, worker: str = SLEEP, **options: object) -> LocalCluster:
    return LocalCluster(data_dir=data_dir, services=lambda counts, env: stand_ins(worker), **options)  # pyright: ignore


def is_alive(pid: int) -> bool:
    """False also for a zombie."""
    with contextlib.suppress(FileNotFoundError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


async def gone(pids: list[int], timeout_s: float = 30.0) -> bool:
    await until(lambda: not any(map(is_alive, pids)), timeout_s)
    return True


async def test_a_killed_child_is_started_again(tmp_path: Path) -> None:
    # Given a running cluster
    async with cluster(tmp_path) as running:
        before = running.pids
        assert set(before) == {"redis", "manager", "rollout-0"}
        # When one child is killed
        await restart(running, "rollout-0", signal.SIGKILL)
        # Then it runs again, under another process id, and the others were left alone
        after = running.pids
        assert after["rollout-0"] != before["rollout-0"]
        assert (after["redis"], after["manager"]) == (before["redis"], before["manager"])
        assert running.num_exits == {"redis": 0, "manager": 0, "rollout-0": 1}


async def test_nothing_is_left_after_the_end_not_even_who_ignores_sigterm(tmp_path: Path) -> None:
    async with cluster(tmp_path, STUBBORN) as running:
        pids = list(running.pids.values())
    assert await gone(pids, 0.5)
    assert read_cluster_file(tmp_path) is None


async def test_what_a_killed_child_had_started_ends_with_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, WITH_GRANDCHILD) as running:
        leader = running.pids["rollout-0"]
        await until(lambda: descendants(leader))
        grandchildren = descendants(leader)
        running.kill("rollout-0")
        await until(lambda: not alive(grandchildren))


async def test_redis_keeps_its_data_and_its_address_when_killed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        async with connect(running) as client:
            await client.set("answer", "42")
        await restart(running, "redis", signal.SIGKILL)
        async with connect(running) as client:
            assert await answer(client) == b"42"
    # and over a stop and a new start, with a new password
    async with cluster(tmp_path) as running, connect(running) as client:
        assert await answer(client) == b"42"


def connect(running: LocalCluster) -> Any:
    return redis.asyncio.Redis.from_url(running.redis_url)  # pyright: ignore[reportUnknownMemberType]


async def answer(client: Any) -> bytes:
    """Tried again while Redis starts."""
    while True:
        with contextlib.suppress(redis.ConnectionError):
            return await client.get("answer")
        await asyncio.sleep(0.02)


async def test_a_redis_that_cannot_write_starts_again_in_the_room_that_was_kept(tmp_path: Path) -> None:
    # Given a disk that has its reserve, until somebody fills it
    heard: list[str] = []
    reserve = {"MARLAAS_DISK_RESERVE_BYTES": str(free_bytes(tmp_path) - (1 << 30))}
    room, filler = tmp_path / "data" / "redis" / "room", tmp_path / "filler"
    async with cluster(tmp_path / "data", environment=reserve, notify=heard.append) as running:
        assert room.stat().st_blocks * 512 >= KEPT_BYTES, "it takes its place on the disk"
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 2 << 30)
        # When Redis may write no further
        written = (tmp_path / "data" / "redis" / "appendonly.aof").stat().st_size
        resource.prlimit(running.pids["redis"], resource.RLIMIT_FSIZE, (written + 4096, resource.RLIM_INFINITY))
        kept = 0
        async with connect(running) as client:
            with contextlib.suppress(redis.ConnectionError):
                for kept in range(10_000):
                    await client.set(f"key-{kept}", "x" * 100)
        # Then it starts again with all that it had taken in, and the cells know
        async with connect(running) as client:
            await until(lambda: _is_set(client, Cell("tiny").disk_full))
            assert await client.exists(*(f"key-{number}" for number in range(kept))) == kept > 10
            assert not room.exists() and "is full: only reads, deletes and cancels" in heard[0]
            # and when the disk has its reserve again, it is kept again
            filler.unlink()
            await until(room.exists)
            await until(lambda: _is_unset(client, Cell("tiny").disk_full))
        assert heard[-1].endswith("has room again")


async def _is_set(client: Any, key: str) -> bool:
    with contextlib.suppress(redis.ConnectionError):
        return bool(await client.exists(key))
    return False


async def _is_unset(client: Any, key: str) -> bool:
    return not await client.exists(key)


async def test_redis_asks_for_a_password_that_only_this_user_can_read(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        port = int(running.redis_url.rsplit(":", 1)[1].split("/")[0])
        async with redis.asyncio.Redis(port=port) as stranger:
            with pytest.raises(redis.AuthenticationError):
                await stranger.get("answer")
        for name in ("redis/redis.conf", "cluster.json"):
            assert (tmp_path / name).stat().st_mode & 0o077 == 0


async def test_only_this_user_can_read_what_is_kept(tmp_path: Path) -> None:
    # Given a folder of another version, open to all
    (tmp_path / "kept" / "redis").mkdir(parents=True, mode=0o755)
    # When a cluster has written to it
    writes = "import os, pathlib; pathlib.Path(os.environ['MARLAAS_DATA_DIR'], 'store', 'x').touch(); import time; time.sleep(600)"
    async with cluster(tmp_path / "kept", writes) as running:
        async with connect(running) as client:
            await client.set("answer", "42")
        await until((tmp_path / "kept" / "store" / "x").exists)
    # Then nobody else can read a file or enter a folder of it
    found = list((tmp_path / "kept").rglob("*"))
    assert {path.name for path in found} >= {"redis", "store", "logs", "appendonly.aof", "redis.conf", "x", "redis.log"}
    assert [path.name for path in found if path.stat().st_mode & 0o077] == []


async def test_a_second_cluster_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        with pytest.raises(StartError, match=rf"already runs on .*{running.base_url}.*--data"):
            await cluster(tmp_path).start()
        assert read_cluster_file(tmp_path) is not None  # of the first
    async with cluster(tmp_path):
        pass  # the lock is free again


async def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StartError, match=r"port \d+ .*--port"):
            await cluster(tmp_path, port=taken.getsockname()[1]).start()


async def test_a_child_that_refuses_its_settings_ends_the_start_with_its_line(tmp_path: Path) -> None:
    heard: list[str] = []
    refuses = f"import sys; print('other'); print('trainer: MARLAAS_X=0: must be 1'); sys.exit({REFUSED})"
    services = [ServiceCommand("manager", python(SLEEP)), ServiceCommand("trainer-0", python(refuses))]
    with pytest.raises(StartError, match=r"^trainer: MARLAAS_X=0: must be 1$"):
        await LocalCluster(data_dir=tmp_path, services=lambda counts, env: services, notify=heard.append).start()
    assert heard == []


async def test_a_redis_that_is_stopped_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "START_TIMEOUT_S", 0.5)
    monkeypatch.setattr(supervisor, "PING_S", 0.5)
    server = RedisServer.start(tmp_path, durable=False)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        starting = cluster(
            tmp_path / "data", environment={"MARLAAS_REDIS_URL": f"redis://:secret@127.0.0.1:{server.port}/0"}
        )
        async with asyncio.timeout(60):
            with pytest.raises(StartError, match=r"MARLAAS_REDIS_URL does not answer") as caught:
                await starting.start()
        assert "secret" not in str(caught.value)
    finally:
        server.stop()


async def test_up_waits_for_the_store_that_its_redis_knows(tmp_path: Path) -> None:
    # Given a data folder whose store was moved away
    async with cluster(tmp_path):
        pass
    store, away = tmp_path / "store", tmp_path / "away"
    store.rename(away)
    # When it is started again
    told: list[str] = []
    starting = cluster(tmp_path, notify=told.append)
    task = asyncio.create_task(starting.start())
    await until(lambda: told)
    # Then it says what is missing, starts no service, and leaves the place free
    assert told[0].startswith(f"waiting for the store: there is no folder {store}")
    assert set(starting.pids) == {"redis"} and not store.exists()
    # And goes on once it is back
    away.rename(store)
    await task
    assert set(starting.pids) == {"redis", "manager", "rollout-0"}
    await starting.stop()


async def test_a_store_that_does_not_come_ends_the_start_with_what_to_do(tmp_path: Path) -> None:
    # Given two data folders with one Redis outside
    server = RedisServer.start(tmp_path)
    environment = {"MARLAAS_REDIS_URL": server.url}
    async with cluster(tmp_path / "one", environment=environment):
        pass
    # When the second is started
    told: list[str] = []
    starting = cluster(tmp_path / "two", environment=environment, notify=told.append)
    task = asyncio.create_task(starting.start())
    await until(lambda: told)
    # Then it says that the Redis belongs to another store
    with pytest.raises(StartError, match=r"MARLAAS_REDIS_URL .* begin again"):
        await starting.wait_ready(0.1)
    assert starting.pids == {}
    # And Ctrl-C ends it
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    server.stop()


async def test_why_a_child_ended_is_told_with_that_it_starts_again(tmp_path: Path) -> None:
    # Given a folder that was used before
    log = tmp_path / "logs" / "trainer-0.log"
    log.parent.mkdir()
    log.write_text("long ago: another reason\n")
    heard: list[str] = []
    services = [ServiceCommand("manager", python(SLEEP)), ServiceCommand("trainer-0", python(BROKEN))]
    # When a child cannot start there
    with pytest.raises(StartError) as caught:
        await LocalCluster(data_dir=tmp_path, services=lambda counts, env: services, notify=heard.append).start()
    # Then its reason comes with the news, and nothing from before
    assert heard[0] == "trainer-0 ended with status 1: no such model; starting again in 0.1 s"
    assert "long ago" not in str(caught.value) and str(caught.value).endswith("no such model")


UP = """
import asyncio, signal, sys
from pathlib import Path
from manager_service.launcher.commands.up import run_until_told
from tests.manager.test_supervisor import cluster
signal.signal(signal.SIGINT, signal.SIG_IGN)
asyncio.run(run_until_told(cluster(Path(sys.argv[1])), as_json=True))
"""
"""`marlaas up` as `marlaas up &` in a script starts it: with SIGINT ignored."""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
async def test_no_process_outlives_a_supervisor_that_ctrl_c_or_a_kill_ends(tmp_path: Path, end: signal.Signals) -> None:
    # Given a supervisor in a process of its own
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", UP, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment) as up:
        assert up.stdout is not None
        pids: dict[str, int] = json.loads(await asyncio.to_thread(up.stdout.readline))["pids"]
        assert all(map(is_alive, pids.values()))
        # When it ends, or is killed
        up.send_signal(end)
        await asyncio.to_thread(up.wait, 20)
    # Then its children end too, and the folder is free
    assert await gone(list(pids.values()), 2.0)
    async with cluster(tmp_path):
        pass


def test_all_base_models_share_the_workers_unless_vllm_cannot_sleep() -> None:
    environment = {"MARLAAS_BASE_MODELS": "tiny,big=/models/big"}
    services = service_commands({"rollout": 2, "trainer": 1}, environment)
    assert [service.name for service in services] == ["manager", "exporter", "rollout-0", "rollout-1", "trainer-0"]
    assert services[-1].environment == {"MARLAAS_BASE_MODEL": ""}, "all of them"
    assert services[-1].argv[-2:] == ("-m", "trainer_service")
    services = service_commands({"rollout": 1, "trainer": 1}, environment | {"MARLAAS_ENGINE": "vllm"})
    assert [service.name for service in services[2:]] == ["rollout-tiny-0", "rollout-big-0", "trainer-0"]
    assert services[2].environment == {"MARLAAS_BASE_MODEL": "tiny"}
    asleep = {"MARLAAS_ENGINE": "vllm", "MARLAAS_ROLLOUT_DEVICE": "cuda", "MARLAAS_ROLLOUT_KV_BYTES": "20GB"}
    services = service_commands({"rollout": 1, "trainer": 1}, environment | asleep)
    assert [service.name for service in services[2:]] == ["rollout-0", "trainer-0"]


def test_a_long_log_is_moved_aside_while_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"old\n" * 10)
        rotate(log, limit_bytes=20)
        writer.write(b"new\n")
    assert log.read_bytes() == b"new\n"
    assert (tmp_path / "x.log.1").read_bytes() == b"old\n" * 10


def test_the_last_error_of_a_log_is_no_warning_of_a_process_that_ended_later(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    warning = "/usr/lib/python3.12/multiprocessing/resource_tracker.py:279: UserWarning: resource_tracker: There appear to be 1"
    source = "  warnings.warn('resource_tracker: There appear to be %d '"
    log.write_text(f"starting\nrollout: vLLM did not start\n{warning}\n{source}\n")
    assert last_error(log) == "rollout: vLLM did not start"
    assert last_error(log, start=len("starting\nrollout: vLLM did not start\n")) == ""


def test_exit_statuses_in_words() -> None:
    assert describe(-9) == "was killed by SIGKILL"
    assert describe(3) == "ended with status 3"
    assert describe(REFUSED) == "refused its settings"
