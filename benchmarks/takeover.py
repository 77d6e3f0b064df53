"""Measures how soon the work of a killed worker goes on, beside workers that have no slot free, and what that costs these.

    python -m benchmarks.takeover [--lease-s 2] [--orphans 20] [--rounds 5] [--slots 32] [--json FILE]

A consumer reads entries and is never heard again. Three workers take over, each with all of its slots taken by work that lasts two
to six leases, and with more of it waiting. An orphan goes on when its handler begins. The survivors' speed is the time that they
spent on work of their own in six leases, against the same without orphans. Redis is the one of `marlaas up`.

Then the same with rollout workers and real turns: tokens a second of the survivors' own turns from the kill until a lease and 2 s
later, against the same window of a run without a kill; the median of some rounds.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks._report import Goal, Report, make_table, run
from benchmarks._takeover_turns import Case, Speed
from benchmarks._takeover_turns import measure as measure_turns
from common.bus import Bus, Out
from common.handlers import Beat
from common.messages import BASE, EnvSpec, Sampling, Start
from common.objects import Objects
from common.streams import GROUP_ENV, Cell
from common.telemetry import About, Reporter
from common.worker import Inbox, Worker
from harness.redis_server import embedded_redis
from harness.standin import StandIn

CELL = Cell("tiny")
NUM_WORKERS = 3
GIVE_UP_LEASES = 20
WATCHED_LEASES = 6
"""Over which the survivors' speed is taken."""
BEAT_S = 0.1
ORPHANS = 1000
"""Groups below are orphans."""


@dataclass
class LongWork(StandIn):
    """Beats for two to six leases, as its group's number says."""

    lease_s: float
    begun_s: dict[int, float] = field(default_factory=dict[int, float])  # group -> monotonic
    worked_s: dict[int, float] = field(default_factory=dict[int, float])  # group -> up to now

    async def __call__(self, message: Start, beat: Beat) -> list[Out]:
        self.begun_s.setdefault(message.group, time.monotonic())
        end = time.monotonic() + random.Random(message.group).uniform(2, 6) * self.lease_s
        while time.monotonic() < end:
            beat()
            since = time.monotonic()
            await asyncio.sleep(BEAT_S)
            self.worked_s[message.group] = self.worked_s.get(message.group, 0.0) + time.monotonic() - since
        return []


def start(group: int) -> Start:
    return Start(
        id=f"job/{group}/0",
        tenant="acme",
        job="job",
        partition=0,
        adapter=BASE,
        purpose="train",
        seed=1,
        group=group,
        samples=(0,),
        item=None,
        env=EnvSpec("single_turn"),
        sampling=Sampling(),
    )


@dataclass(frozen=True, slots=True)
class Survived:
    """Work of three workers after a fourth was killed."""

    waits_s: list[float]  # from the last renewal of each orphan that went on to its beginning elsewhere, sorted
    own_s: float  # spent on other work within WATCHED_LEASES, added up over slots


async def survive(url: str, lease_s: float, num_orphans: int, slots: int) -> Survived:
    buses = [Bus.connect(url, CELL) for _ in range(NUM_WORKERS)]
    await buses[0].ensure_group(CELL.env, GROUP_ENV)
    await buses[0].publish([(CELL.env, start(group)) for group in range(num_orphans)])
    if num_orphans:
        await buses[0].read([CELL.env], GROUP_ENV, "killed", count=num_orphans)
    since = time.monotonic()
    await buses[0].publish([(CELL.env, start(ORPHANS + n)) for n in range(GIVE_UP_LEASES * NUM_WORKERS * slots)])
    handlers, stop = [LongWork(lease_s) for _ in buses], asyncio.Event()
    workers = [_worker(bus, handler, lease_s, slots) for bus, handler in zip(buses, handlers, strict=True)]
    tasks = [asyncio.create_task(worker.run(stop)) for worker in workers]
    await asyncio.sleep(WATCHED_LEASES * lease_s - (time.monotonic() - since))
    own_s = sum(s for handler in handlers for group, s in handler.worked_s.items() if group >= ORPHANS)
    while len(waits := _waits(handlers, since)) < num_orphans and time.monotonic() - since < GIVE_UP_LEASES * lease_s:
        await asyncio.sleep(BEAT_S)
    stop.set()
    await asyncio.wait(tasks)
    for bus in buses:
        await bus.close()
    return Survived(waits, own_s)


def _waits(handlers: Sequence[LongWork], since: float) -> list[float]:
    return sorted(at - since for handler in handlers for group, at in handler.begun_s.items() if group < ORPHANS)


def _worker(bus: Bus, handler: LongWork, lease_s: float, slots: int) -> Worker:
    reporter = Reporter(f"worker-{id(handler)}", "env", CELL.base_model, About(slots=slots))
    return Worker(bus, handler, [Inbox(CELL.env, GROUP_ENV)], reporter, lease_s=lease_s)


def measure(options: Any) -> Report:
    lease_s, num_orphans, slots = float(options.lease_s), int(options.orphans), int(options.slots)
    with embedded_redis() as server:
        found = asyncio.run(survive(server.url, lease_s, num_orphans, slots))
    with embedded_redis() as server:
        undisturbed = asyncio.run(survive(server.url, lease_s, 0, slots))
    in_time = sum(wait <= lease_s + 2 for wait in found.waits_s)
    last = found.waits_s[-1] if found.waits_s else float("nan")
    speed = found.own_s / undisturbed.own_s
    rounds = [_round(lease_s, num_orphans, slots) for _ in range(int(options.rounds))]
    ratio = statistics.median(after.per_s / before.per_s for before, after in rounds)
    cpu_ratio = statistics.median(after.per_cpu_s / before.per_cpu_s for before, after in rounds)
    turns = make_table(
        "Tokens a second of the survivors' own turns",
        ("without a kill", "with one", "per processor second", "with one", "orphans that went on"),
        [(a.per_s, b.per_s, a.per_cpu_s, b.per_cpu_s, b.taken_over) for a, b in rounds],
    )
    columns = ("orphans", "went on", "within lease + 2 s", "last: lease + s", "survivors' speed %")
    table = make_table("Take-over", columns, [(num_orphans, len(found.waits_s), in_time, last - lease_s, 100 * speed)])
    figures = {
        "orphans": num_orphans,
        "went_on": len(found.waits_s),
        "in_time": in_time,
        "last_s": last,
        "lease_s": lease_s,
        "slots": slots,
        "survivors_speed": speed,
        "token_ratio": ratio,
        "token_ratio_cpu": cpu_ratio,
    }
    goals = [
        Goal("orphans that go on in time", 100 * in_time / num_orphans, 100, " %"),
        Goal("survivors' speed", 100 * speed, 90, " %"),
        Goal("survivors' own tokens", 100 * ratio, 90, " %"),
    ]
    return Report([table, turns], figures, goals)


def _round(lease_s: float, num_orphans: int, slots: int) -> tuple[Speed, Speed]:
    """Without a kill, and with one."""
    found: list[Speed] = []
    for kills in (False, True):
        with embedded_redis() as server:
            case = Case(lease_s, num_orphans, slots, kills)
            found.append(asyncio.run(measure_turns(server.url, Objects.open("memory:///"), case)))
    return found[0], found[1]


if __name__ == "__main__":
    run(__doc__, measure, lease_s=2, orphans=20, rounds=5, slots=32)
