"""Supervised jobs on the web page, in a real Chromium over the real API."""

import re
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from common.wire.messages import Failure
from manager_service.records.job_records import JobState
from manager_service.records.keys import JSON
from manager_service.records.sample_records import EventRecord, SampleRecord, Written
from tests.manager.test_api_supervised import EXAMPLES, create
from tests.support.api_server import ApiServer, keep_samples, running_api
from tests.support.browser import Tab, browsing

pytestmark = pytest.mark.asyncio(loop_scope="session")  # as the browser's

STEPS = ({"step": 1, "loss": 2.5, "grad_norm": 1.0, "kl": 0.1}, {"step": 2, "loss": 0.75, "kl": 0.2})


@pytest_asyncio.fixture(loop_scope="session")
async def server(redis_url: str, tmp_path: Path) -> AsyncGenerator[ApiServer]:
    async with running_api(redis_url, tmp_path / "data", keep_alive_s=0.3) as running:
        yield running


async def submitted(tab: Tab, file: Path) -> str:
    page = tab.page
    await tab.go("/submit")
    await page.get_by_label("Method").select_option("supervised")
    await expect(page.get_by_label("Grader or environment as JSON")).to_be_hidden()
    await expect(page.locator("input[name=group_size]")).to_have_count(0)
    await page.locator("input[name=n_epochs]").fill("2")
    await page.get_by_label("New training file").set_input_files(file)
    await page.get_by_role("button", name="Submit the job").click()
    await page.wait_for_url("**#/job/ftjob-*")
    return page.url.partition("#/job/")[2].partition("?")[0]


async def trained(server: ApiServer, job: str) -> None:
    """Writes two steps and an evaluation as the owner does."""
    rows = [{**data, "version": data["step"], "reward_mean": None, "failed_share": 0.0} for data in STEPS]
    rows.append({"step": 2, "version": 2, "eval_loss": 0.5, "eval_n": 3, "eval_failed": 0, "eval_tokens": 9})
    for number, data in enumerate(rows, 1):
        event = EventRecord(number, 1, "info", f"Event {number}", "metrics", data)
        await server.api.redis.xadd(server.bus.cell.events(job), {"event": JSON.encode(event)}, id=f"{number}-0")
    state = JobState(status="succeeded", version=2, num_events=3, last_loss=0.75, last_eval_loss=0.5, best_version=2)
    await server.api.redis.hset(server.bus.cell.job(job), "state", JSON.encode(state))


async def test_a_supervised_job_is_submitted_and_shows_its_losses(
    server: ApiServer, browser: Browser, tmp_path: Path
) -> None:
    (file := tmp_path / "examples.jsonl").write_bytes(EXAMPLES)
    async with browsing(browser, server.url) as tab:
        await tab.enter(server.key)
        job = await submitted(tab, file)
        made = (await server.http.get(f"/v1/fine_tuning/jobs/{job}")).json()
        assert made["method"]["type"] == "supervised" and made["hyperparameters"]["n_epochs"] == 2
        await trained(server, job)
        await tab.page.reload()
        await expect(tab.page.get_by_role("img", name="Loss. ")).to_be_visible()
        await expect(tab.page.locator(".chart b").first).to_have_text("Loss")
        await expect(tab.page.get_by_role("img", name="Reward. ")).to_have_count(0)
        await expect(tab.page.get_by_text("evaluation loss 0.500, best version 2")).to_be_visible()
        await tab.go("/jobs")
        await expect(tab.page.get_by_text("0.750")).to_be_visible()
        await expect(tab.page.get_by_role("img", name="loss from 2.50 to 0.75")).to_be_visible()
        assert tab.errors == []


async def test_a_supervised_jobs_settings_and_samples_are_shown(server: ApiServer, browser: Browser) -> None:
    job = (await create(server, hyper={"batch_size": 3})).id
    await trained(server, job)
    prompt, said = (server.api.bases["tiny"].tokenizer.encode(text) for text in ("min 3,1,2", "answer 0"))
    written = Written([*prompt, *said], [len(prompt), len(said)], [])
    learned = [
        SampleRecord(0, group, 0, f"answer {group}", None, "length", "min 3,1,2", written=written, step=3)
        for group in range(2)
    ]
    failed = SampleRecord(0, 7, 0, "", None, "failed", failure=Failure("invalid", "too long"), kept="failed", step=3)
    await keep_samples(server, job, 3, [*learned, failed])
    async with browsing(browser, server.url) as tab:
        await tab.enter(server.key)
        await tab.go(f"/job/{job}?tab=settings")
        await expect(tab.page.get_by_role("row", name="batch_size 3")).to_be_visible()
        await expect(tab.page.get_by_text("Grader or environment")).to_have_count(0)
        # The newest samples say their step: neither their version nor the job's tells it
        await tab.go(f"/job/{job}?tab=samples")
        listed, field = tab.page.locator(".list button"), tab.page.get_by_label("Step", exact=True)
        await expect(field).to_have_value("3")
        await expect(listed.locator("b")).to_have_text(["", "", "×"])
        await expect(tab.page.locator(".turn .tokens").last).to_have_text("answer 0")
        await expect(tab.page.get_by_text("Of a step its first examples are kept")).to_be_visible()
        await expect(tab.page.get_by_text(re.compile("log-prob|written by|shade of a token"))).to_have_count(0)
        which = tab.page.get_by_label("Which samples")
        await expect(which.locator("option")).to_have_text(["all", "failed"])
        await which.select_option("failed")
        await expect(listed).to_have_count(1)
        await expect(listed).to_contain_text("too long")
        assert tab.errors == []
