"""The real `tinker` SDK in a virtual environment of its own, and programs that run in it."""

import asyncio
import fcntl
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

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
INSTALL_S = 300.0
PROGRAM_S = 300.0


def cache_folder(version: str) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "marlaas" / f"tinker-{version}-py{sys.version_info.major}.{sys.version_info.minor}"


@cache
def sdk_python(version: str) -> str:
    """The interpreter of a version's environment, which is made when it is first needed.

    Raises RuntimeError if it cannot be made: the packages come from where those of `make test` come from.
    """
    folder = cache_folder(version)
    python, ready = folder / "bin" / "python", folder / ".ready"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not ready.exists():
            try:
                _make(folder, version)
            except (OSError, subprocess.SubprocessError) as error:
                raise RuntimeError(f"the tinker SDK {version} cannot be installed here: {error}") from error
            ready.touch()
    return str(python)


def _make(folder: Path, version: str) -> None:
    """Fills it by this Python's pip: one of its own takes seconds."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=INSTALL_S)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--python", str(folder), "install"]
    subprocess.run([*pip, *NEEDS, *MORE], check=True, timeout=INSTALL_S, capture_output=True)
    subprocess.run([*pip, "--no-deps", f"tinker=={version}"], check=True, timeout=INSTALL_S, capture_output=True)


async def run_sdk(
    program: str, *, url: str = "", key: str = "", version: str = VERSION, timeout_s: float = PROGRAM_S
) -> Any:
    """The JSON that a program of Python prints last. It finds the service by the SDK's own variables."""
    ended = await _ended(["-c", program], url=url, key=key, version=version, timeout_s=timeout_s)
    assert ended.code == 0, ended.err[-4000:]
    return json.loads(ended.out.strip().splitlines()[-1])


async def run_command(*words: str, url: str, key: str, version: str = VERSION) -> "Ended":
    """The SDK's command line, `tinker WORDS`."""
    return await _ended(["-m", "tinker.cli", *words], url=url, key=key, version=version)


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        assert self.code == 0, self.err[-4000:]
        return json.loads(self.out)


async def _ended(words: list[str], *, url: str, key: str, version: str, timeout_s: float = PROGRAM_S) -> Ended:
    python = await asyncio.to_thread(sdk_python, version)
    variables = {
        **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
        "TINKER_BASE_URL": url or "http://127.0.0.1:9",
        "TINKER_API_KEY": f"tml-{key}",
        "PYTHONWARNINGS": "ignore",
    }
    process = await asyncio.create_subprocess_exec(
        python, *words, env=variables, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())
