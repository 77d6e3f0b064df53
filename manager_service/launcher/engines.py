"""Devices to plan for, what each engine of rollouts takes of one, and its rows and tokens. Only arithmetic.

Of vLLM nothing was measured on a GPU: how it uses its memory is assumed, each part by a constant here.
"""

from typing import Literal, NamedTuple

from common.errors import InvalidInput
from common.models.base_shape import BaseShape
from common.models.footprint import BYTES_OF_SCORE, CPU_PROCESS, GPU_PROCESS, GRAIN, ROWS_PART, cache_room
from common.settings import parse_bytes

EngineName = Literal["torch", "vllm"]
IDLE_ADAPTERS = 64 << 20
MAX_LORAS, MAX_LORA_RANK = {False: 8, True: 32}, 32
"""Adapters in one batch of vLLM by whether on a GPU, and their largest rank, by default."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM can be started with."""
STEP_TOKENS = 8192
"""Tokens of one step of vLLM on a GPU, prompts' pieces included."""
BLOCK = 16
"""Tokens of a block of vLLM's keys and values."""
CUDA_GRAPHS = 1e9
"""Bytes that vLLM's CUDA graphs take: assumed."""
VLLM_PROCESSES = 3e9
"""Bytes of vLLM's processes on a CPU, code and buffers, on a base in the shape of Qwen3-0.6B."""

REACHED = {("torch", False): 0.5, ("vllm", False): 0.5, ("torch", True): 0.2, ("vllm", True): 0.5}
"""The part of the bound on sampled tokens that an engine is expected to reach, by name and whether on a GPU.

The first was measured: steps of 4 and 16 rows in the shape of Qwen3-0.6B, on one core. The others are assumed.
"""
LEAST_STEP_S = {"torch": 0.002, "vllm": 0.003}
"""Seconds of a step on a GPU at least. Of the embedded engine: for each layer, whose kernels its host starts; 58 to 72 ms were
measured for the 28 layers of Qwen3-0.6B, on an H100, with 1 and 8 adapters. Of vLLM: its scheduler and its graphs, assumed."""
PRODUCTS_REACHED = 0.7
"""The part of a GPU's operations a second that the products of training reach: assumed. A CPU's steps reach all, as measured."""
KERNEL_S = 30e-6
"""Seconds in which a GPU's host starts a kernel of training: docs/decisions/backbones.md has a step on an H100."""
KERNELS, KERNELS_AGAIN, OTHER_KERNELS = 337, 126, 190
"""Kernels of a layer in a micro-batch, of one that is computed again, and of what is no layer: counted, with 8 adapters."""
PASSES, SCORE_PASSES = 21, 45
"""Bytes that these read and write for each that is kept for the backward, and for each score: counted for Qwen3-0.6B and 8B."""


class Device(NamedTuple):
    """Memory in bytes, and what bounds speed: bytes and floating-point operations a second."""

    memory: float
    bandwidth: float
    flops: float
    gpu: bool = True


GPUS = {
    "l4": Device(24e9, 300e9, 121e12),
    "a10": Device(24e9, 600e9, 125e12),
    "rtx3090": Device(24e9, 936e9, 71e12),
    "rtx4090": Device(24e9, 1008e9, 165e12),
    "l40s": Device(48e9, 864e9, 362e12),
    "a100": Device(80e9, 2039e9, 312e12),
    "h100": Device(80e9, 3350e9, 989e12),
    "h200": Device(141e9, 4800e9, 989e12),
}
"""Operations a second from the makers' data sheets: dense bfloat16."""
CORE = Device(0, 10e9, 60e9, gpu=False)
"""One core of a server's processor in float32, as measured here."""


def parse_gpu(text: str) -> Device:
    """`24GB`, `80GiB`, or a name in GPUS. A size is as fast as the slowest known GPU of it, or a little less. Raises InvalidInput."""
    if text.lower() in GPUS:
        return GPUS[text.lower()]
    try:
        memory = parse_bytes(text)
    except ValueError:
        memory = 0
    if memory < 1e9:
        raise InvalidInput(f"--gpu {text!r}: a size such as 24GB, or one of {', '.join(GPUS)}")
    known = [gpu for gpu in GPUS.values() if 1.1 * gpu.memory >= memory] or [max(GPUS.values())]
    return min(known, key=lambda gpu: gpu.bandwidth)._replace(memory=memory)


def slots_of(engine: EngineName, *, gpu: bool) -> int:
    """Turns that an engine makes at once by default."""
    return 256 if engine == "vllm" and gpu else 128


