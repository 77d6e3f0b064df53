"""Writes an owner's changes by one script for all its partitions, which first compares the lease of each.

A stamp next to the lease names the last write by its number and a random part. A stamp is written once, so the script can be
repeated after a lost reply. By it an owner sees that another one wrote, or that Redis lost its last moment.
"""

import secrets
from collections.abc import Iterable
from typing import Any

from redis.exceptions import ResponseError

from common.bus.bus import Bus
from common.bus.redis_connection import passes
from common.errors import Fenced, Unavailable
from manager_service.owner.jobs.changes import RedisCommand

# KEYS: none named (all keys share the cell's hash tag, KEYS[1] routes). ARGV, for each partition: lease, rev, token, stamp of the
# write before, stamp of this one, number of commands, then the commands, each as its length and its words. Answers for each.
#
# Fencing: the lease is compared here and not before the call, because an owner that was frozen, or whose call was delayed, still
# believes that it holds the lease. Only Redis can decide it at the moment of the write.
# Outputs stand before acks: a refused command ends its partition's write, and what precedes it stays. Work sent twice is harmless,
# since its id follows from its cause; an entry acknowledged without its effect would be lost.
# HEXISTS is no write but a condition: a record that its owner has read, and that is gone, was lost with Redis' last moment.
# Above its memory limit Redis refuses a script's first write if that needs memory, and none after it. So the first is a DEL of
# nothing: what an owner has finished makes room in a full Redis too.
COMMIT = """
local at, answers = 1, {}
local function take() at = at + 1; return ARGV[at - 1] end
redis.call('DEL', KEYS[1] .. ':nothing')
while at <= #ARGV do
  local lease, rev, token, before, stamp, commands = take(), take(), take(), take(), take(), tonumber(take())
  local last, answer = redis.call('GET', rev) or '', 'done'
  if redis.call('GET', lease) ~= token then answer = 'fenced' elseif last ~= before and last ~= stamp then answer = 'lost' end
  local writes = answer == 'done' and last == before
  for _ = 1, commands do
    local words = tonumber(take())
    local reply = writes and redis.pcall(unpack(ARGV, at, at + words - 1))
    if type(reply) == 'table' and reply.err then writes, answer = false, reply.err end
    if reply == 0 and ARGV[at] == 'HEXISTS' then writes, answer = false, 'lost' end
    at = at + words
  end
  if writes then redis.call('SET', rev, stamp) end
  answers[#answers + 1] = answer
end
return answers
"""

MAX_COMMAND_WORDS = 4000
"""Words in one command at most; Lua's unpack has a limit of about 8,000."""


class Lost(Unavailable):
    """Redis differs from this owner's memory, which must be rebuilt."""


class Fence:
    """Lets one partition be written, until the lease is not this owner's."""

    def __init__(self, bus: Bus, partition: int, token: str) -> None:
        self._bus = bus
        self._token = token
        self._lease, self._rev_key = bus.cell.lease(partition), bus.cell.rev(partition)
        self._stamp = ""  # of the last write, as this owner knows it

    async def read_stamp(self) -> None:
        """Reads the last write's stamp. Call once after taking the lease, before the first commit."""
        value: Any = await self._bus.retrying(lambda: self._bus.client.get(self._rev_key))
        self._stamp = value.decode() if value else ""

    def words(self, commands: list[RedisCommand]) -> tuple[str, list[Any]]:
        """The stamp of a write of these commands, and what COMMIT takes for it."""
        number = int(self._stamp.partition(":")[0] or 0) + 1
        stamp, chunked = f"{number}:{secrets.token_hex(8)}", _chunked(commands)
        words: list[Any] = [self._lease, self._rev_key, self._token, self._stamp, stamp, len(chunked)]
        for command in chunked:
            words += [len(command), *command]
        return stamp, words

    def answered(self, answer: str, stamp: str) -> Fenced | Lost | None:
        """Takes in what COMMIT answered for this partition. Lost also means that Redis refused a command."""
        if answer == "done":
            self._stamp = stamp
            return None
        return Fenced(self._lease) if answer == "fenced" else Lost(f"{self._rev_key}: {answer}")


class Commits:
    """Applies, for each of several partitions, all of its commands or none."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._commit = bus.client.register_script(COMMIT)

    async def apply(self, writes: Iterable[tuple[Fence, list[RedisCommand]]]) -> list[Fenced | Lost | None]:
        """Returns, for each, the reason for which it was not applied."""
        made = [(fence, *fence.words(commands)) for fence, commands in writes]
        words = [word for _, _, part in made for word in part]

        async def call() -> list[str]:
            answers = [answer.decode() for answer in await self._commit(keys=[words[0]], args=words)]
            for refused in map(ResponseError, answers):
                if passes(refused):
                    raise refused
            return answers

        answers = await self._bus.retrying(call)
        return [fence.answered(answer, stamp) for (fence, stamp, _), answer in zip(made, answers, strict=True)]


def _chunked(commands: list[RedisCommand]) -> list[RedisCommand]:
    """Splits the variadic commands that are too long for one call."""
    result: list[RedisCommand] = []
    for command in commands:
        head = {"XACK": 3, "XDEL": 2, "HDEL": 2, "HSET": 2}.get(command[0])
        if head is None or len(command) <= MAX_COMMAND_WORDS:
            result.append(command)
            continue
        rest = command[head:]
        result += [command[:head] + rest[at : at + MAX_COMMAND_WORDS] for at in range(0, len(rest), MAX_COMMAND_WORDS)]
    return result
