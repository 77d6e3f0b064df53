"""A trainer of two ranks, forked from a process that has imported what it needs; its other rank is executed, as it is in a service."""

import contextlib
import os
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import msgspec

from tests.support.forked_ranks import FORKS
from tests.support.trainer_cases import TINY, make_init, make_rows, make_step, nothing
from trainer_service.ranks.backbone import RankedBackbone
from trainer_service.ranks.leader import Ranks, begin_of
from trainer_service.settings import TrainerSettings
from trainer_service.training import Trainer


@dataclass(frozen=True)
class Forked:
    process: ForkServerProcess
    other: int
    """The other rank's process id."""
    errors: Path

    def ended(self) -> tuple[int | None, str]:
        """Its exit status, or minus the signal, and what it wrote to its standard error."""
        self.process.join()
        return self.process.exitcode, self.errors.read_text()


@contextlib.contextmanager
def forked(folder: Path, patience_s: float, *, busy: bool) -> Generator[Forked]:
    """One that has made a step. `busy`: it goes on to make steps."""
    ours, theirs = FORKS.Pipe(duplex=False)
    errors = folder / "errors"
    process = FORKS.Process(target=main, args=(theirs, errors, patience_s, busy))
    process.start()
    theirs.close()
    try:
        with os.fdopen(os.dup(ours.fileno())) as file:
            lines: Iterator[str] = iter(file.readline, "")
            other = int(next(line for line in lines if line.strip().isdigit()))
            assert next(lines) == "step\n"
            yield Forked(process, other, errors)
    finally:
        process.kill()
        process.join()
        ours.close()


def main(output: Connection, errors: Path, patience_s: float, busy: bool) -> None:
    """Writes the process id of the other rank, then a line for each step of training; if it is not busy, for the first alone."""
    os.dup2(output.fileno(), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    begin = msgspec.structs.replace(begin_of(TrainerSettings(trainer_ranks=2), TINY), patience_s=patience_s)
    ranks, part = Ranks.start(begin)
    trainer = Trainer(RankedBackbone(part, ranks))
    say(ranks.processes[0].pid)
    state = trainer.init(make_init())
    while True:
        trainer.step(make_step(0, make_rows()), state, nothing)
        say("step")
        while not busy:
            time.sleep(1)


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()
