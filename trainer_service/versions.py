"""Reads and commits versions of adapters, and caches the last states of some."""

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

import structlog
from msgspec.structs import replace

from base_model.adapter import CONFIG_FILE, WEIGHTS_FILE, check_fits, load_adapter, save_adapter
from common.cancellation import beating
from common.errors import AlreadyExists, InvalidInput, Unavailable
from common.models.base_digest import BaseIdentity
from common.store.adapters import OPTIMIZER_FILE, PEFT_FILES, AdapterStore, Manifest
from common.store.byte_cache import ByteCache
from common.store.objects import patiently
from common.wire.messages import AdapterRef, Init
from common.worker.handlers import Beat
from trainer_service import lora
from trainer_service.backbone.interface import Backbone
from trainer_service.open_step import TrainState
from trainer_service.optimiser import Moments, load_moments, save_moments

T = TypeVar("T")
log = structlog.get_logger()


class Versions:
    """The versions of one base model's adapters. Raises Unavailable when the store stays away or full."""

    def __init__(
        self,
        store: AdapterStore,
        backbone: Backbone,
        base_model: str,
        *,
        cache_bytes: int,
        retry_delays_s: tuple[float, ...],
        fingerprints: Mapping[str, str],
    ) -> None:
        self.store = store
        self._backbone = backbone
        self._base_model = base_model
        self._fingerprints = fingerprints
        self._retry_delays_s = retry_delays_s
        self._cache: ByteCache[AdapterRef, TrainState] = ByteCache(cache_bytes, lambda state: state.num_bytes)
        """Each of a committed version."""
        self._older: ByteCache[AdapterRef, TrainState] = ByteCache(cache_bytes // 8, lambda state: state.num_bytes)
        """Weights without optimiser states, that rows were sampled by and that nothing is trained from any more."""
        self._told = False

    def resident(self) -> list[AdapterRef]:
        """The versions in memory."""
        return list(self._cache)

    async def manifest(self, adapter: AdapterRef) -> Manifest | None:
        """The commit record of a version, None if there is none. Raises CorruptObject."""
        return await self._patiently(lambda: self.store.manifest(adapter))

    async def refuse_other_bits(self, parent: AdapterRef) -> None:
        """Raises InvalidInput if a version was trained on other bits: its job was cancelled before it joined."""
        if parent.version == 0 or parent in self._cache:
            return
        manifest = await self.manifest(parent)
        if manifest and manifest.fingerprints.get("trainer") != self._fingerprints.get("trainer"):
            raise InvalidInput(f"{parent} was trained in another mode, or on other bits, than this trainer's")

    async def state(self, adapter: AdapterRef, beat: Beat) -> TrainState:
        """The state from memory, else from the store. Raises CorruptObject or NotFound."""
        state = self._cache.get(adapter)
        if state is None:
            state = await self.read(adapter, beat)
            self._keep(adapter, state)
        return state

    async def weights(self, adapter: AdapterRef, beat: Beat) -> TrainState:
        """A state for forwards alone, from memory, else from the store. Raises CorruptObject or NotFound."""
        state = self._cache.get(adapter) or self._older.get(adapter)
        if state is None:
            state = await self.read(adapter, beat, with_optimizer=False)
            self._keep_weights(adapter, state)
        return state

    async def read(self, adapter: AdapterRef, beat: Beat, *, with_optimizer: bool = True) -> TrainState:
        """A state from the store; without its optimiser, with a new one. Raises CorruptObject, NotFound, or InvalidInput if it
        is of another base model."""
        names = (*PEFT_FILES, OPTIMIZER_FILE) if with_optimizer else PEFT_FILES
        files = await beating(beat, self._patiently(partial(self.store.read, adapter, names)))
        return await beating(beat, asyncio.to_thread(self._load, files))

    async def read_uploaded(self, init: Init, beat: Beat) -> TrainState:
        """The adapter in a file that a user uploaded, with a new optimiser. Raises CorruptObject, NotFound, or InvalidInput if it
        says that it is of another base model."""
        self.store.base.check("the uploaded adapter", BaseIdentity(digest=init.base_digest))
        weights = await beating(beat, self._patiently(partial(self.store.read_uploaded, init.file)))
        config = {"r": init.lora.rank, "lora_alpha": init.lora.alpha, "target_modules": init.lora.targets}
        files = {WEIGHTS_FILE: weights, CONFIG_FILE: json.dumps(config).encode()}
        return await beating(beat, asyncio.to_thread(self._load, files))

    async def commit(self, manifest: Manifest, state: TrainState, beat: Beat) -> tuple[Manifest, bool]:
        """Commits a version and whether it did; if somebody else was first, returns what they committed.

        Fills in the manifest's `base_model`, `base_digest` and `fingerprints`, and what `AdapterStore.commit` does.
        """
        base = {"base_model": self._base_model, "base_digest": self.store.base.digest}
        manifest = replace(manifest, **base, fingerprints=dict(self._fingerprints))
        files = await beating(beat, asyncio.to_thread(self._save, state))
        # The store writes the files first, under this attempt's own name, then the manifest that names them, which is created only once.
        # So a trainer that dies leaves files that nobody names, a version is whole or absent, and of two trainers with one message the
        # second adopts the first's version.
        try:
            committed = await beating(beat, self._patiently(partial(self.store.commit, manifest, files)))
        except AlreadyExists:
            winner = await self.manifest(manifest.adapter)
            if winner is None:
                raise Unavailable(f"the manifest of {manifest.adapter} exists but cannot be read") from None
            return winner, False
        self._keep(manifest.adapter, state)
        return committed, True

    def retire(self, adapter: AdapterRef, *, is_read: bool) -> None:
        """Makes room in memory: nothing is trained from this version any more. `is_read`: rows that it sampled may be trained."""
        state = self._cache.pop(adapter)
        if state and is_read:
            self._keep_weights(adapter, state)

    def forget(self, adapter: AdapterRef) -> None:
        """Makes room in memory: nothing is computed from this version any more."""
        self._cache.pop(adapter)
        self._older.pop(adapter)

    def _keep_weights(self, adapter: AdapterRef, state: TrainState) -> None:
        self._older.put(adapter, dataclasses.replace(state, moments=Moments.zeros(0, self._backbone.device)))

    def _keep(self, adapter: AdapterRef, state: TrainState) -> None:
        """Caches a state, unless it is larger than all may be, which the log says once."""
        budget = self._cache.budget_bytes
        if state.num_bytes > budget and not self._told:
            self._told = True
            log.warning("state_not_kept", adapter=str(adapter), state_bytes=state.num_bytes, trainer_cache_bytes=budget)
        self._cache.put(adapter, state)

    def _save(self, state: TrainState) -> dict[str, bytes]:
        files = save_adapter(state.adapter, self._base_model, self.store.base.digest)
        return {**files, OPTIMIZER_FILE: save_moments(state.moments)}

    def _load(self, files: dict[str, bytes]) -> TrainState:
        adapter, device = load_adapter(files), self._backbone.device
        check_fits(adapter, self._backbone.linear_shapes())
        num_values = lora.AdapterLayout.of(adapter).num_values
        known = files.get(OPTIMIZER_FILE)
        moments = Moments.zeros(num_values, device) if known is None else load_moments(known, num_values, device)
        return TrainState.of(adapter, moments)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Tries again while the store is unavailable, a bounded number of times."""
        return await patiently(call, delays_s=self._retry_delays_s)
