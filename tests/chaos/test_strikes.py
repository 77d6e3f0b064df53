"""Tests that hits are counted: real helpers, sockets and clocks, and what is not there to be hit."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaos import inflict
from chaos.faults import Fault
from chaos.helpers import calls, helpers
from chaos.report import Story
from common.tasks.graders import TextSimilarity
from env_service.graders.attempt import Attempt
from env_service.graders.text import TextComparer
from env_service.sandbox.sandbox import Sandbox
from env_service.verifiers.package_process import HOST
from env_service.work import Allowance
from harness.proxy import nothing
from manager_service.http.reading.reading_helpers import SMALL_BYTES, Helpers
from manager_service.http.reading.tasks import ParseBody
from manager_service.records.tenants import TenantRecord
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


@pytest.fixture(autouse=True)
def _no_process_of_earlier_tests() -> None:  # pyright: ignore[reportUnusedFunction]
    gc.collect()  # a sandbox that nobody closed ends its prepared processes


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
    async with asyncio.timeout(60):
        while alive(helpers):
            await asyncio.sleep(0.02)
    await use()
    await comparer.close()
    await reading.close()


@pytest.mark.parametrize(("kind", "num"), [("kill a helper", 4), ("kill a call", 1), ("freeze a helper", 4)])
async def test_supervisors_calls_and_hosts_of_packages_are_struck(kind: str, num: int) -> None:
    # Given a call in the sandbox, and a host that waits for what it is to load
    others, (ours, theirs) = descendants(os.getpid()), socket.socketpair()
    host = subprocess.Popen([sys.executable, str(HOST), str(theirs.fileno())], pass_fds=[theirs.fileno()])
    sandbox = Sandbox()
    call = asyncio.create_task(sandbox.run("import time\ntime.sleep(1)\nprint('done')", timeout_s=30))
    while not calls([os.getpid()]) or len(helpers([os.getpid()])) < 4:
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
    await sandbox.close()
    assert alive(descendants(os.getpid()) - others) == set()


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


@pytest.mark.parametrize("kind", ["kill as it stops", "freeze as it stops"])
async def test_a_worker_is_struck_while_it_stops_and_one_that_has_ended_is_not(kind: str) -> None:
    stubborn = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout and process.stdout.readline()
        signals: list[int] = []

        def kill(_: str, number: int) -> bool:
            signals.append(number)
            process.send_signal(number)
            return process.poll() is None

        cluster = running(rollout=process.pid)
        cluster.services.kill = kill
        async with inflict.INFLICTIONS[kind, "process"](cluster, fault(kind, "rollout", chance=0.0)) as hits:
            assert hits() == 1 and signals == [signal.SIGTERM, signal.SIGKILL if "kill" in kind else signal.SIGSTOP]
        process.kill()
        process.wait()

        def ends(_: str, number: int) -> bool:
            cluster.services.pids = {}
            return True

        cluster.services.kill = ends
        async with inflict.INFLICTIONS[kind, "process"](cluster, fault(kind, "rollout")) as hits:
            assert hits() == 0


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


def test_a_strike_that_hits_nothing_is_not_survived_and_a_cause_that_never_hits_is_named() -> None:
    story, helper = Story(), fault("kill a helper", "env-0", number=1)
    faults = [helper, fault("cut", "store link", number=2), fault("cut", "store link", number=3)]
    for one in faults:
        story.strike(one)
    story.miss(helper)
    story.miss(faults[1])
    assert [one.number for _, one in story.strikes] == [3]
    assert story.never_hit() == ["kill a helper env struck 1 times and hit nothing"]
