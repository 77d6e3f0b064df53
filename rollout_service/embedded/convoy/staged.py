"""The head's model: its own layers, then those of each stage, over sockets. Its calls block, in the engine's thread.

reads, writes: stages' connections   waits for: a stage's answer   unblocked by: that stage; PATIENCE_S without a byte
after a stage is lost: the rows stay as they are, so that they can be handed back with their tokens, until `close`
"""

import socket
import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec
import structlog
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from base_model.stacked import NUM_FUSED, FusedAdapter
from common.peers.server import BEAT, HEAR_S, PART, STAGE
from rollout_service.embedded.backbone.fused import FusedDecoder
from rollout_service.embedded.backbone.interface import ForwardPart
from rollout_service.embedded.convoy import stage

PATIENCE_S = 15.0
"""Seconds in which a stage takes a step, or says a byte, or counts as gone: its process loads the whole base model meanwhile."""
MAX_ADAPTERS = 64
"""Adapters that a stage keeps: more than one step has."""
log = structlog.get_logger()


class StageLost(Exception):
    """A stage is gone, and its rows' keys and values with it."""


class StageLink:
    """The head's connection to one stage."""

    def __init__(self, address: str, key: str, layers: range) -> None:
        """Raises OSError if nobody is there."""
        host, _, port = address.rpartition(":")
        self._address = address
        self._products = slice(layers.start * NUM_FUSED, layers.stop * NUM_FUSED)
        self._numbers = dict[FusedAdapter, int]()  # by which the stage knows adapters, those used last at the end
        self._socket = socket.create_connection((host, int(port)), HEAR_S)
        self._socket.settimeout(PATIENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(f"{key} {STAGE} 0\n".encode())
        self._answers = self._socket.makefile("rb")

    def run(self, x: Tensor, positions: Tensor, part: ForwardPart) -> Tensor:
        """Hidden states behind the stage's layers. Raises StageLost, and RuntimeError for a forward that fails there."""
        new = list[stage.SentAdapter]()
        turns = [([*turn.slots], turn.num, self._number(turn.adapter, new)) for turn in part.turns]
        step = msgspec.msgpack.encode(stage.StageStep(turns, part.width, x, positions, new), enc_hook=stage.packed)
        try:
            self._socket.sendall(stage.framed(step))
            while (mark := self._answers.read(1)) == BEAT:
                pass
            content = self._answers.read(int.from_bytes(self._answers.read(stage.SIZE_BYTES), "little"))
            if mark == PART:
                return stage.unpacked(x.device, Tensor, content)
        except (OSError, SafetensorError) as error:
            raise StageLost(f"the stage at {self._address}: {error!r}") from error
        if mark == stage.FAILED:
            raise RuntimeError(f"at the stage {self._address}: {content.decode()}")
        raise StageLost(f"the stage at {self._address} ended the connection")

    def close(self) -> None:
        self._answers.close()
        self._socket.close()

    def _number(self, adapter: FusedAdapter | None, new: list[stage.SentAdapter]) -> int:
        """The number by which the stage knows it, from this step on if it is added to `new`."""
        if adapter is None:
            return stage.NO_ADAPTER
        if (number := self._numbers.pop(adapter, None)) is None:
            is_full = len(self._numbers) == MAX_ADAPTERS
            number = self._numbers.pop(next(iter(self._numbers))) if is_full else len(self._numbers)
            a, b = adapter.factors.a[self._products], adapter.factors.b[self._products]
            new.append((number, adapter.rank, [*a], [[*same] for same in b]))
        self._numbers[adapter] = number
        return number


class StagedDecoder:
    """See `EngineBackbone`. Its rows keep nothing between turns, and compute in deterministic mode's way."""

    def __init__(
        self,
        own: FusedDecoder,
        shapes: Mapping[str, tuple[int, int]],
        links: Sequence[StageLink],
        on_lost: Callable[[], object],
    ) -> None:
        """`own`: the first layers. `shapes`: see `linear_shapes`. `on_lost`: called in the engine's thread."""
        self.config, self.embedding, self.logits = own.config, own.embedding, own.logits
        self._own, self._shapes, self._links, self._on_lost = own, shapes, links, on_lost
        self._closed = threading.Event()

    def linear_shapes(self) -> Mapping[str, tuple[int, int]]:
        return self._shapes

    def forward(self, tokens: Tensor, positions: Tensor, parts: Sequence[ForwardPart]) -> Tensor:
        (part,) = parts
        x, num = self._own.run(F.embedding(tokens, self._own.embedding), positions, parts), len(part.turns) * part.width
        try:
            if self._closed.is_set():
                raise StageLost("the convoy is over")
            for link in self._links:
                x[:num] = link.run(x[:num], positions[:num], part)
        except StageLost as error:
            log.warning("stage_lost", reason=str(error))
            self._on_lost()
            self._closed.wait()
            raise
        return self._own.final_norm(x)

    def close(self) -> None:
        """Ends a forward that has lost a stage, and all later ones."""
        self._closed.set()
