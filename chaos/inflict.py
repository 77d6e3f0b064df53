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
from chaos.helpers import calls, helpers, signalled
from harness.proxy import Proxy
from harness.redis_server import RedisServer
from harness.s3_server import S3Server

POLL_S = 0.02
DAY_S = 86_400.0
FAILED_SHARE = 0.1
CALLS = (b"GET /", b"PUT /", b"HEAD /", b"POST /", b"DELETE /")
WRITES = (b"PUT /", b"POST /")
HALVED_SHARE = 0.05
HANDS_BACK_S = 0.1
"""The longest time from SIGTERM to what strikes a worker that stops: most have more to do."""
PATIENCE_S, PAUSE_S = 10.0, 0.1
"""Time in which a victim that comes and goes must be there (a helper, a call, a connection to the store), and between two looks."""
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


def _pids(cluster: Cluster, fault: Fault) -> list[int]:
    """The victim's process; none if it is between two runs."""
    return [pid for name, pid in cluster.services.pids.items() if name == fault.victim]


async def _running(cluster: Cluster, name: str) -> int:
    """The process's id, once it runs."""
    while (pid := cluster.services.pids.get(name)) is None:
        await asyncio.sleep(POLL_S)
    return pid


@asynccontextmanager
async def end(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    number = signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM
    while not cluster.services.kill(fault.victim, number):
        await asyncio.sleep(POLL_S)
    yield _one


@asynccontextmanager
async def kill_helpers(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    """Kills all that there are: none is missed, and idle ones are started again when they are needed."""
    num = await _until_hit(lambda: signalled(helpers(_pids(cluster, fault)), signal.SIGKILL))
    yield lambda: num


@asynccontextmanager
async def kill_calls(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    num = await _until_hit(lambda: signalled(calls(_pids(cluster, fault)), signal.SIGKILL))
    yield lambda: num


@asynccontextmanager
async def freeze_helpers(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    """Freezes those that there are, with what they run for tenants."""
    frozen: list[psutil.Process] = []

    def strike() -> int:
        frozen[:] = helpers(_pids(cluster, fault))
        return signalled(frozen, signal.SIGSTOP)

    num = await _until_hit(strike)
    try:
        yield lambda: num
    finally:
        signalled(frozen, signal.SIGCONT)


@asynccontextmanager
async def freeze(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    pid = await _running(cluster, fault.victim)
    cluster.services.kill(fault.victim, signal.SIGSTOP)
    try:
        yield lambda: int(_stands_still(pid))
    finally:
        cluster.services.kill(fault.victim, signal.SIGCONT)


@asynccontextmanager
async def strike_as_it_stops(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    number = signal.SIGKILL if fault.kind.startswith("kill") else signal.SIGSTOP
    pid = await _running(cluster, fault.victim)
    cluster.services.kill(fault.victim, signal.SIGTERM)
    await asyncio.sleep(fault.chance * HANDS_BACK_S)
    struck = _pids(cluster, fault) == [pid] and cluster.services.kill(fault.victim, number)
    try:
        yield lambda: int(struck)
    finally:
        cluster.services.kill(fault.victim, signal.SIGCONT)


def _stands_still(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


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
    before = num_writes(pid)
    try:
        yield lambda: max(0, num_writes(pid) - before)
    finally:
        if cluster.services.pids.get(fault.victim) == pid:
            limit_files(pid, resource.RLIM_INFINITY)


def limit_files(pid: int, num_bytes: int) -> None:
    """Lets the process write no file beyond this size from now on."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, hard))


def num_writes(pid: int) -> int:
    """Number of times that the process has tried to write, other than to a socket; 0 if it has ended."""
    try:
        return psutil.Process(pid).io_counters().write_count
    except psutil.NoSuchProcess:
        return 0


# ---- Redis ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def redis_ends(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    """Ends it by a signal, or by its next write, for which its disk has no room."""
    server = cluster.redis.server
    assert server.process is not None
    if fault.kind == "full disk":
        limit_files(server.pid, 1)
    else:
        server.process.send_signal(signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
    await asyncio.to_thread(server.wait)
    try:
        yield _one
    finally:
        await cluster.redis.restart()


@asynccontextmanager
async def server_freezes(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    """Redis or the store takes connections and calls, and answers when it goes on."""
    server, link = _server(cluster, fault)
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    before = link.num_passed
    try:
        yield lambda: link.num_passed - before
    finally:
        server.process.send_signal(signal.SIGCONT)


def _server(cluster: Cluster, fault: Fault) -> tuple[RedisServer | S3Server, Proxy]:
    if fault.victim == STORE:
        return cluster.store, cluster.store_link
    return cluster.redis.server, cluster.redis.link


@asynccontextmanager
async def redis_is_replaced(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    await cluster.redis.replace()
    yield _one


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
async def silent(cluster: Cluster, fault: Fault) -> AsyncGenerator[Hits]:
    link = cluster.link(fault.victim)
    before = link.num_swallowed
    link.fall_silent()
    try:
        yield lambda: link.num_swallowed - before
    finally:
        link.speak()


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
    ("kill", "process"): end,
    ("stop", "process"): end,
    ("kill as it stops", "process"): strike_as_it_stops,
    ("freeze as it stops", "process"): strike_as_it_stops,
    ("kill a helper", "process"): kill_helpers,
    ("kill a call", "process"): kill_calls,
    ("freeze", "process"): freeze,
    ("freeze a helper", "process"): freeze_helpers,
    ("clock", "process"): clock,
    ("full disk", "process"): full_disk,
    ("kill", REDIS): redis_ends,
    ("restart", REDIS): redis_ends,
    ("freeze", REDIS): server_freezes,
    ("replace", REDIS): redis_is_replaced,
    ("full disk", REDIS): redis_ends,
    ("full memory", REDIS): redis_is_full,
    ("away", STORE): store_is_away,
    ("slow", STORE): _late(0.05, 0.5),
    ("freeze", STORE): server_freezes,
    ("fails", STORE): store_refuses,
    ("full disk", STORE): store_refuses,
    ("cut", "link"): cut,
    ("silent", "link"): silent,
    ("late", "link"): _late(0.005, 0.2),
    ("halved", "link"): halved,
}
