"""Finds the machine's GPUs, and says which worker computes on which.

A worker takes as many GPUs as its tensor-parallel group, or its ranks, have parts. They are numbered as nvidia-smi has them, or from 0 as
CUDA_VISIBLE_DEVICES has them, where the operator has set that.
"""

import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.errors import InvalidInput

SERVICES = ("rollout", "trainer")
TIMEOUT_S = 30.0
MIB = 1 << 20
UNNOTICED = 0.03
"""A part of a GPU's memory within what plans leave: less is not reckoned with."""
EXAMPLE = "write rollout:0-3,trainer:4-7"


class LocalWorker(NamedTuple):
    name: str
    service: str  # rollout or trainer
    base: str


class Gpu(NamedTuple):
    name: str  # as CUDA_VISIBLE_DEVICES has it
    memory: float  # bytes, all of it
    held: float = 0  # bytes that others hold now

    @property
    def free(self) -> float:
        return self.memory - self.held


@dataclass(frozen=True, slots=True)
class Needs:
    """The workers of one service that compute on GPUs: by name, and how many GPUs each takes."""

    workers: Sequence[str]
    size: int

    @property
    def total(self) -> int:
        return len(self.workers) * self.size


Seats = dict[str, tuple[int, ...]]
"""LocalWorker -> the numbers of its GPUs."""


def find_gpus(environment: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that nvidia-smi finds and CUDA_VISIBLE_DEVICES leaves; none where nvidia-smi is missing or fails."""
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return []
    query = [program, "--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
        rows = [tuple(map(str.strip, line.split(","))) for line in told.splitlines() if line.strip()]
        found = [(uuid, _gpu(index, float(total), float(free))) for index, uuid, total, free in rows]
    except (
        OSError,
        subprocess.SubprocessError,
        ValueError,
    ):  # a driver without a device, or a memory that it does not know
        return []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [gpu for _, gpu in found]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [gpu for name in names for uuid, gpu in found if name == gpu.name or uuid.startswith(name)]


def _gpu(index: str, total: float, free: float) -> Gpu:
    """`total`, `free`: MiB. What the driver keeps for itself is nobody's, and no reason to tell of others."""
    held = total - free if total - free > UNNOTICED * total else 0
    return Gpu(index, total * MIB, held * MIB)


def parse_devices(text: str, num_gpus: int) -> dict[str, list[int]]:
    """`rollout:0-1,3,trainer:4` -> {"rollout": [0, 1, 3], "trainer": [4]}. Raises InvalidInput."""
    found: dict[str, list[int]] = {}
    service = ""
    for part in text.split(","):
        name, colon, numbers = part.strip().rpartition(":")
        service = name if colon else service
        if service not in SERVICES:
            raise _wrong(text, f"{part!r} names none of {' and '.join(SERVICES)}; {EXAMPLE}")
        first, dash, last = numbers.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise _wrong(text, f"{numbers!r} is neither a number nor a range such as 0-3; {EXAMPLE}")
        if int(last or first) >= num_gpus:
            raise _wrong(text, f"{numbers} is not there: nvidia-smi finds {num_gpus} GPUs here, the first is 0")
        found.setdefault(service, []).extend(range(int(first), int(last or first) + 1))
        if len(set(found[service])) < len(found[service]):
            raise _wrong(text, f"{service} has a GPU twice")
    return found


def _wrong(text: str, reason: str) -> InvalidInput:
    return InvalidInput(f"MARLAAS_DEVICES={text}: {reason}")


def chosen_seats(needs: Mapping[str, Needs], devices: Mapping[str, Sequence[int]]) -> Seats:
    """Gives workers the GPUs that MARLAAS_DEVICES names, in order. Raises InvalidInput if they are too few."""
    for service, need in needs.items():
        if need.total > len(devices.get(service, ())):
            raise InvalidInput(
                f"MARLAAS_DEVICES gives {service} {len(devices.get(service, ()))} GPUs, and {len(need.workers)} workers of {need.size} take"
                f" {need.total}"
            )
    return {name: seat for service, need in needs.items() for name, seat in _in_order(need, devices[service]).items()}


def default_seats(needs: Mapping[str, Needs], num_gpus: int) -> Seats:
    """Rollouts have the first GPUs and trainers the next. Where these are too few, trainers have the last, and rollouts share what is left
    of them, or all. Raises InvalidInput if one worker takes more than there are."""
    rollout, trainer = (needs.get(service, Needs((), 1)) for service in SERVICES)
    if wide := [service for service, need in needs.items() if need.size > num_gpus and need.workers]:
        raise InvalidInput(f"a {wide[0]} worker takes {needs[wide[0]].size} GPUs, and nvidia-smi finds {num_gpus} here")
    everything = range(num_gpus)
    if rollout.total + trainer.total <= num_gpus:
        of_trainers = everything[rollout.total :]
    else:
        of_trainers = everything[-min(trainer.total, num_gpus) or num_gpus :]
    left = everything[: of_trainers[0]] if trainer.workers else everything
    return _in_order(rollout, left if len(left) >= rollout.size else everything) | _in_order(trainer, of_trainers)


def _in_order(need: Needs, devices: Sequence[int]) -> Seats:
    """Begins again with the first GPUs when all are taken."""
    groups = [tuple(devices[at : at + need.size]) for at in range(0, len(devices) - need.size + 1, need.size)]
    return {name: groups[number % len(groups)] for number, name in enumerate(need.workers)}


def visible(seat: Sequence[int], gpus: Sequence[Gpu]) -> dict[str, str]:
    """The variables of a worker with these GPUs, of which it sees no others."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[number].name for number in seat), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def described(seats: Seats, num_gpus: int) -> str:
    """A line for whoever starts the services."""
    told = ", ".join(f"{name} has {' and '.join(map(str, seat))}" for name, seat in seats.items())
    idle = num_gpus - len({number for seat in seats.values() for number in seat})
    more = (
        f"; {idle} of {num_gpus} are idle: --rollout, --trainer or more GPUs for each worker take them" if idle else ""
    )
    return f"GPUs: {told}{more}; MARLAAS_DEVICES=rollout:0,trainer:1 chooses"


def told_of_others(gpus: Sequence[Gpu], numbers: Collection[int]) -> list[str]:
    """A line for each of those GPUs on which others hold memory."""
    return [
        f"GPU {number}: others hold {gpu.held / 1e9:.1f} of its {gpu.memory / 1e9:.1f} GB; reckoned with is what is free"
        for number, gpu in enumerate(gpus)
        if number in numbers and gpu.held
    ]
