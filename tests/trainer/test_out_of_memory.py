"""Memory that runs out in a step: its micro-batches get smaller, down to one row; only a row that is too large fails."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from base_model.decoder import Decoder
from common.errors import InvalidInput
from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.wire.messages import AdapterUpdate
from tests.support.trainer_cases import load_shallow, make_init, make_rows, make_step, nothing
from tests.trainer.test_trainer_fused import job, same_bytes
from trainer_service.backbone.interface import AdapterPlace, Sequences
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.fusion import Fusion
from trainer_service.handler import TrainHandler
from trainer_service.open_step import Trained
from trainer_service.packing import Budget
from trainer_service.training import Trainer


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_shallow()


@dataclass(frozen=True, slots=True)
class Small(DecoderBackbone):
    """A base model on a device with room for so many tokens, padding included."""

    room: int = 0
    asked: list[int] = field(default_factory=list[int])  # tokens of each pass

    @property
    def concurrent(self) -> bool:
        return False

    def logprobs(self, sequences: Sequences, adapters: Sequence[AdapterPlace] | None) -> Tensor:
        self.asked.append(len(sequences.trees) * sequences.width)
        if self.asked[-1] > self.room:
            raise MemoryError("no room")
        return DecoderBackbone.logprobs(self, sequences, adapters)


async def test_a_step_that_is_too_large_alone_is_computed_in_smaller_micro_batches(decoder: Decoder) -> None:
    # Given a lone step whose first micro-batch takes three times the memory that there is
    base = Small(decoder, room=200)
    fusion = Fusion(Trainer(base, Budget(2048), share_prefixes=False))
    one = job(fusion.trainer, 0, num_groups=12)

    found = await fusion.train(*one, nothing)

    # Then it is computed after two attempts or so, and learns what it would at once
    expected = Trainer(DecoderBackbone(decoder), Budget(2048), share_prefixes=False).step(*one, nothing)
    refused = [tokens for tokens in base.asked if tokens > base.room]
    assert refused[0] > 3 * base.room and 2 <= len(refused) <= 3
    assert all(later <= earlier / 2 for earlier, later in pairwise(refused))
    torch.testing.assert_close(found.state.values_P, expected.state.values_P, atol=1e-5, rtol=1e-5)
    assert found.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=1e-5)


@pytest.mark.exact
async def test_in_deterministic_mode_it_has_the_same_bytes(decoder: Decoder) -> None:
    fusion = Fusion(Trainer(Small(decoder, room=200), Budget(2048), deterministic=True))
    one = job(fusion.trainer, 0, num_groups=6)

    found = await fusion.train(*one, nothing)

    assert same_bytes(found.state, Trainer(DecoderBackbone(decoder), deterministic=True).step(*one, nothing).state)


async def test_rows_that_share_a_beginning_are_computed_apart_where_they_are_too_large_together(
    decoder: Decoder,
) -> None:
    base = Small(decoder, room=60)
    fusion = Fusion(Trainer(base, Budget(2048)))
    one = job(fusion.trainer, 0, num_groups=2, group_size=8)
    opened = fusion.trainer.begin(*one)
    assert min(map(len, opened.opened.queue)) > base.room
    fusion.trainer.discard(opened.opened)

    found = await fusion.train(*one, nothing)

    expected = Trainer(DecoderBackbone(decoder)).step(*one, nothing)
    torch.testing.assert_close(found.state.values_P, expected.state.values_P, atol=1e-5, rtol=1e-5)


async def test_a_row_that_is_too_large_alone_fails_with_what_to_set_and_harms_no_other(decoder: Decoder) -> None:
    base = Small(decoder, room=30)
    fusion = Fusion(Trainer(base, Budget(2048)))
    large = job(fusion.trainer, 0)
    small = fusion.trainer.init(make_init("small"))
    rows = make_rows(1, num_groups=1, group_size=2)
    longest = int(large[0].rows.lengths.numpy().max())
    assert longest > base.room + 1 > rows.lengths.numpy().max()

    failed, found = await asyncio.gather(
        fusion.train(*large, nothing),
        fusion.train(make_step(0, rows, "small", tenant="other"), small, nothing),
        return_exceptions=True,
    )

    assert isinstance(failed, InvalidInput)
    assert f"in a row of {longest - 1} tokens" in str(failed)
    assert "MB free" in str(failed) and "MARLAAS_TRAINER_CHECKPOINTING=true" in str(failed)
    assert isinstance(found, Trained)


async def test_a_step_that_was_delivered_before_begins_with_smaller_micro_batches(
    decoder: Decoder, tmp_path: Path
) -> None:
    # Given a step at which two trainers have died
    base, store = Small(decoder, room=1 << 20), AdapterStore(Objects.open(tmp_path.as_uri()))
    handler = TrainHandler(Trainer(base, Budget(512), share_prefixes=False), store, "tiny")
    await handler(make_init(), nothing)
    step = make_step(0, make_rows(num_groups=12))

    handler.delivered_again(step, 2)
    ((_, update),) = await handler(step, nothing)

    # Then it takes a quarter of the tokens at a time, and the step after it as many as ever
    assert isinstance(update, AdapterUpdate) and update.failure is None
    assert 64 < max(base.asked) <= 128
    await handler(make_step(1, make_rows(num_groups=12, version=1)), nothing)
    assert max(base.asked) > 256
