"""Runs tenants' Python code: each call in a process of its own without means to do harm.

It protects, by the strongest means that the machine allows (`Sandbox.probe` says which hold):

    the network      a network namespace without interfaces; seccomp refuses sockets
    other work       a process namespace and a uid of its own; no signals, no new processes or sessions, no limits or
                     priorities of others, no shared memory (seccomp); the environment is empty, no descriptor of the
                     worker is inherited, the worker's environment cannot be read
    files            a file system that holds Python's library, read-only, and an empty folder that vanishes with the
                     process; landlock, also where there are no namespaces
    the machine      limits on CPU seconds, memory, file size, open files, processes, and what the folder holds, with what was
                     deleted from it and is still in use; the output is cut off and the process killed when it exceeds its
                     limit; a wall-clock limit, after which a process that runs none of the tenant's code kills all that is
                     left (`child.py`)

It does not protect:

    - against bugs of the kernel: code runs on it directly, there is no virtual machine
    - the total of all calls: each has its limits, and `max_processes` of them run at a time and one more, but no cgroup
      bounds their sum, and nothing bounds memory bandwidth or caches (side channels)
    - a grader against itself: code that a tenant's grader executes in its own process, for example a model's answer
      given to `exec`, can bring about any reward; prints and stray writes cannot, for they do not know the nonce
    - where there are neither namespaces nor landlock, or no seccomp: files that the call's user may read, and without
      root that user is the worker's own, so its environment in /proc is among them; without seccomp nor a network
      namespace the network. `check_strength` refuses this
"""

import asyncio
import contextlib
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import structlog

from common.children.own_folder import OwnFolder
from common.errors import InvalidInput, Unavailable
from common.sharing.places import Places
from env_service import work
from env_service.sandbox.calls import filter_program
from env_service.sandbox.child import WORK_BYTES, WORK_FILES

SITE = str(Path(np.__file__).parents[1])
NUMPY = ("numpy", "numpy.fft", "numpy.linalg", "numpy.ma", "numpy.polynomial", "numpy.random")
"""Modules for source that names numpy, with those that numpy imports only where they are first used."""
LIBRARY = (
    "ast", "collections", "copy", "datetime", "decimal", "difflib", "fractions", "functools", "itertools", "math",
    "random", "re", "statistics", "string", "typing", "unicodedata",
)  # fmt: skip
"""Modules that calls often need."""
ROOT = str(Path(__file__).parents[2])
START = "import sys; sys.path.append(sys.argv[2]); from env_service.sandbox.prepared import main; main()"
PREFIX = "marlaas-sandbox-"
LAYERS = ("namespaces", "landlock", "seccomp")
END_S = 1.0
"""Time in which a killed call is gone: milliseconds on a machine that is not overloaded."""

