"""Checks of a real cluster whose jobs have ended, whatever happened to its processes."""

from typing import Any

from harness.live import Api, is_balanced
from manager_service.launcher.supervisor import LocalCluster


async def asked_as_admin(cluster: LocalCluster, path: str) -> list[Any]:
    """The rows of a list that is the operator's."""
    admin = Api(cluster.base_url, cluster.admin_key)
    try:
        return (await admin.get(path))["data"]
    finally:
        await admin.close()


async def workers(cluster: LocalCluster) -> list[Any]:
    return await asked_as_admin(cluster, "/cluster/workers")


async def until_whole(cluster: LocalCluster, api: Api, jobs: list[str], *, steps: int, trajectories: int) -> None:
    """Waits for the end of the jobs: all succeed, every version is made once, every trajectory accounted for, nothing left open."""
    done = await api.until_done(*jobs)
    assert [job["status"] for job in done] == ["succeeded"] * len(jobs), [job["error"] for job in done]
    for job in jobs:
        ledger = await api.ledger(job)
        assert is_balanced(ledger) and ledger["in_flight"] == ledger["failed"] == 0, ledger
        assert ledger["trained"] == trajectories, ledger
        assert await api.steps(job) == list(range(1, steps + 1))
    assert await asked_as_admin(cluster, "/cluster/dead") == []
