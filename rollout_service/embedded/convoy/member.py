"""A loader's part in a convoy: serves its stage, or leads the rows as the head.

reads: `convoy:*`, a head's connection; the head also the rollout streams   writes: `convoy:<place>`; the head what rollout workers write
waits for: its stage's weights, the other stages   unblocked by: the fetch, other loaders, the first that is whole, SIGTERM
after a crash: of a stage the head hands its rows back; those of a head are taken over as any worker's
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import structlog
from safetensors import SafetensorError

from common.cancellation import done_before, running, set_within
from common.errors import InvalidInput, MarlaasError
from common.models.weight_files import read_weights
from common.peers.chain import Relay
from common.peers.convoys import HOLD_S, LOADING, READY, TELL_S, Convoy
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
                head = await asyncio.to_thread(Head.load, make, settings, parts, convoy)
        except (MarlaasError, OSError, RuntimeError, SafetensorError) as error:  # torch's lack of memory too
            return log.warning("no_convoy", reason=f"{type(error).__name__}: {error}")
        relay.server.serve_stage = partial(
            serve_head, head.own, EngineLimits(kv_bytes=settings.rollout_kv_bytes).step_lanes
        )
        convoy.state = READY if convoy.state == LOADING else convoy.state
        while not stop.is_set() and convoy.state == READY:
            if convoy.number == 0 and convoy.is_formed:
                await head.lead(relay, stop)
            await set_within(stop, TELL_S)
        await set_within(stop, HOLD_S)  # heads must hear who is whole
        relay.server.serve_stage = None


@dataclass(frozen=True, slots=True)
class Head:
    """The first of a convoy: has a stage, and leads the rows."""

    make: Make
    settings: RolloutSettings
    parts: Parts
    convoy: Convoy
    own: FusedDecoder
    shapes: Mapping[str, tuple[int, int]]
    tokenizer: ChatTokenizer

    @classmethod
    def load(cls, make: Make, settings: RolloutSettings, parts: Parts, convoy: Convoy) -> "Head":
        folder, own = convoy.folder, load_stage(settings, convoy.folder, convoy.stages[convoy.number])
        tokenizer = ChatTokenizer.load(folder, settings.max_context)
        return cls(make, settings, parts, convoy, own, read_weights(folder).shapes, tokenizer)

    async def lead(self, relay: Relay, stop: asyncio.Event) -> None:
        """Generates turns until a loader is whole, a stage is lost, or it stops; then hands them back."""
        over, links = asyncio.Event(), list[StageLink]()
        on_lost = partial(asyncio.get_running_loop().call_soon_threadsafe, over.set)
        try:
            for stage, each in zip(self.convoy.stages[1:], self.convoy.loaders[1:], strict=True):
                if stage.layers:
                    links.append(await asyncio.to_thread(StageLink, each.address, relay.holders.key, stage.layers))
            async with running(self._watch(over, stop)):
                await self._serve(StagedDecoder(self.own, self.shapes, links, on_lost), over)
        except OSError as error:
            log.warning("convoy_not_formed", reason=repr(error))
        finally:
            for link in links:
                link.close()

    async def _serve(self, model: StagedDecoder, over: asyncio.Event) -> None:
        slots = {"rollout_slots": min(SLOTS, self.settings.rollout_slots), "rollout_orphan_slots": 0}
        settings = self.settings.model_copy(update=slots | {"own_streams": False})
        limits = EngineLimits(settings.engine_slots, settings.rollout_kv_bytes, 0, 0, exact=True)
        engine, convoy, cell = TorchEngine(model, self.tokenizer, limits=limits), self.convoy, self.parts.cell
        await engine.start()
        parts = replace(self.parts, worker=f"{self.parts.worker}-convoy")
        service = self.make(settings, parts, engine, lambda: cell.rollout_worker(convoy.whole) if convoy.whole else "")
        about = replace(service.about, counters=engine.counters)  # what peers sent, this worker tells later
        try:
            log.info("convoy_serves", stages=convoy.num_stages)
            await serve(settings, service, parts, Reporter(parts.worker, "rollout", cell.base_model, about), over)
        finally:
            model.close()
            for close in service.close:
                await close()

    async def _watch(self, over: asyncio.Event, stop: asyncio.Event) -> None:
        """Ends the convoy once a loader is whole, or this worker stops."""
        while not stop.is_set() and not self.convoy.whole:
            await set_within(stop, TELL_S)
        over.set()
