"""A whole MARLaaS on one machine: Redis, the manager and the workers as child processes that are kept running.

    async with LocalCluster(data_dir=Path(".marlaas"), rollout=2) as cluster:
        httpx.get(f"{cluster.base_url}/v1/models", headers={"Authorization": f"Bearer {cluster.api_key}"})
        cluster.kill("rollout-0")  # SIGKILL; it is started again

    start: lock the folder, check the port ─► prefork servers, Redis ─► manager and workers at once ─► /readyz
    stop:  workers and manager (SIGTERM, a few seconds, SIGKILL) ─► Redis ─► prefork servers ─► unlock

Without `stop`, even if this process is killed with SIGKILL, the kernel ends the children.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self, TextIO, cast

import httpx
from redis.exceptions import RedisError

from common.bus.redis_connection import make_client
from common.cancellation import done_before
from common.children.forking import PreforkServer
from common.children.processes import Command, Notify, StartChild, SupervisedProcess, rotate, start_tied
from common.errors import InvalidInput, MarlaasError, Unavailable
from common.settings import parse_base_models
from manager_service.launcher.devices import arrange, idle_gpu
from manager_service.launcher.elastic_pool import ElasticPool
from manager_service.launcher.embedded_redis import EmbeddedRedis, RedisRoom, make_private, write_private
from manager_service.launcher.gpus import SERVICES, LocalWorker, vllm_stays_awake
from manager_service.launcher.own_store import OwnStore
from manager_service.launcher.settings import pin_bases
from manager_service.records.keys import GLOBAL
from manager_service.scheduling.elastic import WorkerRange
from marlaas_client.cluster_file import CLUSTER_FILE, ClusterFile, read_cluster_file

GRACE_S = 4.0
"""Seconds from SIGTERM to SIGKILL."""
START_TIMEOUT_S = 300.0
"""Seconds until /readyz: vLLM itself takes a minute where cores are busy."""
MAX_EXITS_AT_START = 3
POLL_S = 0.05
PING_S = 2.0
"""Seconds in which Redis must answer whether it is there."""
ROTATE_EVERY_S = 30.0
ROOT = Path(__file__).resolve().parents[2]
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Many small processes share the machine; more threads in each only disturb the others."""
NO_PLUGINS = {"PYDANTIC_DISABLE_PLUGINS": "__all__", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""None of ours has any, and to look for them reads the metadata of each installed package."""


class StartError(MarlaasError):
    """The cluster could not be started. The message says why and where to look."""


class LocalCluster:
    """The children `redis`, `manager`, `rollout-0`, `env-0`, `trainer-0`, … Enter and leave it (or `start` and `stop`) on one event
    loop, in the main thread."""

    def __init__(
        self,
        *,
        data_dir: Path,
        rollout: int | WorkerRange = 1,
        env: int = 1,
        trainer: int = 1,
        port: int = 0,
        environment: Mapping[str, str] | None = None,
        notify: Notify = lambda line: None,
        services: "Services | None" = None,
        start: StartChild | None = None,
    ) -> None:
        """`rollout`: of a range as many as turns want. `port` 0: any free one. `environment`: more variables for every child. `notify`
        hears of each restart. For tests: `services`, other commands; `start`, which starts a service instead of prefork servers.
        Raises InvalidInput where a range makes no sense."""
        self.data_dir = data_dir.resolve()
        self.host = "127.0.0.1"
        self.port = port
        self.redis_url = ""
        bounds = WorkerRange(rollout, rollout) if isinstance(rollout, int) else rollout
        self._counts = {"rollout": bounds.most, "env": env, "trainer": trainer}
        self._environment = {**inherited(), **(environment or {})}
        self._notify = notify
        self._is_up = False
        self._store = OwnStore(self._environment, self.data_dir, notify)
        self._commands = services or service_commands
        self._start = start
        self._redis: SupervisedProcess | None = None
        self._room: RedisRoom | None = None
        self._services: dict[str, SupervisedProcess] = {}
        self._elastic = ElasticPool(bounds, self._environment, self._services, notify)
        self._prefork_servers: list[PreforkServer] = []
        self._lock: TextIO | None = None
        self._stopping = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def api_key(self) -> str:
        """The first tenant's key."""
        return (self.data_dir / "api_key").read_text().strip()

    @property
    def admin_key(self) -> str:
        return (self.data_dir / "admin_key").read_text().strip()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that run just now, by name."""
        return {name: process.pid for name, process in self._processes.items() if process.pid is not None}

    @property
    def num_exits(self) -> dict[str, int]:
        """Counts for each child the ends that nobody asked for."""
        return {name: process.num_exits for name, process in self._processes.items()}

    def log_file(self, name: str) -> Path:
        return self.data_dir / "logs" / f"{name}.log"

    def kill(self, name: str, number: int = signal.SIGKILL) -> bool:
        """Sends a signal to a child, which is then started again. False if it is between two runs.

        Raises KeyError for an unknown name.
        """
        return self._processes[name].signal(number)

    async def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until /readyz answers 200, or only workers that refuse to join are missing, which `notify` hears of.

        Raises StartError after `timeout_s`, or if a child keeps dying before that.
        """
        deadline, announced = time.monotonic() + timeout_s, list[str]()
        options: dict[str, Any] = {"timeout": 5.0, "trust_env": False, "verify": False}  # to itself, without TLS
        async with httpx.AsyncClient(base_url=self.base_url, **options) as client:
            while (refused := await _refused_when_ready(client, starting := list[str]())) is None:
                if starting and starting != announced:  # a download goes on, however long it takes
                    deadline, announced = time.monotonic() + timeout_s, starting
                    self._notify("; ".join(starting))
                self._check_start("manager", late=time.monotonic() > deadline)
                await asyncio.sleep(POLL_S)
        for line in refused:
            self._notify(line)

    async def start(self) -> None:
        """Returns once the API is ready.

        Raises StartError: the folder is in use, the port is taken, or a child does not come up.
        """
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = lock_folder(self.data_dir)
        try:
            self.port = choose_port(self.host, self.port)
            self._prepare()
            self._running = asyncio.create_task(self._run())
            await _unless_ended(self._running, self.wait_ready())
            self._is_up = True
            self._write_cluster_file()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ends every child, Redis last. Harmless if nothing runs."""
        self._stopping.set()
        if self._running is not None:
            await asyncio.wait([self._running])
            if not self._running.cancelled() and (error := self._running.exception()):
                self._notify(f"the supervision ended with {error!r}")
            self._running = None
        (self.data_dir / CLUSTER_FILE).unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def _processes(self) -> dict[str, SupervisedProcess]:
        return {**({"redis": self._redis} if self._redis else {}), **self._services}

    def _prepare(self) -> None:
        """Makes the commands of all children."""
        make_private(self.log_file("redis").parent)  # `data_dir` itself may be a folder of the user's, for more
        self.redis_url = self._environment.get("MARLAAS_REDIS_URL", "")
        if not self.redis_url:
            server = EmbeddedRedis(folder=self.data_dir / "redis", port=choose_port(self.host, 0))
            server.prepare()
            self.redis_url = server.url
            command = self._command("redis", server.argv, {})
            self._redis = SupervisedProcess(command, self._hear_of_redis, start_tied)
            self._room = RedisRoom(server, self._environment, self._notify)
        pin_bases(self._environment, self._notify)
        commands = self._commands(self._counts, self._environment)
        arranged = arrange(self._store.with_bases_here(), list(_workers(commands)))
        self._environment |= arranged.settings
        for line in filter(None, [idle_gpu(self._environment), *arranged.lines]):
            self._notify(line)
        made = [
            self._command(each.name, each.argv, {**each.environment, **arranged.of_workers.get(each.name, {})})
            for each in commands
        ]
        holders = {worker.name for worker in _workers(commands)}
        self._keep([command for command in made if command.name not in holders])
        self._keep([command for command in made if command.name in holders])

    def _keep(self, commands: Sequence[Command]) -> None:
        """Supervises them, with their own prefork server: what holds weights imports as long as all others together."""
        server = PreforkServer(commands if self._start is None else (), self.log_file("prefork"))
        self._prefork_servers.append(server)
        for command in commands:
            make = partial(SupervisedProcess, command, self._hear, self._start or server.start)
            if command.name.startswith("rollout-"):
                self._elastic.add(command.name, make)
            else:
                self._services[command.name] = make()

    def _command(self, name: str, argv: tuple[str, ...], environment: Mapping[str, str]) -> Command:
        rotate(self.log_file(name))
        shared = {
            **ONE_THREAD,
            **NO_PLUGINS,
            **self._environment,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), self._environment.get("PYTHONPATH", "")])),
            "PYTHONSAFEPATH": "1",  # a folder `common` where the user happens to be is not ours
            "PYTHONUNBUFFERED": "1",
            "MARLAAS_REDIS_URL": self.redis_url,
            "MARLAAS_DATA_DIR": str(self.data_dir),
            "MARLAAS_HOST": self.host,
            "MARLAAS_PORT": str(self.port),
        }
        return Command(name=name, argv=argv, environment={**shared, **environment}, log=self.log_file(name))

    def _hear_of_redis(self, line: str) -> None:
        if self._room and self._redis:
            self._room.redis_ended(self._redis.last_words(5))
        self._hear(line)

    def _hear(self, line: str) -> None:
        """Passes on a child's exits. A child that refuses its settings ends the start, whose error says why."""
        if self._is_up or not any(process.refused for process in self._processes.values()):
            self._notify(line)

    async def _run(self) -> None:
        """Starts and keeps all children, from the first to the last. Ends when `stop` is called, or with StartError."""
        try:
            for server in self._prefork_servers:
                server.begin()
            async with asyncio.TaskGroup() as group:
                if self._redis:
                    group.create_task(self._redis.keep_running())
                await self._wait_for_redis()
                await done_before(self._stopping, self._store.recognise(self.redis_url))
                for process in self._services.values():
                    group.create_task(process.keep_running())
                loops = [self._rotate_logs(), self._elastic.follow(self.redis_url, group)]
                loops += [self._room.watch()] if self._room else []
                helpers = [group.create_task(loop) for loop in loops]
                await self._stopping.wait()
                for task in helpers:
                    task.cancel()
                for server in self._prefork_servers:
                    server.give_up()
                await asyncio.gather(*(process.stop(GRACE_S) for process in self._services.values()))
                if self._redis:
                    await self._redis.stop(GRACE_S)
        finally:  # reached with services only when something above went wrong
            for process in self._processes.values():
                process.signal(signal.SIGKILL)
            for server in self._prefork_servers:
                server.end()

    async def _wait_for_redis(self) -> None:
        """Waits until it answers, or `stop` is called."""
        deadline = time.monotonic() + START_TIMEOUT_S
        client = make_client(self.redis_url, GLOBAL, retry=None)
        try:
            while not self._stopping.is_set():
                with contextlib.suppress(RedisError, OSError):  # a TimeoutError is an OSError
                    async with asyncio.timeout(PING_S):
                        await client.ping()
                        return
                self._check_start("redis", late=time.monotonic() > deadline)
                await asyncio.sleep(POLL_S / 5)
        finally:
            await client.aclose()

    async def _rotate_logs(self) -> None:
        while True:
            await asyncio.sleep(ROTATE_EVERY_S)
            for name in self._processes:
                await asyncio.to_thread(rotate, self.log_file(name))

    def _check_start(self, suspect: str, *, late: bool) -> None:
        """Raises StartError if a child refuses its settings or keeps dying, or about `suspect` if the start took too long."""
        for process in self._processes.values():
            if process.refused:
                raise StartError(process.last_error())
        dying = [n for n, process in self._processes.items() if process.num_exits >= MAX_EXITS_AT_START]
        if late and self._store.waits_for:
            raise StartError(self._store.waits_for)
        if dying or late:
            name, what = (dying[0], "keeps ending") if dying else (suspect, "does not answer")
            if name not in self._processes:
                raise StartError(f"the Redis of MARLAAS_REDIS_URL {what}")
            end = self._processes[name].last_words(15)
            raise StartError(f"{name} {what}; the end of {self.log_file(name)}:\n{end}")

    def _write_cluster_file(self) -> None:
        models = parse_base_models(self._environment.get("MARLAAS_BASE_MODELS", "tiny"))
        bases = {name: str(Path(where).resolve()) for name, where in models.items() if Path(where).is_dir()}
        record = ClusterFile(url=self.base_url, pid=os.getpid(), redis_url=self.redis_url, bases=bases)
        write_private(self.data_dir / CLUSTER_FILE, record.model_dump_json())


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """One child other than Redis."""

    name: str
    argv: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict[str, str])
    """Variables in addition to those that all children get."""


