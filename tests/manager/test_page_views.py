"""More of the web page in a real Chromium: versions side by side, the cluster, downloads, colours, and the keyboard alone."""

import io
import re
import time
import zipfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from common.store.adapters import PEFT_FILES
from common.wire.messages import Failure, Span
from manager_service.records.sample_records import SampleRecord, Written
from tests.manager.test_api_cluster import dead_letter, report, tell
from tests.manager.test_api_supervised import EXAMPLES, learn
from tests.support.api_server import (
    ApiServer,
    commit_version,
    create,
    item,
    jsonl,
    keep_samples,
    running_api,
    upload,
    write_events,
)
from tests.support.browser import Tab

pytestmark = pytest.mark.asyncio(loop_scope="session")  # as the browser's

PROMPT, REPLY = "add 1+2", "that is wrong"
ANSWERS = {0: ("33", "4"), 5: ("12", "3")}
"""The words of each version, before and after the environment's reply."""
UNNAMED = Path(__file__).parent.parent / "support" / "unnamed.js"
COLOURS = Path(__file__).parent.parent / "support" / "contrasts.js"


@pytest_asyncio.fixture(loop_scope="session")
async def server(redis_url: str, tmp_path: Path) -> AsyncGenerator[ApiServer]:
    async with running_api(redis_url, tmp_path / "data", keep_alive_s=0.3) as running:
        yield running


def answer(server: ApiServer, version: int, at: int) -> SampleRecord:
    """The answer of an evaluation, in two turns; the last item's failed."""
    first, last = ANSWERS[version]
    parts = [server.api.bases["tiny"].tokenizer.encode(text) for text in (PROMPT, first, REPLY, f"{last} item {at}")]
    lengths = [len(part) for part in parts]
    logprobs = [-0.25] * (lengths[1] + lengths[3])
    return SampleRecord(
        version,
        group=at,
        sample=0,
        text=last,
        reward=None if at == 2 else float(version == 5),
        stop_reason="failed" if at == 2 else "stop",
        prompt=PROMPT,
        reward_parts={"exact": float(version == 5), "format": 0.5},
        failure=Failure("grader", "it raised") if at == 2 else None,
        written=Written([token for part in parts for token in part], lengths, logprobs),
        kept="evaluation",
        step=version,
        item=at,
    )


async def evaluated(server: ApiServer) -> str:
    """A job of five steps, evaluated before the first and after the last, with a checkpoint."""
    held_out = await upload(server.openai, jsonl(*(item() for _ in range(4))))
    job = (await create(server.openai, suffix="mine", validation_file=held_out)).id
    said: list[dict[str, Any]] = [{"eval_reward_mean": 0.1, "eval_n": 8, "eval_reward_stderr": 0.02, "version": 0}]
    said += [{"reward_mean": step / 5, "failed_share": 0.0, "version": step} for step in range(1, 6)]
    said += [{"eval_reward_mean": 0.9, "eval_n": 8, "eval_reward_stderr": 0.02, "version": 5}]
    rows = [data | {"step": data["version"]} for data in said]
    ended: dict[str, Any] = {
        "status": "succeeded",
        "version": 5,
        "last_reward": 1.0,
        "first_eval": 0.1,
        "last_eval": 0.9,
    }
    await write_events(server, job, rows, **ended)
    for version in ANSWERS:
        await keep_samples(server, job, version, [answer(server, version, at) for at in range(3)], "answers")
    learned = [SampleRecord(4, 0, at, f"answer {at}", at / 2, "stop", PROMPT, step=5) for at in range(3)]
    await keep_samples(server, job, 5, learned)
    await commit_version(server, job, 5)
    return job


