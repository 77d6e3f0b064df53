"""An operation on an adapter in, an AdapterUpdate out.

reads: `train`, adapters/   writes: adapters/, `adapters:<p>`   holds: the last states of some adapters (a cache; the store
is the truth)   waits for: an Init or TrainStep   unblocked by: manager
after a crash: another trainer makes the version again; the manifest, created once, says whose counts
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import msgspec
import structlog

from base_model.adapter import check_fits, load_adapter, save_adapter
from common.adapters import OPTIMIZER_FILE, PEFT_FILES, AdapterStore, Manifest, update_of
from common.byte_cache import ByteCache
from common.errors import (
    AlreadyExists,
    CorruptObject,
    InvalidInput,
    MarlaasError,
    NotFound,
    TrainingFailed,
    Unavailable,
)
from common.messages import AdapterRef, AdapterUpdate, Failure, FailureKind, Init, Message, TrainStep, Usage
from common.streams import Cell
from common.tasks import beating
from trainer_service import lora
from trainer_service.fusion import Fusion
from trainer_service.open_step import Trained, TrainState
from trainer_service.optimiser import load_moments, save_moments
from trainer_service.packing import WINDOW
from trainer_service.training import Trainer

Outputs = list[tuple[str, Message]]
T = TypeVar("T")
log = structlog.get_logger()


class TrainHandler:
    """Makes each version once, however often and by however many it is asked.

    It cannot be parked (see `common.worker.Parks`): an operation once sent is done, for its version may exist already.
    """

    def __init__(
        self,
        trainer: Trainer,
        store: AdapterStore,
        base_model: str,
        *,
        cache_bytes: int = 512 << 20,
        retry_delays_s: tuple[float, ...] = (0.2, 1.0, 3.0),
        fingerprints: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`fingerprints`: by service, of the bits that the cell computes just now; written into manifests."""
        self._trainer = trainer
        self._store = store
        self._base_model = base_model
        self._cell = Cell(base_model)
        self._cache: ByteCache[AdapterRef, TrainState] = ByteCache(cache_bytes, lambda state: state.num_bytes)
        """Each of a committed version."""
        self._retry_delays_s = retry_delays_s
        self._fingerprints = fingerprints
        self._fusion = Fusion(trainer)
        self._held_tokens = 0
        names = ("busy_s", "trained_tokens", "forward_tokens", "padding_tokens", "commit_s")
        self._counters: dict[str, float] = dict.fromkeys(names, 0.0)

    async def __call__(self, message: Init | TrainStep, beat: Callable[[], None]) -> Outputs:
        """The AdapterUpdate of the version that `message` asks for; steps that are asked for at a time are trained together.

        What will fail in the same way again is an AdapterUpdate with a failure. Raises Unavailable when the store stays
        away or full after a few attempts: nothing is lost, deliver the message again.
        """
        target = message.adapter if isinstance(message, Init) else message.adapter.next()
        num_tokens = len(message.rows.tokens) if isinstance(message, TrainStep) else 0
        self._held_tokens += num_tokens
        try:
            manifest = await self._patiently(lambda: self._store.manifest(target))
            if manifest is None:
                manifest = await self._make(message, target, beat)
        except (TrainingFailed, CorruptObject, NotFound, InvalidInput) as error:
            kind = _failure_kind(error)
            log.warning("step_refused", job=message.job, version=target.version, kind=kind, reason=str(error))
            return self.failed(message, Failure(kind, str(error)))
        finally:
            self._held_tokens -= num_tokens
        await self._drop_old(message, target)
        return [(self._cell.adapters(message.partition), update_of(manifest, message.about()))]

    def has_room(self) -> bool:
        """Whether one message more would be worked on soon; if not, it is better left to another trainer."""
        return self._held_tokens < WINDOW * self._trainer.budget.tokens

    def failed(self, message: Init | TrainStep, failure: Failure) -> Outputs:
        """What to publish when the operation is given up."""
        target = message.adapter if isinstance(message, Init) else message.adapter.next()
        update = AdapterUpdate(
            id=f"{message.id}/failed",
            **message.about(),
            adapter=target,
            batch=message.id,
            next_group=message.next_group if isinstance(message, TrainStep) else 0,
            failure=failure,
        )
        return [(self._cell.adapters(message.partition), update)]

    def counters(self) -> dict[str, float]:
        """Totals since the start, lost races included: `busy_s` and `compute_s` in forward, backward and optimiser, by the
        clock and of the thread; `trained_tokens`, `forward_tokens` with their `padding_tokens`; `commit_s` in files and manifests.
        """
        return self._counters | {"compute_s": self._fusion.compute_s}

    def hand_back(self, message: Init | TrainStep) -> Outputs | None:
        """Half a step is worth nothing elsewhere: the message goes back as it was."""
        return None

    def resident(self) -> list[str]:
        """Adapters in memory, as `job@version`."""
        return [str(adapter) for adapter in self._cache]

    async def _make(self, message: Init | TrainStep, target: AdapterRef, beat: Callable[[], None]) -> Manifest:
        """Compute and commit; if somebody else was first, what they committed."""
        trained = await self._compute(message, beat)
        since = time.monotonic()
        self._count(trained)
        files = await beating(beat, asyncio.to_thread(self._save, trained.state))
        commit = partial(self._store.commit, self._manifest(message, target, trained), files)
        try:
            manifest = await beating(beat, self._patiently(commit))
        except AlreadyExists:
            winner = await self._patiently(lambda: self._store.manifest(target))
            if winner is None:
                raise Unavailable(f"the manifest of {target} exists but cannot be read") from None
            log.info("commit_lost", job=message.job, version=target.version, wasted_s=trained.train_s)
            return winner
        self._counters["commit_s"] += time.monotonic() - since
        if isinstance(message, TrainStep):
            self._cache.pop(message.adapter)  # nothing is trained from it again
        self._cache.put(target, trained.state)
        log.info("version_committed", job=message.job, version=target.version, train_s=trained.train_s)
        return manifest

    def _manifest(self, message: Init | TrainStep, target: AdapterRef, trained: Trained) -> Manifest:
        is_step = isinstance(message, TrainStep)
        return Manifest(
            adapter=target,
            base_model=self._base_model,
            attempt="",
            files={},
            parent=message.adapter.version if is_step else None,
            batch=message.id,
            seed=message.seed,
            next_group=message.next_group if is_step else 0,
            trajectories=message.trajectories if is_step else (),
            metrics=trained.metrics,
            fingerprints=dict(self._fingerprints),
            usage=Usage(trained_tokens=trained.trained_tokens, train_s=trained.train_s),
        )

    def _count(self, trained: Trained) -> None:
        forward = trained.metrics.get("forward_tokens") or 0.0
        padding = forward * (trained.metrics.get("padding_share") or 0.0)
        new = (trained.train_s, trained.trained_tokens, forward, padding)
        for name, amount in zip(("busy_s", "trained_tokens", "forward_tokens", "padding_tokens"), new, strict=True):
            self._counters[name] += amount

    async def _compute(self, message: Init | TrainStep, beat: Callable[[], None]) -> Trained:
        if isinstance(message, Init):
            drawn = await beating(beat, asyncio.to_thread(self._trainer.init, message))
            return Trained(drawn, {}, 0, 0.0)
        return await self._fusion.train(message, await self._state(message.adapter, beat), beat)

    async def _state(self, adapter: AdapterRef, beat: Callable[[], None]) -> TrainState:
        """From memory, else from the store. Raises CorruptObject or NotFound."""
        state = self._cache.get(adapter)
        if state is None:
            read = partial(self._store.read, adapter, (*PEFT_FILES, OPTIMIZER_FILE))
            files = await beating(beat, self._patiently(read))
            state = await beating(beat, asyncio.to_thread(self._load, files))
            self._cache.put(adapter, state)
        return state

    def _save(self, state: TrainState) -> dict[str, bytes]:
        return {**save_adapter(state.adapter, self._base_model), OPTIMIZER_FILE: save_moments(state.moments)}

    def _load(self, files: dict[str, bytes]) -> TrainState:
        adapter = load_adapter(files)
        check_fits(adapter, self._trainer.decoder.linear_shapes())
        num_values = lora.AdapterLayout.of(adapter).num_values
        return TrainState.of(adapter, load_moments(files[OPTIMIZER_FILE], num_values, self._trainer.decoder.device))

    async def _drop_old(self, message: Init | TrainStep, newest: AdapterRef) -> None:
        """Optimiser state is kept for the newest two versions, adapters for as long as their job wants. A failure here costs
        only space.
        """
        if not isinstance(message, TrainStep):
            return
        dropped = [msgspec.structs.replace(newest, version=version) for version in message.drops]
        try:
            if newest.version >= 2:
                old = msgspec.structs.replace(newest, version=newest.version - 2)
                self._cache.pop(old)
                await self._store.drop_optimizer(old)
            for old in dropped:
                await self._store.drop_files(old)
        except MarlaasError as error:
            log.warning("old_version_not_dropped", job=newest.job, version=newest.version, reason=str(error))

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Try again while the store is unavailable, a bounded number of times."""
        for delay_s in self._retry_delays_s:
            try:
                return await call()
            except Unavailable as error:
                log.warning("store_unavailable", reason=str(error), retry_s=delay_s)
                await asyncio.sleep(delay_s)
        return await call()


def _failure_kind(error: MarlaasError) -> FailureKind:
    match error:
        case TrainingFailed():
            return "non_finite"
        case InvalidInput():
            return "invalid"
        case _:
            return "corrupt_adapter"
