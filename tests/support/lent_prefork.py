"""One prefork server for all processes among which a run's tests are divided: what it imports takes nine seconds of a processor.

the process that divides them lends it ─► the others ask at an abstract socket once they start a cluster ─► `LentServer`
"""

import os
import socket
import threading
from pathlib import Path

import msgspec

from common.children.forking import PreforkServer

NAME = "MARLAAS_TEST_PREFORK"
"""The variable that names the socket."""
MAX_BYTES = 1 << 20


class About(msgspec.Struct, frozen=True):
    """A server's process id, and the variables beside settings of the commands that it is for."""

    pid: int
    environment: dict[str, str]


def lend() -> None:
    """Lends this process's server to those that it starts from now on. It begins once one of them asks, and ends with this process."""
    os.environ[NAME] = f"marlaas-tests-{os.getpid()}"
    listening = _socket()
    listening.bind(f"\0{os.environ[NAME]}")
    listening.listen()
    threading.Thread(target=_lend, args=(listening,), daemon=True).start()


def _lend(listening: socket.socket) -> None:
    asking, _ = listening.accept()
    from tests.support.forked import own_server  # here: it takes a second, and most runs start no cluster

    server = own_server()
    server.begin()
    while True:
        with asking:
            server.give(asking)
        asking, _ = listening.accept()


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class OwnServer(PreforkServer):
    """A server that can be lent."""

    def give(self, asking: socket.socket) -> None:
        assert self.pid is not None and self._requests is not None
        about = msgspec.json.encode(About(self.pid, self._environment))
        socket.send_fds(asking, [about], [self._requests.fileno()])


class LentServer(PreforkServer):
    """Another process's."""

    def __init__(self) -> None:
        super().__init__([], Path(os.devnull))
        with _socket() as asking:
            asking.connect(f"\0{os.environ[NAME]}")
            content, (requests,), _, _ = socket.recv_fds(asking, MAX_BYTES, 1)
        about = msgspec.json.decode(content, type=About)
        self._lent, self._environment = about.pid, about.environment
        self._requests = socket.socket(fileno=requests)

    @property
    def pid(self) -> int:
        return self._lent

    def begin(self) -> None:
        """It has begun."""
