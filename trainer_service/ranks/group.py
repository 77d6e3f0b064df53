"""The processes of one trainer, its ranks, as a group that computes in step, and each one's share of a micro-batch.

Axes: P all values of an adapter, M log-probs of a rank.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh

from base_model.device import give_back_memory
from trainer_service.backbone.device_kernels.kernel_choice import use_kernels
from trainer_service.backbone.interface import Sequences
from trainer_service.backbone.loading import load_modules
from trainer_service.backbone.modules import ModulesBackbone
from trainer_service.backbone.sharding import bytes_held, shard
from trainer_service.batch import Ints
from trainer_service.packing import spread

HOST = "127.0.0.1"
A = TypeVar("A")
LOADING = timedelta(hours=2)
"""Seconds that the others may take to start, and to load the base model one after the other."""


class Begin(msgspec.Struct, frozen=True):
    """Facts that a rank needs at its start."""

    rank: int
    num_ranks: int
    port: int  # where the group meets
    folder: str
    device: str  # cpu; or cuda, of which each rank takes the device of its own number
    dtype: str
    kernels: tuple[str, ...]
    max_context: int | None
    threads: int
    parent: int  # the first rank's process
    patience_s: float  # how long a rank waits for the others in an operation

    @property
    def own_device(self) -> torch.device:
        return torch.device(self.device, self.rank) if self.device == "cuda" else torch.device(self.device)


def open_store() -> tuple[Store, int]:
    """Opens the store where the ranks of a new group meet, on this machine only; returns its port too."""
    listening = socket.create_server((HOST, 0))
    port = listening.getsockname()[1]
    return TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()), port


def find_store(port: int) -> Store:
    return TCPStore(HOST, port, is_master=False)


@dataclass(frozen=True, slots=True)
class RankGroup:
    """This process's place among the ranks. All call each method at the same point of their work."""

    begin: Begin
    store: Store

    @property
    def rank(self) -> int:
        return self.begin.rank

    @property
    def num_ranks(self) -> int:
        return self.begin.num_ranks

    @property
    def device(self) -> torch.device:
        return self.begin.own_device

    def join(self) -> None:
        """Meets the others."""
        begin, device = self.begin, self.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        patience = timedelta(seconds=begin.patience_s)
        self.store.set(f"started/{begin.rank}", "")
        self.store.wait([f"started/{rank}" for rank in range(begin.num_ranks)], LOADING)
        dist.init_process_group(
            backend, store=self.store, rank=begin.rank, world_size=begin.num_ranks, timeout=patience
        )

    def leave(self) -> None:
        dist.destroy_process_group()

    def load(self) -> ModulesBackbone:
        """Loads the base model, one rank after the other: each has it whole on the host until it takes its part. Raises
        InvalidInput for one that cannot be computed as it is meant."""
        begin = self.begin
        if self.rank:
            self.store.wait([f"loaded/{self.rank - 1}"], LOADING)
        dtype = getattr(torch, begin.dtype)
        context, checked = begin.max_context, bool(self.rank)  # the first rank has been there
        whole = load_modules(Path(begin.folder), dtype=dtype, max_context=context, checked=checked)
        assert dist.group.WORLD is not None
        part = shard(whole, DeviceMesh.from_group(dist.group.WORLD, self.device.type))
        use_kernels(part, begin.kernels)
        give_back_memory()
        self.store.set(f"loaded/{self.rank}", str(bytes_held(part)))
        return part

    def loaded(self) -> list[int]:
        """Waits until all ranks have loaded their parts; the bytes of each."""
        self.store.wait([f"loaded/{self.num_ranks - 1}"], LOADING)
        return [int(self.store.get(f"loaded/{rank}")) for rank in range(self.num_ranks)]

    def say(self, data: bytes) -> None:
        """Sends bytes from the first rank to all others, which `hear` them."""
        dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), src=0)

    def hear(self, num_bytes: int) -> bytes:
        heard = torch.empty(num_bytes, dtype=torch.uint8)
        dist.broadcast(heard, src=0)
        return heard.numpy().tobytes()

    def least(self, number: int) -> int:
        """The least of the ranks' numbers."""
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def lacking(self, part: ModulesBackbone) -> list[int]:
        """The ranks on which memory ran out in the pass that each has brought to its end."""
        assert part.shortage
        # All ranks gather the same weights in the same order, so one that left a pass would leave the others waiting. Each goes on to
        # the end empty-handed; only here do they agree whether the pass counts.
        lack = torch.zeros(self.num_ranks, dtype=torch.int64)
        lack[self.rank] = bool(part.shortage.reason)
        dist.all_reduce(lack)
        return torch.nonzero(lack).flatten().tolist()

    def hand_on(self, values_P: Tensor) -> None:
        """Copies the first rank's values into those of all."""
        dist.broadcast(values_P, src=0)

    def add_up(self, grad_P: Tensor) -> None:
        """Makes the first rank's gradient the sum of all."""
        dist.reduce(grad_P, dst=0)

    def collect(self, own_M: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Each rank's values, of these sizes, on the first rank; an empty list on the others."""
        room = [own_M.new_empty(max(sizes)) for _ in sizes] if self.rank == 0 else None
        dist.gather(_padded(own_M, max(sizes)), room, dst=0)
        return [values[:size] for values, size in zip(room or [], sizes, strict=False)]

    def hand_out(self, of_ranks: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """This rank's part of the first one's values, [sizes[rank]]. `of_ranks`: on the others, empty."""
        own = torch.empty(max(sizes), device=self.device)
        dist.scatter(own, [_padded(part, max(sizes)) for part in of_ranks] or None, src=0)
        return own[: sizes[self.rank]]


def _padded(values_M: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(values_M, (0, size - len(values_M)))


@dataclass(frozen=True, slots=True)
class Share(Generic[A]):
    """One rank's part of a micro-batch."""

    sequences: Sequences
    adapters: Sequence[A] | None  # of each sequence
    places: Ints  # of its targets in the micro-batch; empty if nobody wants the share's results
    num_tokens: int  # 0 in the same case

    @property
    def num_targets(self) -> int:
        return sum(map(len, self.sequences.targets))


def split(sequences: Sequences, adapters: Sequence[A] | None, num_ranks: int) -> list[Share[A]]:
    """Splits a micro-batch's sequences over ranks by `spread`, about as many tokens each, in the micro-batch's order.

    Every rank splits alike, so none is told. A rank without a sequence computes the shortest one too, and drops the result:
    all ranks must gather each layer's weights.
    """
    lengths = [*map(len, sequences.trees)]
    shortest = lengths.index(min(lengths))
    ends = np.cumsum([0, *map(len, sequences.targets)])
    rows = np.cumsum([0, *(len(tree.rows) for tree in sequences.trees)])

    def share(numbers: list[int]) -> Share[A]:
        own = [row for number in numbers or [shortest] for row in range(rows[number], rows[number + 1])]
        places = [np.arange(ends[row], ends[row + 1]) for row in own if numbers]
        return Share(
            replace(
                sequences,
                trees=[sequences.trees[number] for number in numbers or [shortest]],
                targets=[sequences.targets[row] for row in own],
                temperatures=[sequences.temperatures[row] for row in own],
                learned=[sequences.learned[row] for row in own] if sequences.learned else (),
            ),
            None if adapters is None else [adapters[number] for number in numbers or [shortest]],
            np.concatenate([np.zeros(0, np.int64), *places]),
            sum(lengths[number] for number in numbers),
        )

    return [share(sorted(numbers)) for numbers in spread(lengths, num_ranks)]
