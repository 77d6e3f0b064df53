"""Does this machine keep the promise that a turn's bits do not depend on what runs beside it? Asked at start-up.

The same turns are generated alone, then among others of mixed adapters and lengths and in another order: tokens and
log-probs must be the same bits.
"""

import numpy as np
import torch

from base_model.adapter import Adapter, init_adapter, load_adapter, save_adapter
from base_model.decoder import Decoder
from base_model.stacked import FusedAdapter, fuse
from common.messages import BASE, AdapterRef, LoraSpec, Sampling, TrajectoryRef, TurnRequest, f32, i32, u8
from common.rng import uniform
from rollout_service.batch import Batch, Limits
from rollout_service.seats import Row

RANKS = (8, 3, 16)
LENGTHS = (5, 40, 70, 1, 33, 12)
MAX_TOKENS = (6, 3, 9)
CROWD = 60
"""As it thins out, forwards have all numbers of rows."""


class NotDeterministic(RuntimeError):
    """This machine does not compute the same bits for the same turn."""


def selftest(decoder: Decoder) -> None:
    """A second or less for a small base. Raises NotDeterministic."""
    adapters = [_adapter(decoder, seed, rank) for seed, rank in enumerate(RANKS)]
    crowd = [_row(decoder, adapters, i) for i in range(CROWD)]
    rows = crowd[: 2 * len(LENGTHS)]
    together = _run(decoder, crowd, slots=CROWD)
    reversed_ = _run(decoder, rows[::-1], slots=5)
    for row in rows:
        alone = _run(decoder, [row], slots=1)
        for other in (together, reversed_):
            if other[row.request.id] != alone[row.request.id]:
                raise NotDeterministic(
                    "on this machine a generated turn's bits depend on its neighbours (rows, lengths or adapters); "
                    "unset MARLAAS_DETERMINISTIC, or use one thread, float32 and the pinned wheels"
                )


def _adapter(decoder: Decoder, seed: int, rank: int) -> FusedAdapter:
    """Through its file format, with a B that is not zero."""
    shapes = decoder.linear_shapes()
    initial = init_adapter(LoraSpec(rank, 16.0), shapes, seed)
    b: dict[str, torch.Tensor] = {}
    for index, (name, tensor) in enumerate(sorted(initial.b.items())):
        draws = uniform(seed, "selftest", index, np.arange(tensor.numel())).astype(np.float32) - 0.5
        b[name] = torch.from_numpy(draws).view_as(tensor) * 0.05
    files = save_adapter(Adapter(initial.spec, initial.a, b), "selftest")
    return fuse(load_adapter(files), shapes, decoder.config.num_layers, like=decoder.embedding)


def _row(decoder: Decoder, adapters: list[FusedAdapter], index: int) -> Row:
    which = index % (len(adapters) + 1)
    num = LENGTHS[index % len(LENGTHS)]
    room = decoder.config.context // 2
    tokens = (uniform(index, "selftest", np.arange(min(num, room))) * decoder.config.vocab).astype(np.int32)
    request = TurnRequest(
        id=str(index),
        tenant="selftest",
        job="selftest",
        partition=0,
        adapter=BASE if which == len(adapters) else AdapterRef("selftest", "selftest", which),
        trajectory=TrajectoryRef("train", 1, index // 2, index),
        turn=0,
        tokens=i32(tokens),
        logprobs=f32(np.zeros(len(tokens))),
        written=u8(np.zeros(len(tokens))),
        sampling=Sampling(max_tokens=MAX_TOKENS[index % len(MAX_TOKENS)]),
    )
    return Row(request, None if which == len(adapters) else adapters[which], handle=None)


def _run(decoder: Decoder, rows: list[Row], *, slots: int) -> dict[str, tuple[list[int], list[float]]]:
    batch = Batch(decoder, end_ids=(), decode=lambda _: "", limits=Limits(slots=slots))
    results: dict[str, tuple[list[int], list[float]]] = {}
    with torch.inference_mode():
        for row in rows:
            batch.add(Row(row.request, row.adapter, handle=None))
        while batch.has_work:
            results |= {e.row.request.id: (e.tokens, e.logprobs) for e in batch.advance()}
    return results
