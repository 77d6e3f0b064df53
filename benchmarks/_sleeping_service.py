"""Rollout workers and trainers that sleep instead of computing, so that two processor cores are enough for many: the real pool workers,
gates, worker loops and handlers, with adapters that are written and read. `python -m benchmarks._sleeping_service` runs one of SERVICE.
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from pathlib import Path

from base_model.adapter import init_adapter, save_adapter
from benchmarks._paced_rollout import PacedCore
from common.bus.bus import Out
from common.bus.streams import GROUP_TRAINER
from common.pool.gate import stay_awake
from common.settings import resolve_model
from common.text.tokens import ChatTokenizer
from common.wire.messages import Init, LoraSpec, TrainStep
from common.wire.operations import Forget
from common.worker.handlers import Beat
from common.worker.service import BuiltService, Parts, run
from common.worker.telemetry import About
from common.worker.worker import Habits, Inbox
from harness.standin import StandInTrainer
from rollout_service import __main__ as rollout
from rollout_service.process.adapter_files import AdapterFiles, linear_shapes
from rollout_service.process.core import SamplingRequest, TokenChunk
from rollout_service.process.process_engine import ProcessEngine, Shape
from rollout_service.settings import RolloutSettings
from trainer_service import __main__ as trainer
from trainer_service.settings import TrainerSettings

SERVICE = "MARLAAS_TEST_SERVICE"
TURN_S, TRAIN_S, LOAD_S = 0.3, 0.6, 0.5
VOCAB, CONTEXT, MAX_LORAS = 265, 2048, 64


class SleepingCore(PacedCore):
    """Ends each turn after `step_s`."""

    async def start(self) -> None:
        await asyncio.sleep(self.load_s)

    async def sample(self, request: SamplingRequest) -> AsyncGenerator[TokenChunk]:
        await asyncio.sleep(self.step_s)
        yield TokenChunk([97, request.end_ids[0]], [-1.0, -1.0], [], finished=True)


@dataclass
class SleepingTrainer(StandInTrainer):
    """Trains one step after the other."""

    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, message: Init | TrainStep | Forget, beat: Beat) -> list[Out]:
        async with self._turn:
            await asyncio.sleep(TRAIN_S if isinstance(message, TrainStep) else 0.0)
            return await super().__call__(message, beat)


def load_engine(settings: RolloutSettings) -> tuple[ProcessEngine, str]:
    folder = resolve_model(settings.models[settings.model_name])
    tokenizer = ChatTokenizer.load(folder, settings.max_context)
    shape = Shape(VOCAB, CONTEXT, settings.engine_slots, MAX_LORAS, MAX_LORAS, max_temperature=2.0)
    files = AdapterFiles(linear_shapes(folder), max_rank=16)
    return ProcessEngine(lambda: SleepingCore(TURN_S, load_s=LOAD_S), files, tokenizer, shape), ""


async def build_rollout(settings: RolloutSettings, parts: Parts) -> BuiltService:
    return replace(await rollout.build(settings, parts), sleep=stay_awake, wake=stay_awake)


async def build_trainer(settings: TrainerSettings, parts: Parts) -> BuiltService:
    await asyncio.sleep(LOAD_S)
    handler = SleepingTrainer(
        parts.cell, parts.store, files=adapter_of(resolve_model(settings.models[settings.model_name]))
    )
    own = Inbox(parts.cell.trainer(parts.worker), GROUP_TRAINER, at_once=1, keep_s=trainer.KEEP_INBOX_S)
    inboxes = [own, Inbox(parts.cell.train, GROUP_TRAINER, at_once=1)]
    return BuiltService(handler, inboxes, About(trainer.MAX_STEPS), Habits(drain_s=trainer.DRAIN_S, gather_s=0.0))


def adapter_of(folder: Path) -> dict[str, bytes]:
    return save_adapter(init_adapter(LoraSpec(1, 1.0, ("q_proj",)), linear_shapes(folder), 0), "a base")


def main(service: str) -> None:
    if service == "rollout":
        rollout.load_engine = load_engine  # pyright: ignore[reportAttributeAccessIssue]
        run(service, RolloutSettings, build_rollout, rollout.pooled)
    else:
        run(service, TrainerSettings, build_trainer, trainer.pooled)


if __name__ == "__main__":
    main(os.environ[SERVICE])
