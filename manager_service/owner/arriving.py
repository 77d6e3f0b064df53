"""Takes jobs in outside of an owner's passes, since reading files may take long: new ones, and a take-over's."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping

from common.cancellation import starting
from common.errors import Unavailable
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.partition import Partition
from manager_service.owner.transaction import Fence

RETRY_S = 1.0
"""Time between two tries to read a job's files."""
Owned = tuple[Partition, Fence]


class Intake:
    """Takes in jobs of the partitions of one owner, each for itself."""

    def __init__(
        self,
        owned: Mapping[int, Owned],
        lock: asyncio.Lock,
        decide: Callable[[defaultdict[int, Changes], float], Awaitable[None]],
    ) -> None:
        """`owned`: the owner's partitions. `lock`: while jobs change. `decide`: decides what follows, and commits."""
        self._owned = owned
        self._lock = lock
        self._decide = decide
        self._read: list[tuple[int, Owned, str, Unavailable | None]] = []  # jobs that are to enter, or why they cannot
        self.wanted = asyncio.Event()
        """Set it when a partition has jobs that arrive."""

    async def run(self) -> None:
        """Works until cancelled."""
        under_way: dict[tuple[Partition, str], asyncio.Task[None]] = {}
        async with starting() as start:
            while True:
                await self.wanted.wait()
                self.wanted.clear()
                under_way = {key: task for key, task in under_way.items() if not task.done()}
                for number, owned in self._owned.items():
                    for job in owned[0].arriving:
                        if (owned[0], job) not in under_way:
                            under_way[owned[0], job] = start(self._take_in(number, owned, job))

    async def _take_in(self, number: int, owned: Owned, job: str) -> None:
        """Reads a job. Who has the lock first lets all that are read enter."""
        failure = None
        try:
            await owned[0].fetch(job)
        except Unavailable as error:
            failure = error
        self._read.append((number, owned, job, failure))
        async with self._lock:
            await self._let_in()
        if failure:
            await asyncio.sleep(RETRY_S)
            self.wanted.set()

    async def _let_in(self) -> None:
        """Lets all jobs that were read enter, and decides at once what follows, as a pass does."""
        read, self._read = self._read, []
        changes: defaultdict[int, Changes] = defaultdict(Changes)
        for number, owned, job, failure in read:
            if self._owned.get(number) is owned:  # else the next owner does it
                await self._enter(owned[0], job, failure, changes[number])
        if changes:
            await self._decide(changes, time.time())

    async def _enter(self, partition: Partition, job: str, failure: Unavailable | None, changes: Changes) -> None:
        """Lets a job that was read enter, or notes why it cannot."""
        if failure:
            await partition.delay(job, failure, time.time(), changes)
        if not failure or job in partition.jobs:
            await partition.take_in(job, time.time(), changes)
