"""Assigns workers to devices, and tells each how much memory it may use."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import InvalidInput
from common.models.host_memory import host_bytes
from common.settings import explained
from manager_service.launcher.fitting import USABLE
from manager_service.launcher.gpus import (
    SERVICES,
    Gpu,
    LocalWorker,
    Needs,
    Placement,
    chosen_placement,
    default_placement,
    described,
    find_gpus,
    parse_devices,
    shared_gpus,
    visible,
)
from manager_service.launcher.memory_shares import choose
from manager_service.launcher.settings import LocalSettings

DEVICES = Path("/dev")
SIZES = {"rollout": "MARLAAS_VLLM_TENSOR_PARALLEL", "trainer": "MARLAAS_TRAINER_RANKS"}
"""The settings that say how many GPUs one worker takes."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    settings: dict[str, str]
    """Variables for all services."""
    of_workers: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    """More variables, by a worker's name."""
    lines: list[str] = field(default_factory=list[str])
    """Lines about them, for whoever starts the services."""


def arrange(environment: Mapping[str, str], workers: Sequence[LocalWorker]) -> Arrangement:
    """Raises InvalidInput for MARLAAS_DEVICES that make no sense here, and where the base models do not fit."""
    try:
        own = LocalSettings.of(environment)
    except ValueError as error:
        raise InvalidInput(explained(error)) from error
    on_gpu = any(_device(environment, service).startswith("cuda") for service in SERVICES)
    gpus = find_gpus(environment) if own.devices or on_gpu else []
    devices = parse_devices(own.devices, len(gpus)) if own.devices else {}
    settings = _on_gpus(environment, devices)
    everything = {**environment, **settings}
    placement = _placement(everything, workers, devices, gpus)
    one_each = bool(placement) and (bool(devices) or len(gpus) > 1)
    of_workers = {name: visible(numbers, gpus) for name, numbers in placement.items()} if one_each else {}
    settings |= _pool_bytes(everything, workers, placement, gpus)
    chosen = choose(everything, workers, placement, gpus)
    taken = {number for numbers in placement.values() for number in numbers}
    lines = [described(placement, len(gpus))] if one_each else []
    return Arrangement(settings | chosen.settings, of_workers, [*lines, *shared_gpus(gpus, taken), *chosen.lines])


def _pool_bytes(
    environment: Mapping[str, str], workers: Sequence[LocalWorker], placement: Placement, gpus: Sequence[Gpu]
) -> dict[str, str]:
    """An equal part of the memory for each worker that serves several base models, unless somebody has said how much."""
    if "MARLAAS_POOL_BYTES" in environment or all(worker.base for worker in workers):
        return {}
    holders = Counter(number for numbers in placement.values() for number in numbers)
    parts = [USABLE * gpus[number].free / num for number, num in holders.items()]
    if on_cpu := sum(worker.name not in placement for worker in workers):
        parts.append(USABLE * host_bytes() / on_cpu)
    return {"MARLAAS_POOL_BYTES": str(int(min(parts)))}


def _device(environment: Mapping[str, str], service: str) -> str:
    return environment.get(f"MARLAAS_{service.upper()}_DEVICE", "cpu")


def _on_gpus(environment: Mapping[str, str], devices: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Services with GPUs compute on them. Raises InvalidInput for one that is told otherwise."""
    names = {service: f"MARLAAS_{service.upper()}_DEVICE" for service in devices}
    for service, name in names.items():
        if environment.get(name, "cuda") != "cuda":
            raise InvalidInput(
                f"MARLAAS_DEVICES names GPUs of {service}, and {name}={environment[name]}: leave one of them out"
            )
    return dict.fromkeys(names.values(), "cuda")


def _placement(
    environment: Mapping[str, str],
    workers: Sequence[LocalWorker],
    devices: Mapping[str, Sequence[int]],
    gpus: Sequence[Gpu],
) -> Placement:
    """The GPUs of the workers; none where CUDA chooses, or nvidia-smi finds none. Raises InvalidInput."""
    needs = {
        service: Needs([worker.name for worker in workers if worker.service == service], _size(environment, service))
        for service in SERVICES
        if _device(environment, service).startswith("cuda")
    }
    if devices:
        return chosen_placement(needs, devices)
    by_number = any(_device(environment, service).startswith("cuda:") for service in SERVICES)  # as in cuda:1
    if not gpus or not needs or by_number:
        return {}
    return default_placement(needs, len(gpus))


def _size(environment: Mapping[str, str], service: str) -> int:
    """Raises InvalidInput for what is no number."""
    if service == "rollout" and environment.get("MARLAAS_ENGINE") != "vllm":
        return 1
    size = environment.get(SIZES[service], "1")
    if not size.isdecimal() or int(size) < 1:
        raise InvalidInput(f"{SIZES[service]}={size}: a number from 1 on")
    return int(size)


def idle_gpu(environment: Mapping[str, str], devices: Path = DEVICES) -> str | None:
    """A line for whoever starts the services; None if there is no GPU, or trainers have one."""
    has_gpu = any(file.name[6:].isdigit() for file in devices.glob("nvidia*"))
    if not has_gpu or _device(environment, "trainer") != "cpu":
        return None
    return (
        "training is on the CPU, and this machine has a GPU: MARLAAS_TRAINER_DEVICE=cuda"
        " and MARLAAS_ROLLOUT_DEVICE=cuda use it, and `marlaas plan MODEL --gpu 24GB` says what fits"
    )
