"""Scheduling policies as data, and their rules as pure functions of state.

    policy       jobs at once   rollouts and training          a trajectory at its tools   staleness of a job
    sequential   one            of that job, in turn           frees its slot              0
    synchronous  all            global barrier between them    frees its slot              0
    naive        all            event-driven                   holds its slot              0
    marlaas      all            event-driven                   frees its slot              its `max_staleness`, 0 by default
    bounded      all            event-driven                   frees its slot              its `max_staleness`, eta by default

The first three are the baselines of MARLaaS (arXiv 2605.08527), `marlaas` is its strict versioning, and `bounded` follows AReaL
(arXiv 2505.24298). All else (engine, batching, training queue, fair shares) is the same under each. Each owner keeps one job at
a time, and the barrier, for its own partitions: run one manager to compare.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

MAX_ETA = 64
_NAME = re.compile(r"([a-z]+)(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class Policy:
    """One scheduling policy. Each field is a difference from `marlaas`."""

    name: str
    one_job: bool = False
    """A queued job starts only when no other runs; the oldest goes first."""
    barrier: bool = False
    """Nothing trains until every job's batch is complete; nothing is sampled until all are trained."""
    holds_slots: bool = False
    """A trajectory takes up a rollout slot until it is scored, even while its tools run."""
    eta: int | None = None
    """Staleness of a job that does not ask for one; None: strict."""
    fixed: bool = False
    """Jobs are strict whatever they ask for."""

    def max_staleness(self, asked: int | None) -> int:
        """Versions that a job's trajectories may lag behind. `asked`: the user's choice, if any."""
        if self.fixed:
            return 0
        return asked if asked is not None else self.eta or 0


MARLAAS = Policy("marlaas")
POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("sequential", one_job=True, fixed=True),
        Policy("synchronous", barrier=True, fixed=True),
        Policy("naive", holds_slots=True, fixed=True),
        MARLAAS,
        Policy("bounded", eta=1),
    )
}


def parse_policy(text: str) -> Policy:
    """Reads `marlaas`, or `bounded:4` for another eta than 1. Raises ValueError, which lists the known names."""
    match = _NAME.fullmatch(text)
    policy = POLICIES.get(match[1]) if match else None
    if match is None or policy is None:
        raise ValueError(f"unknown policy {text!r}: use {', '.join(POLICIES)}, or bounded:ETA such as bounded:4")
    if match[2] is None:
        return policy
    if policy.eta is None:
        raise ValueError(f"the policy {policy.name!r} takes no number; bounded:{match[2]} does")
    if not 1 <= int(match[2]) <= MAX_ETA:
        raise ValueError(f"bounded:{match[2]}: eta must be between 1 and {MAX_ETA}")
    return replace(policy, eta=int(match[2]))


def may_start(policy: Policy, *, num_running: int, num_queued: int) -> int:
    """Number of queued jobs that the policy lets start."""
    return min(num_queued, max(0, 1 - num_running)) if policy.one_job else num_queued


def closed(was_closed: bool, *, num_behind: int, num_ready: int, num_training: int) -> bool:
    """Is the barrier closed to rollouts, and open to training? `was_closed`: its last state, at first False.

    It closes when a batch is ready and no job is `behind`, still sampling for its next training. It opens when all batches are
    trained. Later jobs join the rollouts under way, and the next training waits for them.
    """
    if was_closed:
        return num_ready + num_training > 0
    return num_behind == 0 and num_ready > 0


def capacity(*, eta: int, batch_size: int, num_untrained: int) -> int:
    """Groups that a job may still be issued, by AReaL's rule `(eta + version + 1) B - (accepted + running)`.

    `num_untrained`: groups under way, complete, or with a trainer. AReaL counts the `version * B` trained ones too, so the
    versions cancel out; dropped groups do not count. Groups are counted where they are: a counter that a restart could
    lose would lead to a burst.
    """
    return max(0, (eta + 1) * batch_size - num_untrained)
