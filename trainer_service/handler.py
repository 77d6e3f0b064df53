"""An Init or TrainStep in, an AdapterUpdate out; Operations of a run in, an OperationsDone out (run_handler.py); Forget in, Forgotten out.

reads: `train`, `train:<worker>`, adapters/   writes: adapters/, `adapters:<p>`   holds: the last states of some adapters (a cache;
the store is the truth), gradients of runs (a cache; their log is the truth)   waits for: a message   unblocked by: manager
after a crash: another trainer makes the version again; the manifest, created once, says whose counts
"""

import asyncio
import time
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
import structlog

from base_model.adapter import target_names
from common.bus.deliveries import Out
from common.bus.streams import Cell
from common.cancellation import beating
from common.errors import CorruptObject, InvalidInput, MarlaasError, NotFound, TrainingFailed
from common.store.adapters import AdapterStore, Manifest, update_of
from common.wire.messages import AdapterRef, AdapterUpdate, Failure, Init, TrainStep, Usage
from common.wire.operations import Forget, Forgotten, Operations
from common.worker.handlers import Beat
from trainer_service.fusion import Fusion
from trainer_service.lagged import is_lagged, measure
from trainer_service.open_step import Trained, TrainState, failure_of
from trainer_service.packing import WINDOW_BATCHES
from trainer_service.run_handler import RunHandler
from trainer_service.training import Trainer
from trainer_service.versions import Versions

TrainerMessage = Init | TrainStep | Operations | Forget
LARGE_BATCHES = 16
"""Micro-batches, as which a larger message counts among those that a trainer holds."""
MAX_LARGE_MESSAGES = 4
log = structlog.get_logger()


