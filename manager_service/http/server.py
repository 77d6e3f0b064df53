"""Wiring of the API: makes the parts behind the routes, and serves them. `__main__` runs the owners."""

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import structlog
import uvicorn

from common.bus.bus import Bus
from common.bus.fullness import Gauge, used_by
from common.bus.streams import Cell
from common.models.base_digest import base_digest
from common.models.base_shape import NAMED_AS_LLAMA, BaseShape
from common.models.weight_files import Weights, read_weights
from common.peers.base_fetch import BaseFetch
from common.settings import resolve_config, stored_digest
from common.store.adapters import AdapterStore
from common.store.disk_room import DiskRoom
from common.store.known_store import remember
from common.store.objects import Objects, patiently
from common.text.model_folder import read_json
from common.text.tokens import ChatTokenizer
from manager_service.http.app import create_app
from manager_service.http.connections import Connection
from manager_service.http.context import LIMITS, Api, ApiLimits, Base, connect_impatiently
from manager_service.http.openai.files.file_store import Files
from manager_service.http.reading.reading_helpers import Helpers
from manager_service.http.sampling.cell_share import BULK
from manager_service.http.sampling.feed import Feed
from manager_service.http.sampling.inference import Inference
from manager_service.http.tinker.parts import Records
from manager_service.records.archive import Archive
from manager_service.records.cluster import Cluster
from manager_service.records.keys import GLOBAL
from manager_service.records.stored import StoredBytes
from manager_service.records.tenants import Tenants, bootstrap, check_format
from manager_service.scheduling.fairness import OVERSUBSCRIPTION
from manager_service.settings import ManagerSettings

log = structlog.get_logger()
INFERENCE_SHARE = 0.5
"""The share of the live rollout slots that all tenants' completions may take, over all replicas."""
DRAIN_S = 5
"""Seconds that open requests may go on after SIGTERM."""

ACCEPTED_AT_ONCE = 16
"""Connections that asyncio accepts in one round of the event loop, which it takes from uvicorn's `backlog`. With uvicorn's 2048, who
opens and closes connections faster than they are worked on stops everybody else's requests."""
MAX_UNACCEPTED = 2048
"""Connections that the kernel keeps until they are accepted."""


@contextlib.asynccontextmanager
async def make_api(settings: ManagerSettings, limits: ApiLimits = LIMITS) -> AsyncGenerator[Api]:
    """The parts behind the routes, with the first tenant and keys made."""
    redis, objects = connect_impatiently(settings.redis_url, GLOBAL), Objects.open(settings.store)
    await patiently(objects.probe)
    tenants, api_id = Tenants(redis), secrets.token_hex(8)
    bases = {
        name: await make_base(settings, limits, name, where, objects, api_id) for name, where in settings.models.items()
    }
    helpers = Helpers({b.name: b.folder for b in bases.values()}, {b.name: b.tokenizer for b in bases.values()})
    try:
        bus = next(iter(bases.values())).bus
        await bus.retrying(lambda: check_format(redis))
        await bus.retrying(lambda: bootstrap(tenants, settings.data_dir))
        stored = StoredBytes(redis, {base.cell: base.redis for base in bases.values()}, settings.max_stored_bytes)
        files = Files(
            redis,
            objects,
            helpers,
            bases=bases,
            max_line_bytes=limits.max_line_bytes,
            stored=stored,
            room=DiskRoom(settings.store, settings.disk_reserve_bytes),
        )
        yield Api(settings, limits, redis, objects, AdapterStore(objects), tenants, helpers, stored, files, bases)
    finally:
        await helpers.close()
        for base in bases.values():
            await base.bus.close()
            await base.redis.aclose()
        await redis.aclose()


async def keep_keys(api: Api, every_s: float = 5.0) -> None:
    """Tells Redis again what it may have lost: the first tenant, its keys, and which store the cells have."""
    buses = [base.bus for base in api.bases.values()]
    while True:
        await asyncio.sleep(every_s)
        await buses[0].retrying(lambda: bootstrap(api.tenants, api.settings.data_dir))
        await remember(await api.objects.identity(), buses)


async def make_base(
    settings: ManagerSettings, limits: ApiLimits, name: str, where: str, objects: Objects, api_id: str
) -> Base:
    if stored_digest(where):
        folder = await patiently(BaseFetch(objects, settings.node_dir, where, with_weights=False).run)
    else:
        folder = await asyncio.to_thread(resolve_config, where)
    bus = Bus.connect(settings.redis_url, Cell(name), objects)
    cluster = Cluster(bus)
    inference = Inference(
        bus,
        api_id,
        silence_s=limits.inference_silence_s,
        timeout_s=settings.inference_timeout_s,
        slots=lambda kind: _places(kind, cluster),
        most_for_chat=INFERENCE_SHARE,
        num_workers=lambda: cluster.num_workers("rollout"),
        turn=lambda: cluster.turn("rollout"),
    )
    redis = connect_impatiently(settings.redis_url, bus.cell.key(""))
    return Base(
        name=name,
        bus=bus,
        redis=redis,
        gauge=Gauge(lambda: used_by(redis, bus.cell)),
        cluster=cluster,
        folder=folder,
        digest=await asyncio.to_thread(base_digest, folder, with_weights=False),
        tokenizer=await asyncio.to_thread(ChatTokenizer.load, folder, settings.max_context),
        inference=inference,
        feed=Feed(bus),
        archive=Archive(objects, name),
        where=where,
        weights=await asyncio.to_thread(weights_of, folder),
        created_at=int(time.time()),
    )


def _places(kind: str, cluster: Cluster) -> int:
    """Places for all replicas' requests; bulk samples share theirs with jobs."""
    if kind == BULK:
        return int(OVERSUBSCRIPTION * cluster.slots("rollout"))
    return int(INFERENCE_SHARE * cluster.slots(kind))


def weights_of(folder: Path) -> Weights:
    """Without weight files computed from the configuration: of the hub's models a manager downloads only the texts."""
    try:
        found = read_weights(folder)
    except ValueError as error:  # whoever computes with it refuses it
        log.warning("weights_not_read", reason=str(error))
        found = Weights(0, "")
    if found.num:
        return found
    config = read_json(folder / "config.json")
    try:
        shape = BaseShape.of(config)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
        linear = shape.linear_shapes if config.get("model_type") in NAMED_AS_LLAMA else {}
        return Weights(shape.num_weights, dtype, linear)
    except ValueError:  # its sizes are not known here
        return found


async def serve(api: Api, tinker: Records, stop: asyncio.Event) -> None:
    """Answers requests until `stop`, then lets open ones finish for a while. The caller runs the loops of bases and futures."""
    settings = api.settings
    config = uvicorn.Config(
        create_app(api, tinker),
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        http=Connection,
        ws="none",
        timeout_graceful_shutdown=DRAIN_S,
        lifespan="off",
        backlog=ACCEPTED_AT_ONCE,
    )
    server = Server(config)
    log.info("api_starts", host=settings.host, port=settings.port)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(server.serve())
        stopped = group.create_task(stop.wait())
        await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await asyncio.wait([running])
        stopped.cancel()


class Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: the process has one way to stop."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in (each for server in self.servers for each in server.sockets):
            with listening.dup() as same:
                same.listen(MAX_UNACCEPTED)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
