"""The real `tinker` SDK, each version in a virtual environment of its own that borrows what all need, and programs that run in it, in
children of one process that has imported it."""

import asyncio
import atexit
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from tests.support.installed import made

VERSION = "0.38.0"
NEEDS = (
    "httpx[http2]",
    "numpy",
    "orjson",
    "protobuf>=4.21",
    "pydantic<3",
    "pyqwest>=0.4.1",
    "rich",
    "sniffio",
    "zstandard",
)
MORE = ("anyio<5", "click", "distro<2", "typing-extensions<5")
"""Packages that the SDK needs, without those that only its tokenizers need."""
PROGRAM_S = 300.0


@cache
def sdk_python(version: str) -> str:
    """The interpreter of a version's environment, which is made when it is first needed.

    Raises RuntimeError if it cannot be made: the packages come from where those of `make test` come from.
    """
    try:
        needs = made("tinker-needs", [*NEEDS, *MORE])
        folder = made(f"tinker-{version}", ["--no-deps", f"tinker=={version}"], lender=needs)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"the tinker SDK {version} cannot be installed here: {error}") from error
    return str(folder / "bin" / "python")


async def run_sdk(
    program: str, *, url: str = "", key: str = "", version: str = VERSION, timeout_s: float = PROGRAM_S
) -> Any:
    """The JSON that a program of Python prints last. It finds the service by the SDK's own variables."""
    ended = await _ended(program, url=url, key=key, version=version, timeout_s=timeout_s)
    assert ended.code == 0, ended.err[-4000:]
    return json.loads(ended.out.strip().splitlines()[-1])


def anew(program: str) -> str:
    """The same program, in a Python that has imported nothing yet."""
    return f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', {program!r}])"


COMMANDS = """
import contextlib, io, json, sys
from tinker.cli.__main__ import main
ended = []
for words in json.loads(sys.argv[1]):
    sys.argv, out, err, code = ["tinker", *words], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    ended.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(ended))
"""


async def run_commands(lines: Sequence[str], *, url: str, key: str, version: str = VERSION) -> list["Ended"]:
    """The SDK's command line, `tinker --format json LINE`, one line after the other in a process that imports it once."""
    commands = json.dumps([["--format", "json", *line.split()] for line in lines])
    done = await _ended(COMMANDS, commands, url=url, key=key, version=version)
    assert done.code == 0, done.err[-4000:]
    return [Ended(*each) for each in json.loads(done.out.splitlines()[-1])]


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that ended, or a command in one."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        assert self.code == 0, self.err[-4000:]
        return json.loads(self.out)


async def _ended(program: str, *words: str, url: str, key: str, version: str, timeout_s: float = PROGRAM_S) -> Ended:
    """Runs a program in a child of the version's nursery."""
    nursery = await asyncio.to_thread(_nursery, version)
    variables = {
        **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
        "TINKER_BASE_URL": url or "http://127.0.0.1:9",
        "TINKER_API_KEY": f"tml-{key}",
        "PYTHONWARNINGS": "ignore",
    }
    with TemporaryDirectory() as name:
        folder, asked = Path(name), [name, program, words, variables, ceil(timeout_s)]
        nursery.stdin.write(json.dumps(asked) + "\n")
        nursery.stdin.flush()
        try:
            while not (folder / "code").exists():
                assert nursery.process.poll() is None, "the nursery ended"
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            if (folder / "pid").exists():
                os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
            raise
        code, out, err = ((folder / file).read_text() for file in ("code", "out", "err"))
        return Ended(int(code), out, err)


NURSERY = """
import contextlib, gc, importlib, json, os, signal, sys
import tinker
for name in ("anyio._backends._asyncio", "h2.connection", "httpcore", "tinker.proto.request_conv", "tinker.resources"):
    with contextlib.suppress(ImportError):  # not in each version
        importlib.import_module(name)  # the SDK would when it is used
gc.freeze()  # a collection in a child would copy all of it
def put(name, text):
    with open(name + ".new", "w") as file:
        file.write(text)
    os.rename(name + ".new", name)
def bury(*of):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
signal.signal(signal.SIGCHLD, bury)
for line in sys.stdin:
    folder, program, words, variables, timeout_s = json.loads(line)
    if os.fork():
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if child := os.fork():
        try:
            put(folder + "/pid", str(child))
            put(folder + "/code", str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
        finally:  # also where nobody waits for it any more
            os._exit(0)
    signal.alarm(timeout_s)
    for number, name in ((1, "/out"), (2, "/err")):
        os.dup2(os.open(folder + name, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = ["-c", *words]
    break
else:
    os._exit(0)
exec(compile(program, "program", "exec"), {"__name__": "__main__"})
"""
"""A process that has imported the SDK, which takes a second, and forks for each program; what it forks ends as any Python does."""


@dataclass(frozen=True, slots=True)
class _Nursery:
    process: "subprocess.Popen[str]"
    stdin: IO[str]


@cache
def _nursery(version: str) -> _Nursery:
    command = [sdk_python(version), "-W", "ignore", "-c", NURSERY]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    atexit.register(process.communicate)  # which lets it end
    return _Nursery(process, process.stdin)