def inherited() -> dict[str, str]:
    """This process's environment without the variables that are only for the CLI."""
    return {key: value for key, value in os.environ.items() if key not in ("MARLAAS_URL", "MARLAAS_API_KEY")}


Services = Callable[[Mapping[str, int], Mapping[str, str]], list[ServiceCommand]]


def service_commands(counts: Mapping[str, int], environment: Mapping[str, str]) -> list[ServiceCommand]:
    """The manager, the exporter, and so many workers of each service for all base models; for each where vLLM does not sleep.

    Raises InvalidInput if MARLAAS_BASE_MODELS cannot be read.
    """
    try:
        bases = list(parse_base_models(environment.get("MARLAAS_BASE_MODELS", "tiny")))
    except ValueError as error:
        raise InvalidInput(str(error)) from error
    services = [ServiceCommand("manager", (sys.executable, "-m", "manager_service"))]
    services.append(ServiceCommand("exporter", (sys.executable, "-m", "manager_service.export")))
    for service, count in counts.items():
        pinned_each = len(bases) > 1 and service == "rollout" and vllm_stays_awake(environment)
        for base in bases if pinned_each or len(bases) == 1 else [""]:
            argv, prefix = (sys.executable, "-m", f"{service}_service"), f"{service}-{base}" if pinned_each else service
            services += [ServiceCommand(f"{prefix}-{i}", argv, {"MARLAAS_BASE_MODEL": base}) for i in range(count)]
    return services


