"""Fused steps with other kernels than a trainer takes by itself, beside those."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from torch.utils.flop_counter import FlopCounterMode

from base_model.decoder import Decoder
from benchmarks._gpu_bases import random_modules
from benchmarks._gpu_parts import done
from benchmarks._report import in_turns, ratio, timed
from benchmarks.fused import Job, fused
from trainer_service.training import Trainer


def measure_kernels(
    default: Trainer, decoder: Decoder, names: Sequence[str], jobs: list[Job], repetitions: int
) -> dict[str, float]:
    """Steps of several jobs, by this trainer and with these kernels in turn; operations are those of this trainer.

    Raises ImportError without what a kernel needs, RuntimeError where it cannot run.
    """
    trainers = {"kernels": _with_kernels(default, decoder, names), "default": default}
    device = default.backbone.device
    runs = {name: timed(done(lambda each=each: fused(each, jobs), device)) for name, each in trainers.items()}
    seconds = in_turns(runs, repetitions)
    with FlopCounterMode(display=False) as counter:
        fused(default, jobs)
    fused_s = statistics.median(seconds["kernels"])
    return {
        "tokens_per_s": sum(len(step.rows.tokens) for step, _ in jobs) / fused_s,
        "flops_per_s": counter.get_total_flops() / fused_s,
        "to_default": ratio(seconds["default"], seconds["kernels"]),
    }


def _with_kernels(default: Trainer, decoder: Decoder, names: Sequence[str]) -> Trainer:
    """A trainer over the same weights that keeps as much for the backward."""
    from trainer_service.backbone.device_kernels.choice import use_kernels  # here: they import transformers
    from trainer_service.backbone.modules import ModulesBackbone

    own, backbone = default.backbone, random_modules(decoder)
    assert isinstance(own, ModulesBackbone) and isinstance(backbone, ModulesBackbone)
    use_kernels(backbone, names)
    alike = replace(backbone, num_checkpointed=own.num_checkpointed, max_scores=own.max_scores)
    return Trainer(alike, default.budget)