RunEnding = Literal["ok", "raised", "output", "result", "timeout", "crashed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    memory_bytes: int = 512 * 1024 * 1024
    """Address space of the process."""
    file_bytes: int = 8 * 1024 * 1024
    """The most bytes of each file that it writes."""
    output_bytes: int = 64 * 1024
    """The most bytes that it prints; with more it is killed."""
    result_bytes: int = 64 * 1024
    """The most bytes of its result, as JSON; with more it is killed."""
    input_bytes: int = 4 * 1024 * 1024
    """Source and arguments, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a call."""

    ending: RunEnding
    value: Any = None
    """The function's value: None, a bool, a number, or a string (`nan` and `inf` arrive as strings)."""
    output: str = ""
    """The text that it printed, at most `output_bytes`."""
    reason: str = ""
    """One line, unless it ended well."""
    layers: tuple[str, ...] = ()
    """The layers that held: see the table in `child.py`."""
    seconds: float = 0.0
    """Wall-clock seconds, waiting for a free place not included."""
    killed: bool = False
    """It was killed before its end, and not by the sandbox."""


class Reply(msgspec.Struct):
    """The line that the child writes at its end."""

    nonce: str
    layers: tuple[str, ...]
    value: str | int | float | bool | None = None
    error: str = ""
    raised: str = ""


class Prepared:
    """A prepared process: see `prepared.py`. It starts when first needed, and again once it has ended."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._requests: socket.socket | None = None
        self.end: Callable[[], object] = lambda: None

    def fork(self, folder: str) -> list[socket.socket]:
        """Has it fork a process that works in the folder; returns sockets to its data, output and control."""
        with contextlib.ExitStack() as theirs:
            pairs = [socket.socketpair() for _ in range(3)]
            fds = [theirs.enter_context(pair[1]).fileno() for pair in pairs]
            fds.append(os.open(folder, os.O_RDONLY))
            theirs.callback(os.close, fds[-1])
            try:
                socket.send_fds(self._requests or self._start(), [b"c"], fds)
            except OSError:  # it has ended
                socket.send_fds(self._start(), [b"c"], fds)
        return [ours for ours, _ in pairs]

    def _start(self) -> socket.socket:
        self.end()
        self._requests, theirs = socket.socketpair()
        self._requests.setblocking(False)
        with theirs:
            number = theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-c", START, str(number), ROOT, SITE, *self._modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[number],
                env={"PATH": "", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"},
                cwd="/",
                start_new_session=True,
            )
        self.end = weakref.finalize(self, _end, process, self._requests)
        return self._requests


def _end(process: subprocess.Popen[bytes], requests: socket.socket) -> None:
    requests.close()
    process.kill()
    process.wait()


class Sandbox:
    """Runs calls, at most `max_processes` at a time, and one more of a tenant with none running: see `Places`."""

    def __init__(
        self, *, max_processes: int = 4, limits: SandboxLimits | None = None, layers: Sequence[str] = LAYERS
    ) -> None:
        self._limits = limits or SandboxLimits()
        self._layers = tuple(layers)
        self._places = Places(lambda: max_processes)
        self._own: OwnFolder | None = None
        self._prepared = {True: Prepared(*LIBRARY, *NUMPY), False: Prepared(*LIBRARY)}  # with numpy, and without
        machine = os.uname().machine
        self._filters = {
            "filter": filter_program(machine, own_files=False).hex(),
            "own_files_filter": filter_program(machine, own_files=True).hex(),
        }

    async def run(
        self,
        source: str,
        *,
        call: str | None = None,
        arguments: Sequence[Any] = (),
        parsed: tuple[str, str] | None = None,
        timeout_s: float,
    ) -> Outcome:
        """Executes `source`, then `call(*arguments)` if it is named. Never raises for what the code does. Raises Unavailable if the
        disk has no room for a call's files, or if others kill the call twice.

        The time limit begins when a place is free. Nothing of the call lives on. A call that was killed, as where memory runs
        out, is made once more in the time left. `parsed`: a field that the first argument gets in the process, and the field
        with its text as JSON.
        """
        try:
            job = self._job(source, {"call": call, "arguments": arguments, "parsed": parsed}, timeout_s)
        except UnicodeEncodeError as error:
            return Outcome(ending="raised", reason=f"UnicodeEncodeError: {error}")
        if len(job) > self._limits.input_bytes:
            return Outcome(ending="raised", reason=f"source and arguments exceed {self._limits.input_bytes} bytes")
        async with work.place(self._places):
            allowance, started = work.Allowance(timeout_s), time.monotonic()
            prepared = self._prepared["numpy" in source]
            outcome = await self._run(prepared, job, allowance)
            if outcome.killed:
                outcome = await self._run(prepared, job, allowance)
        seconds = time.monotonic() - started
        work.charge(seconds)
        work.beat()
        if outcome.killed:
            raise Unavailable(
                "sandboxed calls are killed from outside, as where the memory of the env worker's machine runs out"
            )
        return replace(outcome, seconds=seconds)

    async def close(self) -> None:
        """Ends the prepared processes, and removes the folder of all calls' folders. The next worker removes those of a killed one."""
        for prepared in self._prepared.values():
            prepared.end()
        if self._own is not None:
            self._own.remove()

    async def probe(self) -> tuple[str, ...]:
        """The layers that hold here. Raises InvalidInput if the sandbox does not work at all."""
        outcome = await self.run("", timeout_s=30)
        if outcome.ending != "ok":
            raise InvalidInput(f"the sandbox does not work on this machine: {outcome.reason}")
        return outcome.layers

    @contextlib.asynccontextmanager
    async def _folder(self) -> AsyncGenerator[str]:
        """A call's working folder, which is gone afterwards. Raises Unavailable."""
        folder = self._new_folder()
        try:
            yield folder
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _new_folder(self) -> str:
        try:
            if self._own is None:
                self._own = OwnFolder(PREFIX)
                self._own.path.chmod(0o711)  # calls may have a uid of their own
            return tempfile.mkdtemp(dir=self._own.path)
        except OSError as error:
            raise Unavailable(f"the env worker's disk for temporary files: {error.strerror or error}") from error

    def _job(self, source: str, call: Mapping[str, Any], timeout_s: float) -> bytes:
        """Raises UnicodeEncodeError for half a surrogate pair."""
        limits = {
            "cpu_s": math.ceil(timeout_s) + 1,
            "memory_bytes": self._limits.memory_bytes,
            "file_bytes": self._limits.file_bytes,
        }
        job = {"source": source, **call, "limits": limits, "layers": self._layers}
        return msgspec.json.encode(job | self._filters)

    async def _run(self, prepared: Prepared, job: bytes, allowance: work.Allowance) -> Outcome:
        """Raises Unavailable."""
        async with self._folder() as folder:
            with allowance.spending():
                outcome = await self._run_in(prepared, folder, job, allowance)
            if outcome.ending in ("raised", "crashed") and "files" not in outcome.layers:
                _check_room(folder)
        return outcome

    async def _run_in(self, prepared: Prepared, folder: str, job: bytes, allowance: work.Allowance) -> Outcome:
        nonce = secrets.token_hex(16)
        job = b'{"nonce": "' + nonce.encode() + b'", ' + job[1:]
        process = CallProcess(prepared.fork(folder), self._limits.result_bytes, self._limits.output_bytes)
        try:
            await process.converse(job, allowance)
        finally:
            await process.end()
        return _outcome(process, nonce)


class CallProcess:
    """A call's supervisor, as the sandbox sees it.

    Every end that the sandbox causes goes through `stop`. If a killed call has no `stopped`, the supervisor's status says
    whether it did that itself (`child.supervise`) or the kill came from outside.
    """

    def __init__(self, sockets: Sequence[socket.socket], result_bytes: int, output_bytes: int) -> None:
        """`sockets`: to its data, output and control, as `child.main` has them."""
        self._sockets = sockets
        self._result_bytes, self._output_bytes = result_bytes, output_bytes
        self._streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.result, self.output, self._told = bytearray(), bytearray(), bytearray()
        """The bytes that it wrote, up to their limits."""
        self.stopped: tuple[RunEnding, str] | None = None
        """Kind of the end that the sandbox caused, and its reason."""

    @property
    def status(self) -> int:
        return int(self._told or -signal.SIGKILL)

    def stop(self, ending: RunEnding, reason: str) -> None:
        """Has the supervisor kill the call. The first reason counts, also if the call has just ended."""
        if self.stopped is None:
            self.stopped = ending, reason
            self._streams[-1][1].write_eof()

    async def converse(self, content: bytes, allowance: work.Allowance) -> None:
        """Gives it its input, and collects its output, up to its end or that of the allowance."""
        result, output = self._result_bytes, self._output_bytes
        for each in self._sockets:
            self._streams.append(await asyncio.open_unix_connection(sock=each))
        (data, given), (printed, _), (control, _) = self._streams
        try:
            async with work.time_limit(allowance.left_s):
                await asyncio.gather(
                    self._give(content, given),
                    self._read(data, self.result, result, "result", f"returned more than {result} bytes"),
                    self._read(printed, self.output, output, "output", f"printed more than {output} bytes"),
                    self._read(control, self._told, 8, "crashed", "it has a status that is too long"),
                )
        except TimeoutError:
            self.stop("timeout", f"took longer than {allowance.seconds:g} seconds")

    async def end(self) -> None:
        """Has the supervisor kill the rest of the call, and waits for that, but not for long."""
        try:
            async with asyncio.timeout(END_S):
                for _, writer in self._streams[2:]:
                    writer.write_eof()
                for reader, _ in self._streams:
                    with contextlib.suppress(ConnectionError):
                        while await reader.read(65536):
                            pass
        except TimeoutError:
            structlog.get_logger().error("sandboxed_call_does_not_end")
        for _, writer in self._streams:
            writer.close()
        for each in self._sockets[len(self._streams) :]:
            each.close()

    async def _give(self, content: bytes, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # it died before it read all: its end says why
            writer.write(content)
            await writer.drain()
            writer.write_eof()

    async def _read(
        self, stream: asyncio.StreamReader, into: bytearray, limit: int, ending: RunEnding, reason: str
    ) -> None:
        """Reads to the end: a process counts as ended only when its streams are empty. Stops a call that writes more than
        `limit` bytes; the rest is read and dropped."""
        with contextlib.suppress(ConnectionError):  # it died before it read all
            while chunk := await stream.read(16384):
                work.beat()
                if len(into) + len(chunk) > limit:
                    self.stop(ending, reason)
                into += chunk[: limit - len(into)]


def check_strength(layers: Sequence[str]) -> None:
    """Raises InvalidInput if what holds is weaker than what the operator is told: docs/operations.md."""
    if "seccomp" in layers and {"files", "landlock"} & set(layers):
        return
    raise InvalidInput(
        f"the sandbox is too weak for tenants' code: of its layers only {', '.join(layers) or 'none'} hold on this machine, "
        "and it needs seccomp, and landlock (Linux 5.13) or namespaces. Allow them, or set MARLAAS_WEAK_SANDBOX=1 if you "
        "trust the code of every tenant"
    )


def _check_room(folder: str) -> None:
    """Raises Unavailable if the disk does not hold what a call may have: that may be why it failed."""
    disk = os.statvfs(folder)
    if disk.f_bavail * disk.f_frsize < WORK_BYTES or (disk.f_files and disk.f_favail < WORK_FILES):
        raise Unavailable("the env worker's disk for temporary files is full")


def _outcome(process: CallProcess, nonce: str) -> Outcome:
    text, status = process.output.decode(errors="replace"), process.status
    if process.stopped:
        ending, reason = process.stopped
        return Outcome(ending=ending, output=text, reason=reason)
    reply = _parse(bytes(process.result), nonce)
    if reply is None:
        killed = _signal(status) == signal.SIGKILL
        return Outcome(ending="crashed", output=text, reason=_how_it_died(status, text), killed=killed)
    ending: RunEnding = "raised" if reply.error else "ok"
    return Outcome(ending=ending, value=reply.value, output=text, reason=reply.error, layers=reply.layers)


def _parse(result: bytes, nonce: str) -> Reply | None:
    """The child's line; None if there is none, or if it is not the child's own."""
    try:
        reply = msgspec.json.decode(result, type=Reply)
    except (msgspec.DecodeError, ValueError):
        return None
    return reply if secrets.compare_digest(reply.nonce, nonce) else None


def _signal(status: int) -> int:
    """The signal that ended the supervisor, or the call below it. Below 1, or no signal, if none did."""
    return -status if status < 0 else status - 128


def _how_it_died(status: int, output: str) -> str:
    number = _signal(status)
    if number == signal.SIGXCPU:
        return "used more CPU time than allowed"
    if number == signal.SIGXFSZ:
        return "wrote more into its folder than allowed"
    if 0 < number < 65:
        return f"killed by signal {number}"
    last = output.strip().rpartition("\n")[2][:200]
    return f"ended without a result (status {status}){f': {last}' if last else ''}"
