"""Applies and heals each kind of fault, and counts what it hit: one whose victim has changed its name hits nothing."""

import asyncio
import contextlib
import random
import resource
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import psutil

from chaos.cluster import Cluster
from chaos.faults import LINKS, REDIS, STORE, Fault
from env_service.graders import text
from harness.processes import with_descendants
from manager_service.api.reading import helpers

POLL_S = 0.02
DAY_S = 86_400.0
FAILED_SHARE = 0.1
CALLS = (b"GET /", b"PUT /", b"HEAD /", b"POST /", b"DELETE /")
WRITES = (b"PUT /", b"POST /")
HELPERS = {text.HELPER, helpers.HELPER}
"""Modules that they run."""
HALVED_SHARE = 0.05
PATIENCE_S, PAUSE_S = 5.0, 0.1
"""Time in which a victim that comes and goes must be there (a helper, a connection to the store), and between two looks."""
ERROR = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
FULL = b"HTTP/1.1 507 Insufficient Storage\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


Hits = Callable[[], int]
"""Says, once the fault's time is over, how many processes, connections, calls or pieces it has hit."""


async def inflict(cluster: Cluster, fault: Fault) -> int:
    """Strikes, waits for the fault's time, and heals. Returns how much it has hit."""
    async with INFLICTIONS[fault.kind, _group(fault.victim)](cluster, fault) as hits:
        await asyncio.sleep(fault.seconds)
        return hits()


def _one() -> int:
    return 1


async def _until_hit(strike: Hits) -> int:
    """Strikes again until it hits something, but not for long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while not (num := strike()):
                await asyncio.sleep(PAUSE_S)
            return num
    return 0


def _group(victim: str) -> str:
    return victim if victim in (REDIS, STORE) else "link" if victim in LINKS else "process"


# ---- processes ------------------------------------------------------------------------------------------------------


async def _running(cluster: Cluster, name: str) -> int:
    """The process's id, once it runs."""
    while (pid := cluster.services.pids.get(name)) is None:
        await asyncio.sleep(POLL_S)
    return pid


@asynccontextmanager
async def kill(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    while not cluster.services.kill(fault.victim, signal.SIGKILL):
        await asyncio.sleep(POLL_S)
    yield _one


@asynccontextmanager
async def kill_a_helper(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    """Kills all that there are: none is missed, and idle ones are started again when they are needed."""

    def strike() -> int:
        num, roots = 0, [pid for name, pid in cluster.services.pids.items() if name == fault.victim]
        for process in with_descendants(roots):
            with contextlib.suppress(psutil.NoSuchProcess):
                if set(process.cmdline()) & HELPERS:
                    process.kill()
                    num += 1
        return num

    num = await _until_hit(strike)
    yield lambda: num


@asynccontextmanager
async def freeze(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    while not cluster.services.kill(fault.victim, signal.SIGSTOP):
        await asyncio.sleep(POLL_S)
    try:
        yield _one
    finally:
        cluster.services.kill(fault.victim, signal.SIGCONT)


@asynccontextmanager
async def clock(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    wall = cluster.clocks[fault.victim]

    def is_off() -> int:
        pid = cluster.services.pids.get(fault.victim)
        return int(pid is not None and wall.is_of(pid))

    wall.shift(jump_s(fault.chance))
    try:
        yield is_off
    finally:
        wall.shift(0.0)


def jump_s(chance: float) -> float:
    """Seconds from one to a day, back for chances below a half; as many jumps of seconds as of hours."""
    sign, size = (-1, 1 - 2 * chance) if chance < 0.5 else (1, 2 * chance - 1)
    return sign * DAY_S**size


@asynccontextmanager
async def full_disk(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    limit_files(pid := await _running(cluster, fault.victim), 0)
    try:
        yield _one
    finally:
        if cluster.services.pids.get(fault.victim) == pid:
            limit_files(pid, resource.RLIM_INFINITY)


def limit_files(pid: int, num_bytes: int) -> None:
    """Lets the process write no file beyond this size from now on."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, hard))


# ---- Redis ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def redis_ends(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    server = cluster.redis.server
    assert server.process is not None
    server.process.send_signal(signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
    await asyncio.to_thread(server.wait)
    try:
        yield _one
    finally:
        await cluster.redis.restart()


@asynccontextmanager
async def redis_freezes(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    process = cluster.redis.server.process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    try:
        yield _one
    finally:
        process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def redis_is_replaced(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    await cluster.redis.replace()
    yield _one


@asynccontextmanager
async def redis_has_no_room(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    """Its next write ends it."""
    server = cluster.redis.server
    limit_files(server.pid, 1)
    await asyncio.to_thread(server.wait)
    try:
        yield _one
    finally:
        await cluster.redis.restart()


@asynccontextmanager
async def redis_is_full(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    with cluster.redis.client() as client:

        def num_calls() -> int:
            """The calls that others have made."""
            nonlocal own
            own += 1
            return int(client.info("stats")["total_commands_processed"]) - own

        own = 0
        await asyncio.to_thread(client.config_set, "maxmemory", 1)
        before = num_calls()
        try:
            yield lambda: num_calls() - before
        finally:
            await asyncio.to_thread(client.config_set, "maxmemory", 0)


# ---- the store ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def store_is_away(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    link = cluster.store_link
    await link.shut()
    try:
        yield lambda: int(link.num_passed > 0)  # nobody can count connections that the kernel refuses
    finally:
        await link.open()


@asynccontextmanager
async def store_refuses(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    chance, num = random.Random(fault.chance), 0
    calls, share, answer = (WRITES, 1.0, FULL) if fault.kind == "full disk" else (CALLS, FAILED_SHARE, ERROR)

    def refuse(piece: bytes) -> bytes:
        nonlocal num
        if not (piece.startswith(calls) and chance.random() < share):
            return b""
        num += 1
        return answer

    cluster.refuse = refuse
    try:
        yield lambda: num
    finally:
        cluster.refuse = lambda piece: b""


# ---- links ----------------------------------------------------------------------------------------------------------


def _late(least_s: float, most_s: float) -> "Infliction":
    @asynccontextmanager
    async def infliction(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
        link = cluster.store_link if fault.victim == STORE else cluster.link(fault.victim)
        link.delay_s += (added := least_s + fault.chance * (most_s - least_s))
        before = link.num_passed
        try:
            yield lambda: link.num_passed - before
        finally:
            link.delay_s -= added

    return infliction


@asynccontextmanager
async def cut(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    num = await _until_hit(cluster.link(fault.victim).cut)
    yield lambda: num


@asynccontextmanager
async def halved(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    link = cluster.link(fault.victim)
    link.halved, before = HALVED_SHARE, link.num_halves
    link.chance.seed(fault.chance)
    try:
        yield lambda: link.num_halves - before
    finally:
        link.halved = 0.0


Infliction = Callable[[Cluster, Fault], AbstractAsyncContextManager[Hits]]
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
    ("full memory", REDIS): redis_is_full,
    ("away", STORE): store_is_away,
    ("slow", STORE): _late(0.05, 0.5),
    ("fails", STORE): store_refuses,
    ("full disk", STORE): store_refuses,
    ("cut", "link"): cut,
    ("late", "link"): _late(0.005, 0.2),
    ("halved", "link"): halved,
}
