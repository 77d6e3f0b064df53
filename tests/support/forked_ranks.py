"""Other ranks of a trainer whose first rank is the process of the tests: each is forked from one that has imported what it needs."""

import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Generator
from multiprocessing.connection import Connection

import msgspec
import pytest

from trainer_service.ranks.group import Begin

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.support.warm", "tests.support.forked_ranks"])


@contextlib.contextmanager
def forked_ranks() -> Generator[None]:
    """Lets this process's trainers fork their other ranks."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("trainer_service.ranks.leader._spawned", ForkedRank)
        yield


class ForkedRank:
    """A rank as its leader sees it: the part of `subprocess.Popen` that `Ranks` needs."""

    def __init__(self, begin: Begin) -> None:
        theirs, ours = FORKS.Pipe(duplex=False)
        self._process = FORKS.Process(target=_follow, args=(begin, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid
        self.stdin = os.fdopen(os.dup(ours.fileno()), "wb")
        ours.close()
        self._ended = threading.Thread(target=self._process.join, daemon=True)
        """It alone asks for the status, which can be read once."""
        self._ended.start()

    def poll(self) -> int | None:
        return None if self._ended.is_alive() else self._process.exitcode

    def wait(self) -> int | None:
        self._ended.join()
        return self._process.exitcode

    def communicate(self) -> None:
        self.stdin.close()
        self.wait()


def _follow(begin: Begin, commands: Connection) -> None:
    """Runs the program of a rank in the forked process. What starts it, and ends with it, is the fork server."""
    from trainer_service.ranks.__main__ import main  # here: the process of the tests needs no other rank's program

    os.dup2(commands.fileno(), 0)
    sys.stdin = os.fdopen(0)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.argv[1:] = [msgspec.json.encode(msgspec.structs.replace(begin, parent=os.getppid())).decode()]
    main()
