"""The processes in which packages of environments run, each in the Python environment that its operator named.

Hosts.begin ─► the package's Host, started if need be ─► HostedTrajectory

holds: trajectories in their hosts   waits for: a host's next line   unblocked by: the host, or its death
after a host dies: its trajectories fail, with the reason; the next one starts another
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from common.cancellation import cancel_all
from common.sharing.places import SPARE_PLACES
from env_service import work
from env_service.failures import EnvironmentFailed, NoRoom

HOST = Path(__file__).with_name("host.py")
KEY_VARIABLE = "MARLAAS_HOST_API_KEY"
"""Holds the key that tells a package's requests from those of other programs on this machine."""
_NAMES = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR LD_LIBRARY_PATH XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE UV_CACHE_DIR UV_OFFLINE
    OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS TOKENIZERS_PARALLELISM
    HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE
"""
VARIABLES = frozenset(_NAMES.split())
"""Variables of the worker that a package's process has too, with LC_*. None of them is a secret."""
MAX_LINE_BYTES = 4 * 1024 * 1024 + 1024
MAX_HOSTS = 8
"""Processes of one worker, and one more of a tenant with none. Other arguments of a package need another process."""
MEMORY_BYTES = 4 << 30
"""Data of one process."""
START_S = 300.0
"""A package may fetch its data meanwhile."""
STOP_S = 5.0
AFTER_FAILURE_S = 30.0
"""Seconds after which a package that could not be loaded is tried again."""
WAITING_S = 10.0
"""Seconds for which a tenant that found no room counts as waiting."""
KEPT_BYTES = 2000
"""Bytes of what a process last wrote, for the operator's log."""

ENDED = "the environment's process ended"

log = structlog.get_logger()


class HostedTrajectory:
    """One trajectory in a host. `close` when done with it, whether or not it has ended."""

    def __init__(self, host: "Host", name: str) -> None:
        self._host = host
        self._name = name
        self.heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def say(self, what: str, more: Mapping[str, Any] | None = None) -> None:
        self._host.say({what: self._name} | dict(more or {}))

    async def next(self) -> dict[str, Any]:
        """The host's next message, one that `asks` or `ends`. Raises EnvironmentFailed."""
        message = await self.heard.get()
        if "fails" in message:
            raise EnvironmentFailed(str(message["why"]))
        return message

    def close(self) -> None:
        self._host.forget(self._name)


