"""Says which workers compute on the processor although there is a GPU."""

from collections.abc import Mapping
from pathlib import Path

DEVICES = Path("/dev")


def idle_gpu(environment: Mapping[str, str], devices: Path = DEVICES) -> str | None:
    """A line for whoever starts the services; None if there is no GPU, or trainers have one."""
    has_gpu = any(file.name[6:].isdigit() for file in devices.glob("nvidia*"))
    if not has_gpu or environment.get("MARLAAS_TRAINER_DEVICE", "cpu") != "cpu":
        return None
    return (
        "training is on the CPU, and this machine has a GPU: MARLAAS_TRAINER_DEVICE=cuda and MARLAAS_ROLLOUT_DEVICE=cuda use it,"
        " and `marlaas plan MODEL --gpu 24GB` says what fits"
    )
