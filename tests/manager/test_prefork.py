"""Children that a prefork server forks, with real processes: what holds for those that are executed holds for them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio

from common.children.forking import Forked, PreforkServer
from common.children.processes import ChildProcess, Command, start_tied
from common.errors import REFUSED
from manager_service.launcher.supervisor import NO_PLUGINS, ONE_THREAD, ROOT
from tests.manager.test_supervisor import gone, is_alive
from tests.support import forked

PROGRAM = """
import json, os, signal, sys, threading, time
if __name__ == "__main__":
    mask = os.umask(0)
    arguments = [part for part in open("/proc/self/cmdline").read().split(chr(0)) if part]
    print(json.dumps({
        "leads": os.getsid(0) == os.getpid() == os.getpgrp(), "umask": mask, "argv": sys.argv, "cmdline": arguments,
        "variables": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},
        "input": sys.stdin.read(), "threads": threading.active_count(), "files": sorted(os.listdir("/proc/self/fd"))[:3],
        "handled": [n for n in range(1, 32) if callable(signal.getsignal(n)) and n != signal.SIGINT],
    }), flush=True)
    end = os.environ.get("MARLAAS_END", "stay")
    if end == "stay":
        time.sleep(600)
    sys.exit(end) if end.isalpha() else sys.exit(int(end))
"""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    return {"PATH": os.environ["PATH"], "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **ONE_THREAD, **NO_PLUGINS}


def program(tmp_path: Path, variables: Mapping[str, str], **more: str) -> Command:
    argv = (sys.executable, "-m", "program")
    return Command(name="program", argv=argv, environment={**variables, **more}, log=tmp_path / "program.log")


@pytest_asyncio.fixture
async def server(tmp_path: Path, variables: dict[str, str]) -> AsyncIterator[PreforkServer]:
    made = PreforkServer([program(tmp_path, variables)], tmp_path / "prefork.log")
    yield made
    made.end()


async def said(log: Path) -> dict[str, object]:
    """The first line that a child wrote."""
    while not log.exists() or b"\n" not in log.read_bytes():
        await asyncio.sleep(0.02)
    return json.loads(log.read_bytes().splitlines()[0])


async def killed(child: ChildProcess) -> int:
    child.send_signal(signal.SIGKILL)
    return await child.wait()


async def test_a_forked_child_is_as_one_that_was_executed(
    server: PreforkServer, tmp_path: Path, variables: dict[str, str]
) -> None:
    # Given the same command, forked and executed
    command = program(tmp_path, variables, MARLAAS_PORT="1", AWS_REGION="us-east-1")
    found: list[dict[str, object]] = []
    for start in (server.start, start_tied):
        child = await start(command)
        assert isinstance(child, Forked) == (start == server.start)
        found.append(await said(command.log))
        assert await killed(child) == -signal.SIGKILL
        command.log.unlink()
    # Then each sees the same: its session, variables, arguments, input and permissions; so does whoever looks at it with `ps`
    assert found[0] == found[1]
    assert found[0]["leads"] and found[0]["umask"] == 0o077 and found[0]["input"] == ""
    assert found[0]["cmdline"] == list(command.argv)


@pytest.mark.parametrize(("end", "status"), [("0", 0), ("3", 3), ("refused", 1)])
async def test_the_exit_status_of_a_forked_child_is_told(
    server: PreforkServer, tmp_path: Path, variables: dict[str, str], end: str, status: int
) -> None:
    first, second = [await server.start(program(tmp_path, variables, MARLAAS_END=each)) for each in (end, "stay")]
    assert isinstance(first, Forked)
    assert await first.wait() == status
    assert is_alive(second.pid)
    await killed(second)
    if end == "refused":
        assert "refused" in (tmp_path / "program.log").read_text().splitlines()


async def test_what_may_be_read_by_an_import_is_executed(
    server: PreforkServer, tmp_path: Path, variables: dict[str, str]
) -> None:
    command = program(tmp_path, variables, OMP_NUM_THREADS="2")
    child = await server.start(command)
    assert not isinstance(child, Forked)
    told = await said(command.log)
    assert isinstance(told["variables"], dict) and told["variables"]["OMP_NUM_THREADS"] == "2"
    await killed(child)


async def test_children_end_with_their_prefork_server_and_are_executed_afterwards(
    server: PreforkServer, tmp_path: Path, variables: dict[str, str]
) -> None:
    # Given a child of a prefork server
    child = await server.start(program(tmp_path, variables))
    assert server.pid is not None
    # When the prefork server is killed
    os.kill(server.pid, signal.SIGKILL)
    # Then the child ends with it, and the next is executed
    assert await child.wait() == -signal.SIGKILL
    assert await gone([child.pid])
    after = await server.start(program(tmp_path, variables))
    assert not isinstance(after, Forked)
    await killed(after)


async def test_a_prefork_server_that_cannot_import_leaves_its_commands_to_be_executed(
    server: PreforkServer, tmp_path: Path, variables: dict[str, str]
) -> None:
    (tmp_path / "program.py").write_text("import nothing_of_this_name")
    child = await server.start(program(tmp_path, variables))
    assert await child.wait() == 1
    assert "nothing_of_this_name" in (tmp_path / "program.log").read_text()


STARTER = """
import asyncio, json, sys
from pathlib import Path
from common.children.forking import PreforkServer
from tests.manager.test_prefork import program
async def main():
    command = program(Path(sys.argv[1]), json.loads(sys.argv[2]))
    server = PreforkServer([command], command.log)
    child = await server.start(command)
    print(json.dumps([server.pid, child.pid]), flush=True)
    await child.wait()
asyncio.run(main())
"""


async def test_neither_prefork_server_nor_child_outlives_a_supervisor_that_is_killed(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STARTER, str(tmp_path), json.dumps(variables)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as starter:
        assert starter.stdout is not None
        pids: list[int] = json.loads(await asyncio.to_thread(starter.stdout.readline))
        starter.kill()
    assert await gone(pids)


async def test_nothing_that_services_import_starts_a_thread(tmp_path: Path) -> None:
    # Given the prefork server of every service that tests share, once it has imported all and forked a child
    status, _ = await forked.ended("env_service", tmp_path / "log", MARLAAS_ENV_SLOTS="none")
    assert status == REFUSED
    # Then it has one thread: a fork of more might wait for ever for a lock that another held
    assert len(os.listdir(f"/proc/{forked.shared[0].pid}/task")) == 1
