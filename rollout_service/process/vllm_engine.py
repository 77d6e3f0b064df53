"""Runs vLLM, on CPU and CUDA; the only file that imports it. `process_engine.py` does the rest.

vLLM 0.32 asks for care in some places; docs/real-models.md tells each with its symptom:

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
from collections.abc import AsyncGenerator, Generator
from functools import partial
from pathlib import Path
from typing import Any

from base_model.device import alone_on
from common.children.own_folder import roomy
from common.errors import InvalidInput, Unavailable
from common.models.families import unsupported_on_cpu
from common.models.weight_files import LINEAR_LAYERS
from common.text.model_folder import read_config
from common.text.tokens import ChatTokenizer
from common.wire.messages import Tops
from rollout_service.process.adapter_files import AdapterFiles, linear_shapes
from rollout_service.process.core import AdapterFolder, CoreDied, SamplingRequest, TokenChunk, UnreadableAdapter
from rollout_service.process.process_engine import ProcessEngine, Shape
from rollout_service.settings import RolloutSettings

MAX_TEMPERATURE = 2.0
"""vLLM's own limit."""
MAX_TOP_LOGPROBS = 20
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, a token's log-prob outside top_p or top_k, which JSON cannot say."""
CHUNK_TOKENS = 8192
"""The most tokens of a step on CUDA; longer prompts are prefilled in pieces, with rows that decode."""
INTERVAL = 8
"""Tokens given at once on CUDA: each time costs the worker's loop 50 us. On a CPU a turn would pass for hanging meanwhile."""
IN_THE_CORE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Computes in the engine core's process. On a CPU vLLM would start another, and both would spin in their waits."""
SLEEP_LEVEL = 2
"""Weights are dropped and read again, from the page cache at the best: a copy of them for each process (1) would need the host's memory."""
ASLEEP_BYTES = 2 << 30
"""Memory of a device that a sleeping process keeps, expected: its context, its graphs, and what libraries hold."""
STOP_S = 1.0
"""The time that vLLM gets to stop before its processes are killed."""


def vllm_engine(settings: RolloutSettings, folder: Path, tokenizer: ChatTokenizer) -> ProcessEngine:
    """Makes an engine for the base model in a folder, not started yet.

    Raises InvalidInput if vLLM is not installed, or not for this device or base model.
    """
    check_installed(settings)
    _check_base(settings, folder)
    parent = roomy(settings.rollout_idle_adapter_bytes)
    files = AdapterFiles(linear_shapes(folder), settings.vllm_max_lora_rank, parent=parent)
    shape = Shape(
        tokenizer.vocab_size,
        tokenizer.context,
        settings.engine_slots,
        settings.vllm_max_loras,
        settings.vllm_max_known_loras,
        MAX_TEMPERATURE,
        masks=True,
    )
    turn = partial(alone_on, settings.rollout_device, settings.vllm_tensor_parallel)
    return ProcessEngine(lambda: VllmCore(settings, folder, tokenizer.context), files, tokenizer, shape, turn)


