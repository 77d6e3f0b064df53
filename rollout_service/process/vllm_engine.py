"""Runs vLLM, on CPU and CUDA; the only file that imports it. `process_engine.py` does the rest of the engine.

vLLM 0.32 asks for care in some places; docs/vllm.md tells each with its symptom:

    every request names an adapter    next to rows with adapters, one without is computed with another's weights
    prompts are prefilled whole on a CPU: there a seeded request whose prompt is prefilled in pieces kills the process
    `add_lora` before `generate`      a request whose adapter cannot be read kills the process; `add_lora` merely raises
    every await ends with the process `add_lora` never returns if it dies meanwhile: `process_engine.Life.unless_over`
    parameters are checked before     one that does not decode ends the process's reading thread, and nothing is heard again
"""

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from base_model.device import alone_on
from common.children.own_folder import roomy
from common.errors import InvalidInput, Unavailable
from common.models.families import unsupported_on_cpu
from common.models.weight_files import LINEAR_LAYERS
from common.text.model_folder import read_config
from rollout_service.engine import Tokenizer
from rollout_service.process.adapter_files import AdapterFiles, linear_shapes
from rollout_service.process.core import AdapterFolder, CoreDied, SamplingRequest, TokenChunk, UnreadableAdapter
from rollout_service.process.process_engine import ProcessEngine, Shape

MAX_TEMPERATURE = 2.0
"""vLLM's own limit."""
MAX_TOP_LOGPROBS = 20
LEAST_LOGPROB = -9999.0
"""Stands for the log-prob of a token that top_p or top_k excludes, minus infinity, which JSON cannot say."""
CHUNK_TOKENS = 8192
"""The most tokens of a step on CUDA; longer prompts are prefilled in pieces, beside rows that decode."""
IN_THE_CORE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Computes in the engine core's process. On a CPU vLLM would start another one, and both would spin while they wait for each other."""
STOP_S = 1.0
"""The time that vLLM gets to stop before its processes are killed; nobody waits for its answers any more."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """The operator's choices; `settings.py` explains each."""

    folder: Path  # the base model
    device: str
    dtype: str
    slots: int
    max_loras: int
    max_known: int  # adapters in its memory
    max_lora_rank: int
    tensor_parallel: int
    memory_fraction: float
    kv_bytes: int  # on the CPU
    enforce_eager: bool
    idle_adapter_bytes: int  # for which their files need room

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"


class BaseTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows the base model's sizes; `common.text.tokens.ChatTokenizer` is one."""

    context: int
    vocab_size: int


def vllm_engine(options: VllmOptions, tokenizer: BaseTokenizer) -> ProcessEngine:
    """Makes an engine, not started yet. Raises InvalidInput if vLLM is not installed, or not for this device or base model."""
    check_installed(options)
    _check_base(options)
    parent = roomy(options.idle_adapter_bytes)
    files = AdapterFiles(linear_shapes(options.folder), options.max_lora_rank, parent=parent)
    shape = Shape(
        tokenizer.vocab_size, tokenizer.context, options.slots, options.max_loras, options.max_known, MAX_TEMPERATURE
    )
    turn = partial(alone_on, options.device, options.tensor_parallel)
    return ProcessEngine(lambda: VllmCore(options, tokenizer.context), files, tokenizer, shape, turn)


