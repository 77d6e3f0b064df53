"""Measures what a killed rollout worker costs, beside workers whose slots are all taken; what a pool saves that shrinks; and adapters
that come through peers.

    python -m benchmarks.elastic [--parts kill repack relay bases multicast spike convoy] [--slots 128] [--lease_s 2] [--rounds 3]
                                 [--window_s 120] [--readers 16] [--megabytes 100] [--copy_s 5] [--loaders 7] [--spike_s 60]

Three workers, each a process at a given pace (`_paced_rollout`), have all of their slots taken, and more turns wait. A turn takes ten
leases or more. Then one is killed with SIGKILL. Each of its turns goes on when another worker gives it a token; its cost is the
tokens that it had had and that are sampled once more. The speed is of all turns, from when the last went on: against two thirds of
that of the three before, which is what two workers give. Redis is the one of `marlaas up`. `_elastic_repack`
says what is measured of pools, `_elastic_relay` what of adapters, `_elastic_bases`, `_elastic_multicast` and `_elastic_convoy` what of
base models, `_elastic_spike` what of spikes.
"""

import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._elastic_bases import bases_report
from benchmarks._elastic_convoy import convoy_report
from benchmarks._elastic_multicast import multicast_report
from benchmarks._elastic_relay import relay_report
from benchmarks._elastic_repack import repack_report
from benchmarks._elastic_spike import spike_report
from benchmarks._paced_rollout import CELL, PROGRESS_S, ROW_S, STEP_S
from benchmarks._report import Goal, Report, at_most, joined, make_table, parsed, parser, show
from benchmarks.rollout import request
from common.bus.bus import Bus
from common.bus.streams import GROUP_ROLLOUT
from common.wire.messages import BASE
from harness.redis_server import embedded_redis
from rollout_service.handler import SHORT_TURN

NUM_WORKERS = 3
WINDOW_S = 5.0
PROMPT = range(97, 113)


