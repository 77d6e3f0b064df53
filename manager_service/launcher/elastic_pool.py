"""Starts and stops rollout workers of `marlaas up --rollout MIN:MAX`, as their cell wants them.

reads: `wanted`   waits for: a burst, or turns that the others have room for   unblocked by: the owner of the first partition
after a crash: the kernel ends the workers; the next `up` begins with the least. While Redis or that owner is away all stay
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, MutableMapping

from redis.exceptions import RedisError

from common.bus.redis_connection import make_client
from common.bus.streams import Cell
from common.children.processes import Notify, SupervisedProcess
from common.errors import InvalidInput
from manager_service.records.cluster import WantedWorkers, wanted_of
from manager_service.scheduling.elastic import WorkerRange

LOOK_EVERY_S = 0.5
ANSWER_S = 2.0
"""Seconds in which Redis must answer, else all stays as it is until the next look."""
OFF = ("0", "false", "no", "off", "f", "n", "")
"""Values of a setting that mean no."""
GRACE_S = 30.0
"""Seconds for a worker that retires to hand its turns back, before SIGKILL."""


class ElasticPool:
    """The rollout workers of one cell."""

    def __init__(
        self,
        bounds: WorkerRange,
        environment: MutableMapping[str, str],
        running: dict[str, SupervisedProcess],
        notify: Notify,
    ) -> None:
        """`environment`: managers are told the range there. `running`: the supervisor's processes, by name. `notify` hears who starts and
        who retires, and why. Raises InvalidInput for a range where the number of workers must be fixed."""
        bases = environment.get("MARLAAS_BASE_MODELS", "tiny").split(",")
        self._bounds, self._running, self._notify = bounds, running, notify
        self._cell = Cell(bases[0].partition("=")[0].strip())
        self._makes: dict[str, Callable[[], SupervisedProcess]] = {}
        self._retiring = set[str]()
        if bounds.is_fixed:
            return
        exact = environment.get("MARLAAS_DETERMINISTIC", "0").lower() not in OFF
        if why := "with several base models" if len(bases) > 1 else "in deterministic mode" if exact else "":
            raise InvalidInput(f"--rollout {bounds}: {why} no workers come and go; write --rollout {bounds.most}")
        environment["MARLAAS_ROLLOUT_RANGE"] = str(bounds)

    def add(self, name: str, make: Callable[[], SupervisedProcess]) -> None:
        """Adds a place; the first ones have a worker from the beginning. `make`: of a process that was never started."""
        self._makes[name] = make
        if self._bounds.is_fixed or len(self._makes) <= self._bounds.least:
            self._running[name] = make()

    async def follow(self, redis_url: str, group: asyncio.TaskGroup) -> None:
        """Follows `wanted` until cancelled, unless the number is fixed. `group` keeps the workers running."""
        async with make_client(redis_url, self._cell.key(""), retry=None) as client:
            while not self._bounds.is_fixed:
                wanted = None
                with contextlib.suppress(RedisError, OSError):  # a TimeoutError is an OSError
                    async with asyncio.timeout(ANSWER_S):
                        wanted = await wanted_of(client, self._cell)
                if wanted is not None:
                    self._start(wanted, group)
                    self._retire(wanted, group)
                await asyncio.sleep(LOOK_EVERY_S)

    def _workers(self) -> list[str]:
        return [name for name in self._makes if name in self._running and name not in self._retiring]

    def _start(self, wanted: WantedWorkers, group: asyncio.TaskGroup) -> None:
        missing = self._bounds.clamp(wanted.workers) - len(self._workers())
        for name in [name for name in self._makes if name not in self._running][: max(0, missing)]:
            self._running[name] = process = self._makes[name]()
            group.create_task(process.keep_running())
            self._notify(f"{name} starts: {wanted.turns} turns want {wanted.workers} rollout workers")

    def _retire(self, wanted: WantedWorkers, group: asyncio.TaskGroup) -> None:
        """Stops the worker that the owner chose, if this cluster has it and it is not needed meanwhile."""
        if len(self._workers()) <= self._bounds.clamp(wanted.workers):
            return
        for name in self._workers():
            process = self._running[name]
            if wanted.retires.startswith(f"rollout-{socket.gethostname()}-{process.pid}-"):
                self._notify(f"{name} retires: {wanted.turns} turns want {wanted.workers} rollout workers")
                self._retiring.add(name)
                group.create_task(self._end(name))

    async def _end(self, name: str) -> None:
        """Frees the place once its worker has ended. Others start and retire meanwhile."""
        await self._running[name].stop(GRACE_S)
        del self._running[name]
        self._retiring.remove(name)
