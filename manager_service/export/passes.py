"""Runs a writer: a process for some jobs of one tenant, with only its key, that dies with this process."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from common.children.processes import tied
from manager_service.export.rows import Row
from manager_service.records.keys import JSON
from manager_service.records.receivers import LoggerName

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 180.0
"""Time limit of one pass. What it has not answered for by then is tried again later."""
WRITER = (sys.executable, "-m", "manager_service.export.writer")


class JobRows(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a job for a writer."""

    job: str
    project: str
    name: str
    entity: str
    tags: tuple[str, ...]
    config: dict[str, Any]
    rows: list[Row]  # ascending
    final: str | None  # the job's status, if these are its last rows


class Order(msgspec.Struct, frozen=True, kw_only=True):
    folder: str  # for files of this tenant and logger
    key: str  # empty: nothing is sent anywhere
    base_url: str
    jobs: list[JobRows]


class PassAnswer(msgspec.Struct, frozen=True):
    job: str
    error: str = ""  # empty: the logger surely has all of the job's rows


@dataclass(frozen=True, slots=True)
class Passes:
    """Runs writers. `command`: another writer, for tests."""

    command: Sequence[str] = WRITER
    timeout_s: float = TIMEOUT_S
    proxy: str = ""  # where a logger's calls go through; empty: they go out directly

    async def write(self, logger: LoggerName, order: Order) -> dict[str, PassAnswer]:
        """Answers for the jobs that the writer has come to; the last may be the error that ended it."""
        folder = Path(order.folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _home(folder) as home:
            output, ended = await self._run(logger, order, home)
        answers = {answer.job: answer for answer in _answers(output)}
        if unanswered := next((job.job for job in order.jobs if job.job not in answers), None):
            answers[unanswered] = PassAnswer(unanswered, error=ended)
        return answers

    async def _run(self, logger: LoggerName, order: Order, home: Path) -> tuple[bytes, str]:
        """The output of the writer, and the reason of its end."""
        output = bytearray()
        process = await asyncio.create_subprocess_exec(
            *tied((*self.command, logger)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # a library may say a key there
            env=_environment(home, self.proxy),
            cwd=order.folder,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self.timeout_s):
                await _talk(process, JSON.encode(order), output)
                await process.wait()
            return bytes(output), f"the writer of {logger} ended with status {process.returncode}"
        except TimeoutError:
            return bytes(output), f"{logger} took more than {self.timeout_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _talk(process: asyncio.subprocess.Process, order: bytes, output: bytearray) -> None:
    """Hands over the order, and adds to `output` what the writer says, as it comes."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its end says more
        process.stdin.write(order)
        await process.stdin.drain()
    process.stdin.close()
    while part := await process.stdout.read(1 << 16):
        output += part


def check_disk(folder: Path, most: int) -> None:
    """Raises OSError if a tenant's files take more than `most` bytes."""
    taken = 0
    for path, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # a writer's draft
                taken += os.stat(os.path.join(path, file)).st_size
    if taken >= most:
        raise OSError(
            f"your files of all loggers take {taken:,} bytes here, at most {most:,}: ask the operator to move some"
        )


@contextlib.contextmanager
def _home(folder: Path) -> Generator[Path]:
    """A folder for what libraries leave, such as logs, here and in passes that were killed.

    It also marks the pass's processes: all have it as HOME.
    """
    home = folder / ".home"
    _end_all_of(home)
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    try:
        yield home
    finally:
        _end_all_of(home)
        shutil.rmtree(home, ignore_errors=True)


def _end_all_of(home: Path) -> None:
    """Kills what a writer has started: W&B's own process has its own session. Without /proc it ends some time later."""
    mark = f"HOME={home}".encode()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark in file.read_bytes().split(b"\0"):
                os.kill(int(file.parent.name), signal.SIGKILL)


def _environment(home: Path, proxy: str) -> Mapping[str, str]:
    """Nothing of this process's own: a logger finds neither the operator's keys nor Redis' password."""
    return {
        "PATH": os.defpath,
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "PYTHONSAFEPATH": "1",
        "TRACKIO_DIR": str(home.parent),
        "TRACKIO_SQLITE_SYNCHRONOUS": "full",
        "WANDB_ERROR_REPORTING": "false",
        "HF_HUB_OFFLINE": "1",
    } | dict.fromkeys(("http_proxy", "https_proxy") if proxy else (), proxy)


def _answers(output: bytes) -> list[PassAnswer]:
    return [msgspec.json.decode(line, type=PassAnswer) for line in output.split(b"\n")[:-1]]
