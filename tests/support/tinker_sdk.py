"""The real `tinker` SDK, each version in a virtual environment of its own that borrows what all need, and programs that run in it."""

import asyncio
import json
import os
import subprocess
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.support.api_server import ApiServer
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


HEAD = """
import json, urllib.request, tinker
from tinker import types
def datum(n, start=0):
    tokens = [(start + i) % 200 for i in range(n)]
    return types.Datum(model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": tokens[1:] + [0], "weights": [1.0] * n})
def told(future):
    try:
        return str(future.result())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
service = tinker.ServiceClient()
"""
"""The beginning of the programs of `run_program`."""


async def run_program(server: ApiServer, program: str, **options: Any) -> Any:
    """The JSON that a program behind HEAD prints last, as the server's first tenant."""
    return await run_sdk(HEAD + program, url=server.url, key=server.key, **options)


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
    """Runs a program in a process of its own."""
    python = await asyncio.to_thread(sdk_python, version)
    variables = {
        **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
        "TINKER_BASE_URL": url or "http://127.0.0.1:9",
        "TINKER_API_KEY": f"tml-{key}",
    }
    process = await asyncio.create_subprocess_exec(
        *(python, "-W", "ignore", "-c", program, *words), stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=variables
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    except (asyncio.CancelledError, TimeoutError):
        process.kill()
        await process.wait()
        raise
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())
