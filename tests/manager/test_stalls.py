"""A job of which nothing comes back says what its work waits for, and nobody else's."""

import pytest

from common.bus import Bus
from common.objects import Objects
from harness.standin import create_job, job_spec
from manager_service.cluster import Cluster
from manager_service.owner import owner
from tests.common.test_worker import until
from tests.manager.test_api_cluster import report, tell
from tests.manager.test_owner import System

ROOM = "the OpenEnv server has no room for a session: at capacity"


async def test_a_job_names_what_its_own_work_waits_for(
    bus: Bus, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "STALL_S", 0.1)
    waiting, another = job_spec("ftjob-waiting"), job_spec("ftjob-another", "other")
    workers = [report(service, service) for service in ("rollout", "trainer")]
    await tell(bus, *workers, report("env", "env", waiting={waiting.id: ROOM}))
    cluster = Cluster(bus)
    await cluster.follow_once()
    system = System(bus, objects)
    system.slots = cluster  # type: ignore[assignment]
    system.start_owner()
    try:
        for spec in (waiting, another):
            await create_job(bus, spec)
            await until(lambda spec=spec: _stalled(system, spec.id))
        assert ROOM in await _stalled(system, waiting.id)
        assert ROOM not in await _stalled(system, another.id)
    finally:
        await system.stop()


async def _stalled(system: System, job: str) -> str:
    return next((e.message for e in await system.events(job) if "Nothing has come back" in e.message), "")
