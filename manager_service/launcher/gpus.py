"""Finds the machine's GPUs, and assigns workers to them.

A worker takes as many GPUs as its tensor-parallel group or its ranks have parts. Numbers are those of nvidia-smi, or
the places in CUDA_VISIBLE_DEVICES where that is set.
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
"""The part of a GPU's memory that counts as nobody's, such as the driver's."""
EXAMPLE = "write rollout:0-3,trainer:4-7"


class LocalWorker(NamedTuple):
    name: str
    service: str  # rollout or trainer
    base: str  # empty: all, in turn


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


Placement = dict[str, tuple[int, ...]]
"""Worker -> the numbers of its GPUs."""


def find_gpus(environment: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that nvidia-smi finds and CUDA_VISIBLE_DEVICES leaves; none where nvidia-smi fails."""
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return []
    query = [program, "--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
        rows = [tuple(map(str.strip, line.split(","))) for line in output.splitlines() if line.strip()]
        gpus = [(uuid, _gpu(index, float(total), float(free))) for index, uuid, total, free in rows]
    except (OSError, subprocess.SubprocessError, ValueError):  # a driver without a device, or of unknown memory
        return []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [gpu for _, gpu in gpus]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [gpu for name in names for uuid, gpu in gpus if name == gpu.name or uuid.startswith(name)]


def _gpu(index: str, total: float, free: float) -> Gpu:
    """`total`, `free`: MiB."""
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


def chosen_placement(needs: Mapping[str, Needs], devices: Mapping[str, Sequence[int]]) -> Placement:
    """Gives workers the GPUs of MARLAAS_DEVICES in order. Raises InvalidInput if they are too few."""
    placement: Placement = {}
    for service, need in needs.items():
        numbers = devices.get(service, ())
        if need.total > len(numbers):
            workers = f"{len(need.workers)} workers of {need.size}"
            raise InvalidInput(f"MARLAAS_DEVICES gives {service} {len(numbers)} GPUs, and {workers} take {need.total}")
        placement |= _in_order(need, numbers)
    return placement


def default_placement(needs: Mapping[str, Needs], num_gpus: int) -> Placement:
    """Rollouts have the first GPUs and trainers the next. Of too few, trainers have the last, and rollouts share the
    others, or all. Raises InvalidInput if one worker takes more than there are."""
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


def _in_order(need: Needs, devices: Sequence[int]) -> Placement:
    """Gives workers GPUs in order. When all are taken, it begins again with the first."""
    groups = [tuple(devices[at : at + need.size]) for at in range(0, len(devices) - need.size + 1, need.size)]
    return {name: groups[number % len(groups)] for number, name in enumerate(need.workers)}


def visible(numbers: Sequence[int], gpus: Sequence[Gpu]) -> dict[str, str]:
    """The variables of a worker with these GPUs, of which it sees no others."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus[number].name for number in numbers),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def described(placement: Placement, num_gpus: int) -> str:
    """A line for whoever starts the services."""
    owners = ", ".join(f"{name} has {' and '.join(map(str, numbers))}" for name, numbers in placement.items())
    idle = num_gpus - len({number for numbers in placement.values() for number in numbers})
    hint = f"; {idle} of {num_gpus} are idle: --rollout, --trainer or more GPUs for each worker take them"
    return f"GPUs: {owners}{hint if idle else ''}; MARLAAS_DEVICES=rollout:0,trainer:1 chooses"


def shared_gpus(gpus: Sequence[Gpu], numbers: Collection[int]) -> list[str]:
    """A line for each of those GPUs on which others hold memory."""
    return [
        f"GPU {number}: others hold {gpu.held / 1e9:.1f} of its {gpu.memory / 1e9:.1f} GB; reckoned with is what is free"
        for number, gpu in enumerate(gpus)
        if number in numbers and gpu.held
    ]


def vllm_stays_awake(environment: Mapping[str, str]) -> bool:
    """Does vLLM keep its memory? On a CPU, and where keys and values may take all that is free."""
    get = environment.get
    on_gpu = "cuda" in get("MARLAAS_ROLLOUT_DEVICE", "") or "rollout" in get("MARLAAS_DEVICES", "")
    return get("MARLAAS_ENGINE") == "vllm" and not (on_gpu and "MARLAAS_ROLLOUT_KV_BYTES" in environment)
