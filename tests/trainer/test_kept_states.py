"""A trainer keeps the states of adapters between their steps: by default of some large ones, and it says if one is too large."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from common.store.adapters import AdapterStore
from common.store.objects import Objects
from tests.support.trainer_cases import NO_ROWS, load_tiny, make_init, make_step, nothing
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.handler import TrainHandler
from trainer_service.memory import CACHED_STATES, LEAST_CACHE, cache_bytes
from trainer_service.training import Trainer

GB = 1_000_000_000
LAYER_8B = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)} | {
    "gate": (12_288, 4096),
    "up": (12_288, 4096),
    "down": (4096, 12_288),
}
SHAPES_8B = {f"{layer}.{name}": shape for layer in range(36) for name, shape in LAYER_8B.items()}
"""The linear layers of Qwen3-8B."""


def test_by_default_there_is_room_for_some_large_states() -> None:
    values = 32 * sum(out + width for out, width in SHAPES_8B.values())
    assert cache_bytes(SHAPES_8B, 1000 * GB) == CACHED_STATES * 3 * 4 * values > 4 * GB
    assert cache_bytes(SHAPES_8B, 24 * GB) == 3 * GB
    assert cache_bytes(SHAPES_8B, GB) == LEAST_CACHE


@pytest.mark.parametrize(("budget", "kept"), [(1000, False), (1 << 30, True)])
async def test_a_state_that_is_larger_than_all_room_is_said_once(tmp_path: Path, budget: int, kept: bool) -> None:
    trainer = Trainer(DecoderBackbone(load_tiny()))
    handler = TrainHandler(trainer, AdapterStore(Objects.open(tmp_path.as_uri())), "tiny", cache_bytes=budget)
    with capture_logs() as logs:
        await handler(make_init(), nothing)
        await handler(make_step(0, NO_ROWS), nothing)
    told = [line for line in logs if line["event"] == "state_not_kept"]
    assert [line["trainer_cache_bytes"] for line in told] == ([] if kept else [budget])
    assert bool(handler.resident()) is kept
