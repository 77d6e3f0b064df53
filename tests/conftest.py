"""Fixtures: a real Redis for the whole run, emptied before each test; a bus and an object store on it."""

import gc
from collections.abc import AsyncIterator, Generator, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import redis
import structlog
from hypothesis import settings

from common.bus.bus import Bus
from common.bus.streams import Cell
from common.store.objects import Objects
from harness.redis_server import RedisServer
from tests.support.exact_mode import Exact, prepare
from tests.support.lent_prefork import lend

if TYPE_CHECKING:  # most tests do not need them
    from playwright.async_api import Browser

    from tests.support.engines_under_test import Running, SharedVllm

exact = pytest.StashKey[Exact]()
KINDS = ("exact", "slow", "vllm", "gpu")
"""Marks of tests that run by themselves."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exact", action="store_true", help="only the tests that ask for bits, prepared by deterministic mode"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Chooses kernels before any test is imported: they stand with a process's first product."""
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if config.getoption("--exact"):
        if runs_tests:
            config.stash[exact] = prepare()
    elif not runs_tests:
        lend()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """If tests of one kind are asked for, files without any are not imported: all take each process 20 s."""
    if collection_path.suffix != ".py" or (kind := _only_kind(config)) is None:
        return None
    return not _may_have(collection_path, kind) or None


def _only_kind(config: pytest.Config) -> str | None:
    """The kind that `--exact`, `-m vllm`, `-m gpu` and `-m "slow and not vllm and not gpu"` ask for."""
    words = (config.getoption("markexpr") or "").split(" and ")
    return "exact" if config.getoption("--exact") else next((kind for kind in KINDS if kind in words), None)


def _may_have(path: Path, kind: str) -> bool:
    text = path.read_text()
    return (
        f"mark.{kind}" in text or "engines_under_test import KINDS" in text or (kind == "gpu" and "device: str" in text)
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Keeps the garbage collector from looking through all that was imported, again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for path, kind in {(item.path, kind) for item in items for kind in KINDS if item.get_closest_marker(kind)}:
        assert _may_have(path, kind), f"{path}: its tests that are {kind} would not be found"
    wanted = bool(config.getoption("--exact"))
    chosen = [item for item in items if (item.get_closest_marker("exact") is not None) == wanted]
    config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
    num_workers: int = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = _dealt(chosen, num_workers) if num_workers > 1 else chosen


def _dealt(items: list[pytest.Item], num_workers: int) -> list[pytest.Item]:
    """A part for each worker, as `--dist worksteal` cuts them: its files of slow tests, then fast ones, which workers take from each
    other in the end."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    fast = [item for item in items if not item.get_closest_marker("slow")]
    parts: list[list[pytest.Item]] = [[] for _ in range(num_workers)]
    for number, (_, tests) in enumerate(groupby(slow, key=lambda item: item.path)):
        parts[number % num_workers] += tests
    for part in parts:
        missing = -(-len(items) // num_workers) - len(part)
        part += fast[:missing]
        fast = fast[missing:]
    return [item for part in parts for item in part]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """On a machine that deterministic mode refuses, its tests assert the refusal."""
    found = pyfuncitem.config.stash.get(exact, None)
    if found is None or found.refusal is None:
        return None
    assert "on this machine bits depend on what is computed beside them" in found.refusal
    return True


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device on which the same must hold."""
    if request.param == "cuda":
        _need_cuda()
    return request.param


def _need_cuda() -> None:
    import torch  # here: most tests do not need it

    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device here")


@pytest.fixture
def min_rows(request: pytest.FixtureRequest) -> int:
    """The rows that deterministic mode chose, for tests marked `exact`."""
    return request.config.stash[exact].min_rows


settings.register_profile(
    "steady", max_examples=50, deadline=None, derandomize=True
)  # the same cases each time, however busy the machine
settings.load_profile("steady")
# without the variables of each frame, which take seconds to write: an event loop that stands meanwhile loses its leases
plainly = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plainly])


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer.start(tmp_path_factory.mktemp("redis"), durable=False)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def redis_client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_server.url) as client:
        yield client


@pytest.fixture
def redis_url(redis_server: RedisServer, redis_client: redis.Redis) -> str:
    """An empty Redis."""
    redis_client.config_set("maxmemory", 0)  # a test that failed may have left it full
    redis_client.flushall()
    return redis_server.url


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return Objects.open((tmp_path / "store").as_uri())


@pytest.fixture
async def bus(redis_url: str, objects: Objects) -> AsyncIterator[Bus]:
    bus = Bus.connect(redis_url, Cell("tiny"), objects)
    yield bus
    await bus.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm() -> "AsyncIterator[SharedVllm]":
    """A real vLLM, started when first used, once for all tests; and again after a test has killed it."""
    from tests.support.engines_under_test import SharedVllm

    shared = SharedVllm()
    yield shared
    await shared.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> "AsyncIterator[Browser]":
    """A Chromium, for tests whose loop is the session's."""
    from tests.support.browser import started

    async with started() as browser:
        yield browser


@pytest.fixture
def running(request: pytest.FixtureRequest) -> "Running":
    """Runs an engine of the kind that the test's parameter names."""
    from tests.support.engines_under_test import ProcessRunning, SharedCore, TorchRunning, fake_core, modules_running

    if request.param == "torch":
        return TorchRunning()
    if request.param == "modules":
        return modules_running("cpu")
    if request.param == "cuda":
        _need_cuda()
        return modules_running("cuda")
    if request.param == "deterministic":
        return TorchRunning(min_rows=request.getfixturevalue("min_rows"))
    if request.param == "fake":
        return ProcessRunning(fake_core)
    shared = request.getfixturevalue("vllm")
    return ProcessRunning(lambda: SharedCore(shared), masks=True)