@dataclass(frozen=True, slots=True)
class Steps:
    """A worker's notes: when its steps were with how many rows, and when which turn began with how many tokens, after which step."""

    steps: list[tuple[float, int]]
    begun: dict[str, tuple[float, int, int]]

    @classmethod
    def read(cls, file: Path) -> "Steps":
        lines = [line.split() for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return cls(
            [(float(line[1]), int(line[2])) for line in lines if line[0] == "step"],
            {line[2]: (float(line[1]), int(line[3]), int(line[4])) for line in lines if line[0] == "begin"},
        )

    def speed(self, since_s: float, until_s: float) -> float:
        """Tokens a second between two moments."""
        return sum(rows for at_s, rows in self.steps if since_s <= at_s < until_s) / (until_s - since_s)


@dataclass(frozen=True, slots=True)
class Loss:
    """The cost of one kill."""

    num_turns: int
    waits_s: list[float]
    """Seconds from the kill until each went on, sorted."""
    most_tokens: int
    """The most tokens of one turn that are sampled once more."""
    bound_tokens: float
    """The most that may be."""
    speed: float
    """Tokens a second once all went on, over two thirds of that before."""


async def measure(url: str, slots: int, lease_s: float, folder: Path) -> Loss:
    bus, notes = Bus.connect(url, CELL), [folder / str(number) for number in range(NUM_WORKERS)]
    await bus.ensure_group(CELL.rollout, GROUP_ROLLOUT)
    options = ("-m", "benchmarks._paced_rollout", url, str(lease_s), str(slots))
    workers = [await asyncio.create_subprocess_exec(sys.executable, *options, str(file)) for file in notes]
    try:
        num_tokens = round(20 * lease_s / (STEP_S + ROW_S * slots))
        turns = [request(BASE, list(PROMPT), number, num_tokens) for number in range(2 * NUM_WORKERS * slots)]
        await bus.publish([(CELL.rollout, each) for each in turns])
        async with asyncio.timeout(120):
            while not all(file.exists() and len(Steps.read(file).begun) == slots for file in notes):
                await asyncio.sleep(0.5)
        await asyncio.sleep(WINDOW_S)
        killed_s = time.monotonic()
        workers[0].send_signal(signal.SIGKILL)
        await asyncio.sleep(lease_s + 2 + WINDOW_S)
        return loss([Steps.read(file) for file in notes], slots, killed_s)
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
            await worker.wait()
        await bus.close()


def loss(notes: Sequence[Steps], slots: int, killed_s: float) -> Loss:
    killed, *others = notes
    gone_on = {turn: other.begun[turn] for turn in killed.begun for other in others if turn in other.begun}
    had = {turn: tokens + len(killed.steps) - step for turn, (_, tokens, step) in killed.begun.items()}
    last_s = max((at_s for at_s, _, _ in gone_on.values()), default=killed_s)
    before = sum(each.speed(killed_s - WINDOW_S, killed_s) for each in notes)
    after = sum(each.speed(last_s, last_s + WINDOW_S - 1) for each in others)
    return Loss(
        len(killed.begun),
        sorted(at_s - killed_s for at_s, _, _ in gone_on.values()),
        max((had[turn] - tokens for turn, (_, tokens, _) in gone_on.items()), default=0),
        max(2 * SHORT_TURN, 2 * PROGRESS_S * killed.speed(killed_s - WINDOW_S, killed_s) / slots),
        after / (before * (NUM_WORKERS - 1) / NUM_WORKERS),
    )


def kill_report(given: Any) -> Report:
    losses: list[Loss] = []
    for _ in range(given.rounds):
        with embedded_redis() as server, tempfile.TemporaryDirectory() as folder:
            losses.append(asyncio.run(measure(server.url, given.slots, float(given.lease_s), Path(folder))))
    rows = [
        (str(len(each.waits_s)), each.waits_s[-1], each.most_tokens, each.bound_tokens, each.speed) for each in losses
    ]
    columns = ("turns that went on", "the last after s", "tokens lost, most", "allowed", "speed over two workers'")
    in_time = min(sum(wait <= given.lease_s + 2 for wait in each.waits_s) / each.num_turns for each in losses)
    goals = [
        Goal("turns that go on within a lease and 2 s, the fewest", 100 * in_time, 100, " %"),
        at_most(
            "tokens lost of a turn, over what may be", max(e.most_tokens / e.bound_tokens for e in losses), 1, " x"
        ),
        Goal("tokens/s of all turns, of two workers'", 100 * min(each.speed for each in losses), 90, " %"),
    ]
    table = make_table("A worker is killed", columns, rows)
    return Report([table], {"losses": [asdict(each) for each in losses]}, goals)


PARTS: dict[str, Callable[[Any], Report]] = {
    "kill": kill_report,
    "repack": lambda given: repack_report(float(given.window_s)),
    "relay": lambda given: relay_report(given.readers, given.megabytes * 1_000_000, given.copy_s),
    "bases": lambda given: bases_report(2 * given.megabytes * 1_000_000, tries=1 if given.quick else 2),
    "multicast": lambda given: multicast_report(given.loaders, given.megabytes, given.copy_s),
    "spike": lambda given: spike_report(6 * given.megabytes * 1_000_000, given.spike_s),
    "convoy": lambda given: convoy_report(min(4, given.readers // 2), 2 * given.megabytes * 1_000_000),
}
QUICK = ["kill", "repack", "relay", "bases"]
"""Parts of a quick run; the others take long."""


if __name__ == "__main__":
    numbers = {"slots": 128, "lease_s": 2, "rounds": 3, "window_s": 120, "readers": 16, "megabytes": 100, "copy_s": 5}
    options = parser(__doc__, **numbers, loaders=7, spike_s=60)
    options.add_argument("--parts", choices=PARTS, nargs="+", default=[*PARTS], help="default: all")
    quick = {"slots": 32, "lease_s": 1, "rounds": 1, "window_s": 4, "readers": 4, "megabytes": 16, "copy_s": 1}
    asked = parsed(options, quick | {"parts": QUICK})
    show(joined([PARTS[part](asked) for part in asked.parts]), asked.json)
