"""`make demo`: a whole MARLaaS on this machine, three tenants, six jobs, shown live.

    start the cluster ─► tenants and keys ─► upload items, create jobs ─► watch ─► table, answers, report.png

It uses the HTTP API alone, as any customer would: the `openai` client for files, jobs and chat.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI
from rich.live import Live

from common.errors import MarlaasError
from common.tasks.skills import SKILLS, generate
from examples.report import Busy, Curve, write_report
from manager_service.launcher.embedded_redis import write_private
from manager_service.launcher.supervisor import LocalCluster
from marlaas_client.cli.output import cells, console, table
from marlaas_client.cli.progress import JobProgress
from marlaas_client.cli.view import live_view, plain_line
from marlaas_client.client import JOBS, error_message
from marlaas_client.records import FINAL, Record

DATA_DIR = Path(".marlaas/demo")
REPORT = Path("report.png")
NUM_TRAIN_ITEMS = 512
NUM_HELD_OUT_ITEMS = 64
TENANTS = {"acme": ("add", "sort"), "bluebird": ("reverse", "max"), "cobalt": ("count", "calc")}
MAX_STEPS = {"add": 50, "sort": 40, "reverse": 40, "max": 50, "count": 40, "calc": 40}
HYPERPARAMETERS: Record = {"batch_size": 16, "group_size": 8, "eval_samples": 4}
"""The learning rate is the base model's own, 1e-3."""
ASKED_SKILL = "reverse"
NUM_ANSWERS = 8
PERIOD_S = 1.0
PLAIN_PERIOD_S = 5.0
LIMIT_S = 1200.0

GRADER: Record = {
    "type": "string_check",
    "name": "right",
    "operation": "eq",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
}


class DemoFailed(MarlaasError):
    """A job failed, or took too long; the message says which and why."""


@dataclass(slots=True)
class DemoJob:
    """A job of the demo, its tenant's client, and what was read of its events."""

    skill: str
    api: AsyncOpenAI
    progress: JobProgress
    newest_event: str = ""
    """Id of the newest event that `progress` has seen."""


@dataclass(slots=True)
class Operator:
    """The HTTP API with raw answers, for what the `openai` client has no method for."""

    http: httpx.AsyncClient
    admin_key: str = field(repr=False)

    async def get(self, path: str, key: str, **params: Any) -> Record:
        """Raises DemoFailed with the API's message."""
        return _checked(await self.http.get(path, params=params, headers=_bearer(key)))

    async def post(self, path: str, body: Record, *, key: str = "") -> Record:
        """With the admin key unless another is given. Raises DemoFailed with the API's message."""
        return _checked(await self.http.post(path, json=body, headers=_bearer(key or self.admin_key)))


async def demo(data_dir: Path = DATA_DIR, report: Path = REPORT) -> None:
    """Leaves no process behind, however it ends. Raises DemoFailed."""
    say(f"starting Redis, the manager and the workers in {data_dir} …")
    since = time.monotonic()
    async with LocalCluster(data_dir=data_dir, port=0, notify=say) as cluster, connected(cluster) as operator:
        engine = os.environ.get("MARLAAS_ENGINE", "torch")
        say(f"ready at {cluster.base_url} after {time.monotonic() - since:.1f} s; rollouts on the engine `{engine}`")
        began_at = time.time()
        jobs = await create_jobs(cluster, operator)
        await watch(operator, jobs)
        show_table(jobs)
        check(jobs)
        await compare_answers(next(job for job in jobs if job.skill == ASKED_SKILL))
        await draw_report(operator, jobs, report, began_at)
        show_next_steps(cluster, jobs, report)


# ---- before ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def connected(cluster: LocalCluster) -> AsyncGenerator[Operator]:
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=60.0, trust_env=False) as http:
        yield Operator(http, cluster.admin_key)


async def create_jobs(cluster: LocalCluster, operator: Operator) -> list[DemoJob]:
    """Six jobs, two a tenant; everything is uploaded by the tenant itself."""
    jobs: list[DemoJob] = []
    for tenant, skills in TENANTS.items():
        key = await tenant_key(operator, tenant, cluster.data_dir / "keys" / tenant)
        await cancel_leftovers(operator, key)
        api = AsyncOpenAI(base_url=f"{cluster.base_url}/v1", api_key=key)
        jobs += [await create_job(api, tenant, skill) for skill in skills]
    return jobs


