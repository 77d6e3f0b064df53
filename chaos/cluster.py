"""The processes of one act: managers and workers, kept running as `marlaas up` keeps them; Redis and an S3 server behind links."""

import asyncio
import ctypes
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from chaos.clock import Clock
from chaos.faults import MANAGERS, PROCESSES
from common.bus.streams import Cell
from harness.processes import with_descendants
from harness.proxy import Proxy
from harness.redis_server import free_port
from harness.replaceable_redis import ReplaceableRedis
from harness.s3_server import BUCKET, S3Server, environment
from manager_service.launcher.supervisor import LocalCluster, ServiceCommand, service_commands

CELL = Cell("tiny")
"""The cell of the base model that it serves."""
LEASE_S = 2.0
PR_SET_CHILD_SUBREAPER = 36
MANIFEST = b"/manifest.json"


@dataclass
class Cluster:
    """Everything that a fault may strike. Its folder holds all files that any of the processes writes."""

    folder: Path
    deterministic: bool
    commits: dict[bytes, float] = field(default_factory=dict[bytes, float])
    """Each version's first commit that was on its way to the store: the monotonic time."""

    def __post_init__(self) -> None:
        adopt_orphans()
        self.shared_memory = shared_memory()
        """The state before."""
        (self.folder / "tmp").mkdir(parents=True)
        self.second_port = free_port()
        self.clocks = {name: Clock(self.folder / "clocks", name) for name in PROCESSES}
        self.redis = ReplaceableRedis(self.folder)
        self.store = S3Server.start()
        self.store_link = Proxy(self.store.port, answer=self.on_call)
        self.refuse: Callable[[bytes], bytes] = lambda piece: b""
        """Answers a call to the store in its place, if it returns any bytes."""
        self.services = LocalCluster(
            data_dir=self.folder / "data",
            rollout=2,
            env=2,
            trainer=2,
            environment=self._environment(),
            services=self._commands,
        )

    async def start(self) -> None:
        await self.redis.link.open()
        await self.store_link.open()
        await self.services.start()

    async def stop_services(self) -> None:
        """Ends managers and workers; Redis and the store stay to be looked at."""
        await self.services.stop()

    async def stop(self) -> None:
        await self.services.stop()
        await self.redis.link.shut()
        await self.store_link.shut()
        self.redis.stop()
        self.store.stop()

    @property
    def urls(self) -> list[str]:
        """Addresses of both managers."""
        return [f"http://127.0.0.1:{port}" for port in (self.services.port, self.second_port)]

    def link(self, name: str) -> Proxy:
        return {"redis link": self.redis.link, "store link": self.store_link}[name]

    def left_processes(self) -> list[str]:
        """Command lines of what lives below this process, orphans included, but for Redis and the store."""
        ours = {self.redis.server.pid, self.store.process.pid, os.getpid()}
        return [_described(p) for p in with_descendants([os.getpid()]) if p.pid not in ours and _lives(p)]

    async def age(self, session: str) -> bool:
        """Lets five minutes pass in which a client of the Tinker protocol is silent. False if it showed no sign of life before, or
        while Redis is away.
        """
        return await asyncio.to_thread(self.redis.delete, CELL.session(session))

    def shift_managers(self, seconds: float) -> None:
        """Sets their clocks ahead."""
        for name in MANAGERS:
            self.clocks[name].shift(seconds)

    def on_call(self, piece: bytes) -> bytes:
        told = self.refuse(piece)
        head = piece[:300].split(b" ", 2)
        if not told and head[0] == b"PUT" and head[1].split(b"?")[0].endswith(MANIFEST):
            self.commits.setdefault(head[1], time.monotonic())
        return told

    def _environment(self) -> dict[str, str]:
        mode = {"MARLAAS_DETERMINISTIC": "1"} if self.deterministic else {}
        return {
            **environment(self.store_link.endpoint),
            "MARLAAS_STORE_URL": f"s3://{BUCKET}/cell",
            "MARLAAS_REDIS_URL": self.redis.url,
            "MARLAAS_LEASE_S": str(LEASE_S),
            "MARLAAS_ARCHIVE_AFTER_S": "15",  # so that records move under faults too
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": str(self.clocks[MANAGERS[0]].folder),
            **mode,
        }

    def _commands(self, counts: Mapping[str, int], variables: Mapping[str, str]) -> list[ServiceCommand]:
        """Two managers. Each rollout worker has a node folder of its own, as on two machines: they pass adapters on to each other."""
        manager, *workers = service_commands(counts, variables)
        for worker in workers:
            worker.environment["MARLAAS_CACHE_DIR"] = str(self.folder / "nodes" / worker.name)
        managers = [replace(manager, name=name) for name in MANAGERS]
        managers[1] = replace(managers[1], environment={"MARLAAS_PORT": str(self.second_port)})
        return managers + workers


def adopt_orphans() -> None:
    """Makes what a dead child leaves behind a child of this process, where it is found at the end."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def shared_memory() -> set[str]:
    """Ids of System V shared memory of this machine."""
    file = Path("/proc/sysvipc/shm")
    return {line.split()[1] for line in file.read_text().splitlines()[1:]} if file.exists() else set()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _described(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return str(process.pid)
