"""Declares the parts of a worker's report."""

from typing import Literal

import msgspec

Tier = Literal["device", "host", "disk", "away"]
"""The place of a closed base model: a closed process; only its files, which are in memory; the disk; not downloaded."""


class Span(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A busy segment of a worker, for the timeline. Seconds of the wall clock of the worker's host."""

    start_s: float
    end_s: float
    tenant: str
    job: str
    phase: str  # "rollout", "env", "train", "load", "switch"


class Outside(msgspec.Struct, frozen=True):
    """Hosts that an env worker may call outside of the service: the operator's lists, see `common.outgoing`."""

    endpoint: str = ""  # for graders `endpoint`
    grader: str = ""  # for graders' models
    openenv: str = ""
    openenv_servers: tuple[str, ...] = ()  # by the operator's names


class InPool(msgspec.Struct, frozen=True):
    """The state of a base model at a pool worker's place, told by its base worker, or by the pool worker while it has none."""

    worker: str  # the pool worker's id
    tier: Tier = "device"
    opens_in_s: float = 0.0  # expected time to open it once it is its turn
    waiting_s: float = 0.0  # age of the oldest entry that nobody has read
