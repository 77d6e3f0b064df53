"""Clusters of real processes that start without importing anything: one prefork server serves all clusters of a test run.

Few tests leave the starting to `harness.live.running`, whose clusters begin prefork servers of their own as `marlaas up` does. What a test
gives variables beside settings is executed, as there; where these are folders of packages alone, only what looks for environments in them.
"""

import atexit
import os
import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from common.children.forking import PreforkServer, can_be_forked
from common.children.prefork import beside_settings
from common.children.processes import ChildProcess, Command, start_tied
from harness import live
from harness.live import Api
from manager_service.launcher.supervisor import NO_PLUGINS, ONE_THREAD, ROOT, LocalCluster, inherited
from tests.support.lent_prefork import NAME, LentServer, OwnServer

MODULES = (
    "manager_service",
    "manager_service.export",
    "rollout_service",
    "env_service",
    "trainer_service",
    "trainer_service.ranks",  # and with it transformers' models, which take three seconds
)
PATHS = "PYTHONPATH"
LOOKERS = ("manager_service", "env_service")
OF_CHILDREN = {*ONE_THREAD, *NO_PLUGINS, PATHS, "PYTHONSAFEPATH", "PYTHONUNBUFFERED"}
"""Variables that a cluster gives to all its children."""
XDISTS = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID")
COME_LATER = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "GLOO_SOCKET_IFNAME", *XDISTS)
"""Variables that pytest, transformers' models once imported, and ranks set in this process. A prefork server with other ones would not
fork."""
shared: list[PreforkServer] = []
"""The prefork server, once it is needed."""


def running(folder: Path | None = None, **options: Any) -> AbstractAsyncContextManager[tuple[LocalCluster, Api]]:
    """A cluster like `harness.live.running`'s."""
    return live.running(folder, start=start, **options)


async def start(command: Command) -> ChildProcess:
    """Forks what is a module of Python and has no variables of a test's; the rest is executed."""
    plain = _paths()
    given = {name for name, value in beside_settings(command.environment).items() if _differs(name, value)}
    if command.environment[PATHS] != plain and command.argv[-1] in LOOKERS:
        given.add(PATHS)
    if given or not can_be_forked(command):
        return await start_tied(command)
    variables = {name: value for name, value in command.environment.items() if name not in COME_LATER}
    command = replace(command, environment=variables | {PATHS: plain})
    if not shared:
        shared.append(LentServer() if NAME in os.environ else own_server(command))
        atexit.register(shared[0].end)
    return await shared[0].start(command)


def own_server(command: Command | None = None) -> OwnServer:
    """A server that has not begun, for commands with this one's variables, or as a cluster without settings has them."""
    one = command or _command(MODULES[0], Path(os.devnull))
    all_programs = [replace(one, argv=(sys.executable, "-m", module)) for module in MODULES]
    return OwnServer(all_programs, Path(gettempdir()) / "prefork-of-tests.log")


async def begun(module: str, log: Path, **settings: str) -> ChildProcess:
    """A module that runs as one of a cluster's services does."""
    return await start(_command(module, log, **settings))


def _command(module: str, log: Path, **settings: str) -> Command:
    common = {
        **ONE_THREAD,
        **NO_PLUGINS,
        **inherited(),
        PATHS: _paths(),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }
    argv, variables = (sys.executable, "-m", module), {**common, **settings}
    return Command(name=module, argv=argv, environment=variables, log=log)


async def ended(module: str, log: Path, **settings: str) -> tuple[int, list[str]]:
    """The exit status of a module that ends by itself, and the lines that it wrote."""
    child = await begun(module, log, **settings)
    return await child.wait(), log.read_text().splitlines()


def _paths() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get(PATHS, "")]))


def _differs(name: str, value: str) -> bool:
    """Is it a variable of the test's alone?"""
    return name not in OF_CHILDREN and os.environ.get(name) != value
