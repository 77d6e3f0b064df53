"""Makes rows of events. Metrics have the names of TRL and the Tinker cookbook, or else `marlaas/<name>`."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from manager_service.records.sample_records import EventRecord

STEP = "train/global_step"
"""The x axis: the version that a row is about."""

NAMES: Mapping[str, tuple[str, ...]] = {
    "step": (STEP,),
    "reward_mean": ("train/reward", "env/all/reward/total"),
    "reward_std": ("train/reward_std",),
    "loss": ("train/loss",),
    "kl": ("train/kl",),
    "grad_norm": ("train/grad_norm",),
    "learning_rate": ("train/learning_rate", "optim/lr"),
    "entropy": ("optim/entropy",),
    "clip_fraction": ("train/clip_ratio/region_mean",),
    "truncated_share": ("train/completions/clipped_ratio",),
    "sampling_gap": ("train/sampling/sampling_logp_difference/mean",),
    "step_s": ("train/step_time", "time/total"),
    "eval_reward_mean": ("eval/reward", "test/env/all/reward/total"),
    "eval_loss": ("eval/loss", "test/nll"),
}
"""Names of our metrics in TRL (as its W&B callback writes them) and in the cookbook."""
OURS = "marlaas/"
NOT_SHOWN = ("version",)


class Row(msgspec.Struct, frozen=True):
    """The figures of one event."""

    sequence: int  # of the event, ascending in a job
    at: int  # seconds since 1970
    step: int
    metrics: dict[str, float]


def rows_of(events: Iterable[EventRecord]) -> list[Row]:
    """A row for each event that shows figures, in order."""
    return [
        Row(event.sequence, event.created_at, int(event.data.get("step", 0)), named(event.data))
        for event in events
        if event.type == "metrics"
    ]


def named(data: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among an event's data, by the names that they have outside."""
    return {
        name: value
        for key, value in data.items()
        if isinstance(value, int | float) and math.isfinite(value) and key not in NOT_SHOWN
        for name in NAMES.get(key, (OURS + key,))
    }