class TrainHandler:
    """Makes each version once, however often and by however many it is asked.
    It cannot be parked (see `common.worker.handlers.Parks`): a sent operation is done, its version may exist."""

    def __init__(
        self,
        trainer: Trainer,
        store: AdapterStore,
        base_model: str,
        *,
        worker: str = "",
        cache_bytes: int = 512 << 20,
        retry_delays_s: tuple[float, ...] = (0.2, 1.0, 3.0),
        fingerprints: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`worker`: the id by which a run's owner finds it again. `cache_bytes`: of states, again of runs' gradients, and
        an eighth of it of older weights.
        `fingerprints`: by service, of the cell's bits now; written into manifests."""
        self._trainer = trainer
        self._cell = Cell(base_model)
        self._versions = Versions(
            store,
            trainer.backbone,
            base_model,
            cache_bytes=cache_bytes,
            retry_delays_s=retry_delays_s,
            fingerprints=fingerprints,
        )
        self._fusion = Fusion(trainer)
        names = ("busy_s", "trained_tokens", "forward_tokens", "padding_tokens", "commit_s")
        self._counters: dict[str, float] = dict.fromkeys(names, 0.0)
        self._runs = RunHandler(
            self._fusion, self._versions, self._cell, self._counters, worker=worker, cache_bytes=cache_bytes
        )
        self.num_gradients = self._runs.num_gradients
        self._held: list[int] = []  # tokens of each message

    async def __call__(self, message: TrainerMessage, beat: Beat) -> list[Out]:
        """Returns the AdapterUpdate (Init, TrainStep), OperationsDone (Operations) or Forgotten (Forget). Messages under way
        together are computed together. A permanent failure is an answer.

        Raises Unavailable when the store stays away or full after a few attempts: deliver the message again.
        """
        num_tokens = _num_tokens(message)
        self._held.append(num_tokens)
        try:
            match message:
                case Operations():
                    return await self._runs(message, beat)
                case Forget():
                    return await self._delete(message, beat)
                case _:
                    return await self._make_version(message, beat)
        finally:
            self._held.remove(num_tokens)
            self._fusion.again.pop(message.id, None)

    async def _make_version(self, message: Init | TrainStep, beat: Beat) -> list[Out]:
        target = message.adapter if isinstance(message, Init) else message.adapter.next()
        try:
            manifest = await self._versions.manifest(target)
            if manifest is None:
                manifest = await self._make(message, target, beat)
        except (TrainingFailed, CorruptObject, NotFound, InvalidInput) as error:
            failure = failure_of(error)
            log.warning("step_refused", job=message.job, version=target.version, kind=failure.kind, reason=str(error))
            return self.failed(message, failure)
        await self._drop_old(message, target)
        return [(self._cell.adapters(message.partition), update_of(manifest, message.about()))]

    def delivered_again(self, message: TrainerMessage, times: int) -> None:
        """The number of halvings of its micro-batches: lack of memory may have ended the trainers that had it."""
        self._fusion.again[message.id] = times

    def has_room(self) -> bool:
        """Would one message more be worked on soon? If not, another trainer may better take it."""
        return sum(self._held) < WINDOW_BATCHES * self._trainer.budget.tokens

    def takes_leftovers(self) -> bool:
        """Does it take a message that no other trainer waits for, so that a small one overtakes large ones here?"""
        large = LARGE_BATCHES * self._trainer.budget.tokens
        return sum(min(tokens, large) for tokens in self._held) < MAX_LARGE_MESSAGES * large

    async def _delete(self, message: Forget, beat: Beat) -> list[Out]:
        """A version whose manifest cannot be read keeps its files, which costs only space."""
        store = self._versions.store
        for versions, delete in ((message.versions, store.drop_files), (message.optimizers, store.drop_optimizer)):
            for version in versions:
                adapter = msgspec.structs.replace(message.adapter, version=version)
                self._versions.forget(adapter)
                try:
                    await delete(adapter)
                except CorruptObject as error:
                    log.warning("version_not_deleted", job=message.job, version=version, reason=str(error))
                beat()
        if message.everything:
            await beating(beat, store.delete_job(message.tenant, message.job))
        return self._forgotten(message)

    def _forgotten(self, message: Forget) -> list[Out]:
        done = Forgotten(id=f"{message.id}/done", **message.about(), forget=message.id)
        return [(self._cell.adapters(message.partition), done)]

    def failed(self, message: TrainerMessage, failure: Failure) -> list[Out]:
        """Messages to publish when the message is given up."""
        if isinstance(message, Operations):
            return self._runs.failed(message, failure)
        if isinstance(message, Forget):
            return self._forgotten(message)
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
        """Totals since the start, lost races included: `busy_s` and `compute_s` in forward, backward and optimiser, by the clock
        and of the thread; `trained_tokens`, `forward_tokens` with their `padding_tokens`; `commit_s` in files and manifests;
        of several ranks, `rank_<n>_tokens` and `ranks_s`."""
        return {**self._counters, "compute_s": self._fusion.compute_s, **self._trainer.backbone.counters()}

    def hand_back(self, message: TrainerMessage) -> list[Out] | None:
        """Half a step is worth nothing elsewhere: the message goes back, or its owner hears that the gradient is gone."""
        return self._runs.hand_back(message) if isinstance(message, Operations) else None

    def resident(self) -> list[str]:
        """Adapters in memory, as `job@version`."""
        return [str(adapter) for adapter in self._versions.resident()]

    async def _make(self, message: Init | TrainStep, target: AdapterRef, beat: Beat) -> Manifest:
        """Compute and commit; if somebody else was first, what they committed."""
        trained = await self._compute(message, beat)
        since = time.monotonic()
        self._count(trained)
        made = self._manifest(message, target, trained)
        manifest, committed = await self._versions.commit(made, trained.state, beat)
        if not committed:
            log.info("commit_lost", job=message.job, version=target.version, wasted_s=trained.train_s)
            return manifest
        self._counters["commit_s"] += time.monotonic() - since
        if isinstance(message, TrainStep):
            self._versions.retire(message.adapter, is_read=is_lagged(message))
        log.info("version_committed", job=message.job, version=target.version, train_s=trained.train_s)
        return manifest

    def _manifest(self, message: Init | TrainStep, target: AdapterRef, trained: Trained) -> Manifest:
        is_step = isinstance(message, TrainStep)
        return Manifest(
            adapter=target,
            parent=message.adapter.version if is_step else None,
            batch=message.id,
            seed=message.seed,
            next_group=message.next_group if is_step else 0,
            trajectories=message.trajectories if is_step else (),
            metrics=trained.metrics,
            usage=Usage(trained_tokens=trained.trained_tokens, train_s=trained.train_s),
        )

    def _count(self, trained: Trained) -> None:
        forward = trained.metrics.get("forward_tokens") or 0.0
        padding = forward * (trained.metrics.get("padding_share") or 0.0)
        new = (trained.train_s, trained.trained_tokens, forward, padding)
        for name, amount in zip(("busy_s", "trained_tokens", "forward_tokens", "padding_tokens"), new, strict=True):
            self._counters[name] += amount

    async def _compute(self, message: Init | TrainStep, beat: Beat) -> Trained:
        if isinstance(message, TrainStep):
            if message.untrained:
                await self._ensure_drawn(message, beat)
            await self._versions.refuse_other_bits(message.adapter)
            state = await self._versions.state(message.adapter, beat)
            lagged = await measure(message, self._fusion, self._versions, beat)
            trained = await self._fusion.train(message, state, beat)
            return lagged.added_to(trained) if lagged else trained
        if message.source is not None:
            return Trained(await self._copied(message, message.source, beat), {}, 0, 0.0)
        if message.file:
            return Trained(await self._versions.read_uploaded(message, beat), {}, 0, 0.0)
        return Trained(await beating(beat, asyncio.to_thread(self._trainer.init, message)), {}, 0, 0.0)

    async def _ensure_drawn(self, step: TrainStep, beat: Beat) -> None:
        """Makes version 0, which a job's first step trains, if missing: a trainer may have died after it."""
        if await self._versions.manifest(step.adapter) is None:
            init = Init(id=f"{step.job}/init", **step.about(), adapter=step.adapter, seed=step.seed, lora=step.lora)
            await self._make(init, step.adapter, beat)

    async def _copied(self, message: Init, source: AdapterRef, beat: Beat) -> TrainState:
        """A version as another adapter's. Raises InvalidInput if its rank or targets are not those asked for."""
        state = await self._versions.read(source, beat, with_optimizer=message.with_optimizer)
        if state.spec.rank != message.lora.rank:
            raise InvalidInput(f"{source} has rank {state.spec.rank}, not {message.lora.rank}")
        shapes = self._trainer.backbone.linear_shapes()
        if target_names(state.spec, shapes) != target_names(message.lora, shapes):
            raise InvalidInput(
                f"{source} has the targets {', '.join(state.spec.targets)}, not those that were asked for"
            )
        return state

    async def _drop_old(self, message: Init | TrainStep, newest: AdapterRef) -> None:
        """Keeps optimiser state for the newest two versions. A failure costs only space."""
        if not isinstance(message, TrainStep) or newest.version < 2:
            return
        old = msgspec.structs.replace(newest, version=newest.version - 2)
        try:
            self._versions.retire(old, is_read=is_lagged(message))
            await self._versions.store.drop_optimizer(old)
        except MarlaasError as error:
            log.warning("old_version_not_dropped", job=newest.job, version=newest.version, reason=str(error))


def _num_tokens(message: TrainerMessage) -> int:
    """The tokens that a message brings."""
    match message:
        case TrainStep():
            return len(message.rows.tokens)
        case Operations():
            return message.num_tokens
        case _:
            return 0
