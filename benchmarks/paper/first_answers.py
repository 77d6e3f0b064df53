"""The time of each job's first answer: reads the stream of finished turns beside the workers, who miss nothing for it."""

from common.bus import Bus
from common.history import ShortResult
from common.messages import TurnResult


async def first_answers(bus: Bus, num_jobs: int, found: dict[str, float]) -> None:
    """Adds to `found`, by job, when its first turn had ended, in seconds since 1970, until all jobs have one.

    Its first token was sampled before; each token took one step of the engine more.
    """
    cursor = "$"
    while len(found) < num_jobs:
        for entry, message in await bus.follow(bus.cell.env, cursor, block_ms=500):
            cursor = entry
            if isinstance(message, TurnResult | ShortResult):
                found.setdefault(message.job, int(entry.partition("-")[0]) / 1000)
