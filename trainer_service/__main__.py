"""Starts one trainer worker. Wiring only."""

import asyncio
from functools import partial
from pathlib import Path

from base_model.device import alone_on, free_bytes, held_bytes, keep_freed_memory, prepare_cpu
from base_model.kernels import choose
from common.bus.streams import GROUP_TRAINER
from common.errors import InvalidInput
from common.pool.pool_worker import PooledService
from common.settings import itemsize_of, resolve_model
from common.store.disk_room import DiskRoom
from common.worker.service import BuiltService, Parts, run
from common.worker.telemetry import About
from common.worker.worker import Habits, Inbox
from trainer_service.backbone.choice import load_backbone
from trainer_service.backbone.interface import Backbone
from trainer_service.handler import TrainHandler
from trainer_service.memory import cache_bytes, fit
from trainer_service.packing import Budget
from trainer_service.selftest import KERNELS, selftest
from trainer_service.settings import TrainerSettings
from trainer_service.training import Trainer

MAX_STEPS = 32
"""Steps of different jobs that are trained together at most."""
KEEP_INBOX_S = 3600
"""Seconds that the inbox of a trainer that died stays."""
DRAIN_S = 5.0
"""A step under way may finish when the worker is told to stop."""

SELFTEST = "trainer_service.selftest"


def load_trainer(settings: TrainerSettings) -> tuple[Trainer, str]:
    """Loads the base model. Returns the trainer, and its bits' fingerprint: "" outside deterministic mode. Raises InvalidInput."""
    deterministic = settings.deterministic
    chosen = (settings.trainer_device, settings.dtype, settings.trainer_threads, settings.trainer_ranks)
    if deterministic and (
        chosen != ("cpu", "float32", 1, 1) or settings.kernels or settings.trainer_backbone == "transformers"
    ):
        raise InvalidInput(
            "deterministic mode needs trainer_device=cpu, trainer_dtype=float32, trainer_threads=1, trainer_ranks=1, "
            "no trainer_kernels, and trainer_backbone not transformers"
        )
    folder = resolve_model(settings.models[settings.model_name])
    choice = choose(SELFTEST, folder, KERNELS) if deterministic else None
    prepare_cpu(settings.trainer_threads)
    with alone_on(settings.trainer_device, settings.trainer_ranks):
        backbone = _load(settings, folder)
        trainer = Trainer(backbone, Budget(settings.trainer_micro_batch_tokens * backbone.num_ranks), deterministic)
        fit(trainer, settings.trainer_memory_bytes, most_tokens=settings.most_tokens)
    return trainer, choice.fingerprint(lambda: selftest(trainer)) if choice else ""


def _load(settings: TrainerSettings, folder: Path) -> Backbone:
    if settings.trainer_ranks == 1:
        return load_backbone(settings, folder)
    from trainer_service.ranks.backbone import load_ranks  # imported here: FSDP and transformers take seconds

    return load_ranks(settings, folder)


async def build(settings: TrainerSettings, parts: Parts) -> BuiltService:
    keep_freed_memory()  # before the thread that loads has a heap of its own
    trainer, bits = await asyncio.to_thread(load_trainer, settings)  # in a thread that stays, for ranks end with it
    prepare_cpu(settings.trainer_threads)  # for this thread
    base, backbone = parts.cell.base_model, trainer.backbone
    cached = settings.trainer_cache_bytes or cache_bytes(backbone.linear_shapes(), free_bytes(backbone.device))
    handler = TrainHandler(
        trainer, parts.store, base, worker=parts.worker, cache_bytes=cached, fingerprints=parts.fingerprints
    )
    room = DiskRoom(settings.store, settings.disk_reserve_bytes)
    own = Inbox(parts.cell.trainer(parts.worker), GROUP_TRAINER, at_once=1, keep_s=KEEP_INBOX_S)
    return BuiltService(
        handler,
        [own, Inbox(parts.cell.train, GROUP_TRAINER, at_once=1)],
        About(MAX_STEPS, fingerprint=bits, resident=handler.resident, counters=handler.counters, lacks_disk=room.lacks),
        Habits(drain_s=DRAIN_S, gather_s=0.0, has_room=handler.has_room, takes_leftovers=handler.takes_leftovers),
        num_bytes=partial(held_bytes, settings.trainer_device),
        num_held=handler.num_gradients,
    )


def pooled(settings: TrainerSettings) -> PooledService:
    """Closing lets steps end."""
    return PooledService(About(MAX_STEPS), itemsize_of(settings.dtype), settings.trainer_memory_bytes, finishes=True)


if __name__ == "__main__":
    run("trainer", TrainerSettings, build, pooled)
