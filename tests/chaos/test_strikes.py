"""Tests that hits are counted: real helpers, sockets and clocks, and what is not there to be hit."""

import asyncio
import contextlib
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import OutOfMemoryError

from chaos import act, inflict
from chaos.__main__ import command, options, plans
from chaos.clock import Clock
from chaos.faults import Fault
from chaos.helpers import calls, helpers
from chaos.report import Story
from common.graders import TextSimilarity
from env_service.graders.attempt import Attempt
from env_service.graders.text import TextComparer
from env_service.sandbox.sandbox import Sandbox
from env_service.verifiers.process import HOST
from env_service.work import Allowance
from harness.proxy import Proxy, nothing
from harness.redis_server import RedisServer
from manager_service.api.reading.helpers import SMALL_BYTES, Helpers
from manager_service.api.reading.tasks import ParseBody
from manager_service.records import TenantRecord
from tests.chaos.test_means import echoing, sent
from tests.support.processes import alive, descendants

ALIKE = TextSimilarity(
    type="text_similarity", input="a b", reference="a b", evaluation_metric="rouge_l", pass_threshold=None
)
LARGE = b"[" + b" " * SMALL_BYTES + b"]"


def fault(kind: str, victim: str, *, chance: float = 0.5, number: int = 1) -> Fault:
    return Fault(number, kind, victim, 0.0, chance, 1.0)


def running(**pids: int) -> Any:
    return SimpleNamespace(services=SimpleNamespace(pids=pids))


@pytest.mark.timeout(120)
async def test_the_helpers_of_graders_and_those_that_read_large_texts_are_killed() -> None:
    comparer, reading, tenant = TextComparer(), Helpers({}, {}), TenantRecord(id="acme", created_at=0)

    async def use() -> None:
        assert await comparer.reward(ALIKE, Attempt({}, "x"), Allowance(60)) == 1.0
        assert await reading.do(tenant, ParseBody(LARGE), num_bytes=len(LARGE)) == []

    others = descendants(os.getpid())
    await use()
    helpers = descendants(os.getpid()) - others
    assert len(helpers) == 2
    assert await inflict.inflict(running(env=os.getpid()), fault("kill a helper", "env")) == 2
    async with asyncio.timeout(20):
        while alive(helpers):
            await asyncio.sleep(0.02)
    await use()
    await comparer.close()
    await reading.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "num"), [("kill a helper", 3), ("kill a call", 1), ("freeze a helper", 3)])
async def test_keepers_calls_and_hosts_of_packages_are_struck(kind: str, num: int) -> None:
    # Given a call in the sandbox, and a host that waits for what it is to load
    others, (ours, theirs) = descendants(os.getpid()), socket.socketpair()
    host = subprocess.Popen([sys.executable, str(HOST), str(theirs.fileno())], pass_fds=[theirs.fileno()])
    call = asyncio.create_task(Sandbox().run("import time\ntime.sleep(1)\nprint('done')", timeout_s=30))
    while not calls([os.getpid()]) or len(helpers([os.getpid()])) < 3:
        await asyncio.sleep(0.02)
    struck = helpers([os.getpid()])
    async with inflict.INFLICTIONS[kind, "process"](running(env=os.getpid()), fault(kind, "env")) as hits:
        assert hits() == num
        while kind == "freeze a helper" and {process.status() for process in struck} != {"stopped"}:
            await asyncio.sleep(0.01)
    # Then the call goes on, or is made again, and nothing is left
    assert (await call).output == "done\n"
    for each in (ours, theirs):
        each.close()
    host.wait()
    assert alive(descendants(os.getpid()) - others) == set()


@pytest.mark.parametrize("kind", ["kill a helper", "kill a call", "freeze a helper"])
async def test_a_worker_without_helpers_has_none_struck(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflict, "PATIENCE_S", 0.2)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert await inflict.inflict(running(env=process.pid), fault(kind, "env")) == 0
        assert await inflict.inflict(running(), fault(kind, "env")) == 0
        process.kill()


WRITES = """
import sys
print(flush=True)
for _ in sys.stdin:
    try: open('file', 'wb', 0).write(b'x')
    except OSError: pass
    print(flush=True)
"""


async def test_a_full_disk_hits_a_process_that_writes_and_a_freeze_one_that_lives(tmp_path: Path) -> None:
    argv, pipe = [sys.executable, "-c", WRITES], subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, cwd=tmp_path, bufsize=0) as process:
        assert process.stdin and process.stdout and process.stdout.readline()

        def kill(_: str, number: int) -> None:
            process.send_signal(number)

        cluster = running(env=process.pid)
        cluster.services.kill = kill
        async with inflict.INFLICTIONS["full disk", "process"](cluster, fault("full disk", "env")) as hits:
            assert hits() == 0
            process.stdin.write(b"x\n")
            process.stdout.readline()
            assert hits() > 0 and (tmp_path / "file").stat().st_size == 0
        async with inflict.INFLICTIONS["freeze", "process"](cluster, fault("freeze", "env")) as hits:
            while not hits():
                await asyncio.sleep(0.01)
            process.kill()
            process.wait()
            assert hits() == 0


async def test_a_clock_hits_a_process_that_tells_the_time_by_it_alone(tmp_path: Path) -> None:
    clock, waits = Clock(tmp_path / "clocks", "ours"), "import time; print(time.time(), flush=True); input()"
    argv, variables = [sys.executable, "-c", waits], {"PYTHONPATH": str(clock.folder)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        (tmp_path / "ours.log").open("w") as log,
        subprocess.Popen(argv, stderr=log, env=variables, **pipes) as process,
    ):
        assert process.stdout and process.stdout.readline()
        cluster = running(ours=process.pid, other=os.getpid())
        cluster.clocks = {"ours": clock, "other": clock}
        hits = [await inflict.inflict(cluster, fault("clock", name)) for name in ("ours", "other")]
        cluster.services.pids = {}
        assert [*hits, await inflict.inflict(cluster, fault("clock", "ours"))] == [1, 0, 0]
        process.kill()


