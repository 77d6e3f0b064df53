"""The head's model: its own layers, then those of each stage, over sockets. Its calls block, in the engine's thread.

reads, writes: stages' connections   waits for: a stage's answer   unblocked by: that stage; PATIENCE_S without a byte
after a stage is lost: the rows stay as they are, so that they can be handed back with their tokens, until `close`
"""

import socket
import threading
from collections.abc import Callable, Mapping, Sequence

import structlog
from torch import Tensor

from base_model.stacked import NUM_FUSED, FusedAdapter, Product
from common.peers.server import BEAT, HEAR_S, PART, SEND_S, STAGE
from rollout_service.embedded import kv
from rollout_service.embedded.backbone.fused import FusedDecoder
from rollout_service.embedded.backbone.interface import ForwardPart, QkvAttend
from rollout_service.embedded.convoy import wire
from rollout_service.embedded.pools import PoolChange

PATIENCE_S = 10.0
"""Seconds without a byte after which a stage counts as gone: its process loads the whole base model meanwhile."""
MAX_ADAPTERS = 64
"""Adapters that stages keep; with more, all come again."""
log = structlog.get_logger()


class StageLost(Exception):
    """A stage is gone, and its rows' keys and values with it."""


class StageLink:
    """The head's connection to one stage."""

    def __init__(self, address: str, key: str, layers: range) -> None:
        """Raises OSError if nobody is there."""
        host, _, port = address.rpartition(":")
        self.changes = list[PoolChange]()  # that the stage does not know
        self._address = address
        self._products = slice(layers.start * NUM_FUSED, layers.stop * NUM_FUSED)
        self._sent, self._new, self._forgets = dict[FusedAdapter, int](), dict[int, wire.SentAdapter](), False
        self._socket = socket.create_connection((host, int(port)), HEAR_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(f"{key} {STAGE} 0\n".encode())

    def run(self, x: Tensor, positions: Tensor, attend: wire.SentAttend, products: Sequence[Product]) -> Tensor:
        """Hidden states behind the stage's layers. Raises StageLost, and RuntimeError for a forward that fails there."""
        if len(self._sent) > MAX_ADAPTERS:
            self._sent, self._new, self._forgets = {}, {}, True
        sent = [
            wire.SentProduct([self._number(each) for each in p.owners], p.gather, p.rows, p.places) for p in products
        ]
        try:
            self._send(wire.StageStep(self.changes, self._forgets, self._new, x, positions, attend, sent))
            answer = wire.decoded(self._answer(), wire.StageAnswer, x.device)
        except (OSError, EOFError, ValueError) as error:
            raise StageLost(f"the stage at {self._address}: {error!r}") from error
        self.changes, self._new, self._forgets = [], {}, False
        if answer.x is None:
            raise RuntimeError(f"at the stage {self._address}: {answer.error}")
        return answer.x

    def close(self) -> None:
        self._socket.close()

    def _number(self, adapter: FusedAdapter) -> int:
        """The number by which the stage knows it."""
        if adapter not in self._sent:
            number = self._sent[adapter] = len(self._sent)
            a, b = adapter.factors.a[self._products], adapter.factors.b[self._products]
            self._new[number] = wire.SentAdapter(adapter.rank, list(a), [list(same) for same in b])
        return self._sent[adapter]

    def _send(self, step: wire.StageStep) -> None:
        self._socket.settimeout(SEND_S)
        self._socket.sendall(wire.framed(step))
        self._socket.settimeout(PATIENCE_S)

    def _answer(self) -> bytes:
        while (mark := self._heard(1)) == BEAT:
            pass
        if mark != PART:
            raise ValueError(f"it says {mark!r}")
        return self._heard(wire.size_of(self._heard(wire.SIZE_BYTES)))

    def _heard(self, num_bytes: int) -> bytes:
        heard = bytearray()
        while len(heard) < num_bytes:
            if not (piece := self._socket.recv(min(1 << 20, num_bytes - len(heard)))):
                raise EOFError("it ended the connection")
            heard += piece
        return bytes(heard)


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
        self.changes = list[PoolChange]()
        """Changes of the rows' pools that no link knows yet: `TorchEngine` adds them."""
        self.config, self.embedding, self.logits = own.config, own.embedding, own.logits
        self._own, self._shapes, self._links, self._on_lost = own, shapes, links, on_lost
        self._closed = threading.Event()

    def linear_shapes(self) -> Mapping[str, tuple[int, int]]:
        return self._shapes

    def forward(self, tokens: Tensor, positions: Tensor, parts: Sequence[ForwardPart]) -> Tensor:
        if self._closed.is_set():
            raise StageLost("the convoy is over")
        (part,) = parts
        x, attend = self._own.run(self._own.embed(tokens), positions, parts), _sent(part.attend)
        for link in self._links:
            link.changes += self.changes
        self.changes.clear()
        try:
            for link in self._links:
                x = link.run(x, positions, attend, part.products)
        except StageLost as error:
            log.warning("stage_lost", reason=str(error))
            self._on_lost()
            self._closed.wait()
            raise
        return self._own.final_norm(x)

    def close(self) -> None:
        """Ends a forward that has lost a stage, and all later ones."""
        self._closed.set()


def _sent(attend: QkvAttend) -> wire.SentAttend:
    if isinstance(attend, kv.PrefillAttend):
        rows = [(pool.length, [pool.slots[row]]) for pool, row in attend.rows]
        return wire.SentAttend(rows, list(attend.nums), attend.width)
    assert isinstance(attend, kv.DecodeAttend), "the rows of a convoy keep nothing between turns"
    rows = [(part.pool.length, list(part.pool.slots)) for part in attend.parts]
    return wire.SentAttend(rows, [part.length for part in attend.parts], 0)