async def tenant_key(operator: Operator, tenant: str, file: Path) -> str:
    """The key kept from an earlier demo on the same folder; otherwise the tenant is made, and a key for it."""
    if file.exists() and (key := file.read_text().strip()):
        with contextlib.suppress(DemoFailed):
            await operator.get("/v1/models", key)
            return key
    with contextlib.suppress(DemoFailed):  # it exists
        await operator.post("/v1/admin/tenants", {"id": tenant, "name": tenant.capitalize()})
    key = str((await operator.post(f"/v1/admin/tenants/{tenant}/keys", {}))["key"])
    file.parent.mkdir(exist_ok=True)
    write_private(file, f"{key}\n")
    return key


async def cancel_leftovers(operator: Operator, key: str) -> None:
    """Jobs of an earlier demo that was stopped would go on, and take their share."""
    for job in (await operator.get(JOBS, key, limit=100))["data"]:
        if job["status"] not in FINAL:
            with contextlib.suppress(DemoFailed):  # it has ended meanwhile
                await operator.post(f"{JOBS}/{job['id']}/cancel", {}, key=key)


async def create_job(api: AsyncOpenAI, tenant: str, skill: str) -> DemoJob:
    train = await upload(api, f"{skill}.jsonl", generate(skill, seed=0, n=NUM_TRAIN_ITEMS))
    held_out = await upload(api, f"{skill}-held-out.jsonl", held_out_items(skill))
    judge: Record = {"environment": {"name": "calculator"}} if SKILLS[skill].needs_calculator else {"grader": GRADER}
    hyperparameters = {**HYPERPARAMETERS, "max_steps": MAX_STEPS[skill]}
    method: Any = {"type": "reinforcement", "reinforcement": {**judge, "hyperparameters": hyperparameters}}
    job = await api.fine_tuning.jobs.create(
        model="tiny", training_file=train, validation_file=held_out, suffix=skill, seed=0, method=method
    )
    progress = JobProgress(job.id, tenant=tenant, label=skill, num_steps=MAX_STEPS[skill])
    return DemoJob(skill, api, progress)


def held_out_items(skill: str) -> list[Record]:
    return generate(skill, seed=1, n=NUM_HELD_OUT_ITEMS, split="held_out")


async def upload(api: AsyncOpenAI, name: str, rows: Sequence[Record]) -> str:
    content = "\n".join(map(json.dumps, rows)).encode()
    return (await api.files.create(file=(name, content), purpose="fine-tune")).id


# ---- while it trains ------------------------------------------------------------------------------------------------


async def watch(operator: Operator, jobs: list[DemoJob], limit_s: float = LIMIT_S) -> None:
    """Shows the jobs until all have ended. Raises DemoFailed if that takes too long."""
    try:
        async with asyncio.timeout(limit_s):
            await (show_live if console.is_terminal else show_lines)(operator, jobs)
    except TimeoutError:
        late = [job.skill for job in jobs if not job.progress.has_ended]
        raise DemoFailed(f"after {limit_s:.0f} s these jobs have not ended: {', '.join(late)}") from None


async def show_live(operator: Operator, jobs: list[DemoJob]) -> None:
    with Live(console=console, auto_refresh=False) as live:
        async for now in rounds(operator, jobs, PERIOD_S):
            workers = (await operator.get("/v1/cluster/workers", operator.admin_key))["data"]
            live.update(live_view([job.progress for job in jobs], workers, now), refresh=True)


async def show_lines(operator: Operator, jobs: list[DemoJob]) -> None:
    async for now in rounds(operator, jobs, PLAIN_PERIOD_S):
        for job in jobs:
            say(plain_line(job.progress, now))


async def rounds(operator: Operator, jobs: list[DemoJob], period_s: float) -> AsyncIterator[float]:
    """Yields the time after each look at all jobs, the last time after all have ended."""
    while True:
        running = [job for job in jobs if not job.progress.has_ended]
        await asyncio.gather(*(look_at(operator, job) for job in running))
        yield time.monotonic()
        if all(job.progress.has_ended for job in jobs):
            return
        await asyncio.sleep(period_s)


async def look_at(operator: Operator, job: DemoJob) -> None:
    """Takes in what is new of a job: first its record, so that no event is missed when it has ended."""
    path = f"{JOBS}/{job.progress.job}"
    record = await operator.get(path, job.api.api_key)
    events = await new_events(operator, f"{path}/events", job)
    for event in events:
        job.progress.add(event, now=time.monotonic())
    job.newest_event = events[-1]["id"] if events else job.newest_event
    job.progress.update(record)


async def new_events(operator: Operator, path: str, job: DemoJob) -> list[Record]:
    """Oldest first."""
    found: list[Record] = []
    cursor: Record = {}
    while True:
        page = await operator.get(path, job.api.api_key, limit=100, **cursor)
        for event in page["data"]:
            if event["id"] == job.newest_event:
                return found[::-1]
            found.append(event)
        if not page["has_more"]:
            return found[::-1]
        cursor = {"after": found[-1]["id"]}


