"""Operations of a run in, an OperationsDone out.

The gradient of a run's log is kept here between two messages; the sender of the next segment names this trainer. It is a
cache: a trainer without it answers `absent`, and gets the whole log.

    redelivery before the commit    the same segment once more: the gradient before it is kept until the next one stands
    redelivery after the commit     the manifest tells the metrics; outputs that were not published are a forward of v
    two trainers, one log           the manifest is create-only, the loser adopts it
"""

import time

import structlog
from msgspec.structs import replace

from common.bus.deliveries import Out
from common.bus.streams import Cell
from common.errors import CorruptObject, InvalidInput, NotFound
from common.store.adapters import Manifest
from common.store.byte_cache import ByteCache
from common.wire.messages import AdapterRef, Failure, Usage
from common.wire.operations import OperationResult, Operations, OperationsDone, Outputs
from common.worker.handlers import Beat
from trainer_service import run_step
from trainer_service.fusion import Fusion
from trainer_service.open_step import failure_of
from trainer_service.run_step import Computed, Gradient
from trainer_service.versions import Versions

log = structlog.get_logger()


class RunHandler:
    """Carries out each segment of a run's log, and makes each version once."""

    def __init__(
        self,
        fusion: Fusion,
        versions: Versions,
        cell: Cell,
        counters: dict[str, float],
        *,
        worker: str,
        cache_bytes: int,
    ) -> None:
        """`counters`: totals of the trainer, to which it adds."""
        self._fusion = fusion
        self._versions = versions
        self._cell = cell
        self._worker = worker
        self._gradients: ByteCache[AdapterRef, Gradient] = ByteCache(cache_bytes, lambda gradient: gradient.num_bytes)
        """The newest of each version's log: none goes on with an older one, or one of a dropped log."""
        self._counters = counters

    async def __call__(self, message: Operations, beat: Beat) -> list[Out]:
        """Raises Unavailable when the store stays away or full: deliver the message again."""
        try:
            manifest = await self._versions.manifest(message.adapter.next()) if _ends(message) else None
            if manifest is not None:
                return await self._recovered(message, manifest, beat)
            gradient = self._gradient(message)
            if gradient is None:
                return self._answer(message, absent=True)
            return await self._carried_out(message, gradient, beat)
        except (CorruptObject, NotFound, InvalidInput) as error:
            log.warning("operations_refused", job=message.job, version=message.adapter.version, reason=str(error))
            return self.failed(message, failure_of(error))

    def failed(self, message: Operations, failure: Failure) -> list[Out]:
        """Messages to publish when a segment is given up."""
        self._gradients.pop(message.adapter)
        open_ones = [operation for operation in message.operations if not operation.answered]
        return self._answer(message, tuple(OperationResult(one.seq, failure=failure) for one in open_ones))

    def hand_back(self, message: Operations) -> list[Out] | None:
        """A segment whose gradient is only here cannot move: its owner sends the whole log."""
        return self._answer(message, absent=True) if message.first else None

    def num_gradients(self) -> int:
        return len([*self._gradients])

    def _gradient(self, message: Operations) -> Gradient | None:
        """The gradient from which the segment goes on; None: it is not here."""
        if not message.first:
            return Gradient(message.operations[0].seq, 0)
        held = self._gradients.get(message.adapter)
        return held if held is not None and held.num_operations == message.first else None

    async def _carried_out(self, message: Operations, gradient: Gradient, beat: Beat) -> list[Out]:
        computed = await self._computed(message, gradient, beat)
        usage = computed.usage
        self._count(computed, usage)
        if computed.state is not None:
            return await self._committed(message, gradient, computed, usage, beat)
        if computed.gradient is None:
            self._gradients.pop(message.adapter)
            return self._answer(message, computed.results, usage=usage)
        self._gradients.put(message.adapter, computed.gradient)
        return self._answer(message, computed.results, held=computed.gradient.num_operations, usage=usage)

    async def _computed(self, message: Operations, gradient: Gradient, beat: Beat) -> Computed:
        state, trainer = await self._versions.state(message.adapter, beat), self._fusion.trainer
        return await self._fusion.run(
            message.tenant,
            lambda driver: run_step.begin(driver, message.operations, state, gradient),
            lambda run: run_step.finish(trainer, run),
            beat,
            tokens=message.num_tokens,
            weight=message.weight,
            goes_on=message.operations[-1].action == "forward_backward",
            halvings=self._fusion.again.pop(message.id, 0),
        )

    async def _committed(
        self, message: Operations, gradient: Gradient, computed: Computed, usage: Usage, beat: Beat
    ) -> list[Out]:
        assert computed.state is not None
        since, made = time.monotonic(), self._manifest(message, gradient, computed, usage)
        manifest, committed = await self._versions.commit(made, computed.state, beat)
        if committed:
            self._counters["commit_s"] += time.monotonic() - since
        else:
            log.info("commit_lost", job=message.job, version=made.adapter.version, wasted_s=computed.seconds)
        self._gradients.pop(message.adapter)
        self._versions.forget(message.adapter)
        return self._answer(message, (*computed.results, _applied(message, manifest)), manifest)

    def _manifest(self, message: Operations, gradient: Gradient, computed: Computed, usage: Usage) -> Manifest:
        target, last = message.adapter.next(), message.operations[-1].seq
        return Manifest(
            adapter=target,
            parent=message.adapter.version,
            batch=f"{message.job}:{gradient.first_seq}-{last}",
            seed=message.seed,
            next_group=0,
            metrics={**computed.metrics, "version": float(target.version)},
            usage=usage,
        )

    async def _recovered(self, message: Operations, manifest: Manifest, beat: Beat) -> list[Out]:
        """The answer of a segment whose version exists: unpublished outputs come from a forward of v."""
        missing = tuple(replace(one, action="forward") for one in message.operations[:-1] if not one.answered)
        results: tuple[OperationResult, ...] = ()
        try:
            if missing:
                results = (await self._computed(replace(message, operations=missing), Gradient(0, 0), beat)).results
        except (CorruptObject, NotFound) as error:
            results = tuple(OperationResult(one.seq, failure=failure_of(error)) for one in missing)
        self._gradients.pop(message.adapter)
        return self._answer(message, (*results, _applied(message, manifest)), manifest)

    def _answer(
        self,
        message: Operations,
        results: tuple[OperationResult, ...] = (),
        manifest: Manifest | None = None,
        *,
        held: int = 0,
        absent: bool = False,
        usage: Usage | None = None,
    ) -> list[Out]:
        """`manifest`: of the version that was committed."""
        done = OperationsDone(
            id=f"{message.id}/done",
            **message.about(),
            adapter=manifest.adapter if manifest else message.adapter,
            attempt=message.attempt,
            results=results,
            held=held,
            holder=self._worker,
            absent=absent,
            usage=manifest.usage if manifest else usage or Usage(),
            size=manifest.size if manifest else (0, 0),
        )
        return [(self._cell.adapters(message.partition), done)]

    def _count(self, computed: Computed, usage: Usage) -> None:
        self._counters["busy_s"] += computed.seconds
        self._counters["trained_tokens"] += usage.trained_tokens
        self._counters["forward_tokens"] += computed.forward_tokens
        self._counters["padding_tokens"] += computed.padding_tokens


def _ends(message: Operations) -> bool:
    return message.operations[-1].action == "optim_step"


def _applied(message: Operations, manifest: Manifest) -> OperationResult:
    """The result of the `optim_step`, whoever committed the version. One of another log is not this log's."""
    last = message.operations[-1].seq
    if manifest.batch.rpartition("-")[2] != str(last):
        reason = f"version {manifest.adapter.version} was made by operations {manifest.batch.rpartition(':')[2]}"
        return OperationResult(last, failure=Failure("infrastructure", reason))
    metrics = {name: value for name, value in manifest.metrics.items() if value is not None}
    return OperationResult(last, run_step.encoded(Outputs(metrics=metrics)))