async def test_two_versions_of_one_item_lie_side_by_side_and_a_checkpoint_is_downloaded(
    server: ApiServer, tab: Tab
) -> None:
    job = await evaluated(server)
    page = tab.page
    await tab.enter(server.key)
    await tab.go(f"/job/{job}?tab=samples")
    await page.get_by_role("link", name="Two versions of one item").click()
    turns = page.locator(".versions .turn .tokens")
    expected = [PROMPT, "33", "12", REPLY, "4 item 0", "3 item 0"]
    await expect(turns).to_have_text(expected)
    rows = [await turn.bounding_box() for turn in await page.locator(".versions .turn").all()]
    tops, lefts = [row["y"] for row in rows if row], [row["x"] for row in rows if row]
    assert tops[1] == tops[2] and tops[4] == tops[5] and lefts[1] < lefts[2], "turn beside turn"
    parts = page.locator(".versions .facts")
    await expect(parts.first).to_contain_text(in_order("reward 0", "exact 0", "format 0.5", "version 0"))
    await expect(parts.last).to_contain_text(in_order("reward 1", "exact 1", "format 0.5", "version 5"))
    # Another item, by the keyboard: the focus stays, and the address names what is shown
    await page.get_by_role("button", name="Next item").focus()
    await page.keyboard.press("Enter")
    await expect(turns.last).to_have_text("3 item 1")
    assert await page.evaluate("document.activeElement.ariaLabel") == "Next item"
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("grader: it raised")).to_have_count(2)
    assert page.url.endswith("?tab=samples&item=2&a=0&b=5")
    await page.get_by_label("Left version").select_option("5")
    await expect(turns).to_have_text([PROMPT, "12", "12", REPLY, "3 item 2", "3 item 2"])
    await page.reload()
    await expect(page.get_by_label("Left version")).to_have_value("5")
    await expect(turns).to_have_count(6)
    # And the checkpoint is downloaded
    await tab.go(f"/job/{job}?tab=checkpoints")
    await expect(page.get_by_role("row", name="version 5")).to_contain_text("0.90 ± 0.039")
    async with page.expect_download() as started:
        await page.get_by_role("button", name="Download").click()
    download = await started.value
    assert download.suggested_filename == f"{job}-5.zip"
    with zipfile.ZipFile(io.BytesIO((await download.path()).read_bytes())) as archive:
        assert set(archive.namelist()) == set(PEFT_FILES)
    assert tab.errors == []


def in_order(*facts: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(fact).replace(r"\ ", r"\s*") for fact in facts), re.DOTALL)


async def test_the_operator_sees_who_used_which_worker_and_what_nobody_could_read(server: ApiServer, tab: Tab) -> None:
    now_s = time.time()
    whose = (("acme", "ftjob-x", 20), ("bluebird", "b", 10))
    spans = tuple(Span(now_s - s, now_s - s + 10, tenant, job, "rollout") for tenant, job, s in whose)
    await tell(server.bus, report("worker-1", "rollout", spans=spans), report("worker-2", "trainer"))
    await server.bus.publish([(server.bus.cell.dead, dead_letter("ftjob-x", "<b>it raised</b>"))])
    page = tab.page
    await tab.enter(server.admin_key)
    await page.get_by_role("link", name="Cluster").click()
    timeline = page.get_by_role("img", name="2 workers, 2 tenants: acme 10 s, bluebird 10 s of work in 2 min")
    await timeline.wait_for()
    box = await timeline.bounding_box()
    assert box is not None
    # Under the pointer: the first worker, 15 seconds before the test, however long ago that is by now
    told = page.get_by_text("acme · ftjob-x · rollout")
    while not await told.is_visible():
        at = 150 + (120 - 15 - (time.time() - now_s)) / 120 * (box["width"] - 158)
        await timeline.hover(position={"x": at, "y": 11})
        await page.wait_for_timeout(100)
    shades = "(c) => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, 20 * devicePixelRatio).data.buffer)).size"
    assert await timeline.evaluate(shades) > 3, "it is drawn, a colour a tenant"
    await expect(page.get_by_role("row", name="<b>it raised</b>")).to_contain_text("acme")


PARTS = ("", "?tab=checkpoints", "?tab=events", "?tab=settings", "?tab=samples&step=5", "?tab=samples&item=0")
VIEWS = ("jobs", "submit", "chat", "usage", "compare?jobs={job}", *(f"job/{{job}}{part}" for part in PARTS))


