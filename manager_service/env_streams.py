"""The env workers' own streams, in which the turns of live sessions wait.

`env-workers` names a worker as long as it has one.
"""

from collections.abc import Iterable
from typing import Any

from common.streams import Cell


async def env_streams(client: Any, cell: Cell) -> list[str]:
    """`client`: of Redis. Raises its errors."""
    return named(await client.zrange(cell.env_workers, 0, -1), cell)


def named(workers: Iterable[Any], cell: Cell) -> list[str]:
    """The streams of these workers, as Redis names them, in one order."""
    return sorted(cell.env_worker(worker.decode()) for worker in workers)
