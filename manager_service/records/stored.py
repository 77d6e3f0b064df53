"""Counts the bytes that tenants keep in object storage, in the transactions that write and delete.

stored:<tenant>              hash   in each cell: job or run -> bytes of its versions; `<job>/records` -> of its samples; `archived` -> of
                                    all records in the archive; `total` -> of all of these; `counted`: nothing of before is missing
marlaas:{@}:file-bytes:<tenant>  hash  file -> bytes
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from common.bus.streams import Cell
from common.store.objects import Objects
from manager_service.records.archive import ARCHIVE_FILES
from manager_service.records.keys import GLOBAL
from manager_service.records.tenants import TenantRecord
from manager_service.records.usage import ARCHIVED

TOTAL, COUNTED = "total", "counted"
MANIFEST = "/manifest.json"
"""The end of the paths that do not count: they stay when their versions go."""
WHAT_TO_DELETE = "delete files, models of finished jobs, or checkpoints of runs"


def records_of(job: str) -> str:
    """The field of `stored:<tenant>` in which a job's samples count."""
    return f"{job}/records"


def file_sizes(tenant: str) -> str:
    return f"{GLOBAL}file-bytes:{tenant}"


def add_stored(cell: Cell, tenant: str, what: str, num_bytes: int) -> list[list[Any]]:
    """The commands that count bytes written; of bytes that were deleted, `num_bytes` is negative. `what`: a job or run,
    `records_of` it, or ARCHIVED. Part of the transaction that makes them count or lets them go."""
    key = cell.stored(tenant)
    return [["HINCRBY", key, what, num_bytes], ["HINCRBY", key, TOTAL, num_bytes]] if num_bytes else []


# KEYS: stored. ARGV: what, its bytes, the field `total`. The DEL of nothing has it run in a full Redis too, as a commit does.
_SET = """
redis.call('DEL', KEYS[1] .. ':nothing')
redis.call('HINCRBY', KEYS[1], ARGV[3], ARGV[2] - (redis.call('HGET', KEYS[1], ARGV[1]) or 0))
if ARGV[2] == '0' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
"""


async def count_again(objects: Objects, redis: Any, cell: Cell, tenant: str, job: str) -> int:
    """Counts what object storage has of a job that has ended, whatever was counted before. Once more changes nothing.
    Returns the bytes of its records in the archive, which count once it leaves Redis."""
    records = await objects.sizes(f"records/{tenant}/{cell.base_model}/{job}/")
    versions = await objects.sizes(f"adapters/{tenant}/{job}/")
    archived = sum(size for path, size in records.items() if path.partition(f"/{job}/")[2].startswith(ARCHIVE_FILES))
    kept = sum(size for path, size in versions.items() if not path.endswith(MANIFEST))
    for what, num_bytes in ((records_of(job), sum(records.values()) - archived), (job, kept)):
        await redis.register_script(_SET)(keys=[cell.stored(tenant)], args=[what, num_bytes, TOTAL])
    return archived


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """The bytes that tenants keep over all cells, and may keep. Raises RedisError."""

    redis: Any  # for the records outside the cells
    cells: Mapping[Cell, Any]  # each with a client for its keys
    max_bytes: int  # of a tenant whose record says nothing else

    async def totals(self, tenants: Sequence[str], *, own: Cell | None = None) -> Counter[str]:
        """Bytes of each of these tenants, files included. A cell whose Redis is away is left out, for it lets nothing be stored
        meanwhile; `own` is not."""
        totals = Counter[str]()
        for cell, redis in self.cells.items():
            pipe = redis.pipeline(transaction=False)
            for tenant in tenants:
                pipe.hget(cell.stored(tenant), TOTAL)
            try:
                totals.update({name: int(num or 0) for name, num in zip(tenants, await pipe.execute(), strict=True)})
            except RedisError:
                if cell == own:
                    raise
        for tenant in tenants:
            totals[tenant] += sum(map(int, await self.redis.hvals(file_sizes(tenant))))
        return totals

    async def room_for_files(self, tenant: TenantRecord) -> int:
        """Bytes that its files may have: what else it keeps leaves so many."""
        files = sum(map(int, await self.redis.hvals(file_sizes(tenant.id))))
        return tenant.may_store(self.max_bytes) - (await self.totals([tenant.id]))[tenant.id] + files

    async def largest(self, tenant: str, num: int = 3) -> list[tuple[str, int]]:
        """A tenant's files, jobs and runs that take the most bytes: names, as in the records above, with bytes."""
        found = Counter[str]()
        for redis, key in [(self.redis, file_sizes(tenant)), *((r, c.stored(tenant)) for c, r in self.cells.items())]:
            found.update({name.decode(): int(size) for name, size in (await redis.hgetall(key)).items()})
        del found[TOTAL], found[COUNTED], found[ARCHIVED]
        return found.most_common(num)


async def listed(objects: Objects, cell: Cell, tenant: str, known: Sequence[str]) -> Counter[str]:
    """The fields of `stored:<tenant>` as object storage says. `known`: jobs and runs of this cell that Redis has."""
    found, mine, folder = Counter[str](), {*known}, f"records/{tenant}/{cell.base_model}/"
    for path, num_bytes in (await objects.sizes(folder)).items():
        job, _, file = path.removeprefix(folder).partition("/")
        if (
            not (is_archived := file.startswith(ARCHIVE_FILES)) or job not in known
        ):  # else they count once it leaves Redis
            found[ARCHIVED if is_archived else records_of(job)] += num_bytes
        mine.add(job)
    folder = f"adapters/{tenant}/"
    for path, num_bytes in (await objects.sizes(folder)).items():
        job = path.removeprefix(folder).partition("/")[0]
        if job in mine and not path.endswith(MANIFEST):
            found[job] += num_bytes
    return found