class VllmCore:
    """Implements `Core`: one `AsyncLLM` and the processes that it starts."""

    def __init__(self, settings: RolloutSettings, folder: Path, context: int) -> None:
        self._choices = settings, folder, context
        self._interval = 1 if _on_a_cpu(settings) else INTERVAL
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
            self._llm = await asyncio.to_thread(_launch, *self._choices)
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
        _end_messages(self._llm.engine_core.resources)

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

    async def sleep(self) -> None:
        with self._trusted():
            await self._llm.sleep(SLEEP_LEVEL)

    async def wake(self) -> None:
        with self._trusted():
            await self._llm.wake_up(["weights"])
            await self._llm.collective_rpc("reload_weights")  # from the files; it forgets all adapters
            await self._llm.wake_up(["kv_cache"])
        self._loras = {}

    @contextlib.contextmanager
    def _trusted(self) -> Generator[None]:
        """Raises CoreDied if the block fails."""
        try:
            yield
        except Exception as error:  # the boundary: vLLM raises many kinds, for want of memory too
            raise CoreDied(repr(error)) from error

    async def sample(self, request: SamplingRequest) -> AsyncGenerator[TokenChunk]:
        prompt = {"type": "token", "prompt_token_ids": request.tokens, "cache_salt": request.salt}
        lora = self._loras[request.adapter.number]
        last, waiting, finished = 0 if request.chat else 1, None, False
        parameters = _parameters(request, 1 if request.by_token else self._interval)
        try:
            waiting = await self._llm.add_request(request.id, prompt, parameters, lora_request=lora, priority=last)
            while not finished:
                output = waiting.get_nowait() or await waiting.get()
                finished = output.finished
                yield _chunk(output, request.num_top_logprobs)
        except asyncio.CancelledError:
            await self._llm.abort(request.id)  # which gives the tokens that wait for their interval
            if waiting and (output := waiting.get_nowait()) and output.outputs[0].token_ids:
                yield _chunk(output, request.num_top_logprobs)
            raise
        except Exception as error:  # the boundary: requests are checked, so it is the process's trouble
            raise CoreDied(repr(error)) from error
        finally:
            await self._llm.abort(request.id)  # one that has ended is not known any more

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
        bare = AdapterFolder(0, "", self._choices[1])
        self._loras[0] = None
        for temperature in (0.0, 1.0):
            request = SamplingRequest(f"warm-up-{temperature}", [0, 0], bare, "warm-up", temperature, 1.0, 1, 4, (), 0)
            async for _ in self.sample(request):
                pass


def check_installed(settings: RolloutSettings) -> None:
    """Prepares this process's environment for vLLM. Raises InvalidInput if it is missing, or for another device."""
    _set_environment(settings)
    try:
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InvalidInput(
            f"MARLAAS_ENGINE=vllm needs vLLM, install it with: make vllm, or from a wheel: marlaas[vllm] ({error})"
        ) from error
    device_type = current_platform.device_type
    if device_type != settings.rollout_device:
        raise InvalidInput(
            f"this vLLM computes on {device_type}, not on MARLAAS_ROLLOUT_DEVICE={settings.rollout_device}: "
            "set that, or run make vllm"
        )


def _check_base(settings: RolloutSettings, folder: Path) -> None:
    """Raises InvalidInput for a base model that vLLM does not compute on this device."""
    config = read_config(folder)
    if _on_a_cpu(settings) and (refused := [*unsupported_on_cpu(config)]):
        raise InvalidInput(
            f"{folder}: on a CPU vLLM does not compute {', nor '.join(refused)}: set MARLAAS_ENGINE=torch"
        )


def _on_a_cpu(settings: RolloutSettings) -> bool:
    return settings.rollout_device == "cpu"


def _set_environment(settings: RolloutSettings) -> None:
    """Sets what vLLM takes from the environment only, unless the operator has; its processes inherit it."""
    chosen = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if _on_a_cpu(settings):
        # The first compiles small helpers for half a minute in each process; the second binds threads to cores that
        # other workers use too.
        chosen |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in chosen.items():
        os.environ.setdefault(name, value)


