"""A job of which nothing comes back says what its work waits for, and nobody else's."""

import pytest

from common.bus.bus import Bus
from common.store.objects import Objects
from common.wire.messages import Span
from harness.standin import FixedSlots, create_job, job_spec
from manager_service.owner import owner
from manager_service.records.cluster import Cluster
from manager_service.records.job_records import JobSpec
from tests.common.test_worker import until
from tests.manager.test_api_cluster import report, tell
from tests.support.owning import System

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


@pytest.mark.parametrize(
    ("job", "holders"),
    [
        ("another", "env workers have work of this job and of other tenants"),
        ("ours", "env workers have work of others of yours and of other tenants"),
    ],
)
async def test_a_job_whose_trajectories_are_out_says_whose_work_the_workers_have(
    bus: Bus, objects: Objects, monkeypatch: pytest.MonkeyPatch, job: str, holders: str
) -> None:
    spec, system = job_spec(job), System(bus, objects)
    spans = (Span(1.0, 2.0, spec.tenant, "another", "env"), Span(1.0, 2.0, "other", "theirs", "env"))
    system.slots = FixedSlots(reports=[report("rollout", "rollout"), report("env", "env", spans=spans)])
    system.env.delay_s = 60
    event = await stalled_event(system, spec, monkeypatch)
    assert "trajectories are with the rollout and env workers; rollout workers have no work, " + holders in event


async def stalled_event(system: System, spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a job until it says that it stalls."""
    monkeypatch.setattr(owner, "STALL_S", 0.1)
    await system.start()
    try:
        await create_job(system.bus, spec)
        await until(lambda: _stalled(system, spec.id))
        return await _stalled(system, spec.id)
    finally:
        await system.stop()


async def _stalled(system: System, job: str) -> str:
    return next((e.message for e in await system.events(job) if "Nothing has come back" in e.message), "")
