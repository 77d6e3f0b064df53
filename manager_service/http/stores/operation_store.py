"""Puts an operation into its run's stream, once. One script writes the entry, and what was asked under its number."""

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import structlog

from common.bus.fullness import MAX_USED_FOR_NEW
from common.bus.streams import partition_of
from common.errors import Unavailable
from common.store.objects import Objects
from common.wire.messages import Failure
from common.wire.operations import Action, Operation
from manager_service.http.errors import ApiError, too_many
from manager_service.http.quota import memory_full
from manager_service.http.stores.run_store import RunRow
from manager_service.records.run_records import NUM_SEQS_KEPT, held_bytes

MAX_OPEN = 256
"""Operations of a run from its first without a result on; later ones are told to come again."""
MAX_HELD_BYTES = 256 << 20
"""Bytes of the payloads of a tenant's operations that wait, or whose gradient waits for its step. The run that holds the most may go
on one by one, or runs that all hold something could wait for each other without end."""

# KEYS: seqs, run, ops, held. ARGV: number, sha256 of what was asked, what was asked, bytes, the run, most open operations, most bytes of
# all of the tenant's, numbers to remember, whether Redis has no room for data (1 or 0), the path of its payload, then the entry's fields.
# Answers with what came of it: `known` if this very one was taken before, `twice` if one like it was. What has no data is taken, an
# optim_step above all, if it is no longer than MAX_OPEN behind the first open operation. That first one, for which the others wait, is
# taken unless the tenant's runs hold too much: then only of the run that holds the most (of equals, the first by name), so that one of
# them always comes to its step; and unless it is too much for one step.
_SUBMIT = """
local seq, known = tonumber(ARGV[1]), redis.call('HGET', KEYS[1], ARGV[1])
if known and string.sub(known, 1, 64) ~= ARGV[2] then return 'other' end
if known then return string.find(known, ' ' .. ARGV[10] .. ' ', 1, true) and 'known' or 'twice' end
local status, head, log = unpack(redis.call('HMGET', KEYS[2], 'status', 'head', 'log'))
if not status or status == 'ended' or status == 'failed' and ARGV[3] ~= 'unload' then return status or 'ended' end
-- A number below the head has its result, or was given up: to take it now would carry it out behind its step.
head = tonumber(head)
if seq < head then return 'past' end
local numbers, bytes, steps = {}, tonumber(ARGV[4]), false
for number = head, head + tonumber(ARGV[6]) - 1 do numbers[#numbers + 1] = number end
for at, asked in ipairs(redis.call('HMGET', KEYS[1], unpack(numbers))) do
  if asked then bytes = bytes + tonumber(string.match(asked, '%d+$')) end
  steps = steps or asked and numbers[at] < seq and string.find(asked, ' optim_step ', 1, true)
end
if seq > numbers[#numbers] then return 'full' end
local has_data = string.sub(ARGV[3], 1, 7) == 'forward' and ARGV[4] ~= '0'
if seq > head and has_data and ARGV[9] == '1' then return 'no_room' end
bytes = bytes + tonumber(log or 0)
local mine, held, most = tonumber(redis.call('HGET', KEYS[4], ARGV[5]) or 0), bytes, seq == head
local all = redis.call('HGETALL', KEYS[4])
for at = 1, #all, 2 do
  local name, size = all[at], tonumber(all[at + 1])
  if name ~= ARGV[5] then
    held = held + size
    if size > mine or size == mine and name < ARGV[5] then most = false end
  end
end
-- Were the run that holds the most refused too, runs that wait for room would wait for each other: none would come to its step.
if has_data and tonumber(ARGV[4]) + tonumber(log or 0) > tonumber(ARGV[7]) then return steps and 'holds' or 'too much' end
if has_data and held > tonumber(ARGV[7]) and not most then return 'holds' end
if bytes > 0 then redis.call('HSET', KEYS[4], ARGV[5], bytes) end
redis.call('XADD', KEYS[3], '*', unpack(ARGV, 11))
local last = tonumber(redis.call('HGET', KEYS[1], 'last') or 0)
redis.call('HSET', KEYS[1], seq, table.concat({ARGV[2], ARGV[3], ARGV[10], ARGV[4]}, ' '), 'last', math.max(seq, last))
if seq > tonumber(ARGV[8]) then redis.call('HDEL', KEYS[1], seq - tonumber(ARGV[8])) end
if ARGV[3] == 'unload' then redis.call('HSET', KEYS[1], 'unload', seq) end
return 'new'
"""

