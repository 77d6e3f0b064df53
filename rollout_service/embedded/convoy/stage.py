"""Computes the layers of one stage for the head of a convoy, whose pools of keys and values it mirrors.

reads, writes: the head's connection   waits for: its next Step   unblocked by: the head, or the connection's end
after a crash: the head hands its rows back
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import structlog
import torch
from torch import Tensor

from base_model.stacked import FusedAdapter, LaneFactors, Product
from common.cancellation import beating
from common.peers.server import BEAT, PART
from rollout_service.embedded import kv
from rollout_service.embedded.backbone.fused import FusedDecoder
from rollout_service.embedded.backbone.interface import ForwardPart, QkvAttend
from rollout_service.embedded.convoy import wire
from rollout_service.embedded.pools import Pool, PoolChange

log = structlog.get_logger()


class StageServer:
    """Serves one head at a time."""

    def __init__(self, model: FusedDecoder) -> None:
        self._model = model
        self._thread = ThreadPoolExecutor(1, "stage")
        self._is_busy = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves a head to its end. Raises OSError or ValueError for one that fails."""
        if self._is_busy:
            raise ValueError("another head has this stage")
        self._is_busy, mirror, loop = True, Mirror(self._model), asyncio.get_running_loop()
        try:
            while True:
                step = await reader.readexactly(wire.size_of(await reader.readexactly(wire.SIZE_BYTES)))
                computing = loop.run_in_executor(self._thread, mirror.answer, step)
                answer = await beating(lambda: writer.write(BEAT), computing)
                writer.write(PART + answer)
                await writer.drain()
        except asyncio.IncompleteReadError:
            log.info("convoy_over")
        finally:
            self._is_busy = False


class Mirror:
    """A stage's part of one head's rows: keys and values of its rows, and their adapters, of the stage's layers."""

    def __init__(self, model: FusedDecoder) -> None:
        self._model = model
        self._shape = replace(model.config, num_layers=len(model.layers))
        self._pools = dict[int, Pool]()  # by length
        self._adapters = dict[int, FusedAdapter]()
        self._lanes = dict[int, tuple[list[int], LaneFactors]]()  # by rank: the last ones

    @torch.inference_mode()
    def answer(self, step: bytes) -> bytes:
        try:
            x = self.compute(wire.decoded(step, wire.StageStep, self._model.embedding.device))
            return wire.framed(wire.StageAnswer(x))
        except (RuntimeError, ValueError, LookupError) as error:
            return wire.framed(wire.StageAnswer(error=f"{type(error).__name__}: {error}"))

    def compute(self, step: wire.StageStep) -> Tensor:
        """Hidden states behind the stage's layers [N, E]."""
        for change in step.changes:
            self._repeat(change)
        if step.forgets:
            self._adapters.clear()
            self._lanes.clear()
        for number, sent in step.adapters.items():
            self._adapters[number] = FusedAdapter(sent.rank, LaneFactors.of(sent.a, sent.b))
        products = [Product(self._factors(sent.owners), sent.gather, sent.rows, sent.places) for sent in step.products]
        part = ForwardPart(len(step.x), self._attend(step.attend, step.positions), products)
        return self._model.run(step.x, step.positions, [part])

    def _repeat(self, change: PoolChange) -> None:
        match change:
            case ("add", length, (slot,)):
                self._pool(length).add(slot)
            case ("resize", length, (num_rows,)):
                self._pool(length).resize(num_rows)
            case ("remove", length, (slot, num, clear)):
                self._pool(length).remove(slot, num, clear=bool(clear))
            case ("copy", length, (slot, to_length, to_slot, num)):
                self._pool(length).copy(slot, self._pool(to_length), to_slot, num)
            case _:
                self._pools.clear()

    def _pool(self, length: int) -> Pool:
        if length not in self._pools:
            self._pools[length] = Pool.empty(self._shape, length, self._model.embedding)
        return self._pools[length]

    def _attend(self, sent: wire.SentAttend, positions: Tensor) -> QkvAttend:
        each = [(self._pool(length), slots) for length, slots in sent.rows]
        if sent.width:
            rows = [(pool, pool.row(slots[0])) for pool, slots in each]
            return kv.PrefillAttend(self._shape, rows, sent.nums, sent.width)
        pools = [pool if pool.slots == slots else pool.only(slots[0]) for pool, slots in each]
        return kv.DecodeAttend(self._shape, kv.slices(pools, positions, sent.nums), exact=True)

    def _factors(self, owners: list[int]) -> LaneFactors:
        adapters = [self._adapters[number] for number in owners]
        first, kept = adapters[0], self._lanes.get(adapters[0].rank)
        if len(owners) == 1:
            return first.factors
        if kept is None or kept[0] != owners:
            values = torch.cat([each.factors.values for each in adapters])
            kept = self._lanes[first.rank] = owners, first.factors.over(lambda _: values)
        return kept[1]
