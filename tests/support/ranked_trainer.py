"""A trainer of two ranks: `python -m tests.support.ranked_trainer PATIENCE_S (busy | idle)`. Writes the process id of the other
rank, then a line for each step of training; idle, for the first alone."""

import sys
import time

import msgspec

from tests.support.trainer_cases import TINY, make_init, make_rows, make_step, nothing
from trainer_service.ranks.backbone import RankedBackbone
from trainer_service.ranks.leader import Ranks, begin_of
from trainer_service.settings import TrainerSettings
from trainer_service.training import Trainer


def main(patience_s: float, busy: bool) -> None:
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


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2] == "busy")
