"""Workers load to a GPU one after the other."""

import contextlib
import os
import select
import subprocess
import sys
import time
import uuid
from pathlib import Path

from base_model.device import alone_on, locked

HOLDS = """
import sys
from base_model.device import locked
with locked(sys.argv[1]):
    print("in", flush=True)
    sys.stdin.readline()
"""


def holding(name: str) -> "subprocess.Popen[str]":
    argv, path = [sys.executable, "-c", HOLDS, name], os.pathsep.join(sys.path)
    own = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen(argv, text=True, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def until_it_waits(process: "subprocess.Popen[str]") -> None:
    """Returns once the kernel has it wait for a lock."""
    while not any("->" in line and f" {process.pid} " in line for line in Path("/proc/locks").read_text().splitlines()):
        assert process.poll() is None
        time.sleep(0.01)


def test_a_process_waits_for_the_one_before_even_if_that_is_killed() -> None:
    name = uuid.uuid4().hex
    with contextlib.ExitStack() as own:
        own.enter_context(locked(name))
        with holding(name) as second, holding(name) as third:
            assert second.stdout and third.stdout
            until_it_waits(second)
            until_it_waits(third)
            own.close()
            first_in = select.select([second.stdout, third.stdout], [], [])[0]
            (inside, waiting) = (second, third) if second.stdout in first_in else (third, second)
            until_it_waits(waiting)
            inside.kill()
            assert waiting.stdout and waiting.stdout.readline() == "in\n"
            waiting.kill()


def test_a_processor_is_nobodys() -> None:
    with alone_on("cpu"), alone_on("cpu"), alone_on("cuda:99"), alone_on("tpu"):
        pass