class Load(NamedTuple):
    """The work of an engine of rollouts. `parallel`: devices over which the base model is spread."""

    shape: BaseShape
    device: Device
    engine: EngineName
    itemsize: int
    rank: int  # of the adapters
    context: int
    parallel: int = 1

    @property
    def slots(self) -> int:
        return slots_of(self.engine, gpu=self.device.gpu)

    @property
    def beside_kv(self) -> float:
        """Bytes of a device except keys and values."""
        shape = self.shape
        weights = shape.num_weights * self.itemsize / self.parallel
        scores = self.slots * shape.vocab * BYTES_OF_SCORE
        return weights + scores + (self._of_vllm if self.engine == "vllm" else self._of_torch)

    @property
    def _of_torch(self) -> float:
        process = GPU_PROCESS if self.device.gpu else CPU_PROCESS
        prefill = 4 * self.context * (self.shape.hidden + self.shape.ffn) * self.itemsize
        return process + prefill + IDLE_ADAPTERS

    @property
    def _of_vllm(self) -> float:
        """A step's activations, places for adapters, each of the largest rank, and the process."""
        tokens = STEP_TOKENS if self.device.gpu else max(self.context, 2048)
        step = 4 * tokens * (self.shape.hidden + self.shape.ffn / self.parallel) * self.itemsize
        places = MAX_LORAS[self.device.gpu] + 1
        adapters = places * self.shape.adapter_weights(max_lora_rank(self.rank)) * self.itemsize
        return step + adapters + (GPU_PROCESS + CUDA_GRAPHS if self.device.gpu else CPU_PROCESS + VLLM_PROCESSES)

    def rows(self, kv: int) -> int:
        """Rows of the whole context at once, with so many bytes of a device for keys and values."""
        token_bytes = self.shape.kv_bytes(self.itemsize, self.parallel)
        if self.engine == "vllm":
            return kv // (token_bytes * _whole(self.context, BLOCK))
        return cache_room(int(ROWS_PART * kv), self.shape.num_layers) // (token_bytes * _whole(self.context, GRAIN))

    def tokens_per_s(self, rows: int) -> float:
        """The most tokens that are sampled in a second.

        A step reads the weights and the rows' keys and values (half of the context on average) once, and multiplies each
        row with its active weights. Routers choose experts evenly; communication takes no time.
        """
        rows = min(rows, self.slots)
        if not rows:
            return 0.0
        read = self._weights_read(rows) * self.itemsize / self.parallel
        read += rows * self.context / 2 * self.shape.kv_bytes(self.itemsize, self.parallel)
        return rows / max(
            read / self.device.bandwidth, 2 * self.shape.num_active * rows / (self.device.flops * self.parallel)
        )

    def expected_tokens_per_s(self, rows: int) -> float:
        """The tokens that the engine is expected to sample in a second."""
        expected = REACHED[self.engine, self.device.gpu] * self.tokens_per_s(rows)
        if not self.device.gpu:
            return expected
        step_s = LEAST_STEP_S[self.engine] * (self.shape.num_layers if self.engine == "torch" else 1)
        return min(expected, min(rows, self.slots) / step_s)

    def _weights_read(self, rows: int) -> float:
        """Weights that a step of so many rows needs: of the experts, those that some row takes."""
        experts = self.shape.experts
        if experts is None:
            return self.shape.num_weights
        untouched = (1 - experts.active / experts.num) ** rows * (self.shape.num_weights - self.shape.weights_with(0))
        return self.shape.num_weights - untouched


def trained_flops(shape: BaseShape, context: int, *, again: bool) -> float:
    """Floating-point operations that a token costs the trainer, in a row of the whole context:

        2 x weights active for it x (2 + again) + 4 x layers x heads x head size x positions seen x (3 + again)

    The weights are frozen: their backward costs as much as the forward, that of attention twice as much. `again`: layers
    are computed again. A position sees half of the context on average, with sliding windows less.
    """
    weights, seen = 2 * shape.num_active, (context + 1) / 2
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * seen
    return weights * (2 + again) + attention * (3 + again)


def training_s(shape: BaseShape, device: Device, tokens: int, context: int, *, again: bool, kept: float) -> float:
    """The expected seconds of a micro-batch in rows of the whole context: on a GPU of starting kernels, of memory and of products, which
    hardly overlap. `kept`: bytes of a token for the backward, if all is kept."""
    products_s = tokens * trained_flops(shape, context, again=again) / device.flops
    if not device.gpu:
        return products_s
    kernels = OTHER_KERNELS + shape.num_layers * (KERNELS + again * KERNELS_AGAIN)
    moved = tokens * (PASSES * kept * (1 + again / 3) + SCORE_PASSES * shape.vocab)
    return KERNEL_S * kernels + moved / device.bandwidth + products_s / PRODUCTS_REACHED


def max_lora_rank(rank: int) -> int:
    """The largest rank that vLLM is started with, for adapters of this one: all cost as if they had it."""
    return next(each for each in LORA_RANKS if each >= min(rank, LORA_RANKS[-1]))


def _whole(tokens: int, grain: int) -> int:
    return -(-tokens // grain) * grain