@contextlib.asynccontextmanager
async def linked() -> AsyncGenerator[Any]:
    """A cluster that is a link to a store."""
    async with echoing() as proxy:
        cluster: Any = SimpleNamespace(store_link=proxy, refuse=nothing, link={"store link": proxy}.get)
        proxy.answer = lambda piece: cluster.refuse(piece)
        yield cluster


@pytest.mark.parametrize(
    ("kind", "victim", "num"),
    [
        ("full disk", "store", 1), ("fails", "store", 2), ("slow", "store", 4),
        ("late", "store link", 4), ("halved", "store link", 2), ("silent", "store link", 2),
    ],
)  # fmt: skip
async def test_calls_and_pieces_that_a_fault_hits_are_counted(
    kind: str, victim: str, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for share in ("FAILED_SHARE", "HALVED_SHARE"):
        monkeypatch.setattr(inflict, share, 1.0)
    group = victim.removeprefix("store ")
    async with linked() as cluster, inflict.INFLICTIONS[kind, group](cluster, fault(kind, victim)) as hits:
        assert hits() == 0
        for piece in (b"PUT /x", b"GET /x"):
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(1):
                    await sent(cluster.store_link, piece)
        assert hits() == num


ANSWERS = """
import socket
server = socket.create_server(('127.0.0.1', 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
while piece := connection.recv(9): connection.send(piece)
"""


async def test_a_store_that_is_frozen_takes_calls_and_answers_when_it_goes_on() -> None:
    with subprocess.Popen([sys.executable, "-c", ANSWERS], stdout=subprocess.PIPE) as process:
        assert process.stdout
        link = Proxy(int(process.stdout.readline()))
        await link.open()
        cluster: Any = SimpleNamespace(store=SimpleNamespace(process=process), store_link=link)
        async with inflict.INFLICTIONS["freeze", "store"](cluster, fault("freeze", "store")) as hits:
            reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
            assert hits() == 0
            writer.write(b"x")
            while not hits():
                await asyncio.sleep(0.01)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.1)
        async with asyncio.timeout(20):
            assert await reader.read(1) == b"x"
        writer.close()
        await link.shut()
        process.kill()


async def test_connections_that_are_cut_are_counted_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked() as cluster:
        with monkeypatch.context() as patched:
            patched.setattr(inflict, "PATIENCE_S", 0.1)
            assert await inflict.inflict(cluster, fault("cut", "store link")) == 0
        striking = asyncio.create_task(inflict.inflict(cluster, fault("cut", "store link")))
        await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.store_link.port)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        assert await striking == 1


async def test_a_redis_whose_memory_is_full_refuses_writes_until_it_is_healed_and_counts_calls(tmp_path: Path) -> None:
    server = RedisServer.start(tmp_path, durable=False)
    cluster: Any = SimpleNamespace(redis=SimpleNamespace(client=lambda: Redis(port=server.port)))
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        client = stack.enter_context(cluster.redis.client())
        async with inflict.INFLICTIONS["full memory", "redis"](cluster, fault("full memory", "redis")) as hits:
            assert hits() == 0
            with pytest.raises(OutOfMemoryError):
                client.set("x", "1")
            assert hits() > 0
        assert client.set("x", "1")


async def refused(cluster: Any, chance: float) -> list[int]:
    """The calls of a thousand that fail."""
    async with inflict.INFLICTIONS["fails", "store"](cluster, fault("fails", "store", chance=chance)) as hits:
        found = [number for number in range(1000) if cluster.refuse(b"GET /x")]
        assert hits() == len(found)
        return found


async def test_the_same_fault_fails_the_same_calls() -> None:
    async with linked() as cluster:
        found = await refused(cluster, 0.25)
        assert found == await refused(cluster, 0.25) != await refused(cluster, 0.75)
        assert 50 < len(found) < 200


async def test_faults_are_drawn_until_as_many_as_asked_for_have_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def every_other(_: Any, fault: Fault) -> int:
        return fault.number % 2

    def at_once(_: int) -> Iterator[Fault]:
        return (Fault(number, "kill", "env-0", 0.0, 0.5, 0.0) for number in count(1))

    monkeypatch.setattr(act, "draw", at_once)
    monkeypatch.setattr(act, "inflict", every_other)
    play: Any = act.Act(act.Plan(seed=7, hits=8, skipped=10), running())
    await play._storm()
    assert [one.number for _, one in play.story.strikes] == [11, 13, 15, 17, 19, 21, 23, 25]


@pytest.mark.parametrize("line", ["--seed 3", "--seconds 12345.678 --faults 90 --mode default", "--quick --seed 5"])
def test_the_command_that_is_printed_plays_the_same(line: str) -> None:
    given = options().parse_args(line.split())
    _, _, args = command(given).partition("ARGS=")
    (again,) = shlex.split(args)
    assert plans(options().parse_args(again.split())) == plans(given)


def test_a_strike_that_hits_nothing_is_not_survived_and_a_cause_that_never_hits_is_named() -> None:
    story, helper = Story(), fault("kill a helper", "env-0", number=1)
    faults = [helper, fault("cut", "store link", number=2), fault("cut", "store link", number=3)]
    for one in faults:
        story.strike(one)
    story.miss(helper)
    story.miss(faults[1])
    assert [one.number for _, one in story.strikes] == [3]
    assert story.never_hit() == ["kill a helper env struck 1 times and hit nothing"]
