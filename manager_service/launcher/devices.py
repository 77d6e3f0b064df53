"""Says which worker computes on which device, with how much of its memory, and what is said of it to whoever starts them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import InvalidInput
from common.settings import explained
from manager_service.launcher.gpus import (
    SERVICES,
    Gpu,
    LocalWorker,
    Needs,
    Seats,
    chosen_seats,
    default_seats,
    described,
    find_gpus,
    parse_devices,
    told_of_others,
    visible,
)
from manager_service.launcher.memory_shares import choose
from manager_service.launcher.settings import LocalSettings

DEVICES = Path("/dev")
SIZES = {"rollout": "MARLAAS_VLLM_TENSOR_PARALLEL", "trainer": "MARLAAS_TRAINER_RANKS"}
"""Numbers of GPUs that a worker takes."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    settings: dict[str, str]
    """Variables for all services."""
    of_workers: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    """More variables, of each worker by its name."""
    lines: list[str] = field(default_factory=list[str])
    """Tell of them."""


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
    seats = _seats(everything, workers, devices, gpus)
    one_each = bool(seats) and (bool(devices) or len(gpus) > 1)
    of_workers = {name: visible(seat, gpus) for name, seat in seats.items()} if one_each else {}
    chosen = choose(everything, workers, seats, gpus)
    taken = {number for seat in seats.values() for number in seat}
    told = [*told_of_others(gpus, taken), *chosen.lines]
    lines = [described(seats, len(gpus))] * one_each + told
    return Arrangement(settings | chosen.settings, of_workers, lines)


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


def _numbered(environment: Mapping[str, str]) -> bool:
    """Has the operator chosen one GPU of several by its number, as in cuda:1?"""
    return any(_device(environment, service).startswith("cuda:") for service in SERVICES)


def _seats(
    environment: Mapping[str, str],
    workers: Sequence[LocalWorker],
    devices: Mapping[str, Sequence[int]],
    gpus: Sequence[Gpu],
) -> Seats:
    """The seats of the workers on GPUs that are known. Raises InvalidInput."""
    needs = {
        service: Needs([worker.name for worker in workers if worker.service == service], _size(environment, service))
        for service in SERVICES
        if _device(environment, service).startswith("cuda")
    }
    if devices:
        return chosen_seats(needs, devices)
    if not gpus or not needs or _numbered(environment):
        return {}
    return default_seats(needs, len(gpus))


def _size(environment: Mapping[str, str], service: str) -> int:
    """Raises InvalidInput for what is no number."""
    said = (
        environment.get(SIZES[service], "1")
        if service == "trainer" or environment.get("MARLAAS_ENGINE") == "vllm"
        else "1"
    )
    if not said.isdecimal() or int(said) < 1:
        raise InvalidInput(f"{SIZES[service]}={said}: a number from 1 on")
    return int(said)


def idle_gpu(environment: Mapping[str, str], devices: Path = DEVICES) -> str | None:
    """A line for whoever starts the services; None if there is no GPU, or trainers have one."""
    has_gpu = any(file.name[6:].isdigit() for file in devices.glob("nvidia*"))
    if not has_gpu or _device(environment, "trainer") != "cpu":
        return None
    return (
        "training is on the CPU, and this machine has a GPU: MARLAAS_TRAINER_DEVICE=cuda and MARLAAS_ROLLOUT_DEVICE=cuda use it,"
        " and `marlaas plan MODEL --gpu 24GB` says what fits"
    )
