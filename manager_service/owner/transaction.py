"""Writes an owner's changes by one script, which first compares the lease.

A stamp beside the lease names the last write by its number and a random part. The script can be repeated after a lost
reply, because a stamp is written once. An owner sees by the stamp if another one wrote, or if Redis lost its last moment.
"""

import secrets
from typing import Any

from redis.exceptions import ResponseError

from common.bus import Bus
from common.errors import Fenced, Unavailable
from manager_service.jobs.changes import Command

# KEYS[1] lease, KEYS[2] rev. ARGV: token, stamp of the write before, stamp of this one, then the commands, each as its
# length and its words.
COMMIT = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'fenced' end
local last = redis.call('GET', KEYS[2]) or ''
if last == ARGV[3] then return 'done' end
if last ~= ARGV[2] then return 'lost' end
local at = 4
while at <= #ARGV do
  local words = tonumber(ARGV[at])
  redis.call(unpack(ARGV, at + 1, at + words))
  at = at + words + 1
end
redis.call('SET', KEYS[2], ARGV[3])
return 'done'
"""

CHUNK = 4000
"""Words in one command at most; Lua's unpack has a limit of about 8,000."""


class Lost(Unavailable):
    """Redis differs from this owner's memory, which must be rebuilt."""


class Fence:
    """Writes to one partition. A write fails once the lease is not this owner's."""

    def __init__(self, bus: Bus, partition: int, token: str) -> None:
        self._bus = bus
        self._token = token
        self._lease, self._rev_key = bus.cell.lease(partition), bus.cell.rev(partition)
        self._commit = bus.client.register_script(COMMIT)
        self._stamp = ""  # of the last write, as this owner knows it

    async def read_stamp(self) -> None:
        """Reads the last write's stamp. Call once after taking the lease, before the first commit."""
        value: Any = await self._bus.retrying(lambda: self._bus.client.get(self._rev_key))
        self._stamp = value.decode() if value else ""

    async def commit(self, commands: list[Command]) -> None:
        """Applies all commands or none. Raises Fenced, or Lost, which also means that Redis refused a command."""
        number = int(self._stamp.partition(":")[0] or 0) + 1
        stamp = f"{number}:{secrets.token_hex(8)}"
        words: list[Any] = [self._token, self._stamp, stamp]
        for command in _chunked(commands):
            words += [len(command), *command]
        keys = [self._lease, self._rev_key]
        try:
            answer = await self._bus.retrying(lambda: self._commit(keys=keys, args=words))
        except ResponseError as error:
            raise Lost(f"{self._rev_key}: {error}") from error
        if answer == b"fenced":
            raise Fenced(self._lease)
        if answer == b"lost":
            raise Lost(self._rev_key)
        self._stamp = stamp


def _chunked(commands: list[Command]) -> list[Command]:
    """Splits the variadic commands that are too long for one call."""
    result: list[Command] = []
    for command in commands:
        head = {"XACK": 3, "XDEL": 2, "HDEL": 2, "HSET": 2}.get(command[0])
        if head is None or len(command) <= CHUNK:
            result.append(command)
            continue
        rest = command[head:]
        result += [command[:head] + rest[at : at + CHUNK] for at in range(0, len(rest), CHUNK)]
    return result
