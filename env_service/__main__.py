"""Starts one env worker. Wiring only."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from common.bus.streams import GROUP_ENV
from common.pool.pool_worker import PooledService
from common.settings import resolve_config
from common.text.tokens import ChatTokenizer
from common.wire.messages import Outside
from common.worker.service import BuiltService, Parts, run
from common.worker.telemetry import About
from common.worker.worker import Habits, Inbox
from env_service.environments.catalogue import Catalogue
from env_service.environments.openenv_server import Servers, read_servers
from env_service.graders.endpoint import Endpoints
from env_service.graders.model import ModelEndpoints
from env_service.graders.runner import GraderRunner
from env_service.graders.text import TextComparer
from env_service.handler import EnvHandler
from env_service.live.registration import Registration
from env_service.live.sessions import Sessions
from env_service.sandbox.sandbox import Sandbox, SandboxLimits, check_strength
from env_service.settings import EnvSettings
from env_service.verifiers.package_process import Hosts

Closing = list[Callable[[], Awaitable[None]]]
"""Closes some parts of the worker, in this order."""
AHEAD = 16
"""Waiting messages for each slot: enough that one of the tenant whose turn it is is among them."""
DRAIN_S = 1.0
"""Most work of an env worker is short; tools that take longer are handed back."""


async def sandbox_of(settings: EnvSettings) -> Sandbox:
    """Raises InvalidInput if it is too weak here."""
    limits = SandboxLimits(memory_bytes=settings.sandbox_memory_mb * 1024 * 1024)
    sandbox = Sandbox(max_processes=settings.sandbox_processes, limits=limits)
    layers = await sandbox.probe()
    structlog.get_logger().info("sandbox", layers=layers)
    if not settings.weak_sandbox:
        check_strength(layers)
    return sandbox


def graders_of(settings: EnvSettings, sandbox: Sandbox) -> tuple[GraderRunner, Closing]:
    endpoints = Endpoints(settings.endpoint_hosts, proxy=settings.endpoint_proxy)
    models = ModelEndpoints(
        Endpoints(settings.grader_hosts, proxy=settings.endpoint_proxy),
        settings.grader_keys,
        most=settings.grader_model_calls,
    )
    comparer = TextComparer()
    graders = GraderRunner(sandbox=sandbox, endpoints=endpoints, text_comparer=comparer, models=models)
    return graders, [comparer.close, endpoints.close, models.close]


async def environments_of(settings: EnvSettings, base_dir: Path) -> tuple[Catalogue, Closing]:
    sandbox = await sandbox_of(settings)
    graders, graders_end = graders_of(settings, sandbox)
    hosts = Endpoints(settings.openenv_hosts, proxy=settings.endpoint_proxy)
    openenv = Servers(hosts, settings.openenv_servers, proxy=settings.endpoint_proxy)
    collections = settings.data_dir / "collections"
    environments = Catalogue(
        graders=graders,
        sandbox=sandbox,
        collections_dir=collections if collections.is_dir() else None,
        openenv=openenv,
        base_dir=base_dir,
        hosts=Hosts(memory_bytes=settings.env_package_memory_mb << 20),
    )
    return environments, [environments.close, *graders_end, openenv.close, sandbox.close]


async def build(settings: EnvSettings, parts: Parts) -> BuiltService:
    base_dir = resolve_config(settings.models[parts.cell.base_model])
    tokenizer = ChatTokenizer.load(base_dir, settings.max_context)
    environments, environments_end = await environments_of(settings, base_dir)
    sessions = Sessions(parts.worker, num=settings.env_sessions)
    registration = Registration(parts.bus, parts.worker, sessions, hold_s=settings.lease_s)
    await registration.begin()
    handler = EnvHandler(
        cell=parts.cell,
        tokenizer=tokenizer,
        environments=environments,
        slots=settings.env_slots,
        sessions=sessions,
    )
    inboxes = [Inbox(parts.cell.env_worker(parts.worker), GROUP_ENV), Inbox(parts.cell.env, GROUP_ENV)]
    return BuiltService(
        handler,
        inboxes,
        About(
            slots=settings.env_slots,
            outside=_outside(settings),
            waiting=handler.waiting.lately,
            counters=handler.counters,
        ),
        Habits(ahead=AHEAD * settings.env_slots, drain_s=DRAIN_S),
        loops=[sessions.close_idle, registration.run],
        close=[sessions.close, registration.close, *environments_end],
        num_held=sessions.__len__,
    )


def _outside(settings: EnvSettings) -> Outside:
    return Outside(
        settings.endpoint_hosts,
        settings.grader_hosts,
        settings.openenv_hosts,
        tuple(read_servers(settings.openenv_servers)),
    )


def pooled(settings: EnvSettings) -> PooledService:
    return PooledService(About(slots=settings.env_slots, outside=_outside(settings)))


if __name__ == "__main__":
    run("env", EnvSettings, build, pooled)
