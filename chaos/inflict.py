"""Applies and heals each kind of fault."""

import asyncio
import contextlib
import resource
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import psutil

from chaos.cluster import Cluster
from chaos.faults import LINKS, REDIS, STORE, Fault
from harness.processes import with_descendants

POLL_S = 0.02
DAY_S = 86_400.0
FAILED_SHARE = 0.1
CALLS = (b"GET /", b"PUT /", b"HEAD /", b"POST /", b"DELETE /")
WRITES = (b"PUT /", b"POST /")
HELPERS = {"env_service.graders.math", "env_service.graders.similarity", "manager_service.api.reading.process"}
"""Modules that they run."""
ERROR = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
FULL = b"HTTP/1.1 507 Insufficient Storage\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


async def inflict(cluster: Cluster, fault: Fault) -> None:
    """Strikes, waits for the fault's time, and heals."""
    async with INFLICTIONS[fault.kind, _group(fault.victim)](cluster, fault):
        await asyncio.sleep(fault.seconds)


def _group(victim: str) -> str:
    return victim if victim in (REDIS, STORE) else "link" if victim in LINKS else "process"


# ---- processes ------------------------------------------------------------------------------------------------------


async def _running(cluster: Cluster, name: str) -> int:
    """The process's id, once it runs."""
    while (pid := cluster.services.pids.get(name)) is None:
        await asyncio.sleep(POLL_S)
    return pid


@asynccontextmanager
async def kill(cluster: Cluster, fault: Fault) -> AsyncGenerator[None]:
    while not cluster.services.kill(fault.victim, signal.SIGKILL):
        await asyncio.sleep(POLL_S)
    yield


@asynccontextmanager
async def kill_a_helper(cluster: Cluster, fault: Fault) -> AsyncGenerator[None]:
    """Kills all that there are: none is missed, and idle ones are started again when they are needed."""
    for process in with_descendants([await _running(cluster, fault.victim)]):
        with contextlib.suppress(psutil.NoSuchProcess):
            if set(process.cmdline()) & HELPERS:
                process.kill()
    yield


@asynccontextmanager
async def freeze(cluster: Cluster, fault: Fault) -> AsyncGenerator[None]:
    while not cluster.services.kill(fault.victim, signal.SIGSTOP):
        await asyncio.sleep(POLL_S)
    try:
        yield
    finally:
        cluster.services.kill(fault.victim, signal.SIGCONT)


@asynccontextmanager
async def clock(cluster: Cluster, fault: Fault) -> AsyncGenerator[None]:
    cluster.clocks[fault.victim].shift(jump_s(fault.chance))
    try:
        yield
    finally:
        cluster.clocks[fault.victim].shift(0.0)


def jump_s(chance: float) -> float:
    """Seconds from one to a day, back for chances below a half; as many jumps of seconds as of hours."""
    sign, size = (-1, 1 - 2 * chance) if chance < 0.5 else (1, 2 * chance - 1)
    return sign * DAY_S**size


@asynccontextmanager
async def full_disk(cluster: Cluster, fault: Fault) -> AsyncGenerator[None]:
    limit_files(pid := await _running(cluster, fault.victim), 0)
    try:
        yield
    finally:
        if cluster.services.pids.get(fault.victim) == pid:
            limit_files(pid, resource.RLIM_INFINITY)


def limit_files(pid: int, num_bytes: int) -> None:
    """From now on the process can write no file beyond this size."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, hard))


# ---- Redis ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def redis_ends(cluster: Cluster, fault: Fault) -> AsyncGenerator[None]:
    server = cluster.redis.server
    assert server.process is not None
    server.process.send_signal(signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
    await asyncio.to_thread(server.wait)
    try:
        yield
    finally:
        await cluster.redis.restart()


@asynccontextmanager
async def redis_freezes(cluster: Cluster, fault: Fault) -> AsyncGenerator[None]:
    process = cluster.redis.server.process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def redis_is_replaced(cluster: Cluster, fault: Fault) -> AsyncGenerator[None]:
    await cluster.redis.replace()
    yield


@asynccontextmanager
async def redis_has_no_room(cluster: Cluster, fault: Fault) -> AsyncGenerator[None]:
    """Its next write ends it."""
    server = cluster.redis.server
    limit_files(server.pid, 1)
    await asyncio.to_thread(server.wait)
    try:
        yield
    finally:
        await cluster.redis.restart()


# ---- the store ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def store_is_away(cluster: Cluster, fault: Fault) -> AsyncGenerator[None]:
    await cluster.store_link.shut()
    try:
        yield
    finally:
        await cluster.store_link.open()


@asynccontextmanager
async def store_refuses(cluster: Cluster, fault: Fault) -> AsyncGenerator[None]:
    chance = cluster.store_link.chance

    def one_in_ten(piece: bytes) -> bytes:
        return ERROR if piece.startswith(CALLS) and chance.random() < FAILED_SHARE else b""

    def writes(piece: bytes) -> bytes:
        return FULL if piece.startswith(WRITES) else b""

    cluster.refuse = writes if fault.kind == "full disk" else one_in_ten
    try:
        yield
    finally:
        cluster.refuse = lambda piece: b""


# ---- links ----------------------------------------------------------------------------------------------------------


def _late(least_s: float, most_s: float) -> "Infliction":
    @asynccontextmanager
    async def infliction(cluster: Cluster, fault: Fault) -> AsyncGenerator[None]:
        link = cluster.store_link if fault.victim == STORE else cluster.link(fault.victim)
        link.delay_s += (added := least_s + fault.chance * (most_s - least_s))
        try:
            yield
        finally:
            link.delay_s -= added

    return infliction


@asynccontextmanager
async def cut(cluster: Cluster, fault: Fault) -> AsyncGenerator[None]:
    cluster.link(fault.victim).cut()
    yield


@asynccontextmanager
async def halved(cluster: Cluster, fault: Fault) -> AsyncGenerator[None]:
    link = cluster.link(fault.victim)
    link.halved = 0.05
    try:
        yield
    finally:
        link.halved = 0.0


Infliction = Callable[[Cluster, Fault], AbstractAsyncContextManager[None]]
INFLICTIONS: dict[tuple[str, str], Infliction] = {
    ("kill", "process"): kill,
    ("kill a helper", "process"): kill_a_helper,
    ("freeze", "process"): freeze,
    ("clock", "process"): clock,
    ("full disk", "process"): full_disk,
    ("kill", REDIS): redis_ends,
    ("restart", REDIS): redis_ends,
    ("freeze", REDIS): redis_freezes,
    ("replace", REDIS): redis_is_replaced,
    ("full disk", REDIS): redis_has_no_room,
    ("away", STORE): store_is_away,
    ("slow", STORE): _late(0.05, 0.5),
    ("fails", STORE): store_refuses,
    ("full disk", STORE): store_refuses,
    ("cut", "link"): cut,
    ("late", "link"): _late(0.005, 0.2),
    ("halved", "link"): halved,
}
