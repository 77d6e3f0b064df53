"""Starts one rollout worker. Wiring only."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from base_model.device import alone_on, held_bytes, keep_freed_memory, prepare_cpu
from base_model.kernels import DEFAULT, choose
from common.bus.bus import Bus
from common.errors import InvalidInput
from common.pool.pool_worker import PooledService
from common.settings import itemsize_of, resolve_model
from common.text.tokens import ChatTokenizer
from common.wire.messages import TurnDelta
from common.worker.service import BuiltService, Parts, run
from common.worker.telemetry import About
from common.worker.worker import Habits
from rollout_service.adapters import AdapterCache
from rollout_service.embedded.backbone.choice import load_backbone
from rollout_service.embedded.convoy.member import take_part
from rollout_service.embedded.pools import EngineLimits
from rollout_service.embedded.selftest import selftest
from rollout_service.embedded.torch_engine import TorchEngine
from rollout_service.handler import RolloutHandler
from rollout_service.process.process_engine import ProcessEngine
from rollout_service.process.vllm_engine import ASLEEP_BYTES, vllm_engine
from rollout_service.settings import RolloutSettings

SELFTEST = "rollout_service.embedded.selftest"


def load_engine(settings: RolloutSettings) -> tuple[TorchEngine | ProcessEngine, str]:
    """The engine, and the fingerprint of the bits that it computes: "" outside deterministic mode.

    Raises InvalidInput for what cannot be done.
    """
    folder = resolve_model(settings.models[settings.model_name])
    return (load_vllm(settings, folder), "") if settings.engine == "vllm" else load_torch(settings, folder)


def load_torch(settings: RolloutSettings, folder: Path) -> tuple[TorchEngine, str]:
    """Loads the base model."""
    deterministic = settings.deterministic
    chosen = (settings.rollout_device, settings.dtype, settings.rollout_threads)
    if deterministic and (chosen != ("cpu", "float32", 1) or settings.rollout_backbone == "transformers"):
        raise InvalidInput(
            "deterministic mode needs rollout_device=cpu, rollout_dtype=float32, rollout_threads=1, and rollout_backbone not transformers"
        )
    choice = choose(SELFTEST, folder, sizes=[settings.engine_slots]) if deterministic else None
    min_rows = choice.kernels.min_rows if choice else DEFAULT.min_rows
    prepare_cpu(settings.rollout_threads)
    model = load_backbone(settings, folder)
    bits = choice.fingerprint(lambda: selftest(model, min_rows, settings.engine_slots)) if choice else ""
    limits = EngineLimits(
        slots=settings.engine_slots,
        kv_bytes=settings.rollout_kv_bytes,
        min_rows=min_rows,
        exact=deterministic,
    )
    return TorchEngine(model, ChatTokenizer.load(folder, settings.max_context), limits=limits), bits


def load_vllm(settings: RolloutSettings, folder: Path) -> ProcessEngine:
    """Loads nothing yet: the engine's process does when it starts."""
    if settings.deterministic:
        raise InvalidInput("deterministic mode needs MARLAAS_ENGINE=torch: vLLM's bits depend on what shares a batch")
    return vllm_engine(settings, folder, ChatTokenizer.load(folder, settings.max_context))


async def build(settings: RolloutSettings, parts: Parts) -> BuiltService:
    keep_freed_memory()  # before the thread that loads has a heap of its own
    with contextlib.ExitStack() as turn:
        if settings.engine == "torch":  # vLLM's process waits for its turn whenever it starts
            await asyncio.to_thread(turn.enter_context, alone_on(settings.rollout_device))
        engine, bits = await asyncio.to_thread(load_engine, settings)
        await engine.start()
    if settings.engine == "torch":
        prepare_cpu(settings.rollout_threads)  # for this thread
    service = serving(settings, parts, engine, bits=bits)
    return service if isinstance(engine, TorchEngine) else _sleeping(service, engine)


def serving(
    settings: RolloutSettings,
    parts: Parts,
    engine: TorchEngine | ProcessEngine,
    heir: Callable[[], str] = str,
    *,
    bits: str = "",
) -> BuiltService:
    """A service of an engine that runs. `heir`: see `RolloutHandler`."""
    adapters = AdapterCache(parts.store, engine, idle_bytes=settings.rollout_idle_adapter_bytes)
    worker = parts.worker if settings.own_streams else ""
    more: dict[str, Any] = {"worker": worker, "deterministic": settings.deterministic, "heir": heir}
    handler = RolloutHandler(engine, adapters, parts.cell, send_delta=partial(_send_delta, parts.bus), **more)
    return BuiltService(
        handler,
        settings.inboxes(parts.cell, parts.worker),
        About(
            slots=settings.shared_slots,
            kv_tokens=engine.kv_tokens,
            kv_used=lambda: engine.kv_used,
            max_lora_rank=settings.vllm_max_lora_rank if settings.engine == "vllm" else None,
            lora_slots=settings.vllm_max_loras if settings.engine == "vllm" and settings.own_streams else None,
            dtype=settings.dtype,
            fingerprint=bits,
            resident=lambda: [str(adapter) for adapter in engine.resident()],
            counters=lambda: engine.counters() | adapters.counters(),
        ),
        Habits(
            orphan_slots=settings.orphan_slots,
            progress_s=settings.rollout_progress_s,
            on_adapter_new=lambda hint: adapters.prefetch(hint.adapter),
        ),
        close=[adapters.close, engine.stop],
        num_bytes=partial(held_bytes, settings.rollout_device),
    )


def _sleeping(service: BuiltService, engine: ProcessEngine) -> BuiltService:
    return replace(service, num_bytes=lambda: ASLEEP_BYTES, sleep=engine.sleep, wake=engine.wake)


async def _send_delta(bus: Bus, reply_to: str, delta: TurnDelta) -> None:
    await bus.publish([(reply_to, delta)])


def pooled(settings: RolloutSettings) -> PooledService:
    """Closing lets turns end in deterministic mode, where one that moves starts again. Raises InvalidInput where vLLM cannot sleep, or
    would take all memory."""
    is_vllm = settings.engine == "vllm"
    if is_vllm and (settings.rollout_device == "cpu" or "rollout_kv_bytes" not in settings.model_fields_set):
        raise InvalidInput(
            "MARLAAS_ENGINE=vllm serves several base models in turn on CUDA alone, with MARLAAS_ROLLOUT_KV_BYTES: set both, or name one "
            "base model with MARLAAS_BASE_MODEL, and start more workers for the others"
        )
    about = About(
        settings.shared_slots, dtype=settings.dtype, max_lora_rank=settings.vllm_max_lora_rank if is_vllm else None
    )
    return PooledService(
        about,
        itemsize_of(settings.dtype) / (settings.vllm_tensor_parallel if is_vllm else 1),
        settings.rollout_kv_bytes,
        finishes=settings.deterministic,
        sleeps=is_vllm,
    )


early = partial(take_part, serving)

if __name__ == "__main__":
    run("rollout", RolloutSettings, build, pooled, early)
