"""Env workers as processes that hold live sessions, killed and stopped in the middle of trajectories."""

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from common.bus.bus import Bus, Out
from common.bus.streams import GROUP_ROLLOUT, Cell
from common.cancellation import running
from common.children.forking import PreforkServer
from common.children.processes import ChildProcess, Command
from common.wire.messages import ScoredTrajectory, TurnRequest
from common.worker.handlers import Beat
from common.worker.telemetry import About, Reporter
from common.worker.worker import Inbox, Worker
from harness.standin import StandIn
from tests.env.test_env_handler import result_of, start_of
from tests.support.live_environments import install

CELL = Cell("tiny")
NUM = 12
LEASE_S = 1.5


class Scripted(StandIn):
    """A rollout that says 10 in each turn; from the second turn on only once the test lets it."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.waiting = 0

    async def __call__(self, message: TurnRequest, beat: Beat) -> list[Out]:
        self.waiting += 1
        while message.turn and not self.goes_on.is_set():
            beat()
            await asyncio.sleep(0.05)
        return [(CELL.holder(message.session), result_of(message, "10<|end|>"))]


class Cluster:
    """Processes of env workers, a scripted rollout, and the trajectories that were scored."""

    def __init__(self, bus: Bus, folder: Path, redis_url: str, server: PreforkServer) -> None:
        self.bus = bus
        self.rollout = Scripted()
        self.story = folder / "story"
        self._folder = folder
        self._redis_url = redis_url
        self._server = server
        self._workers: list[ChildProcess] = []

    async def env_worker(self) -> ChildProcess:
        settings = {
            "REDIS_URL": self._redis_url,
            "STORE_URL": (self._folder / "store").as_uri(),
            "LEASE_S": str(LEASE_S),
            "WEAK_SANDBOX": "1",
            "LOG_LEVEL": "warning",
        }
        variables = {f"MARLAAS_{name}": value for name, value in settings.items()}
        self._workers.append(await self._server.start(command(variables, self._folder / "log")))
        return self._workers[-1]

    async def end(self) -> None:
        for worker in self._workers:
            if worker.returncode is None:
                await ended(worker, signal.SIGKILL)

    async def begin(self, name: str) -> None:
        """Asks for trajectories, and waits until each has had its first turn."""
        self.rollout.waiting = 0
        args = {"story": str(self.story)}
        groups = [
            start_of(name, args, item={"number": group}, group=group, samples=(0, 1, 2), id=f"job1/{group}/0/0")
            for group in range(NUM // 3)
        ]
        await self.bus.publish([(CELL.env, start) for start in groups])
        await self.until(lambda: self.rollout.waiting >= 2 * NUM)

    async def ended(self) -> dict[str, ScoredTrajectory]:
        """All trajectories, once each of them has ended. Nothing more comes."""
        await self.until(lambda: self.bus.client.xlen(CELL.scored(3)), NUM)
        await self.until(lambda: self.bus.client.xlen(CELL.env), 0)
        found = [message for _, message in await self.bus.follow(CELL.scored(3), "0", block_ms=None)]
        scored = {message.trajectory.key(): message for message in found if isinstance(message, ScoredTrajectory)}
        assert len(scored) == len(found) == NUM
        return scored

    async def until(self, look: Callable[[], Any], wanted: Any = True) -> None:
        async with asyncio.timeout(60):
            while True:
                found = look()
                if (await found if asyncio.iscoroutine(found) else found) == wanted:
                    return
                await asyncio.sleep(0.05)

    def told(self, pid: int, sessions: Collection[str] = ()) -> Counter[str]:
        """The number of times that each event happened in a process, to some of its sessions or to all."""
        lines = [line.split() for line in self.story.read_text().splitlines()]
        return Counter(words[1] for words in lines if words[0] == str(pid) and (not sessions or words[2] in sessions))


def command(settings: Mapping[str, str], log: Path) -> Command:
    """`env_service`, with the variables that this process has now."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return Command(
        name="env", argv=(sys.executable, "-m", "env_service"), environment={**variables, **settings}, log=log
    )


async def ended(worker: ChildProcess, by: int) -> int:
    """Sends a signal, unless it has just ended. Returns the status with which it ends."""
    with suppress(ProcessLookupError):
        worker.send_signal(by)
    return await worker.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreforkServer]:
    """Forks env workers that find the environments: each would need a second to import."""
    folder = tmp_path_factory.mktemp("prefork")
    with pytest.MonkeyPatch.context() as patch:
        path = [str(install(folder / "installed")), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        server = PreforkServer([command({}, folder / "log")], folder / "prefork.log")
        yield server
        server.end()


@pytest.fixture
async def cluster(bus: Bus, tmp_path: Path, redis_url: str, server: PreforkServer) -> AsyncIterator[Cluster]:
    cluster = Cluster(bus, tmp_path, redis_url, server)
    inboxes = [Inbox(CELL.rollout_first, GROUP_ROLLOUT), Inbox(CELL.rollout, GROUP_ROLLOUT)]
    reporter = Reporter("rollout-1", "rollout", "tiny", About(slots=2 * NUM))
    worker = Worker(bus, cluster.rollout, inboxes, reporter, lease_s=LEASE_S)
    stop = asyncio.Event()
    async with running(worker.run(stop)):
        yield cluster
        await cluster.end()
        stop.set()


async def test_trajectories_of_a_killed_worker_are_replayed_and_end_once(cluster: Cluster) -> None:
    # Given trajectories in the middle of sessions of one worker
    killed = await cluster.env_worker()
    await cluster.begin("adding")
    # When it is killed, and another one is there
    await ended(killed, signal.SIGKILL)
    other = await cluster.env_worker()
    cluster.rollout.goes_on.set()
    # Then each ends once, as if nothing had happened
    scored = await cluster.ended()
    assert {key: each.reward for key, each in scored.items()} == {
        f"{group}/{sample}": (group + 30) / 100 for group in range(NUM // 3) for sample in range(3)
    }
    assert cluster.told(killed.pid) == {"open": NUM, "step": NUM}
    await cluster.until(lambda: cluster.told(other.pid), {"open": NUM, "step": 3 * NUM, "close": NUM})
