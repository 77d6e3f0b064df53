"""Runners of the engines under the contract tests: `torch`, `modules` and `cuda` (the same on transformers' modules, on a CPU and on a
GPU), `fake` (a process engine over a core that is no process), and `vllm`, whose process is started once and shared by all tests."""

import asyncio
import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Protocol

import pytest

from common.wire.messages import AdapterRef
from rollout_service.embedded.backbone.interface import EngineBackbone
from rollout_service.embedded.pools import EngineLimits
from rollout_service.engine import Engine
from rollout_service.process.adapter_files import AdapterFiles, linear_shapes
from rollout_service.process.core import AdapterFolder, Core, CoreDied, SamplingRequest, TokenChunk
from rollout_service.process.process_engine import LoadingTurn, ProcessEngine, Shape
from rollout_service.settings import RolloutSettings
from tests.support.fake_core import FakeCore
from tests.support.rollout_cases import TINY, NoEnd, exact_limits, running, tokenizer

MAX_LORAS = 4
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; install it with: make vllm"
)
KINDS = [
    "torch",
    "modules",
    pytest.param("cuda", marks=pytest.mark.gpu),
    "fake",
    pytest.param("deterministic", marks=pytest.mark.exact),
    pytest.param("vllm", marks=[pytest.mark.vllm, needs_vllm]),
]
Adapters = Mapping[AdapterRef, dict[str, bytes]]


class Running(Protocol):
    """Runs an engine of one kind. `ends`: whether the end-of-turn token ends a turn."""

    @property
    def exact(self) -> bool:
        """True if bits depend on the request alone, and a resumed turn draws the same numbers."""
        ...

    @property
    def scales_prompts(self) -> bool:
        """True if prompts' log-probs are to be had at any temperature, and tokens' are of the whole vocabulary."""
        ...

    def __call__(
        self, *, adapters: Adapters | None = None, ends: bool = True, slots: int = 64
    ) -> "contextlib.AbstractAsyncContextManager[Engine]": ...


@dataclasses.dataclass
class TorchRunning:
    """The embedded engine; with `min_rows` as deterministic mode runs it."""

    min_rows: int | None = None
    backbone: EngineBackbone | None = None
    scales_prompts: bool = True

    @property
    def exact(self) -> bool:
        return self.min_rows is not None

    def __call__(
        self, *, adapters: Adapters | None = None, ends: bool = True, slots: int = 64
    ) -> "contextlib.AbstractAsyncContextManager[Engine]":
        return running(adapters=adapters, ends=ends, limits=self._limits(slots), backbone=self.backbone)

    def _limits(self, slots: int) -> EngineLimits:
        return EngineLimits(slots=slots) if self.min_rows is None else exact_limits(self.min_rows, slots=slots)


@functools.cache
def modules_running(device: str) -> TorchRunning:
    from rollout_service.embedded.backbone.modules import load_modules  # here: transformers takes seconds

    return TorchRunning(backbone=load_modules(TINY, device=device))


@dataclasses.dataclass
class ProcessRunning:
    """A process engine of its own for each test, over cores that `make_core` makes."""

    make_core: Callable[[], Core]
    exact: bool = False
    scales_prompts: bool = False
    masks: bool = False  # whether its process follows grammars

    @contextlib.asynccontextmanager
    async def __call__(
        self, *, adapters: Adapters | None = None, ends: bool = True, slots: int = 64
    ) -> AsyncGenerator[ProcessEngine]:
        engine = process_engine(self.make_core, ends=ends, slots=slots, masks=self.masks)
        await engine.start()
        try:
            for adapter, files in (adapters or {}).items():
                await engine.load_files(adapter, files)
            yield engine
        finally:
            await engine.stop()


def process_engine(
    make_core: Callable[[], Core],
    *,
    ends: bool = True,
    slots: int = 64,
    max_loras: int = MAX_LORAS,
    max_known: int = 0,
    masks: bool = False,
    files: AdapterFiles | None = None,
    turn: LoadingTurn = contextlib.nullcontext,
) -> ProcessEngine:
    known = tokenizer()
    shape = Shape(known.vocab_size, known.context, slots, max_loras, max_known, max_temperature=2.0, masks=masks)
    stored = files or AdapterFiles(linear_shapes(TINY), max_rank=16)
    return ProcessEngine(make_core, stored, known if ends else NoEnd(), shape, turn)


def fake_core(**told: Any) -> FakeCore:
    return FakeCore(tokenizer().vocab_size, MAX_LORAS + 1, **told)


def vllm_core(tensor_parallel: int = 1) -> Core:
    """A vLLM that is not started yet."""
    from rollout_service.process.vllm_engine import VllmCore, check_installed

    settings = RolloutSettings(
        engine="vllm",
        rollout_slots=64,
        rollout_kv_bytes=1 << 28,
        vllm_max_loras=MAX_LORAS,
        vllm_max_lora_rank=16,
        vllm_tensor_parallel=tensor_parallel,
    )
    check_installed(settings)
    return VllmCore(settings, TINY, tokenizer().context)


class SharedVllm:
    """The one vLLM of a test run."""

    def __init__(self) -> None:
        self._core: Core | None = None
        self._dead: asyncio.Task[None] | None = None
        self.last_number = 0

    async def core(self) -> Core:
        """A living one; started if there is none."""
        if self._dead is not None and self._dead.done():
            await self.stop()
        if self._core is None:
            self._core = vllm_core()
            await self._core.start()
            self._dead = asyncio.create_task(self._core.wait_dead())
        return self._core

    async def stop(self) -> None:
        if self._core is not None:
            await self._core.stop()
            self._core = None

    @property
    def is_alive(self) -> bool:
        return self._dead is not None and not self._dead.done()

    def next_number(self) -> int:
        self.last_number += 1
        return self.last_number


class SharedCore:
    """One test's view of the shared vLLM: numbers and names of its own, and an end that ends nothing."""

    def __init__(self, shared: SharedVllm) -> None:
        self._shared = shared
        self._prefix = shared.next_number()
        self._core: Core | None = None
        self._known: dict[int, AdapterFolder] = {}

    @property
    def _running(self) -> Core:
        assert self._core is not None
        return self._core

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def kv_tokens(self) -> int | None:
        return self._running.kv_tokens

    async def start(self) -> None:
        self._core = await self._shared.core()

    async def stop(self) -> None:
        for adapter in self._known.values():
            if self._shared.is_alive:
                await self._running.remove(adapter)

    async def wait_dead(self) -> None:
        await self._running.wait_dead()

    async def add(self, adapter: AdapterFolder) -> None:
        number = self._shared.next_number()
        renamed = AdapterFolder(number, f"{adapter.name}+{number}", adapter.folder)
        await self._running.add(renamed)
        self._known[adapter.number] = renamed

    async def remove(self, adapter: AdapterFolder) -> None:
        await self._running.remove(self._known.pop(adapter.number))

    async def sleep(self) -> None:
        raise NotImplementedError("others share it")

    wake = sleep

    async def sample(self, request: SamplingRequest) -> AsyncGenerator[TokenChunk]:
        prefix, adapter = self._prefix, self._known[request.adapter.number]
        mine = dataclasses.replace(
            request, id=f"{prefix}/{request.id}", adapter=adapter, salt=f"{prefix}/{request.salt}"
        )
        try:
            async with contextlib.aclosing(self._running.sample(mine)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except CoreDied:
            await self._running.wait_dead()  # so that the next test does not take it for a living one
            raise
