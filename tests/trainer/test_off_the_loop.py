"""A trainer's long work happens beside its event loop, with beats: nobody takes its work for left behind meanwhile.

Each slow part waits in its thread for a beat. On the event loop it would keep the beat from coming, and wait in vain.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.cancellation import BEAT_S
from common.store.adapters import AdapterStore
from common.store.objects import Objects
from tests.support.trainer_cases import NO_ROWS, load_tiny, make_init, make_step, nothing
from trainer_service import training, versions
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.handler import TrainHandler
from trainer_service.training import Trainer

PATIENCE_S = 20 * BEAT_S


class Waiting:
    """Wraps a call so that it goes on once a beat has come."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._beaten = threading.Event()
        self.waited: list[bool] = []

    def beat(self) -> None:
        self._beaten.set()

    def __call__(self, *args: Any, **named: Any) -> Any:
        self._beaten.clear()
        self.waited.append(self._beaten.wait(PATIENCE_S))
        return self._call(*args, **named)


@pytest.mark.parametrize(
    ("module", "name"),
    [(training, "init_adapter"), (versions, "load_adapter"), (versions, "save_adapter"), (versions, "save_moments")],
)
async def test_drawing_loading_and_saving_wait_for_nobody(
    module: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Waiting(getattr(module, name))
    decoder, store = load_tiny(), AdapterStore(Objects.open(tmp_path.as_uri()))
    first = TrainHandler(Trainer(DecoderBackbone(decoder)), store, "tiny")
    if name == "load_adapter":
        await first(make_init(), nothing)
        first = TrainHandler(Trainer(DecoderBackbone(decoder)), store, "tiny")  # with nothing in memory
    monkeypatch.setattr(module, name, slow)
    await first(make_step(0, NO_ROWS) if name == "load_adapter" else make_init(), slow.beat)
    assert slow.waited and all(slow.waited)
