"""Counts the bytes that tenants keep in object storage, in the transactions that write and delete.

stored:<tenant>              hash   in each cell: job or run -> bytes of its versions; `<job>/records` -> of its samples and its
                                    records in the archive; `total` -> of all of these
marlaas:{@}:file-bytes:<tenant>  hash  file -> bytes
"""

from typing import Any

from common.bus.streams import Cell

TOTAL = "total"


def records_of(job: str) -> str:
    """The field of `stored:<tenant>` in which a job's samples and archived records count."""
    return f"{job}/records"


def add_stored(cell: Cell, tenant: str, what: str, num_bytes: int) -> list[list[Any]]:
    """The commands that count bytes written; of bytes that were deleted, `num_bytes` is negative. `what`: a job or run, or
    `records_of` it. Part of the transaction that makes them count or lets them go."""
    key = cell.stored(tenant)
    return [["HINCRBY", key, what, num_bytes], ["HINCRBY", key, TOTAL, num_bytes]] if num_bytes else []


# KEYS: stored. ARGV: what was deleted as a whole, and the field `total`.
_FREE = """
local bytes = redis.call('HGET', KEYS[1], ARGV[1])
if bytes and redis.call('HDEL', KEYS[1], ARGV[1]) then redis.call('HINCRBY', KEYS[1], ARGV[2], -bytes) end
"""


async def free_stored(redis: Any, cell: Cell, tenant: str, what: str) -> None:
    """Counts all bytes of `what` as deleted. Once more changes nothing. For deletions outside of an owner's transactions."""
    await redis.register_script(_FREE)(keys=[cell.stored(tenant)], args=[what, TOTAL])
