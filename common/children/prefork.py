"""A prefork server has imported what services need, and forks them: `python -m common.children.prefork MODULE...`.

    import all modules ─► a request, with the socket of its answers ─► fork: the child becomes `python -m MODULE`
                                          process id, later exit status ─► that socket

Requests come on standard input, a socket of whole messages. It starts no thread and computes nothing, so that a child
chooses kernels and threads as if executed. It ends with its parent, and its children with it.
"""

import contextlib
import ctypes
import gc
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import msgspec

from common.children.child import tie_to
from common.children.processes import open_log

MODULE = "common.children.prefork"
SETTINGS = ("MARLAAS_", "AWS_")
"""Variables with these beginnings are read when a service starts; others may be read when something is imported."""
MAX_REQUEST_BYTES = 1 << 20
ASK_TO_END = (signal.SIGTERM, signal.SIGINT)
"""A server does not hear them: they may reach a whole group, and its children, which end with it, hand back what they have."""
ARGUMENTS = 45
"""Field of /proc/self/stat, after the program's name: the address of the arguments; the next one is their end."""


class ForkRequest(msgspec.Struct, frozen=True):
    """A child to start. It has its prefork server's variables, and settings of its own."""

    module: str
    settings: dict[str, str]
    log: str = ""
    """Standard output and error; empty: the server's."""


def main(modules: Sequence[str]) -> None:
    """Returns in each child when that has ended."""
    load(modules)
    server = os.getpid()
    with socket.socket(fileno=os.dup(0)) as requests:
        request = next_request(requests)
    if request is not None:
        become(request, server)


def load(modules: Sequence[str]) -> None:
    """Imports what they import. Without `freeze` each child's garbage collector would copy what it shares."""
    gc.disable()
    for module in modules:
        runpy.run_module(module, run_name="prefork", alter_sys=True)  # leaves what it imports, and not itself
    gc.freeze()
    gc.enable()


def next_request(requests: socket.socket) -> ForkRequest | None:
    """Serves until nobody asks any more: None. Returns in each child what that is to become. Behind the socket of its answers a
    request may bring another: the child's standard input."""
    answers: dict[int, socket.socket] = {}
    signal.pthread_sigmask(signal.SIG_BLOCK, ASK_TO_END)
    with _woken_by_ends() as ends:
        while True:
            ready, _, _ = select.select([requests, ends], [], [])
            if requests in ready:
                content, files, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 2)
                if not content:
                    return None
                answer = socket.socket(fileno=files[0])
                if not (pid := os.fork()):
                    given = files[1] if files[1:] else os.open(os.devnull, os.O_RDONLY)
                    os.dup2(given, 0)
                    os.close(given)
                    for each in (answer, *answers.values()):
                        each.close()
                    return msgspec.json.decode(content, type=ForkRequest)
                for file in files[1:]:
                    os.close(file)
                answers[pid] = answer
                _tell(answer, pid)
            if ends in ready:
                ends.recv(4096)
                _tell_ends(answers)


@contextlib.contextmanager
def _woken_by_ends() -> Generator[socket.socket]:
    """Yields a socket that can be read when a child has ended. Afterwards nothing is left of it."""
    ends, wakes = socket.socketpair()
    with ends, wakes:
        wakes.setblocking(False)
        before = signal.signal(signal.SIGCHLD, lambda number, frame: None)  # ignored, it would wake nobody
        signal.set_wakeup_fd(wakes.fileno())
        try:
            yield ends
        finally:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, before)


def _tell_ends(answers: dict[int, socket.socket]) -> None:
    """Tells the exit status, or minus the signal, of each child that has ended."""
    while answers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with answers.pop(pid) as answer:
            _tell(answer, os.waitstatus_to_exitcode(status))


def _tell(answer: socket.socket, number: int) -> None:
    with contextlib.suppress(ConnectionError):  # whoever asked does not listen any more
        answer.send(str(number).encode())


def become(request: ForkRequest, parent: int) -> None:
    """Runs the module as the main program of this process, as `child.py` would. Returns or raises as that ends."""
    tie_to(parent)  # to the server, which is tied to the supervisor: whoever of the two dies, this process does
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASK_TO_END)
    os.setsid()  # so that its supervisor can kill all that it starts, and a Ctrl-C in the terminal does not reach it
    if request.log:
        with open_log(Path(request.log)) as log:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
    os.environ.update(request.settings)
    show_as((sys.executable, "-m", request.module))
    sys.argv[1:] = []
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def fork_server() -> socket.socket:
    """Forks a server out of this process, which has imported what its children need, and has no event loop yet. Returns the socket of
    its requests: the server ends with that, or with this thread."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gc.freeze()
    parent = os.getpid()
    if os.fork():
        theirs.close()
        return ours
    ours.close()
    tie_to(parent)
    server = os.getpid()
    with theirs:
        request = next_request(theirs)
    if request is not None:
        become(request, server)
    os._exit(0)  # what the parent does next is not for its fork


def show_as(arguments: Sequence[str]) -> None:
    """Lets `ps` show these arguments for this process, as far as its own had room for them."""
    places = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, end = map(int, places[ARGUMENTS : ARGUMENTS + 2])
    if first:  # 0: the kernel does not tell
        text = "\0".join(arguments).encode()[: end - first - 1]
        ctypes.memset(first, 0, end - first)
        ctypes.memmove(first, text, len(text))


def beside_settings(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not name.startswith(SETTINGS)}


if __name__ == "__main__":
    main(sys.argv[1:])
