"""One act: a cluster in one mode, from its start to the verdict."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import groupby, islice

from chaos import verify
from chaos.cluster import Cluster
from chaos.faults import Fault, draw
from chaos.inflict import inflict
from chaos.report import Story
from chaos.tenants import RECIPES, Client, Deserted, Recipe, Run, Tenant, Unplanned
from common.cancellation import running
from common.store.adapters import Manifest

DRAIN_S = 300.0
"""Time for the last jobs to end, after the last fault."""
STUCK_S = 120.0
"""Without any version for so long, nothing moves any more."""
POLL_S = 0.5
DESERTED_RUNS = 64
"""The most runs that are deserted at once: it is their tenant's limit of jobs and runs."""
DAY_S = 86_400.0
OUTLIVE_DAYS, OUTLIVE_S = 8, 60.0
"""Days after which a run is forgotten, and the time in which it must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    seed: int
    hits: int
    """Faults that hit something, of those that the seed draws."""
    skipped: int = 0
    """Drawn faults before the first."""
    seconds: float | None = None
    """Longest duration of the storm."""
    ramp_s: float = 5.0
    """Left out of the undisturbed pace: jobs have just been submitted."""
    calm_s: float = 15.0
    """Least duration in which the undisturbed pace is taken."""
    deterministic: bool = True
    recipes: Sequence[Recipe] = RECIPES


@dataclass
class Act:
    plan: Plan
    cluster: Cluster
    story: Story = field(default_factory=Story)

    async def run(self) -> Story:
        """Plays the act. What ends it early is among what is wrong."""
        try:
            await self._run()
        except* (Stuck, Unplanned, TimeoutError) as group:
            self.story.wrong += [f"{type(error).__name__}: {error}" for error in group.exceptions]
        self.story.commits = sorted(self.cluster.commits.values())
        return self.story

    async def _run(self) -> None:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.cluster.stop)
            await self.cluster.start()
            self.admin = Client(self.cluster.urls, self.cluster.services.admin_key)
            stack.push_async_callback(self.admin.close)
            self.tenants = [
                Tenant(name, await self._client(name, stack), list(recipes))
                for name, recipes in groupby(self.plan.recipes, key=lambda recipe: recipe.tenant)
            ]
            client = await self._client("deserted", stack, max_jobs=DESERTED_RUNS)
            self.deserted = Deserted(client, self.cluster.urls, self.cluster.age, random.Random(self.plan.seed))
            for tenant in self.tenants:
                await tenant.prepare()
            await self._play()
            await self._judge()

    @property
    def runs(self) -> list[Run]:
        return [run for tenant in self.tenants for run in tenant.runs]

    async def _client(self, tenant: str, stack: AsyncExitStack, **limits: int) -> Client:
        await self.admin.post("/admin/tenants", {"id": tenant, "name": tenant, **limits})
        key = (await self.admin.post(f"/admin/tenants/{tenant}/keys", {}))["key"]
        client = Client(self.cluster.urls, key)
        stack.push_async_callback(client.close)
        return client

    # ---- calm, storm, drain -----------------------------------------------------------------------------------------

    async def _play(self) -> None:
        stop = asyncio.Event()
        async with running(self._watch()), asyncio.TaskGroup() as group:
            for tenant in self.tenants:
                group.create_task(tenant.work(stop))
            await self._calm()
            group.create_task(self.deserted.work(stop))
            await self._storm()
            self.story.ended = time.monotonic()
            self.story.tell("the last fault is healed; the last jobs are to end")
            stop.set()
        async with asyncio.timeout(DRAIN_S):
            for one in (*self.tenants, self.deserted):
                await one.settle()
        self.story.tell("all jobs have ended")

    async def _calm(self) -> None:
        self.story.tell("calm")
        await asyncio.sleep(self.plan.ramp_s)
        since, before = time.monotonic(), len(self.cluster.commits)
        while time.monotonic() < since + self.plan.calm_s or not self._all_ran_once():
            await asyncio.sleep(POLL_S)
        self.story.pace = (len(self.cluster.commits) - before) / (time.monotonic() - since)
        self.story.tell(f"{self.story.pace:.2f} versions a second undisturbed; storm")

    def _all_ran_once(self) -> bool:
        ended = {run.recipe.name for run in self.runs if run.job and run.job["finished_at"]}
        return ended == {recipe.name for tenant in self.tenants for recipe in tenant.recipes}

    async def _storm(self) -> None:
        """Others take the place of those that hit nothing."""
        drawn, end = (
            islice(draw(self.plan.seed), self.plan.skipped, None),
            time.monotonic() + (self.plan.seconds or 1e9),
        )
        while (num := self.plan.hits - len(self.story.strikes)) > 0 and time.monotonic() < end:
            await self._strike_all(islice(drawn, num), end)

    async def _strike_all(self, faults: Iterable[Fault], end: float) -> None:
        """Returns when all are healed. None begins after `end`."""
        free = defaultdict[str, asyncio.Lock](asyncio.Lock)
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                await asyncio.sleep(fault.gap_s)
                if time.monotonic() > end:
                    return
                group.create_task(self._strike(fault, free[fault.victim]))

    async def _strike(self, fault: Fault, free: asyncio.Lock) -> None:
        async with free:
            self.story.strike(fault)
            if not await inflict(self.cluster, fault):
                self.story.miss(fault)

    async def _watch(self) -> None:
        """Raises Stuck."""
        seen, since = 0, time.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            if len(self.cluster.commits) > seen:
                seen, since = len(self.cluster.commits), time.monotonic()
            elif time.monotonic() > since + STUCK_S:
                open_jobs = [run.id for run in self.runs if not (run.job and run.job["finished_at"])]
                raise Stuck(f"no version for {STUCK_S:g} s; these jobs have not ended: {', '.join(open_jobs)}")

    # ---- verdict ----------------------------------------------------------------------------------------------------

    async def _judge(self) -> None:
        wrong = self.story.wrong
        self.story.warnings += self.deserted.idle()
        for run in self.runs:
            wrong += verify.ended_well(run)
        for tenant in self.tenants:
            wrong += await self._judge_jobs(tenant)
        wrong += await self._judge_lists()
        await self._clear()
        wrong += await self._outlive_runs()
        await self.cluster.stop_services()
        wrong += verify.left_keys(self.cluster)
        wrong += verify.left_objects(self.cluster.store, self._forgotten())
        wrong += verify.left_files(self.cluster.folder)
        wrong += verify.left_memory(self.cluster)
        wrong += [f"process {line} is left" for line in self.cluster.left_processes()]

    def _forgotten(self) -> list[str]:
        return self.deserted.forgotten + [run.id for run in self.runs if run.forgotten]

    async def _outlive_runs(self) -> list[str]:
        """Lets days pass for the managers, until they have forgotten the runs that were deserted."""
        self.story.tell("models and files are deleted; days pass for the managers")
        days, end = OUTLIVE_DAYS, time.monotonic() + OUTLIVE_S
        while left := await asyncio.to_thread(verify.runs, self.cluster):
            if time.monotonic() > end:
                return [f"run {run} is not forgotten" for run in left]
            self.cluster.shift_managers(days * DAY_S)
            days += 1
            await asyncio.sleep(1)
        self.story.tell("all deserted runs are forgotten")
        return []

    async def _judge_jobs(self, tenant: Tenant) -> list[str]:
        wrong, paths, store = list[str](), self.cluster.store.paths(), self.cluster.store
        first: dict[str, list[Manifest]] = {}
        for run in (run for run in tenant.runs if not run.forgotten and run.job["status"] == "succeeded"):
            ledger = await tenant.client.get(f"/fine_tuning/jobs/{run.id}/ledger")
            found = verify.manifests(store, paths, tenant.name, run.id)
            events = await tenant.client.pages(f"/fine_tuning/jobs/{run.id}/events")
            wrong += verify.ledger_balances(run.id, ledger) + verify.trained_once(run, ledger, events)
            wrong += verify.steps_once(run.id, events)
            wrong += verify.versions_once(run.id, found, trajectories=run.recipe.num_trajectories)
            wrong += [line for manifest in found for line in verify.bytes_are_there(store, manifest)]
            if self.plan.deterministic:
                reference = first.setdefault(run.recipe.name, found)
                wrong += verify.same_bytes(f"{run.recipe.name} {run.id}", found, reference)
        return wrong

    async def _judge_lists(self) -> list[str]:
        """Each job is listed once, its owner knows of no other, and no message of it was given up."""
        wrong: list[str] = []
        for tenant in self.tenants:
            listed = sorted(job["id"] for job in await tenant.client.pages("/fine_tuning/jobs"))
            known = sorted(run.id for run in tenant.runs if not run.forgotten)
            wrong += (
                [] if listed == known else [f"{tenant.name}: the list has {len(listed)} jobs instead of {len(known)}"]
            )
        return wrong

    async def _clear(self) -> None:
        """Deletes what tenants may delete: their models and files."""
        for one in self.tenants:
            for job in await one.client.pages("/fine_tuning/jobs"):
                suffix = job["user_provided_suffix"] or ""
                name = f"ft:tiny:{job['organization_id']}:{suffix}:{job['id']}"
                await one.client.call("DELETE", f"/models/{name}")
            for file in await one.client.pages("/files"):
                await one.client.call("DELETE", f"/files/{file['id']}")


class Stuck(Exception):
    """Nothing moves any more."""