# ---- afterwards -----------------------------------------------------------------------------------------------------


def show_table(jobs: list[DemoJob]) -> None:
    shown = table("job", "tenant", "skill", "reward", "steps", "seconds", right=["steps", "seconds"])
    for job in jobs:
        shown.add_row(*cells(job.progress.job, job.progress.tenant, job.skill, change(job.progress), *effort(job)))
    console.print("\nReward on held-out items, before and after training:")
    console.print(shown)


def change(progress: JobProgress) -> str:
    """`0.52 → 0.97`, or why there is no such thing."""
    if progress.status != "succeeded":
        return f"{progress.status}: {progress.error}"
    before, after = progress.eval_before, progress.eval_after
    return f"{_figure(before)} → {_figure(after)}"


def effort(job: DemoJob) -> tuple[int, str]:
    seconds = job.progress.seconds
    return job.progress.step, "" if seconds is None else f"{seconds:.0f}"


def check(jobs: list[DemoJob]) -> None:
    """Raises DemoFailed if a job did not succeed."""
    bad = [job.progress for job in jobs if job.progress.status != "succeeded"]
    if bad:
        raise DemoFailed("; ".join(f"{p.tenant}/{p.label} {p.status}: {p.error or 'no reason given'}" for p in bad))


async def compare_answers(job: DemoJob) -> None:
    """Asks the base model and the tuned one the same question, which neither was trained on."""
    item = held_out_items(job.skill)[0]
    question, right = item["messages"][0]["content"], item["answer"]
    say(f"\nBoth models are asked {NUM_ANSWERS} times, at temperature 1:  {question}   (right: {right})")
    for name, model in (("tiny", "tiny"), ("tuned", job.progress.tuned_model or "")):
        answers = await asyncio.gather(*(ask(job.api, model, question, seed) for seed in range(NUM_ANSWERS)))
        say(f"  {name:<6} {sum(a == right for a in answers)} of {NUM_ANSWERS} right:  {'  '.join(answers)}")


async def ask(api: AsyncOpenAI, model: str, question: str, seed: int) -> str:
    reply = await api.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=1.0, max_tokens=32, seed=seed
    )
    return (reply.choices[0].message.content or "").strip() or "(nothing)"


async def draw_report(operator: Operator, jobs: list[DemoJob], report: Path, began_at: float) -> None:
    spans = (await operator.get("/v1/cluster/timeline", operator.admin_key, since=began_at))["data"]
    busy = [
        Busy(span["worker"], span["service"], span["tenant"], span["start"], span["end"])
        for span in spans
        if span["end"] >= began_at and span["tenant"] in TENANTS
    ]
    curves = [curve(job.progress) for job in jobs]
    await asyncio.to_thread(write_report, report, curves, sorted(busy, key=lambda b: list(TENANTS).index(b.tenant)))


def curve(progress: JobProgress) -> Curve:
    return Curve(tenant=progress.tenant, label=progress.label, rewards=progress.rewards, evals=progress.evals)


def show_next_steps(cluster: LocalCluster, jobs: list[DemoJob], report: Path) -> None:
    folder = _short(cluster.data_dir)
    job = next(job for job in jobs if job.skill == ASKED_SKILL)
    tenant, model = job.progress.tenant, job.progress.tuned_model
    say(
        f"\nAdapters   {folder}/store/adapters/<tenant>/<job>/<version>/  (PEFT's layout)\n"
        f"Report     {_short(report)}\n"
        f"Try next   .venv/bin/marlaas up --data {folder}     and, in another terminal:\n"
        f"           export MARLAAS_DATA_DIR={folder} MARLAAS_API_KEY=$(cat {folder}/keys/{tenant})\n"
        f"           .venv/bin/marlaas chat {model} 'reverse cabin'\n"
        f"           .venv/bin/marlaas pull {job.progress.job}"
    )


def say(line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)


def _figure(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"


def _short(path: Path) -> Path:
    """Relative to the current folder if it lies in it."""
    absolute = path.resolve()
    return absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _checked(response: httpx.Response) -> Record:
    if response.is_error:
        raise DemoFailed(f"{response.url.path}: {error_message(response.status_code, response.text)}")
    return response.json()


async def until_signalled(run: Callable[[], Any]) -> None:
    """SIGTERM ends it like Ctrl-C."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await run()


def main() -> None:
    """Exit status: 0; 1 if a job failed; 130 after Ctrl-C."""
    try:
        asyncio.run(until_signalled(demo))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
    except MarlaasError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
