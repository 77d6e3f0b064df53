"""Settings of one rollout process, read once at its start."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from common.bus.streams import GROUP_ROLLOUT, Cell
from common.settings import Bytes, Settings, dtype_on
from common.worker.underway import Inbox

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM can be started with."""
CHAT_SHARE = 8
"""One part in so many of a worker's slots are as many places for chat besides."""
ON_GPU = {"rollout_slots": 256, "rollout_idle_adapter_bytes": 8 << 30, "vllm_max_loras": 32}
"""Defaults of vLLM on CUDA where they differ: it decodes hundreds of rows in the time of one, and adapters of real bases are large."""


class RolloutSettings(Settings):
    """Environment variables `MARLAAS_<NAME>`."""

    engine: Literal["torch", "vllm"] = "torch"
    """The engine that computes the tokens."""
    rollout_device: str = "cpu"
    """A torch device: cpu, cuda, cuda:1. For vLLM cpu or cuda: it takes the first devices of CUDA_VISIBLE_DEVICES."""
    rollout_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype of the base model and the adapters; log-probs are always float32. auto: bfloat16 on a GPU, float32 on a CPU."""
    rollout_backbone: Literal["auto", "decoder", "transformers"] = "auto"
    """The code that computes the base model in the torch engine. auto: our own decoder on a CPU for the families that it knows, and in
    deterministic mode; elsewhere transformers' modules, as in trainers."""
    rollout_threads: int = Field(default=1, ge=1)
    """Threads of torch. Deterministic mode needs 1."""
    rollout_slots: int = Field(default=128, ge=1)
    """Turns generated at once; on vLLM and CUDA 256 unless set."""
    rollout_orphan_slots: int | None = Field(default=None, ge=0)
    """Turns of dead workers generated at once beyond the slots: as many as there are slots unless set; deterministic: 0."""
    rollout_kv_bytes: Bytes = Field(default=1 << 30, ge=1)
    """Memory for keys and values, and for copies of adapters' factors; turns that do not fit wait. vLLM on CUDA, unless set: what its
    memory_fraction leaves."""
    rollout_idle_adapter_bytes: Bytes = Field(default=64 << 20, ge=0)
    """Memory for adapters that no request names at the moment; on vLLM and CUDA 8 GiB unless set."""
    rollout_progress_s: float = Field(default=1.0, ge=0)
    """Time between two writes of the tokens of long turns under way: a worker that is killed loses about so much of each.
    0: none are written."""
    own_streams: bool = True
    """Later turns come back to the worker that has the keys and values of the earlier ones, unless another would idle."""
    vllm_max_loras: int = Field(default=8, ge=1)
    """Adapters in one batch, the bare base model not counted; turns of others queue behind them. On CUDA 32 unless set."""
    vllm_max_known_loras: int = Field(default=64, ge=1)
    """Adapters that vLLM keeps in the host's memory, from which those without a place in the batch come back unread."""
    vllm_max_lora_rank: int = 32
    """The largest `lora_rank` that this worker takes. Announced, so that the manager refuses jobs with a larger one."""
    vllm_tensor_parallel: int = Field(default=1, ge=1)
    """Devices over which the base model is spread."""
    vllm_memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """The share of a CUDA device's memory that vLLM takes for weights, adapters, keys and values, unless rollout_kv_bytes is set."""
    vllm_enforce_eager: bool = False
    """No CUDA graphs and no compilation: starts faster, samples slower. On the CPU always."""

    @model_validator(mode="before")
    @classmethod
    def _as_a_gpu_needs(cls, given: dict[str, Any]) -> dict[str, Any]:
        device, vllm = given.get("rollout_device", "cpu"), given.get("engine") == "vllm"
        if vllm and device not in ("cpu", "cuda"):
            raise ValueError(f"rollout_device={device}: vLLM takes cpu or cuda, and CUDA_VISIBLE_DEVICES says which")
        return ON_GPU | given if vllm and device == "cuda" else given

    @field_validator("vllm_max_lora_rank")
    @classmethod
    def _is_a_rank(cls, value: int) -> int:
        if value not in LORA_RANKS:
            raise ValueError(f"vLLM takes {', '.join(map(str, LORA_RANKS))}")
        return value

    @property
    def engine_slots(self) -> int:
        """Turns that the engine may generate at once: chats, and those of a dead worker, run next to a full load. In deterministic
        mode, whose self-test has seen `rollout_slots`, chats have places out of them."""
        return self.rollout_slots if self.deterministic else self.rollout_slots + self.chat_slots + self.orphan_slots

    @property
    def shared_slots(self) -> int:
        """Slots for turns of every kind."""
        return self.rollout_slots - self.chat_slots if self.deterministic else self.rollout_slots

    @property
    def chat_slots(self) -> int:
        """Places that only chats take."""
        return min(max(1, self.rollout_slots // CHAT_SHARE), self.rollout_slots - self.deterministic)

    def inboxes(self, cell: Cell, worker: str) -> list[Inbox]:
        """Streams that a worker reads, each before the next. Its own also where nothing is sent there: it looks after those of the dead,
        in which turns may wait from before the setting changed."""
        return [
            Inbox(cell.rollout_chat, GROUP_ROLLOUT, own_slots=self.chat_slots, own=cell.rollout_chat_worker(worker)),
            Inbox(cell.rollout_first, GROUP_ROLLOUT, own=cell.rollout_worker(worker)),
            Inbox(cell.rollout, GROUP_ROLLOUT),
        ]

    @property
    def orphan_slots(self) -> int:
        """Places for turns of dead workers."""
        wanted = self.rollout_slots if self.rollout_orphan_slots is None else self.rollout_orphan_slots
        return 0 if self.deterministic else wanted

    @property
    def dtype(self) -> str:
        """The dtype that `rollout_dtype` stands for here."""
        return dtype_on(self.rollout_device) if self.rollout_dtype == "auto" else self.rollout_dtype
