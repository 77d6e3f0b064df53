"""Runs a writer: a process for some jobs of one tenant, which has the key of that tenant alone and dies with this one."""

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

from manager_service.export.rows import Row
from manager_service.local import child
from manager_service.records import JSON, LoggerName

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 180.0
"""Of one pass. What it has not answered for by then is tried again later."""
WRITER = (sys.executable, "-m", "manager_service.export.writer")


class JobRows(msgspec.Struct, frozen=True, kw_only=True):
    """What a writer hears of a job."""

    job: str
    project: str
    name: str
    entity: str
    tags: tuple[str, ...]
    config: dict[str, Any]
    held: int  # sequence number of the last row that the logger said it has; 0: not asked yet
    rows: list[Row]  # ascending
    final: str | None  # the job's status, if these are its last rows


class Order(msgspec.Struct, frozen=True, kw_only=True):
    folder: str  # for files of this tenant and logger
    key: str  # empty: nothing is sent anywhere
    base_url: str
    jobs: list[JobRows]


class Answer(msgspec.Struct, frozen=True):
    job: str
    held: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Passes:
    """Runs writers. `command`: another writer, for tests."""

    command: Sequence[str] = WRITER
    timeout_s: float = TIMEOUT_S

    async def write(self, logger: LoggerName, order: Order) -> dict[str, Answer]:
        """An answer for each job of the order. The key is in none of them."""
        folder = Path(order.folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _home(folder) as home:
            output, missing = await self._run(logger, order, _environment(folder, home))
        found = {job.job: Answer(job.job, error=missing) for job in order.jobs}
        return found | {answer.job: answer for answer in _answers(output, order.key)}

    async def _run(self, logger: LoggerName, order: Order, environment: Mapping[str, str]) -> tuple[bytes, str]:
        """What the writer said, and what to say of jobs of which it said nothing."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-IS", str(child.__file__), str(os.getpid()), *self.command, logger),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # a library may say a key there
            env=environment,
            cwd=order.folder,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self.timeout_s):
                output, _ = await process.communicate(JSON.encode(order))
            return output, f"the writer of {logger} ended with status {process.returncode}"
        except TimeoutError:
            return b"", f"{logger} took more than {self.timeout_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # W&B's own process is in the same group
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


@contextlib.contextmanager
def _home(folder: Path) -> Generator[Path]:
    """A folder for what libraries leave about, such as logs; what a pass that was killed left there goes too."""
    home = folder / ".home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _environment(folder: Path, home: Path) -> Mapping[str, str]:
    """Nothing of this process's own: a logger finds neither the operator's keys nor Redis' password."""
    return {
        "PATH": os.defpath,
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "PYTHONSAFEPATH": "1",
        "TRACKIO_DIR": str(folder),
        "TRACKIO_SQLITE_SYNCHRONOUS": "full",
        "WANDB_ERROR_REPORTING": "false",
        "HF_HUB_OFFLINE": "1",
    }


def _answers(output: bytes, key: str) -> list[Answer]:
    found = [msgspec.json.decode(line, type=Answer) for line in output.split(b"\n")[:-1]]
    return [msgspec.structs.replace(one, error=one.error.replace(key, "[key]")) if key else one for one in found]
