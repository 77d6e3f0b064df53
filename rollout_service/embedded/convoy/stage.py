"""Computes the layers of one stage for the head of a convoy; in these layers it has the keys and values of the head's rows.

A message is its size, 8 bytes, then its bytes: a step is msgpack, tensors are as safetensors has them. Before its answer, hidden states
or why there are none, the stage says PART or FAILED, and BEAT now and then while it computes: so the head hears that it is gone from
that it takes long. Axes: N rows of a forward, E hidden.

reads, writes: the head's connection   waits for: its next step   unblocked by: the head, or the connection's end
after a crash: the head hands its rows back
"""

import asyncio
import contextlib
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from base_model.kernels import DEFAULT
from base_model.stacked import FusedAdapter, LaneFactors, LanePlanner
from common.cancellation import beating
from common.peers.server import BEAT, PART
from rollout_service.embedded import kv
from rollout_service.embedded.backbone.fused import FusedDecoder
from rollout_service.embedded.backbone.interface import ForwardPart
from rollout_service.embedded.pools import FIRST_ROWS, Pool

FAILED = b"!"
SIZE_BYTES = 8
NO_ADAPTER = -1


SentAdapter = tuple[int, int, list[Tensor], list[list[Tensor]]]
"""An adapter's number, maybe an earlier one's, its rank, and its factors A and B by fused product, of the stage's layers."""


class StageStep(msgspec.Struct, frozen=True, array_like=True):
    """One forward of a stage."""

    turns: list[tuple[list[tuple[int, int]], int, int]]  # as `ForwardTurn`, with an adapter's number
    width: int  # rows of each
    x: Tensor  # [N, E] hidden states before the stage's layers
    positions: Tensor  # [N]
    adapters: list[SentAdapter]  # that it does not know yet


def framed(content: bytes) -> bytes:
    return len(content).to_bytes(SIZE_BYTES, "little") + content


def packed(tensor: Tensor) -> bytes:
    return safetensors.torch.save({"x": tensor.detach().cpu().contiguous()})


def unpacked(device: torch.device, _: type, content: Any) -> Tensor:
    return safetensors.torch.load(content)["x"].to(device)


async def serve_head(model: FusedDecoder, lanes_bytes: int, reader: StreamReader, writer: StreamWriter) -> None:
    """Serves a head to its end. `lanes_bytes`: the most for copies of factors. Raises OSError for a head that fails."""
    mirror = Mirror(model, lanes_bytes)
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            size = int.from_bytes(await reader.readexactly(SIZE_BYTES), "little")
            computing = asyncio.to_thread(mirror.answer, await reader.readexactly(size))
            writer.write(await beating(lambda: writer.write(BEAT), computing))
            await writer.drain()


class Mirror:
    """A stage's part of one head's rows. A row's keys and values stay until its slot is another's, which begins at position 0."""

    def __init__(self, model: FusedDecoder, lanes_bytes: int) -> None:
        self._model, self._device = model, model.embedding.device
        self._shape = replace(model.config, num_layers=len(model.layers))
        self._planner = LanePlanner(self._device, DEFAULT.min_rows, budget_bytes=lanes_bytes)
        self._adapters: dict[int, FusedAdapter | None] = {NO_ADAPTER: None}
        self._pools = dict[int, Pool]()  # by length
        self._pool_of = dict[int, Pool]()  # by slot

    @torch.inference_mode()
    def answer(self, content: bytes) -> bytes:
        try:
            step = msgspec.msgpack.decode(content, type=StageStep, dec_hook=partial(unpacked, self._device))
            return PART + framed(packed(self.compute(step)))
        except (RuntimeError, ValueError, LookupError) as error:
            return FAILED + framed(f"{type(error).__name__}: {error}".encode())

    def compute(self, step: StageStep) -> Tensor:
        """Hidden states behind the stage's layers [N, E]."""
        for number, rank, a, b in step.adapters:
            self._adapters[number] = FusedAdapter(rank, LaneFactors.of(a, b))
        turns = [*zip(step.turns, step.positions[:: step.width].tolist(), strict=True)]
        for slot, length in (each for (slots, *_), start in turns if start == 0 for each in slots):
            self._begin(slot, length)
        spans = [
            kv.NewTokens(pool := self._pool_of[slot], pool.row(slot), start, num)
            for (((slot, _), *_), num, _), start in turns
        ]
        x = self._model.run(step.x, step.positions, [self._part(step, spans)])
        for ((first, _), *others), num, _ in step.turns:
            for slot, length in others:
                self._pool_of[first].copy(first, self._pools[length], slot, num)
        return x

    def _part(self, step: StageStep, spans: Sequence[kv.NewTokens]) -> ForwardPart:
        adapters = [self._adapters[number] for _, _, number in step.turns]
        if step.width == 1:
            attend = kv.ExtendAttend(self._shape, spans)
            return ForwardPart(len(spans), attend, self._planner.plan(adapters, len(spans)))
        attend = kv.PrefillAttend(self._shape, [each[:2] for each in spans], [each.num for each in spans], step.width)
        named = [adapter for adapter in adapters if adapter]  # all or none
        return ForwardPart(len(step.x), attend, self._planner.plan_sequences(named, step.width) if named else [])

    def _begin(self, slot: int, length: int) -> None:
        """Gives a new row its place, which no earlier one of its slot has any more."""
        if old := self._pool_of.pop(slot, None):
            old.remove(slot, np.full(max(old.slots) + 1, old.length), clear=True)
        if length not in self._pools:
            self._pools[length] = Pool.empty(self._shape, length, self._model.embedding)
        pool = self._pool_of[slot] = self._pools[length]
        if pool.num_rows == len(pool.slots):
            pool.resize(max(FIRST_ROWS, 2 * pool.num_rows))
        pool.slots.append(slot)
