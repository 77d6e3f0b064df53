"""Checks at start-up that on this machine a turn's bits do not depend on what runs with it.

The same turns are generated one by one, then among others of mixed adapters and lengths, in another order, and in a full
engine: tokens, log-probs and prompt log-probs must be the same bits.
`python -m rollout_service.embedded.selftest FOLDER MIN_ROWS [SLOTS]` checks in a process of its own.
"""

import hashlib

import numpy as np
import torch

from base_model.adapter import Adapter, init_adapter, load_adapter, save_adapter
from base_model.decoder import Decoder
from base_model.kernels import NotDeterministic, run_selftest
from base_model.stacked import FusedAdapter, fuse
from common.rng import uniform
from common.wire.messages import BASE, AdapterRef, LoraSpec, Sampling, TrajectoryRef, TurnRequest
from common.wire.transcript import shown
from rollout_service.embedded.backbone.fused import FusedDecoder
from rollout_service.embedded.backbone.interface import EngineBackbone
from rollout_service.embedded.batch import Ended, RunningRows
from rollout_service.embedded.pools import EngineLimits
from rollout_service.embedded.row_states import TurnRow

RANKS = (8, 3, 16)
LENGTHS = (5, 40, 70, 1, 33, 12)
LONG = {3: 300, 8: 410}
"""Row -> its length. Two that differ attend to different numbers of positions, apart and together."""
MAX_TOKENS = (6, 3, 9)
PROMPT_LOGPROBS = (-1, 0, 20, -1, 0)
CROWD = 60
"""Rows that run together; as they end, forwards of every number of rows occur."""

Turns = dict[str, tuple[list[int], list[float], bytes]]
"""Request id -> tokens, log-probs, and those of the prompt, f4."""


def selftest(model: EngineBackbone, min_rows: int, slots: int = CROWD) -> str:
    """The sha256 of what was generated, the same for any number of slots. Raises NotDeterministic."""
    adapters = [_adapter(model, seed, rank) for seed, rank in enumerate(RANKS)]
    everyone = [_row(model, adapters, i) for i in range(max(CROWD, slots))]
    crowd, rows = everyone[:CROWD], everyone[: 2 * len(LENGTHS)]
    together = _run(model, crowd, slots=CROWD, min_rows=min_rows)
    full = _run(model, everyone, slots=slots, min_rows=min_rows) if slots > CROWD else together
    reversed_ = _run(model, rows[::-1], slots=5, min_rows=min_rows)
    for row in rows:
        alone = _run(model, [row], slots=1, min_rows=min_rows)
        for other in (together, full, reversed_):
            if other[row.request.id] != alone[row.request.id]:
                raise NotDeterministic("a generated turn's bits depend on its neighbours (rows, lengths or adapters)")
    return _digest(together)


def _digest(turns: Turns) -> str:
    found = hashlib.sha256()
    for name, (tokens, logprobs, of_prompt) in sorted(turns.items()):
        found.update(
            name.encode() + np.array(tokens, "<i4").tobytes() + np.array(logprobs, "<f4").tobytes() + of_prompt
        )
    return found.hexdigest()


def _adapter(model: EngineBackbone, seed: int, rank: int) -> FusedAdapter:
    """An adapter that went through its file format, with a B that is not zero."""
    shapes = model.linear_shapes()
    initial = init_adapter(LoraSpec(rank, 16.0), shapes, seed)
    b: dict[str, torch.Tensor] = {}
    for index, (name, tensor) in enumerate(sorted(initial.b.items())):
        draws = uniform(seed, "selftest", index, np.arange(tensor.numel())).astype(np.float32) - 0.5
        b[name] = torch.from_numpy(draws).view_as(tensor) * 0.05
    files = save_adapter(Adapter(initial.spec, initial.a, b), "selftest")
    return fuse(load_adapter(files), shapes, model.config.num_layers, like=model.embedding)


def _row(model: EngineBackbone, adapters: list[FusedAdapter], index: int) -> TurnRow:
    which = index % (len(adapters) + 1)
    num = LONG.get(index, LENGTHS[index % len(LENGTHS)])
    room = model.config.context // 2
    tokens = (uniform(index, "selftest", np.arange(min(num, room))) * model.config.vocab).astype(np.int32)
    request = TurnRequest(
        id=str(index),
        tenant="selftest",
        job="selftest",
        partition=0,
        adapter=BASE if which == len(adapters) else AdapterRef("selftest", "selftest", which),
        trajectory=TrajectoryRef("train", 1, index // 2, index),
        turn=0,
        transcript=shown(tokens),
        sampling=Sampling(
            max_tokens=MAX_TOKENS[index % len(MAX_TOKENS)],
            prompt_logprobs=PROMPT_LOGPROBS[index % len(PROMPT_LOGPROBS)],
        ),
    )
    return TurnRow(request, None if which == len(adapters) else adapters[which], handle=None)


def _run(model: EngineBackbone, rows: list[TurnRow], *, slots: int, min_rows: int) -> Turns:
    limits = EngineLimits(slots=slots, min_rows=min_rows, exact=True)
    running = RunningRows(model, end_ids=(), decode=lambda _: "", limits=limits)
    results: Turns = {}
    with torch.inference_mode():
        for row in rows:
            running.add(TurnRow(row.request, row.adapter, handle=None))
        while running.has_work:
            results |= {e.row.request.id: _turn(e) for e in running.advance()}
    return results


def _turn(end: Ended) -> tuple[list[int], list[float], bytes]:
    return end.partial.tokens, end.partial.logprobs, end.row.prompt_logprobs.data


def _of_decoder(decoder: Decoder, *sizes: int) -> str:
    return selftest(FusedDecoder(decoder, exact=True), *sizes)


if __name__ == "__main__":
    run_selftest(_of_decoder)
