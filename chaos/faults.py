"""The table of faults, and how they are drawn: the same seed draws the same faults, however many are taken.

A fault strikes one victim: a process, Redis, the store, or the link to one of them. Faults on different victims overlap;
one whose victim still suffers from another waits for it.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

MANAGERS = ("manager-0", "manager-1")
WORKERS = ("rollout-0", "rollout-1", "env-0", "env-1", "trainer-0", "trainer-1")
PROCESSES = (*MANAGERS, "exporter", *WORKERS)
ROLLOUTS = ("rollout-0", "rollout-1")
CALLING = ("env-0", "env-1")
HELPED = (*CALLING, *MANAGERS)
REDIS, STORE = "redis", "store"
LINKS = ("redis link", "store link")
GAP_S = (0.8, 2.4)
"""Least and most time between two faults."""


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    weight: int
    victims: tuple[str, ...]
    seconds: tuple[float, float]
    """Least and most time until it is healed."""


KINDS = (
    Kind("kill", 38, PROCESSES, (0, 0)),  # SIGKILL
    Kind("stop", 4, WORKERS, (0, 0)),  # SIGTERM, as to one that retires
    Kind("kill as it stops", 2, ROLLOUTS, (0, 0)),  # SIGTERM, and SIGKILL while it hands its turns back
    Kind("freeze as it stops", 2, ROLLOUTS, (0.2, 5)),  # the same with SIGSTOP, SIGCONT
    Kind("kill a helper", 3, HELPED, (0, 0)),  # SIGKILL of a process that it started for graders or large texts
    Kind("kill a call", 2, CALLING, (0, 0)),  # SIGKILL of tenants' code, below the sandbox's own process
    Kind("freeze", 11, PROCESSES, (0.2, 5)),  # SIGSTOP, SIGCONT: up to two and a half leases
    Kind("freeze a helper", 3, HELPED, (0.2, 4)),  # with what it runs for tenants
    Kind(
        "clock", 6, PROCESSES, (0.5, 8)
    ),  # the wall clock is off by a second to a day, either way, and then right again
    Kind("full disk", 3, MANAGERS + WORKERS, (0.5, 4)),  # no file of the process can grow
    Kind("kill", 4, (REDIS,), (0, 2)),  # SIGKILL, and started from its file
    Kind("freeze", 4, (REDIS,), (0.2, 4)),
    Kind("restart", 3, (REDIS,), (0, 2)),  # SIGTERM, and started from its file
    Kind("replace", 3, (REDIS,), (0, 0)),  # killed; a replica that lost the last second takes its place
    Kind("full disk", 3, (REDIS,), (0.5, 3)),  # its file cannot grow; it ends, and is started from it
    Kind("full memory", 3, (REDIS,), (0.5, 4)),  # it is above its limit, and refuses what needs memory
    Kind("away", 4, (STORE,), (0.5, 8)),  # refuses connections
    Kind("slow", 4, (STORE,), (0.5, 6)),  # answers 50 to 500 ms late
    Kind("freeze", 2, (STORE,), (5, 20)),  # takes connections, and answers nothing before it goes on
    Kind("fails", 4, (STORE,), (0.5, 8)),  # one call in ten
    Kind("full disk", 3, (STORE,), (0.5, 6)),  # answers every write with 507
    Kind("cut", 4, LINKS, (0, 0)),  # all connections are reset
    Kind("silent", 3, LINKS, (5, 15)),  # what comes is swallowed, without an end: the bus waits for 10 s
    Kind("late", 3, LINKS, (0.5, 4)),  # each piece comes 5 to 200 ms late
    Kind("halved", 2, LINKS, (0.5, 3)),  # of one piece in twenty one half comes, and then the end
)


@dataclass(frozen=True, slots=True)
class Fault:
    number: int  # from 1
    kind: str
    victim: str
    seconds: float  # until it is healed
    chance: float  # in [0, 1): how bad it is, where there are degrees
    gap_s: float  # before it

    @property
    def cause(self) -> str:
        """The kind as the report counts it: `kill rollout`, `full disk store`."""
        return f"{self.kind} {self.victim.split('-')[0]}"


def draw(seed: int) -> Iterator[Fault]:
    """Faults without end."""
    rng = random.Random(seed)
    weights, number = [kind.weight for kind in KINDS], 0
    while True:
        number += 1
        (kind,) = rng.choices(KINDS, weights)
        victim, seconds, chance = rng.choice(kind.victims), rng.uniform(*kind.seconds), rng.random()
        yield Fault(number, kind.name, victim, seconds, chance, rng.uniform(*GAP_S))
