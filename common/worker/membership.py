"""Lets a worker join a cell only if it has the base model and computes the same bits as the workers of the jobs that began.

The first worker sets the cell's mode (deterministic or default) and its base model's digest, the first of a service the
service's fingerprint. They stand while a live worker holds them, or a job begun under them is unfinished; then the next
worker sets others.

reads: `begun`   writes: `bits`, `bits:live`   waits for: the end of jobs that began with other bits   unblocked by: owners
after a crash: the worker's hold runs out
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import structlog

from common.bus.bus import Bus
from common.errors import MarlaasError
from common.models.base_digest import shown

HOLD_S = 5.0
"""Seconds that a service is held after its workers were last heard."""
JOIN_EVERY_S = 1.0
OF_ALL = ("mode", "base")
"""Fields of `bits` that no service has of its own."""
Mode = Literal["default", "deterministic"]
log = structlog.get_logger()

# KEYS: bits, bits:live. ARGV: service, mode, fingerprint, milliseconds of a hold, key of the set of jobs that were begun: a
# worker may only read it, and among the KEYS it would take the right to write it; the base model's digest.
# Answers the differing field and the cell's value; or nothing, then all fields and values.
_JOIN = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
if redis.call('EXISTS', ARGV[5]) == 0 then
  if redis.call('ZCARD', KEYS[2]) == 0 then redis.call('DEL', KEYS[1]) end
  if not redis.call('ZSCORE', KEYS[2], ARGV[1]) then redis.call('HDEL', KEYS[1], ARGV[1]) end
end
-- A worker without weights knows the first half of the digest: the longer one stands.
local base = redis.call('HGET', KEYS[1], 'base') or ''
local digest, other = ARGV[6], base
if #digest < #base then digest, other = base, digest end
if string.sub(digest, 1, #other) ~= other then return {'base', base} end
for _, wanted in ipairs({{'mode', ARGV[2]}, {ARGV[1], ARGV[3]}}) do
  local known = redis.call('HGET', KEYS[1], wanted[1])
  if known and known ~= wanted[2] then return {wanted[1], known} end
end
redis.call('HSET', KEYS[1], 'mode', ARGV[2], ARGV[1], ARGV[3], 'base', digest)
redis.call('ZADD', KEYS[2], now + ARGV[4], ARGV[1])
return {'', '', unpack(redis.call('HGETALL', KEYS[1]))}
"""


class JoinRefused(MarlaasError):
    """The cell's jobs were begun on another base model, or on other bits, than this worker's."""


class Membership:
    """One worker's membership in its cell."""

    def __init__(
        self,
        bus: Bus,
        service: str,
        *,
        deterministic: bool,
        fingerprint: str,
        fingerprints: dict[str, str],
        digest: str = "",
    ) -> None:
        """`fingerprint`: of the bits that the worker computes; empty in default mode, which promises none.
        `fingerprints`: those of the cell's services, as of the last `join`. `digest`: of the worker's base model."""
        self._bus = bus
        self._service = service
        self._mode: Mode = "deterministic" if deterministic else "default"
        self._fingerprint = fingerprint
        self._fingerprints = fingerprints
        self._digest = digest
        self._join = bus.client.register_script(_JOIN)

    async def join(self) -> None:
        """Joins, or stays in. Raises JoinRefused, saying what differs and what to do."""
        cell = self._bus.cell
        words = [self._service, self._mode, self._fingerprint, int(HOLD_S * 1000), cell.begun, self._digest]
        answer: Any = await self._bus.retrying(lambda: self._join(keys=[cell.bits, cell.bits_live], args=words))
        differs, known, *pairs = (word.decode() for word in answer)
        if differs:
            raise JoinRefused(self._explained(differs, known))
        fields = dict(zip(pairs[::2], pairs[1::2], strict=True))
        self._fingerprints.clear()
        self._fingerprints.update({name: value for name, value in fields.items() if name not in OF_ALL and value})

    async def wait_to_join(self, tell: Callable[[str], Awaitable[None]]) -> None:
        """Returns once it has joined. `tell` hears about once a second why it has not."""
        logged = ""
        while True:
            try:
                return await self.join()
            except JoinRefused as error:
                if logged != str(error):
                    logged = str(error)
                    log.error("refused", reason=logged)
                await tell(str(error))
            await asyncio.sleep(JOIN_EVERY_S)

    async def keep(self, stop: asyncio.Event) -> None:
        """Stays in until cancelled; sets `stop` if others took the cell over while this worker was silent."""
        while True:
            await asyncio.sleep(JOIN_EVERY_S)
            try:
                await self.join()
            except JoinRefused as error:
                log.error("membership_lost", reason=str(error))
                return stop.set()

    def _explained(self, differs: str, known: str) -> str:
        cell = self._bus.cell.base_model
        if differs == "base":
            return (
                f"the base model that MARLAAS_BASE_MODELS calls {cell} here is another than the one of its workers and unfinished "
                f"jobs (digest {shown(self._digest)} instead of {shown(known)}): name the same files on all machines; to change "
                f"them, end the jobs and stop all workers of {cell}, or give the new base model a name of its own"
            )
        if differs == "mode":
            setting = "set MARLAAS_DETERMINISTIC=1" if known == "deterministic" else "unset MARLAAS_DETERMINISTIC"
            return (
                f"this {self._service} worker runs in {self._mode} mode, but {cell} has workers or unfinished jobs in {known} "
                f"mode: {setting}, or let them end, or cancel them"
            )
        return (
            f"this machine computes other bits than those that the deterministic jobs of {cell} began with (fingerprint of "
            f"{self._service}: {self._fingerprint[:12]} instead of {known[:12]}): use the kind of processor and the wheels of "
            "the others, or cancel the unfinished jobs"
        )
