"""Measures the web page in Chromium: how soon it is there, a list of many jobs, and the curves of a long job.

    python -m benchmarks.page [--jobs 1000] [--steps 10000] [--rounds 5] [--json FILE]

A real manager and a real Redis with the records of jobs that nobody runs, and a headless Chromium without a GPU, on one machine. Every
figure is taken with an empty cache, in the browser's own clock, from the start of the navigation:

    first paint    of the page, before a key is typed (`first-contentful-paint`)
    list           until all jobs are in the list
    curves         until the long job's figures are drawn
    frames         between two frames while the pointer moves over a curve, marks a stretch of it and leaves it again
"""

import asyncio
import random
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
from playwright.async_api import Browser, Page, async_playwright

from benchmarks._report import Goal, Report, make_table, run
from benchmarks._scale_cluster import ScaleCluster, running
from harness.browser import find_browser
from harness.standin import job_spec
from manager_service.http.operators.page_routes import FOLDER
from manager_service.owner.jobs.journal import METRICS
from manager_service.records.job_records import JobSpec, JobState
from manager_service.records.keys import JSON
from manager_service.records.sample_records import EventRecord

TENANT = "default"
SHORT_STEPS = 20
"""Steps of all jobs but the long one."""
CHUNK = 1000
MOVES, STRETCHES = 40, 5
FIRST_PAINT_MS, LIST_MS, FRAME_MS, PAGE_KB = 500, 1000, 33.4, 200
PAINTED = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
LISTED = "(text) => document.querySelector('main')?.textContent.includes(text) && performance.now()"
DRAWN = "(text) => [...document.querySelectorAll('.plot')].some((one) => one.ariaLabel?.includes(text)) && performance.now()"
WATCH = "window.frames_at = []; const note = (now) => { frames_at.push(now); requestAnimationFrame(note); }; requestAnimationFrame(note)"


Taken = dict[str, list[float]]
"""Times in ms by the name of what they are of, one for each round; for frames all."""


# ---- what is shown --------------------------------------------------------------------------------------------------


async def write_jobs(cluster: ScaleCluster, num_jobs: int, num_steps: int) -> str:
    """Writes the records of running jobs, the newest of them the long one. Returns its id."""
    cell, client = cluster.bus.cell, cluster.bus.client
    for number in range(num_jobs):
        steps = num_steps if number == num_jobs - 1 else SHORT_STEPS
        made = msgspec.structs.replace(spec(number), suffix=f"job-{number}", created_at=int(time.time()))
        state = JobState(status="running", version=steps, num_events=steps, last_reward=0.5)
        pipe = client.pipeline(transaction=False)
        pipe.hset(cell.job(made.id), mapping={"spec": JSON.encode(made), "state": JSON.encode(state)})
        pipe.zadd(cell.tenant_jobs(TENANT), {made.id: number})
        for step in range(1, steps + 1):
            pipe.xadd(cell.events(made.id), {"event": JSON.encode(event(step))}, id=f"{step}-0")
            if step % CHUNK == 0:
                await pipe.execute()
        await pipe.execute()
    return spec(num_jobs - 1).id


def spec(number: int) -> JobSpec:
    plain = job_spec(f"ftjob-{number:06d}", TENANT, batch_size=2, group_size=2, num_steps=1)
    return msgspec.structs.replace(plain, method={"type": "reinforcement", "reinforcement": {"hyperparameters": {}}})


def event(step: int) -> EventRecord:
    """The event of a step, with all figures that every step has."""
    rng = random.Random(step)
    figures = {name: rng.random() for name in (*METRICS, "entropy", "reward_mean", "failed_share", "step_s")}
    counts = {"num_rows": 64, "written_tokens": 64 * rng.randrange(20, 60), "step_tokens": 4096}
    return EventRecord(
        step, step, "info", f"Step {step}", "metrics", {"step": step, "version": step, **figures, **counts}
    )


# ---- the browser ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def fresh(browser: Browser, key: str = "") -> AsyncGenerator[Page]:
    """A tab without a cache, with the key in it."""
    context = await browser.new_context(viewport={"width": 1280, "height": 860})
    if key:
        await context.add_init_script(f"sessionStorage.setItem('marlaas.key', '{key}')")
    yield await context.new_page()
    await context.close()


async def when(page: Page, url: str, condition: str, text: str = "") -> float:
    await page.goto(url, wait_until="commit")
    return await (await page.wait_for_function(condition, arg=text)).json_value()


async def frames(page: Page) -> list[float]:
    """Milliseconds between frames."""
    box = await page.locator(".u-over").first.bounding_box()
    assert box is not None
    await page.evaluate(f"() => {{ {WATCH} }}")
    for stretch in range(STRETCHES):
        left, right = box["x"] + 10 * stretch, box["x"] + box["width"] * (0.5 + 0.1 * stretch)
        middle = box["y"] + box["height"] / 2
        await page.mouse.move(left, middle)
        await page.mouse.move(right, middle, steps=MOVES)
        await page.mouse.down()
        await page.mouse.move(left + 0.2 * box["width"], middle, steps=MOVES)
        await page.mouse.up()
        await page.mouse.move(right, middle, steps=MOVES)
        await page.mouse.dblclick(right, middle)
    return np.diff(await page.evaluate("frames_at")).tolist()


async def one_round(browser: Browser, url: str, key: str, job: str, given: Any, taken: Taken) -> None:
    async with fresh(browser) as page:
        taken["first paint"].append(await when(page, url, PAINTED))
    async with fresh(browser, key) as page:
        taken["list of all jobs"].append(await when(page, url, LISTED, f"{given.jobs} of {given.jobs}"))
    async with fresh(browser, key) as page:
        taken["curves of the long job"].append(await when(page, f"{url}/#/job/{job}", DRAWN, f"at step {given.steps}"))
        taken["between frames"] += await frames(page)


async def measure(given: Any) -> Taken:
    taken = defaultdict[str, list[float]](list)
    async with running() as cluster, async_playwright() as playwright:
        await cluster.start_managers(1)
        job = await write_jobs(cluster, given.jobs, given.steps)
        key, url = (cluster.folder / "api_key").read_text().strip(), f"http://127.0.0.1:{cluster.port}"
        browser = await playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        await one_round(
            browser, url, key, job, given, defaultdict(list)
        )  # the first looks of a new manager and a new browser
        for _ in range(given.rounds):
            await one_round(browser, url, key, job, given, taken)
        await browser.close()
    return taken


def report(given: Any) -> Report:
    taken = asyncio.run(measure(given))
    page_kb = sum(file.stat().st_size for file in FOLDER.iterdir()) / 1000
    rows = [(name, statistics.median(ms), float(np.percentile(ms, 95)), max(ms)) for name, ms in taken.items()]
    table = make_table(f"The web page, {page_kb:.0f} kB", ("ms", "median", "95 %", "most"), rows)
    goals = [
        Goal("first paint", rows[0][1], FIRST_PAINT_MS, " ms", more_is_better=False),
        Goal(rows[1][0], rows[1][1], LIST_MS, " ms", more_is_better=False),
        Goal("95 % of frames", rows[3][2], FRAME_MS, " ms", more_is_better=False),
        Goal("the page's files", page_kb, PAGE_KB, " kB", more_is_better=False),
    ]
    figures = {name: {"median": median, "p95": p95, "most": most} for name, median, p95, most in rows}
    return Report([table], {**figures, "page_kb": page_kb}, goals)


if __name__ == "__main__":
    run(__doc__, report, {"jobs": 50, "steps": 1000, "rounds": 1}, jobs=1000, steps=10_000, rounds=5)