class Host:
    """One process, from its start to its end. `stop` when done."""

    def __init__(
        self,
        python: str,
        load: Mapping[str, Any],
        variables: Sequence[str] = (),
        tenant: str = "",
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """`python`: an interpreter, or a Python environment's folder. `load`: see `host.py`. `variables`: the worker's to pass on."""
        self.tenant = tenant
        self._python = python
        self._load = {**load, "memory_bytes": memory_bytes}
        self._variables = variables
        self._conversations: dict[str, HostedTrajectory] = {}
        self._num_begun = 0
        self._writer: asyncio.StreamWriter | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self._life = asyncio.create_task(self._live())
        self._ended_at: float | None = None
        """Seconds by the loop's clock."""

    @property
    def idle(self) -> bool:
        return self._ready.done() and not self._conversations

    def is_over(self) -> bool:
        """True if another should be started: this one died, or could not be loaded some time ago."""
        if self._ended_at is None:
            return False
        loaded = self._ready.exception() is None
        return loaded or asyncio.get_running_loop().time() > self._ended_at + AFTER_FAILURE_S

    async def begin(self, item: Mapping[str, Any]) -> HostedTrajectory:
        """Begins a trajectory. Raises EnvironmentFailed."""
        await asyncio.shield(self._ready)
        self._num_begun += 1
        name = str(self._num_begun)
        conversation = self._conversations[name] = HostedTrajectory(self, name)
        if self._ended_at is not None:
            conversation.heard.put_nowait({"fails": name, "why": ENDED})
        conversation.say("begin", {"item": item})
        return conversation

    def say(self, message: Mapping[str, Any]) -> None:
        if self._writer is not None and self._ended_at is None:
            self._writer.write(msgspec.json.encode(message) + b"\n")

    def forget(self, name: str) -> None:
        if self._conversations.pop(name, None) is not None:
            self.say({"close": name})

    async def stop(self) -> None:
        """Ends the process, and what is under way in it."""
        if self._writer is not None:
            self._writer.close()  # it hears that nobody listens
            await asyncio.wait({self._life})
        await cancel_all([self._life])

    async def _live(self) -> None:
        reason = ENDED
        try:
            async with self._process() as reader:
                await self._listen(reader)
        except EnvironmentFailed as error:
            reason = str(error)
        finally:
            self._ended_at = asyncio.get_running_loop().time()
            if not self._ready.done():
                self._ready.set_exception(EnvironmentFailed(reason))
            for name, conversation in self._conversations.items():
                conversation.heard.put_nowait({"fails": name, "why": reason})

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Raises EnvironmentFailed if the package cannot be loaded."""
        try:
            async with asyncio.timeout(START_S):
                first = await _line(reader)
        except TimeoutError as error:
            raise EnvironmentFailed(f"the environment was not loaded within {START_S:g} seconds") from error
        if "failed" in first:
            raise EnvironmentFailed(f"the environment cannot be loaded: {first['failed']}")
        if first:
            self._ready.set_result(None)
        while message := await _line(reader):
            name = message.get("asks") or message.get("ends") or message.get("fails")
            if (conversation := self._conversations.get(str(name))) is not None:
                conversation.heard.put_nowait(message)

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncGenerator[asyncio.StreamReader]:
        """Lines of the process, as long as the block runs. Raises EnvironmentFailed."""
        ours, theirs = socket.socketpair()
        key = secrets.token_hex(16)
        python = _interpreter(self._python)
        try:
            process = await asyncio.create_subprocess_exec(
                str(python),
                str(HOST),
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=_variables(python, self._variables) | {KEY_VARIABLE: key},
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise EnvironmentFailed(f"the environment's interpreter cannot be started: {error.strerror}") from error
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        output = asyncio.create_task(_last_output(process))
        try:
            self.say({"load": {**self._load, "key": key}})
            yield reader
        finally:
            self._writer.close()
            await _end(process)
            await asyncio.wait({output}, timeout=STOP_S)  # what it started may hold the other end forever
            last_output = output.result() if output.done() else ""
            await cancel_all([output])
            log.info("environment_process_ended", status=process.returncode, output=last_output)


class Hosts:
    """The processes of one worker, one for each package and its arguments. `close` when done.

    Tenants share them: one with more than half gives one back when another waits, as soon as its trajectories end.
    """

    def __init__(self, most: int = MAX_HOSTS, *, memory_bytes: int = MEMORY_BYTES) -> None:
        self._most = most
        self._memory_bytes = memory_bytes
        self._choosing = asyncio.Lock()
        self._hosts: OrderedDict[bytes, Host] = OrderedDict()
        """The one used last stands last."""
        self._waited: dict[str, float] = {}
        """Tenant -> when it last found no room, by the loop's clock."""

    async def begin(
        self, python: str, load: Mapping[str, Any], item: Mapping[str, Any], variables: Sequence[str] = ()
    ) -> HostedTrajectory:
        """Begins a trajectory of the current tenant. Raises EnvironmentFailed, and NoRoom if it must wait for a process."""
        key, tenant = msgspec.json.encode([python, load, variables]), work.current().tenant
        async with self._choosing:
            host = self._hosts.get(key)
            if host is not None and self._gives_back(host):
                raise NoRoom("this environment's process ends, since its tenant has too many and others wait")
            if host is None or host.is_over():
                await self._make_room(key, tenant)
                self._waited.pop(tenant, None)
                host = self._hosts[key] = Host(python, load, variables, tenant, self._memory_bytes)
            self._hosts.move_to_end(key)
        return await host.begin(item)

    async def close(self) -> None:
        await asyncio.gather(*(host.stop() for host in self._hosts.values()))

    async def _make_room(self, key: bytes, tenant: str) -> None:
        """Raises NoRoom."""
        gone = [self._hosts.pop(key)] if key in self._hosts else []
        try:
            while (idle := self._surplus(tenant)) is not None:
                gone.append(self._hosts.pop(idle))
        finally:
            await asyncio.gather(*(host.stop() for host in gone))

    def _surplus(self, tenant: str) -> bytes | None:
        """The process to end before this tenant gets another: the longest idle one of the tenant with the most; its own if it
        has half of all. None: it may have one now. Raises NoRoom if all are at work."""
        counts = self._hosts_by_tenant()
        if len(self._hosts) < self._most + (0 if counts[tenant] else SPARE_PLACES):
            return None
        idle = [key for key, host in self._hosts.items() if host.idle]
        if counts[tenant] >= self._half:
            idle = [key for key in idle if self._hosts[key].tenant == tenant]
        if not idle:
            self._waited[tenant] = asyncio.get_running_loop().time()
            raise NoRoom(f"this worker's {self._most} processes of environments are all at work")
        return max(idle, key=lambda key: counts[self._hosts[key].tenant])

    def _gives_back(self, host: Host) -> bool:
        """Does a tenant with too many of them leave it, so that another tenant gets its place?"""
        since = asyncio.get_running_loop().time() - WAITING_S
        self._waited = {tenant: at for tenant, at in self._waited.items() if at > since}
        first = next(each for each in self._hosts.values() if each.tenant == host.tenant)
        return (
            first is host
            and self._hosts_by_tenant()[host.tenant] > self._half
            and bool(self._waited.keys() - {host.tenant})
        )

    def _hosts_by_tenant(self) -> Counter[str]:
        return Counter(host.tenant for host in self._hosts.values())

    @property
    def _half(self) -> int:
        return max(1, self._most // 2)


async def _line(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The host's next line; nothing once it has ended. Raises EnvironmentFailed."""
    try:
        line = await reader.readline()
        return msgspec.json.decode(line, type=dict[str, Any]) if line.endswith(b"\n") else {}
    except (ConnectionError, ValueError) as error:
        raise EnvironmentFailed(f"the environment's process cannot be understood: {error}") from error


async def _last_output(process: asyncio.subprocess.Process) -> str:
    assert process.stdout
    end = b""
    while chunk := await process.stdout.read(16384):
        end = (end + chunk)[-KEPT_BYTES:]
    return end.decode(errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Gives the process a moment to end, now that nobody listens, and kills what is left of it."""
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        log.warning("environment_process_killed", pid=process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _interpreter(python: str) -> Path:
    """`python` is an interpreter, or the folder of a Python environment."""
    return Path(python) / "bin" / "python" if Path(python).is_dir() else Path(python)


def _variables(python: Path, more: Sequence[str]) -> dict[str, str]:
    """The worker's own that a package may see; the interpreter's folder comes first on the PATH."""
    names = VARIABLES.union(more)
    variables = {name: value for name, value in os.environ.items() if name in names or name.startswith("LC_")}
    return variables | {"PATH": os.pathsep.join([str(python.parent), variables.get("PATH", os.defpath)])}
