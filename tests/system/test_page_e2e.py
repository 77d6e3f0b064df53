"""The web page over real workers: a job is submitted, watched, read, compared and asked, in a real Chromium."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser

from common.tasks.skills import generate
from harness.live import jsonl
from tests.support.browser import Tab, browsing
from tests.support.forked import running

pytestmark = pytest.mark.asyncio(loop_scope="session")  # as the browser's

RAISES = """def grade(sample, item):
    if "3" in sample["output_text"]:
        raise ValueError("it has a three")
    return float(sample["output_text"] == item["answer"])
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_job_from_its_submission_to_its_answers(browser: Browser, tmp_path: Path) -> None:
    items = tmp_path / "add.jsonl"
    items.write_bytes(jsonl(few_with_a_three()))
    async with running() as (cluster, api), browsing(browser, cluster.base_url) as tab:
        plain = await api.submit("add", max_steps=2, batch_size=2)
        await tab.enter(cluster.api_key)
        await submit(tab, items)
        await tab.page.get_by_role("img", name=re.compile("at step [23]")).first.wait_for()
        await tab.page.locator(".badge.succeeded").wait_for()
        job = tab.page.url.partition("#/job/")[2].partition("?")[0]
        await read_a_failure(tab, job)
        await tab.go(f"/compare?jobs={job},{plain}")
        chart = tab.page.get_by_role("img", name="Reward. ")
        await chart.wait_for()
        assert "mine: " in (await chart.get_attribute("aria-label") or "")
        await ask_two_versions(tab, job)


def few_with_a_three() -> list[dict[str, Any]]:
    """Sixteen items of which the grader fails in two: in four, the job would end."""
    rows = generate("add", 1, 64, "train")
    with_three = [row for row in rows if "3" in row["answer"]]
    without = [row for row in rows if "3" not in row["answer"]]
    return with_three[:2] + without[:14]


async def submit(tab: Tab, items: Path) -> None:
    """With a grader that was tried before."""
    page = tab.page
    await tab.go("/submit")
    await page.get_by_label("New training file").set_input_files(items)
    await page.get_by_label("Name", exact=True).fill("mine")
    await page.get_by_text("More", exact=True).click()
    await page.get_by_label("Seed").fill("7")
    await page.get_by_label("Grader or environment as JSON").fill(json.dumps({"type": "python", "source": RAISES}))
    await page.get_by_label("Item", exact=True).fill('{"answer": "12"}')
    await page.get_by_label("Answer of the model").last.fill("12")
    await page.get_by_role("button", name="Run the grader").click()
    await page.get_by_text("reward 1").wait_for()
    await page.get_by_label("Answer of the model").last.fill("13")
    await page.get_by_role("button", name="Run the grader").click()
    await page.get_by_text("it has a three").wait_for()
    for name, value in {"max_steps": "3", "batch_size": "4", "group_size": "4"}.items():
        await page.locator(f"input[name={name}]").fill(value)
    await page.get_by_role("button", name="Submit the job").click()


async def read_a_failure(tab: Tab, job: str) -> None:
    """The first step that kept one has its whole conversation."""
    for step in range(1, 4):
        await tab.go(f"/job/{job}?tab=samples&step={step}")
        await tab.page.locator(".turn.model").first.wait_for()
        await tab.page.get_by_label("Which samples").select_option("failed")
        if await tab.page.locator(".list button").count():
            break
    await tab.page.locator(".list button").first.click()
    await tab.page.get_by_text("it has a three").last.wait_for()
    assert "3" in await tab.page.locator(".turn.model .tokens").inner_text()
    assert "log-prob" in (await tab.page.locator(".turn.model .tokens span").first.get_attribute("title") or "")


async def ask_two_versions(tab: Tab, job: str) -> None:
    await tab.go(f"/job/{job}")
    await tab.page.locator(".head").get_by_role("link", name="Chat").click()
    await tab.page.get_by_label("Message").fill("add 37+58")
    await tab.page.get_by_role("button", name="Ask", exact=True).click()
    for version in ("3", "0"):
        await tab.page.locator(".said small", has_text=f"{job}@{version} ·").wait_for()
