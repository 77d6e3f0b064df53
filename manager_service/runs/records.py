"""What is recorded of a run, in `run:<run>`: `spec`, written once by the API, and `state`, by the partition's owner. Both are JSON.

A session is one client; it numbers its runs from 0, and its samplers too. The SDK builds their names itself:

    session        ses-<16 hex digits>
    run            run-<the same digits>-<n>; to its user `<session>:train:<n>`
    sampler        <session>:sample:<n>
    operation      <run>:<seq>, also the id of its future
"""

import math
import re
from typing import Any, Literal

import msgspec

from common.messages import AdapterRef, Failure, LoraSpec

RunStatus = Literal["queued", "creating", "ready", "failed", "ended"]
Kind = Literal["weights", "sampler_weights"]
_PUBLIC = re.compile(r"ses-([0-9a-f]{16}):train:(\d{1,6})")


class RunSpec(msgspec.Struct, frozen=True):
    id: str
    tenant: str
    session: str
    base_model: str  # the cell's name for it
    asked_model: str  # as its user wrote it: the SDK loads the tokenizer of that name
    lora: LoraSpec
    seed: int
    created_at: int  # seconds since 1970
    source: AdapterRef | None = None  # version 0 is a copy of this one; None: drawn from the seed
    with_optimizer: bool = False  # of the source
    weight: float = 1.0  # the tenant's, when it was created
    user_metadata: dict[str, Any] = {}

    @property
    def urgency(self) -> tuple[float, float]:
        """As of a job without priority and deadline."""
        return 0.0, math.inf

    @property
    def public_id(self) -> str:
        return f"{self.session}:train:{self.id.rpartition('-')[2]}"


class Checkpoint(msgspec.Struct, frozen=True):
    """A name of a version."""

    kind: Kind
    name: str
    version: int
    created_at: int
    expires_at: int | None = None


class SamplerState(msgspec.Struct, frozen=True):
    """What a run's sampler samples with."""

    version: int
    inflight: bool = False  # its version follows the run's saves


class RunState(msgspec.Struct):
    """Changes with every operation that is answered."""

    status: RunStatus = "queued"
    version: int = -1  # the newest that is committed; -1: none yet
    head: int = 1  # number of the first operation that has no result
    attempt: int = 0  # number of the last message to a trainer
    sent: int = 0  # number of the last operation of the message that is with a trainer; 0: none is
    sent_to: str = ""  # the one trainer that can carry it out; empty: any
    holder: str = ""  # the trainer with the gradient; empty: none
    held: int = 0  # that trainer's count of the operations in it
    in_log: int = 0  # how many of the log are in it
    failed_at: int | None = None  # a failed operation since the newest version: the next optim_step fails too
    checkpoints: list[Checkpoint] = []
    samplers: dict[str, SamplerState] = {}
    failure: Failure | None = None  # why it can do nothing more


def run_of(public_id: str) -> str | None:
    """The run that its user names so; None for what is no name of a run."""
    found = _PUBLIC.fullmatch(public_id)
    return f"run-{found[1]}-{int(found[2])}" if found else None


def is_run(name: str) -> bool:
    """Does a name that stands where jobs' ids do mean a run?"""
    return name.startswith("run-")