MAX_SEQ = 2**31 - 1
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOperation:
    """An operation that a client asked for. With a `fault`, it fails when its turn comes."""

    seq: int
    action: Action
    payload: bytes = b""
    num_tokens: int = 0
    fault: str = ""
    known_by: bytes | None = None  # what is the same in a repeat; None: the payload

    @property
    def digest(self) -> str:
        fault, same = (self.fault, self.payload) if self.known_by is None else ("", self.known_by)
        return hashlib.sha256(b"\0".join((self.action.encode(), fault.encode(), same))).hexdigest()


def wrong(reason: str) -> Failure:
    """The failure of an operation that makes no sense."""
    return Failure("invalid", reason)


async def submit(run: RunRow, new: NewOperation, objects: Objects) -> str:
    """The id of the operation's future. Raises ApiError: 400 if the number is taken, 404 if the run has ended, 429 if too many are
    open, 503 for data behind other operations while Redis is too full."""
    answer = await _submit(run, new, objects)
    if answer == "too much":  # its client waits for it, and would wait for ever
        told = f"this run holds {MAX_HELD_BYTES >> 20} MiB of data that wait, or whose step is not done: call optim_step before this one"
        answer = await _submit(run, replace(new, payload=b"", fault=told, known_by=new.payload), objects)
    if answer not in ("new", "known"):
        raise _refusal(answer, run, new.seq)
    return f"{run.id}:{new.seq}"


async def submit_unload(run: RunRow, objects: Objects) -> str:
    """Ends a run, behind all of its operations."""
    while True:
        keys = run.base.cell.seqs(run.id)
        known, last = await run.base.redis.hmget(keys, "unload", "last")
        if known is not None:
            return f"{run.id}:{int(known)}"
        seq = max(int(last or 0) + 1, (await run.state()).head)
        answer = await _submit(run, NewOperation(seq=seq, action="unload"), objects)
        if answer in ("new", "known"):
            return f"{run.id}:{seq}"
        if answer not in ("other", "past"):  # these two: another operation was faster
            raise _refusal(answer, run, seq)


async def _submit(run: RunRow, new: NewOperation, objects: Objects) -> str:
    if not 0 < new.seq <= MAX_SEQ:
        raise ApiError(400, f"seq_id is between 1 and {MAX_SEQ}", param="seq_id", retry=False)
    cell, partition = run.base.cell, partition_of(run.spec.tenant)
    operation = Operation(
        id=f"{run.id}:{new.seq}",
        tenant=run.spec.tenant,
        job=run.id,
        partition=partition,
        seq=new.seq,
        action=new.action,
        payload=new.payload,
        tokens=new.num_tokens,
        failure=wrong(new.fault) if new.fault else None,
    )
    seqs = cell.seqs(run.id)
    keys = [seqs, cell.run(run.id), cell.ops(partition), cell.held(run.spec.tenant)]
    limits = [MAX_OPEN, MAX_HELD_BYTES, NUM_SEQS_KEPT]
    fields = await run.base.bus.fields(operation)
    no_room = int(await run.base.gauge.used() > MAX_USED_FOR_NEW)
    path = fields[-1] if fields[-2] == "ref" else "-"
    words = [new.seq, new.digest, new.action, held_bytes(new.payload), run.id, *limits, no_room, path, *fields]
    answer: bytes = await run.base.redis.register_script(_SUBMIT)(keys=keys, args=words)
    if answer not in (b"new", b"known"):  # "known": Redis' answer to the first try of this very one was lost
        await _tidy(fields, objects)
    return "known" if answer == b"twice" else answer.decode()


async def _tidy(fields: list[Any], objects: Objects) -> None:
    """Deletes the payload of an operation that was refused, if it was written to object storage."""
    name, path = fields[-2:]
    if name == "ref":
        try:
            await objects.delete(path)
        except Unavailable as error:  # it goes with the run's others
            log.warning("not_deleted", path=path, reason=str(error))


def _refusal(answer: str, run: RunRow, seq: int) -> ApiError:
    if answer == "no_room":
        return memory_full()
    name = run.spec.public_id
    if answer == "full":
        return too_many(f"{name} has {MAX_OPEN} operations that wait: send this again when some are done")
    if answer == "holds":
        return too_many(
            f"your runs hold {MAX_HELD_BYTES >> 20} MiB of data that wait, or whose step is not done: send this again when some are"
            " done, call optim_step, or unload models"
        )
    if answer in ("ended", "failed"):
        why = "could not be created" if answer == "failed" else "has ended"
        return ApiError(
            404, f"{name} {why}: create another, from a checkpoint if it has one", code="run_ended", retry=False
        )
    told = "another operation has it" if answer == "other" else "it was passed over, for it came too late"
    return ApiError(400, f"{name}: the seq_id {seq} is taken: {told}", code="conflict", param="seq_id", retry=False)
