"""Notes that a version of a run is used, so that its owner does not have it deleted: see manager_service.runs.retention."""

from common.bus import Bus
from common.messages import AdapterRef
from manager_service.runs.records import USED_S, is_run

# KEYS: versions, use, use with the optimiser's state. ARGV: version, is its optimiser's state wanted (1 or 0), seconds to keep it.
# Answers 0 if the version is not there.
_USE = """
local there = redis.call('HGET', KEYS[1], ARGV[1])
if not there or there < ARGV[2] then return 0 end
redis.call('SET', KEYS[2], '', 'EX', ARGV[3])
if ARGV[2] == '1' then redis.call('SET', KEYS[3], '', 'EX', ARGV[3]) end
return 1
"""


async def use(bus: Bus, adapter: AdapterRef, *, with_optimizer: bool = False) -> bool:
    """Keeps a version for USED_S from now on. False: it is deleted, or about to be. True for what is no run's: jobs keep their own."""
    if not is_run(adapter.job):
        return True
    cell, run, version = bus.cell, adapter.job, adapter.version
    keys = [cell.versions(run), cell.use(run, version), cell.use(run, version, with_optimizer=True)]
    script = bus.client.register_script(_USE)
    return bool(await bus.retrying(lambda: script(keys=keys, args=[version, int(with_optimizer), USED_S])))