async def test_every_view_is_named_for_screen_readers_and_readable_in_the_dark_and_in_the_light(
    server: ApiServer, tab: Tab
) -> None:
    job = await evaluated(server)
    await tab.enter(server.key)
    for view in VIEWS:
        await tab.go(f"/{view.format(job=job)}")
        await tab.page.wait_for_selector("main h1")
        await tab.page.wait_for_load_state("networkidle")
        assert (view, await tab.page.evaluate(UNNAMED.read_text())) == (view, [])
        backs = set[str]()
        for scheme in ("dark", "light"):
            await tab.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            faint = await tab.page.evaluate(COLOURS.read_text())
            assert (view, scheme, faint) == (view, scheme, [])
            backs.add(await tab.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert len(backs) == 2
    assert tab.errors == []


FOCUSED = """(() => {
  const e = document.activeElement;
  const name = e.ariaLabel || e.textContent.trim() || e.labels?.[0]?.textContent.trim() || "";
  return [name, e === document.body || getComputedStyle(e).outlineStyle !== "none"];
})()"""


async def focused(page: Page, name: str, most: int = 60) -> None:
    """Presses Tab until the focus, which is to be seen at every stop, is on what has this name."""
    for _ in range(most):
        await page.keyboard.press("Tab")
        found, is_seen = await page.evaluate(FOCUSED)
        assert is_seen, found
        if found == name:
            return
    raise AssertionError(f"{name} is not reached")


async def test_the_keyboard_alone_reaches_a_job_its_samples_chat_and_submit(server: ApiServer, tab: Tab) -> None:
    await evaluated(server)
    page, press = tab.page, tab.page.keyboard.press
    await page.goto(server.url)
    await page.locator("#key").wait_for()
    await page.keyboard.type(server.key)
    await press("Enter")
    await page.get_by_role("link", name="mine", exact=True).wait_for()
    for name in ("mine", "Samples"):
        await focused(page, name)
        await press("Enter")
    await page.locator(".list button").nth(2).wait_for()
    await focused(page, "1.00answer 2")
    await press("Enter")
    await expect(page.locator(".turn .tokens").last).to_have_text("answer 2")
    await page.locator("body").evaluate("document.activeElement.blur()")
    await focused(page, "To the content")
    await focused(page, "Chat")
    await press("Enter")
    await page.get_by_label("Message").wait_for()
    await focused(page, "Message")
    await page.keyboard.type("add 1+2")
    await focused(page, "Ask")
    await focused(page, "Submit")
    await press("Enter")
    await page.get_by_role("button", name="Submit the job").wait_for()
    await focused(page, "Submit the job", most=120)
    await press("Enter")
    await page.get_by_role("alert").filter(has_text="training").wait_for()


# Supervised jobs ------------------------------------------------------------------------------------------------------

STEPS = ({"step": 1, "loss": 2.5, "grad_norm": 1.0, "kl": 0.1}, {"step": 2, "loss": 0.75, "kl": 0.2})


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
    ended: dict[str, Any] = {
        "status": "succeeded",
        "version": 2,
        "last_loss": 0.75,
        "last_eval_loss": 0.5,
        "best_version": 2,
    }
    await write_events(server, job, rows, **ended)


async def test_a_supervised_job_is_submitted_and_shows_its_losses(server: ApiServer, tab: Tab, tmp_path: Path) -> None:
    (file := tmp_path / "examples.jsonl").write_bytes(EXAMPLES)
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


async def test_a_supervised_jobs_settings_and_samples_are_shown(server: ApiServer, tab: Tab) -> None:
    job = (await learn(server, hyper={"batch_size": 3})).id
    await trained(server, job)
    prompt, said = (server.api.bases["tiny"].tokenizer.encode(text) for text in ("min 3,1,2", "answer 0"))
    written = Written([*prompt, *said], [len(prompt), len(said)], [])
    about: dict[str, Any] = {"prompt": "min 3,1,2", "written": written, "step": 3}
    learned = [SampleRecord(0, group, 0, f"answer {group}", None, "length", **about) for group in range(2)]
    failed = SampleRecord(0, 7, 0, "", None, "failed", failure=Failure("invalid", "too long"), kept="failed", step=3)
    await keep_samples(server, job, 3, [*learned, failed])
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
