"""Settings of one trainer process, read once at its start."""

from typing import Literal

from pydantic import Field, field_validator

from common.settings import Bytes, Settings, dtype_on

DEVICE_KERNELS = ("varlen", "lora", "compile")
"""Kernels for CUDA: of attention, of adapters' products and log-probs, and of whole layers, which need that of attention."""

AUTO = "auto"

GPU_TOKENS = 16_384
"""Tokens of a micro-batch on a GPU at most, where nobody has said how many: more are no faster."""


class TrainerSettings(Settings):
    """Environment variables `MARLAAS_<NAME>`."""

    trainer_device: str = "cpu"
    """A torch device: cpu, cuda, cuda:1."""
    trainer_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype of the base model; adapters and moments are always float32. auto: bfloat16 on a GPU, float32 on a CPU."""
    trainer_backbone: Literal["auto", "decoder", "transformers"] = "auto"
    """Code that computes the base model. decoder: ours, the only one in deterministic mode; transformers: transformers' own modules, for
    every family that it has. auto: the decoder on a CPU for the families that it knows, else transformers."""
    trainer_threads: int = Field(default=1, ge=1)
    """Threads of torch, of each rank. Deterministic mode needs 1."""
    trainer_ranks: int = Field(default=1, ge=1)
    """Processes, each with a part of the base model; with trainer_device=cuda, each on a device of its own. More than 1 needs the
    transformers backbone, and no deterministic mode."""
    trainer_micro_batch_tokens: int = Field(default=2048, ge=1)
    """Tokens in one forward and backward, padding included: on a CPU more do not make it faster. On a GPU, where nobody has said how
    many, up to 16,384, as many as its memory holds. Of each rank. Results depend on it by rounding only, in deterministic mode not at
    all."""
    trainer_memory_bytes: Bytes = Field(default=0, ge=0)
    """Memory that one forward and backward may take on a rank, by a measurement at the start. 0: half of what is free then, and what the
    control groups of a container leave. Say it where workers that share a device or a machine start at once: each finds free what
    the others are about to take."""
    trainer_memory_fraction: float = Field(default=1.0, gt=0, le=1)
    """The most of a CUDA device's memory for this process's tensors, if it has one rank: beyond it a step is out of memory."""
    trainer_checkpointing: bool = False
    """Keep only each layer's input and compute the rest again in the backward: less memory, a third more time. The transformers
    backbone does so by itself for as many layers as memory demands; this makes it all."""
    trainer_kernels: str = "auto"
    """Kernels with which the transformers backbone computes on CUDA, comma-separated: `varlen` for attention, `lora` for adapters'
    products and log-probs, `compile` for whole layers. Empty: its plain path. auto: all of them on one GPU of capability 8.0 or
    newer, in bfloat16, where they run; elsewhere the plain path."""
    trainer_cache_bytes: Bytes = Field(default=0, ge=0)
    """Memory for adapters with optimiser state, kept between their steps, and as much again for gradients of runs; the least
    recently used are dropped first. 0: for four adapters of rank 32, at most an eighth of what is free at the start, at
    least 512 MiB."""

    @field_validator("trainer_kernels")
    @classmethod
    def _are_known(cls, value: str) -> str:
        if value == AUTO:
            return value
        names = _names(value)
        if len({*names} & {*DEVICE_KERNELS}) < len(names):
            raise ValueError(f"auto, or some of {', '.join(DEVICE_KERNELS)}, comma-separated")
        return value

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names in `trainer_kernels`; none, if that is auto."""
        return () if self.trainer_kernels == AUTO else _names(self.trainer_kernels)

    @property
    def dtype(self) -> str:
        """The dtype that `trainer_dtype` stands for here."""
        return dtype_on(self.trainer_device) if self.trainer_dtype == "auto" else self.trainer_dtype

    @property
    def most_tokens(self) -> int:
        """Tokens of a micro-batch where memory holds more than `trainer_micro_batch_tokens`."""
        chosen = "trainer_micro_batch_tokens" in self.model_fields_set or not self.trainer_device.startswith("cuda")
        return self.trainer_micro_batch_tokens if chosen else GPU_TOKENS


def _names(value: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in value.split(","))))