def _launch(settings: RolloutSettings, folder: Path, context: int) -> Any:
    """Starts an AsyncLLM and its processes. Blocks for many seconds."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**_arguments(settings, folder, context)))


def _arguments(settings: RolloutSettings, folder: Path, context: int) -> dict[str, Any]:
    is_cpu = _on_a_cpu(settings)
    kv_bytes = settings.rollout_kv_bytes if is_cpu or "rollout_kv_bytes" in settings.model_fields_set else None
    return {
        "kv_cache_memory_bytes": kv_bytes,
        "gpu_memory_utilization": 0.01 if kv_bytes else settings.vllm_memory_fraction,  # that must be free at the start
        "model": str(folder),
        "structured_outputs_config": {"backend": "guidance"},  # it reads the tokenizer for this alone: ids in, ids out
        "generation_config": "vllm",  # not the base model's own sampling defaults
        "dtype": settings.dtype,
        "tensor_parallel_size": settings.vllm_tensor_parallel,
        "distributed_executor_backend": IN_THE_CORE if is_cpu and settings.vllm_tensor_parallel == 1 else None,
        "enforce_eager": settings.vllm_enforce_eager or is_cpu,
        "max_model_len": context,
        "max_num_seqs": settings.engine_slots,
        "scheduling_policy": "priority",  # chats before others, where memory is short
        "max_num_batched_tokens": max(context, 2048) if is_cpu else CHUNK_TOKENS,
        "enable_chunked_prefill": not is_cpu,
        "seed": secrets.randbits(31),  # or all workers draw the same
        "enable_prefix_caching": True,
        "enable_sleep_mode": bool(settings.pool_worker),
        "enable_lora": True,
        "max_loras": settings.vllm_max_loras + 1,  # and the one that stands for the bare base model
        "max_cpu_loras": max(settings.vllm_max_loras, settings.vllm_max_known_loras) + 1,
        "max_lora_rank": settings.vllm_max_lora_rank,
        "lora_target_modules": list(LINEAR_LAYERS),  # no head: its wrapper fails on prompts' log-probs
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_TOP_LOGPROBS,
        "disable_log_stats": True,
        "worker_extension_cls": "rollout_service.process.vllm_guard.Guard",
    }


def _end_messages(resources: Any) -> None:
    """Ends the context of its sockets, which the garbage collector would end in any thread. Closes them before: where the process was
    dead already vLLM does so only later, in this loop, and a context waits for its sockets."""
    named = (f"{name}_socket" for name in ("output", "input", "first_req_send", "first_req_rcv", "stats_update"))
    for socket in filter(None, (getattr(resources, name) for name in named)):
        socket.close(linger=0)
    resources.ctx.destroy(linger=0)


def _parameters(request: SamplingRequest, interval: int) -> Any:
    from vllm.sampling_params import (  # pyright: ignore[reportMissingImports]
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed if request.temperature else None,
        max_tokens=request.max_tokens,
        logprobs=request.num_top_logprobs,
        prompt_logprobs=request.num_top_logprobs if request.prompt_logprobs else None,
        stop_token_ids=list(request.end_ids),
        ignore_eos=True,
        detokenize=False,
        flat_logprobs=True,
        skip_clone=True,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=interval,
        structured_outputs=StructuredOutputsParams(grammar=request.grammar) if request.grammar else None,
    )


def _chunk(output: Any, num_top: int) -> TokenChunk:
    """Reads vLLM's output: for each position the sampled token first, then the best ones. Where two outputs waited, vLLM joins them and
    names a token that is both only once."""
    completion, of_prompt = output.outputs[0], output.prompt_logprobs
    flat = completion.logprobs
    return TokenChunk(
        tokens=list(completion.token_ids),
        logprobs=[flat.logprobs[start] for start in flat.start_indices],
        top_logprobs=_best(flat, num_top),
        finished=output.finished,
        # The prompt's first token has an empty entry. None or empty: not in this output.
        prompt_logprobs=[of_prompt.logprobs[start] for start in of_prompt.start_indices[1:]] if of_prompt else [],
        prompt_top_logprobs=_best(of_prompt, num_top)[1:] if of_prompt else [],
        num_cached=output.num_cached_tokens or 0,
    )


def _best(flat: Any, num_top: int) -> Tops:
    """The best tokens at each position with their log-probs; none at all where none were asked for."""
    pairs = list(zip(flat.token_ids, flat.logprobs, strict=True)) if num_top else []
    spans = zip(flat.start_indices, flat.end_indices, strict=True) if num_top else []
    best = (sorted(dict(pairs[s:e]).items(), key=lambda pair: -pair[1])[:num_top] for s, e in spans)
    return [[(token, max(logprob, LEAST_LOGPROB)) for token, logprob in top] for top in best]
