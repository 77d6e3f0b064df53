"""A loader's part in a convoy: serves its stage, or leads the rows as the head.

reads: `convoy`, a head's connection; the head also the rollout streams   writes: `convoy`; the head what rollout workers write
waits for: its stage's weights, the other stages   unblocked by: the fetch, other loaders, the first that is whole, SIGTERM
after a crash: of a stage the head hands its rows back; those of a head are taken over as any worker's
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import structlog
from safetensors import SafetensorError

from base_model.kernels import DEFAULT
from common.cancellation import done_before, running, set_within
from common.errors import InvalidInput, MarlaasError
from common.models.weight_files import read_weights
from common.peers.chain import Relay
from common.peers.convoys import HOLD_S, READY, TELL_S, WHOLE, Convoy, Loader, behind
from common.text.tokens import ChatTokenizer
from common.worker.service import BuiltService, Parts, serve
from common.worker.telemetry import Reporter
from rollout_service.embedded.backbone.choice import load_stage
from rollout_service.embedded.backbone.fused import FusedDecoder
from rollout_service.embedded.convoy.stage import serve_head
from rollout_service.embedded.convoy.staged import StagedDecoder, StageLink
from rollout_service.embedded.pools import EngineLimits
from rollout_service.embedded.torch_engine import TorchEngine
from rollout_service.settings import RolloutSettings

SLOTS = 28
"""Turns that a convoy generates at once, besides a few chats: each token costs a way to all stages."""
Make = Callable[[RolloutSettings, Parts, TorchEngine, Callable[[], str]], BuiltService]
"""Makes a service of an engine; the last argument names the stream that gets what is handed back."""
log = structlog.get_logger()


async def take_part(make: Make, settings: RolloutSettings, parts: Parts, convoy: Convoy, stop: asyncio.Event) -> None:
    """Takes part from when the stage's weights are here until a loader is whole, or `stop`."""
    if settings.engine != "torch" or settings.deterministic or settings.rollout_backbone == "transformers":
        raise InvalidInput(
            "MARLAAS_CONVOYS needs MARLAAS_ENGINE=torch, our decoder, and no deterministic mode: unset it"
        )
    relay = parts.store.relay
    assert relay is not None, "the stage is served through it"
    async with convoy.taken_part():
        if not await done_before(stop, convoy.began.wait()):
            return
        try:
            async with convoy.reading:
                loaded = await asyncio.to_thread(_load, settings, convoy)
        except (MarlaasError, OSError, RuntimeError, SafetensorError) as error:  # torch's lack of memory too
            return log.warning("no_convoy", reason=f"{type(error).__name__}: {error}")
        relay.serve_stage(partial(serve_head, loaded.own, EngineLimits(kv_bytes=settings.rollout_kv_bytes).step_lanes))
        convoy.is_now(READY)
        head = Head(make, settings, parts, convoy, loaded, stop)
        while not stop.is_set() and convoy.state == READY:
            if stages := behind(convoy.loaders, convoy.worker, convoy.num_stages):
                await head.lead(stages, relay)
            await set_within(stop, TELL_S)
        await set_within(stop, HOLD_S)  # heads must hear who is whole
        relay.serve_stage(None)


class LoadedStage(NamedTuple):
    own: FusedDecoder
    shapes: Mapping[str, tuple[int, int]]
    tokenizer: ChatTokenizer


def _load(settings: RolloutSettings, convoy: Convoy) -> LoadedStage:
    folder, own = convoy.folder, load_stage(settings, convoy.folder, convoy.stages[convoy.number])
    return LoadedStage(own, read_weights(folder).shapes, ChatTokenizer.load(folder, settings.max_context))


@dataclass(slots=True)
class Head:
    """Leads a convoy."""

    make: Make
    settings: RolloutSettings
    parts: Parts
    convoy: Convoy
    loaded: LoadedStage
    stop: asyncio.Event
    heir: str = ""

    async def lead(self, stages: Sequence[Loader], relay: Relay) -> None:
        """Generates turns until a loader is whole, a stage is lost, or it stops; then hands them back."""
        over, links = asyncio.Event(), list[StageLink]()
        on_lost = partial(asyncio.get_running_loop().call_soon_threadsafe, over.set)
        try:
            for each in stages:
                if layers := self.convoy.stages[each.stage].layers:
                    links.append(await asyncio.to_thread(StageLink, each.address, relay.key, layers))
            async with running(self._watch(over)):
                await self._serve(StagedDecoder(self.loaded.own, self.loaded.shapes, links, on_lost), over)
        except OSError as error:
            log.warning("convoy_not_formed", reason=repr(error))
        finally:
            for link in links:
                link.close()

    async def _serve(self, model: StagedDecoder, over: asyncio.Event) -> None:
        slots = {"rollout_slots": min(SLOTS, self.settings.rollout_slots), "rollout_orphan_slots": 0}
        settings = self.settings.model_copy(update=slots | {"own_streams": False})
        limits = EngineLimits(
            settings.engine_slots, settings.rollout_kv_bytes, 0, 0, min_rows=DEFAULT.min_rows, exact=True
        )
        engine = TorchEngine(model, self.loaded.tokenizer, limits=limits)
        await engine.start()
        parts = replace(self.parts, worker=f"{self.parts.worker}-convoy")
        service = self.make(settings, parts, engine, lambda: self.heir)
        about = replace(service.about, counters=engine.counters)  # what peers sent, this worker tells later
        try:
            log.info("convoy_serves", stages=self.convoy.num_stages)
            await serve(settings, service, parts, Reporter(parts.worker, "rollout", parts.cell.base_model, about), over)
        finally:
            model.close()
            for close in service.close:
                await close()

    async def _watch(self, over: asyncio.Event) -> None:
        """Ends the convoy once a loader is whole, or this worker stops."""
        while not over.is_set():
            if whole := [each.worker for each in self.convoy.loaders if each.state == WHOLE]:
                self.heir = self.parts.cell.rollout_worker(whole[0])
            if whole or self.stop.is_set():
                over.set()
            await set_within(self.stop, TELL_S)
