"""A service's process, from its start to its end."""

import subprocess
import sys

from common.errors import REFUSED

LEAVES_MUCH = """
import asyncio, socket, sys
from common.errors import InvalidInput
from common.service import run_with
from common.settings import Settings

async def main(settings):
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)  # and accepts nobody: the third connection stays half made
    made = [asyncio.create_task(asyncio.open_connection(*listener.getsockname())) for _ in range(4)]
    asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.sleep(0.2)
    assert not all(task.done() for task in made)
    print(type(asyncio.get_running_loop()).__module__, flush=True)
    if sys.argv[1]:
        raise InvalidInput(sys.argv[1])

run_with("service", Settings, main)
"""


def ended(reason: str) -> "subprocess.CompletedProcess[str]":
    """Its input never ends: a thread waits for it for ever."""
    argv = [sys.executable, "-c", LEAVES_MUCH, reason]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None and service.stderr is not None
        service.wait(60)
        return subprocess.CompletedProcess(argv, service.returncode, service.stdout.read(), service.stderr.read())


def test_a_service_ends_with_its_main_whatever_else_goes_on() -> None:
    done = ended("")
    assert (done.returncode, done.stdout, done.stderr) == (0, "uvloop\n", "")


def test_a_service_that_refuses_its_settings_says_so_in_one_line() -> None:
    done = ended("the setting is wrong")
    assert (done.returncode, done.stderr) == (REFUSED, "service: the setting is wrong\n")