class VllmCore:
    """Implements `Core`: one `AsyncLLM` and the processes that it starts."""

    def __init__(self, options: VllmOptions, context: int) -> None:
        self._options = options
        self._context = context
        self._llm: Any = None
        self._pid = 0
        self._dead = asyncio.Event()
        self._loras: dict[int, Any] = {}  # number of the adapter -> LoRARequest

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def kv_tokens(self) -> int | None:
        """Its blocks times their tokens, fewer where layers keep different numbers of them."""
        return self._llm.vllm_config.cache_config.kv_cache_size_tokens

    async def start(self) -> None:
        """Raises Unavailable if vLLM does not come up."""
        try:
            self._llm = await asyncio.to_thread(_launch, self._options, self._context)
        except Exception as error:  # the boundary: vLLM raises many kinds
            raise Unavailable(f"vLLM did not start, its own log says why: {error!r}") from error
        self._watch(self._llm.engine_core.resources.engine_manager.processes[0].pid)
        await self._llm.collective_rpc("end_with", args=(os.getpid(),))
        await self._warm_up()

    async def stop(self) -> None:
        if self._llm is None:
            return
        await asyncio.to_thread(self._llm.shutdown, STOP_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._dead.wait()
        if not self._dead.is_set():
            os.kill(self._pid, signal.SIGKILL)
            await self._dead.wait()
        # It closes its sockets, and leaves their context to the garbage collector, which ends it in whatever thread it runs.
        self._llm.engine_core.resources.ctx.destroy(linger=0)

    async def wait_dead(self) -> None:
        await self._dead.wait()

    async def add(self, adapter: AdapterFolder) -> None:
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        lora: Any = LoRARequest(adapter.name, adapter.number, str(adapter.folder))
        try:
            await self._llm.add_lora(lora)
        except Exception as error:  # the boundary: vLLM raises what its reader raised, as text
            if self._llm.errored:
                raise CoreDied(repr(error)) from error
            raise UnreadableAdapter(str(error)) from error
        self._loras[adapter.number] = lora

    async def remove(self, adapter: AdapterFolder) -> None:
        await self._llm.remove_lora(adapter.number)
        del self._loras[adapter.number]

    async def sample(self, request: SamplingRequest) -> AsyncGenerator[TokenChunk]:
        prompt = {"type": "token", "prompt_token_ids": request.tokens, "cache_salt": request.salt}
        lora = self._loras[request.adapter.number]
        outputs: Any = self._llm.generate(prompt, _parameters(request), request.id, lora_request=lora)
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield _chunk(output, request.num_top_logprobs)
        except Exception as error:  # the boundary: requests are checked before, so it is the process's trouble
            raise CoreDied(repr(error)) from error

    def _watch(self, pid: int) -> None:
        """Sets `_dead` when the engine's process ends."""
        self._pid = pid
        loop, process = asyncio.get_running_loop(), os.pidfd_open(pid)

        def ended() -> None:
            loop.remove_reader(process)
            os.close(process)
            self._dead.set()

        loop.add_reader(process, ended)

    async def _warm_up(self) -> None:
        """Samples a little: the first requests of a process compile and allocate."""
        bare = AdapterFolder(0, "", self._options.folder)
        self._loras[0] = None
        for temperature in (0.0, 1.0):
            request = SamplingRequest(f"warm-up-{temperature}", [0, 0], bare, "warm-up", temperature, 1.0, 1, 4, (), 0)
            async for _ in self.sample(request):
                pass


def check_installed(options: VllmOptions) -> None:
    """Prepares this process's environment for vLLM. Raises InvalidInput if it is missing, or is for another device."""
    _set_environment(options)
    try:
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InvalidInput(
            f"MARLAAS_ENGINE=vllm needs vLLM, install it with: make vllm, or from a wheel: marlaas[vllm] ({error})"
        ) from error
    found = current_platform.device_type
    if found != options.device.partition(":")[0]:
        raise InvalidInput(
            f"this vLLM computes on {found}, not on MARLAAS_ROLLOUT_DEVICE={options.device}: set that, or run make vllm"
        )


def _check_base(options: VllmOptions) -> None:
    """Raises InvalidInput for a base model that vLLM does not compute on this device."""
    config = read_config(options.folder)
    if options.is_cpu and (refused := [*unsupported_on_cpu(config)]):
        raise InvalidInput(
            f"{options.folder}: on a CPU vLLM does not compute {', nor '.join(refused)}: set MARLAAS_ENGINE=torch"
        )


def _set_environment(options: VllmOptions) -> None:
    """Sets what vLLM takes from the environment alone, unless the operator has set it; its processes inherit it."""
    chosen = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if options.is_cpu:
        # The first compiles small helpers for half a minute in each process; the second binds threads to cores that
        # other workers use too.
        chosen |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in chosen.items():
        os.environ.setdefault(name, value)


def _launch(options: VllmOptions, context: int) -> Any:
    """Starts an AsyncLLM and its processes. Blocks for many seconds."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**_arguments(options, context)))


def _arguments(options: VllmOptions, context: int) -> dict[str, Any]:
    memory: Mapping[str, Any] = (
        {"kv_cache_memory_bytes": options.kv_bytes}
        if options.is_cpu
        else {"gpu_memory_utilization": options.memory_fraction}
    )
    return {
        **memory,
        "model": str(options.folder),
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "generation_config": "vllm",  # not the base model's own sampling defaults
        "dtype": options.dtype,
        "tensor_parallel_size": options.tensor_parallel,
        "distributed_executor_backend": IN_THE_CORE if options.is_cpu and options.tensor_parallel == 1 else None,
        "enforce_eager": options.enforce_eager or options.is_cpu,
        "max_model_len": context,
        "max_num_seqs": options.slots,
        "max_num_batched_tokens": max(context, 2048) if options.is_cpu else CHUNK_TOKENS,
        "enable_chunked_prefill": not options.is_cpu,
        "seed": secrets.randbits(31),  # or all workers draw the same
        "enable_prefix_caching": True,
        "enable_lora": True,
        "max_loras": options.max_loras + 1,  # and the one that stands for the bare base model
        "max_cpu_loras": max(options.max_loras, options.max_known) + 1,
        "max_lora_rank": options.max_lora_rank,
        "lora_target_modules": list(LINEAR_LAYERS),  # not the head, whose wrapper fails on log-probs of prompts
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_TOP_LOGPROBS,
        "disable_log_stats": True,
        "worker_extension_cls": "rollout_service.process.vllm_guard.Guard",
    }


def _parameters(request: SamplingRequest) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed if request.temperature else None,
        max_tokens=request.max_tokens,
        logprobs=request.num_top_logprobs,
        prompt_logprobs=0 if request.prompt_logprobs else None,  # of the prompt's own tokens, no others
        stop_token_ids=list(request.end_ids),
        ignore_eos=True,
        detokenize=False,
        flat_logprobs=True,
        skip_clone=True,
        output_kind=RequestOutputKind.DELTA,
    )


def _chunk(output: Any, num_top: int) -> TokenChunk:
    """Reads vLLM's output, which lists for each position the sampled token first, then the best ones by rank."""
    completion = output.outputs[0]
    flat = completion.logprobs
    starts, ends = flat.start_indices, flat.end_indices
    pairs = list(zip(flat.token_ids, flat.logprobs, strict=True))
    top = [
        [(t, max(p, LEAST_LOGPROB)) for t, p in pairs[s + 1 : e][:num_top]] for s, e in zip(starts, ends, strict=True)
    ]
    return TokenChunk(
        tokens=list(completion.token_ids),
        logprobs=[flat.logprobs[start] for start in starts],
        top_logprobs=top if num_top else [],
        finished=output.finished,
        prompt_logprobs=_of_prompt(output.prompt_logprobs),
    )


def _of_prompt(flat: Any) -> list[float]:
    """The log-prob of each prompt token but the first, for which vLLM has an empty entry. None, or empty: they are not in this output."""
    return [flat.logprobs[start] for start in flat.start_indices[1:]] if flat else []