def _workers(commands: Sequence[ServiceCommand]) -> Iterator[LocalWorker]:
    """The commands that hold a base model."""
    for command in commands:
        if (service := command.name.partition("-")[0]) in SERVICES:
            yield LocalWorker(command.name, service, command.environment.get("MARLAAS_BASE_MODEL", ""))


def lock_folder(data_dir: Path) -> TextIO:
    """The lock is held as long as the file is open; the kernel drops it with the process. Raises StartError."""
    file = os.fdopen(os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        running = read_cluster_file(data_dir)
        at = f" at {running.url} (process {running.pid})" if running else ""
        raise StartError(
            f"a cluster already runs on {data_dir}{at}; stop it first, or choose another folder with --data"
        ) from None
    return file


def choose_port(host: str, port: int) -> int:
    """`port` itself if it is free, for 0 any free one. Raises StartError if it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartError(f"port {port} on {host} cannot be used ({error.strerror}); try another --port") from None
        return probe.getsockname()[1]


async def _unless_ended(running: "asyncio.Task[None]", ready: Coroutine[Any, Any, None]) -> None:
    """Waits until `ready` is done. If `running` ends first, raises its error."""
    waiting = asyncio.create_task(ready)
    try:
        await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            _raise_first(running)
        await waiting
    finally:
        waiting.cancel()


async def _refused_when_ready(client: httpx.AsyncClient, starting: list[str]) -> list[str] | None:
    """Says why workers do not join, once nothing else is waited for; None before that. Adds downloads to `starting`."""
    try:
        answer = await client.get("/readyz")
    except httpx.TransportError:
        return None
    if answer.status_code != 503:
        return [] if answer.status_code == 200 else None
    body = answer.json()
    starting += body.get("starting", [])
    refused: list[str] = body["refused"]
    explained = {line.partition(":")[0] for line in refused}
    return refused if explained.issuperset(body["waiting_for"]) else None


def _raise_first(task: "asyncio.Task[None]") -> None:
    """Raises the error that ended the supervision, without the wrapping of its task group."""
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    raise error or Unavailable("the cluster was stopped while it was starting")
