"""The web page in a real Chromium, over the real API."""

import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import expect

from common.wire.messages import Failure
from manager_service.http.operators.page_routes import FOLDER
from manager_service.records.keys import JSON
from manager_service.records.sample_records import EventRecord, SampleRecord, Written
from tests.support.api_server import (
    ApiServer,
    Script,
    commit_version,
    create,
    item,
    jsonl,
    keep_samples,
    method,
    played,
    running_api,
    running_jobs,
    upload,
    write_events,
)
from tests.support.browser import Tab

pytestmark = pytest.mark.asyncio(loop_scope="session")  # as the browser's

MAX_BYTES = 200_000
TURNED, SEEN = "\u202e", r"\u202e"
HOSTILE = '<img src=x onerror="document.title=`broken`"><script>document.title=`broken`</script>'


@pytest_asyncio.fixture(loop_scope="session")
async def server(redis_url: str, tmp_path: Path) -> AsyncGenerator[ApiServer]:
    async with running_api(redis_url, tmp_path / "data", keep_alive_s=0.3) as running:
        yield running


async def write_steps(server: ApiServer, job: str, numbers: range) -> None:
    """Writes steps of a running job as the owner does."""
    rows = [{"step": n, "version": n, "reward_mean": 1 - 1 / n, "failed_share": 0.0} for n in numbers]
    state = {"version": numbers[-1], "last_reward": rows[-1]["reward_mean"]}
    await write_events(server, job, rows, numbers[0], **state)


# What is served -----------------------------------------------------------------------------------------------------


async def test_the_page_is_small_and_asks_nothing_of_another_server(server: ApiServer) -> None:
    answer = await server.http.get("/", headers={"Authorization": ""})
    policy = answer.headers["content-security-policy"]
    assert (answer.status_code, "default-src 'none'" in policy, "unsafe" in policy) == (200, True, False)
    for file in FOLDER.iterdir():
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        found = await server.http.get(path)
        assert (found.status_code, found.content) == (200, file.read_bytes())
        again = await server.http.get(path, headers={"If-None-Match": found.headers["etag"]})
        assert again.status_code == 304
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < MAX_BYTES


@pytest.mark.parametrize("path", ["/page/", "/page/nothing.js", "/page/..%2fsettings.py", "/page/../settings.py"])
async def test_nothing_else_of_the_disk_is_served(server: ApiServer, path: str) -> None:
    assert (await server.http.get(path)).status_code == 404


async def test_no_script_of_ours_makes_markup_of_text() -> None:
    ways = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval(", "new Function")
    scripts = [file for file in FOLDER.glob("*.js") if not file.name.startswith("uplot")]
    assert {(file.name, way) for file in scripts for way in ways if way in file.read_text()} == set()
    assert len(scripts) > 8


# What it shows ------------------------------------------------------------------------------------------------------


async def test_a_wrong_key_is_asked_for_again_a_right_one_is_kept_in_the_tab_and_no_script_comes_in(
    server: ApiServer, tab: Tab
) -> None:
    await tab.page.goto(server.url)
    await tab.page.fill("#key", "sk-wrong")
    await tab.page.press("#key", "Enter")
    await tab.page.get_by_text("this API key is not known").wait_for()
    await tab.enter(server.key)
    await tab.page.reload()
    await tab.page.wait_for_selector("main h1")
    assert await tab.page.evaluate("localStorage.length") == 0
    # And the headers stop a script that comes in all the same, as if a view had made markup of a text
    tried = "try { document.querySelector('main').innerHTML = '<img src=x>' } catch (error) { error.name }"
    assert await tab.page.evaluate(tried) == "TypeError"


async def test_a_curve_grows_while_it_is_watched_and_goes_on_after_the_connection_broke(
    server: ApiServer, tab: Tab
) -> None:
    job = (await create(server.openai, suffix="mine")).id
    await write_steps(server, job, range(1, 4))
    await tab.enter(server.key)
    await tab.page.get_by_role("link", name="mine", exact=True).click()
    reward = tab.page.get_by_role("img", name="Reward. training: 0 at step 1")
    await tab.page.get_by_role("img", name="0.667 at step 3").wait_for()
    await write_steps(server, job, range(4, 6))
    await tab.page.get_by_role("img", name="0.8 at step 5").wait_for()
    await tab.page.context.set_offline(True)
    await write_steps(server, job, range(6, 11))
    await tab.page.context.set_offline(False)
    await tab.page.get_by_role("img", name="0.9 at step 10").wait_for()
    assert await reward.count() == 1
    await tab.page.get_by_text("10/1").wait_for()


async def test_a_job_that_has_ended_and_learned_nothing_says_so_above_its_figures(server: ApiServer, tab: Tab) -> None:
    job = (await create(server.openai)).id
    await write_events(server, job, [{}], status="succeeded")
    event = EventRecord(2, 1, "warn", "The job has completed, but nothing was learned")
    await server.api.redis.xadd(server.bus.cell.events(job), {"event": JSON.encode(event)}, id="2-0")
    await tab.enter(server.key)
    await tab.go(f"/job/{job}")
    await expect(tab.page.locator(".head .waits")).to_contain_text("nothing was learned")


async def test_hostile_names_items_samples_and_events_are_shown_as_text(server: ApiServer, tab: Tab) -> None:
    file = await upload(server.openai, jsonl(item(HOSTILE, HOSTILE)))
    job = (await create(server.openai, training_file=file, metadata={"x": HOSTILE})).id
    failure = Failure("grader", HOSTILE)
    tokens = server.api.bases["tiny"].tokenizer.encode(HOSTILE + TURNED)
    written = Written(tokens, [0, len(tokens)], [-1.0] * len(tokens))
    sample = SampleRecord(0, 0, 0, HOSTILE, None, "failed", TURNED + HOSTILE, {HOSTILE: 1.0}, failure, written, step=1)
    await server.openai.files.create(file=(f"{HOSTILE}.jsonl", jsonl(item())), purpose="fine-tune")
    await write_steps(server, job, range(1, 3))
    await keep_samples(server, job, 1, [sample])
    event = EventRecord(3, 1, "warn", HOSTILE, "metrics", {"failed_reason": HOSTILE, "failed_share": 1.0})
    await server.api.redis.xadd(server.bus.cell.events(job), {"event": JSON.encode(event)}, id="3-0")
    async with played(Script(server.bus, text=HOSTILE)):
        await tab.enter(server.key)
        for tab_name in ("figures", "samples", "events", "settings", "checkpoints"):
            await tab.go(f"/job/{job}?tab={tab_name}")
            if tab_name in ("figures", "samples", "events"):
                await tab.page.get_by_text(HOSTILE).first.wait_for()
            if tab_name == "samples":
                for place in (".list h3", ".turn .tokens"):
                    await expect(tab.page.locator(place).last).to_contain_text(SEEN)
            assert TURNED not in await tab.page.locator("main").inner_text()
        await tab.go(f"/chat?say={HOSTILE}&a=tiny&b=tiny")
        await tab.page.get_by_role("button", name="Ask", exact=True).click()
        await tab.page.locator(".said:not(.user)", has_text=HOSTILE).nth(1).wait_for()
        await tab.go("/job/%E0%A4%A")
        await tab.page.get_by_role("alert").wait_for()
        for view in ("submit", "usage", f"compare?jobs={HOSTILE}", "jobs"):
            await tab.go(f"/{view}")
            await tab.page.wait_for_selector("main h1")
        assert await tab.page.locator("main img, main script").count() == 0
        assert "broken" not in await tab.page.title()


FAIR = [{"grader": "tone", "prompt": "user: <b>fair?</b>", "reply": "no"}]


async def test_a_failed_conversation_is_found_and_read_token_by_token(server: ApiServer, tab: Tab) -> None:
    job = (await create(server.openai)).id
    await write_steps(server, job, range(1, 3))
    encode = server.api.bases["tiny"].tokenizer.encode
    parts = [encode("add 1+2"), encode("33"), encode("that is wrong"), encode("4")]
    tokens, lengths = [token for part in parts for token in part], [len(part) for part in parts]
    written = Written(tokens, lengths, [-0.25] * lengths[1] + [-5.0] * lengths[3])
    good = [SampleRecord(1, 0, n, "3", 1.0, "stop", "add 1+2") for n in range(3)]
    bad = SampleRecord(
        1, 0, 3, "4", None, "failed", "add 1+2", {}, Failure("grader", "it raised"), written, verdicts=FAIR
    )
    learned = SampleRecord(1, 0, 4, "4", 0.0, "stop", "add 1+2", written=written, advantage=-0.5)
    unsaid = SampleRecord(1, 1, 0, "4", 0.0, "stop", written=written)
    await keep_samples(server, job, 2, [*good, bad, learned, unsaid])
    await tab.enter(server.key)
    await tab.go(f"/job/{job}?tab=samples&step=2")
    await tab.page.get_by_label("Which samples").select_option("failed")  # the first that is left is read
    await expect(tab.page.locator(".list button")).to_have_attribute("aria-pressed", "true")
    await tab.page.get_by_text("grader: it raised").wait_for()
    turns = await tab.page.locator(".turn .tokens").all_inner_texts()
    assert turns == ["add 1+2", "33", "that is wrong", "4", "user: <b>fair?</b>", "no"]
    last = tab.page.locator(".turn.model .tokens").last.locator("span")
    await expect(last).to_have_attribute("title", "log-prob -5.000, p 0.0067")
    await tab.go(f"/job/{job}?tab=samples&step=2&group=0&sample=4")
    await tab.page.get_by_title("log-prob -5.000, p 0.0067, advantage -0.5").wait_for()
    heads = tab.page.locator(".list h3")
    await expect(heads).to_have_text(["Group 0 · add 1+2", "Group 1 · no prompt"])
    await tab.page.locator(".list button").last.click()
    await expect(heads.last).to_have_text("Group 1 · add 1+2")


async def test_the_operator_sees_every_tenants_jobs_and_the_cluster(server: ApiServer, tab: Tab) -> None:
    await create(server.openai, suffix="mine")
    bluebird = await server.new_tenant("bluebird")
    theirs = (await create(bluebird, suffix="theirs")).id
    await tab.enter(server.admin_key)
    for name in ("mine", "theirs"):
        await tab.page.get_by_role("link", name=name, exact=True).wait_for()
    await tab.page.get_by_role("link", name="theirs", exact=True).click()
    await tab.page.get_by_role("heading", name="theirs").wait_for()
    assert await tab.page.get_by_role("button", name="Cancel").count() == 0
    await tab.go(f"/job/{theirs}?tab=settings")  # as the tenant has it
    await tab.page.get_by_role("link", name="bluebird").click()
    await tab.page.get_by_role("heading", name="theirs").wait_for()
    await tab.go("/cluster")
    await tab.page.get_by_text("No worker is alive").wait_for()
    await tab.go("/usage")
    await tab.page.get_by_role("link", name="bluebird").wait_for()
    await tab.page.get_by_role("cell", name="of 16.0 GiB").first.wait_for()


async def test_a_job_is_submitted_with_a_file_and_a_changed_hyperparameter(
    server: ApiServer, tab: Tab, tmp_path: Path
) -> None:
    (tmp_path / "items.jsonl").write_bytes(jsonl(*(item() for _ in range(4))))
    async with running_jobs(server):
        await tab.enter(server.key)
        await tab.go("/submit")
        kind = tab.page.get_by_label("Kind")
        offered = {f"environment {one['id']}" for one in (await server.http.get("/v1/environments")).json()["data"]}
        await kind.select_option("environment calculator")
        assert offered <= set(await kind.locator("option").evaluate_all("(all) => all.map((one) => one.value)"))
        source = tab.page.get_by_label("Grader or environment as JSON")
        assert json.loads(await source.input_value()) == {"name": "calculator", "args": {"skill": "calc"}}
        await tab.page.get_by_text("a training file is not needed").wait_for()
        await kind.select_option("grader string_check")
        await tab.page.get_by_label("New training file").set_input_files(tmp_path / "items.jsonl")
        await tab.page.get_by_role("button", name="Take the file's first").click()
        await expect(tab.page.get_by_label("Item", exact=True)).to_have_value(re.compile('"add 1'))
        assert await tab.page.locator("[name=compute_multiplier], [name=reasoning_effort]").count() == 0
        usual = tab.page.locator("fieldset > .fields").last.locator("label")
        assert await usual.count() == 5 and await tab.page.locator("input[name=max_steps]").is_visible()
        await tab.page.get_by_text("More", exact=True).click()
        await tab.page.get_by_text("default: all linear layers").wait_for()
        await tab.page.locator("input[name=batch_size]").fill("0")
        await tab.page.get_by_role("button", name="Submit the job").click()
        await tab.page.get_by_text("batch_size: input should be greater than or equal to 1").wait_for()
        await tab.page.locator("input[name=batch_size]").fill("2")
        await tab.page.locator("input[name=max_steps]").fill("3")
        await tab.page.get_by_role("button", name="Estimate").click()
        await tab.page.get_by_text(re.compile(r"^Estimate: 3 steps; 48 trajectories; about ")).wait_for()
        await tab.page.get_by_role("button", name="Submit the job").click()
        await tab.page.locator(".badge.succeeded").wait_for()
    (job,) = (await server.http.get("/v1/fine_tuning/jobs")).json()["data"]
    assert (job["hyperparameters"]["batch_size"], job["version"]) == (2, 3)


async def test_two_jobs_lie_over_each_other(server: ApiServer, tab: Tab) -> None:
    sizes = {"one": method(batch_size=1), "two": method(batch_size=2)}
    jobs = [(await create(server.openai, suffix=name, method=how)).id for name, how in sizes.items()]
    unnamed = (await create(server.openai, method=method(n_epochs=2))).id
    for job in jobs:
        await write_steps(server, job, range(1, 5))
    await write_events(server, jobs[0], [{"version": 4, "eval_reward_mean": 0.9, "eval_n": 8}], 5, version=4)
    await tab.enter(server.key)
    for name in ("one", "two"):
        await tab.page.get_by_label(f"Compare {name}").check()
    await tab.page.get_by_role("button", name="Compare").click()
    chart = tab.page.get_by_role("img", name="Reward. ")
    await chart.wait_for()
    said = await chart.get_attribute("aria-label") or ""
    assert "one: 0 at step 1, 0.75 at step 4" in said and "two: 0 at step 1" in said
    assert "one, evaluation: 0.9 at step 4" in said
    await tab.page.get_by_text("batch_size 2").wait_for()
    await tab.page.set_viewport_size({"width": 1200, "height": 800})
    await tab.go(f"/compare?jobs={','.join([*jobs, unnamed])}")
    await expect(tab.page.locator(".compared tbody tr")).to_have_count(3)
    box = await tab.page.get_by_role("link", name=unnamed).bounding_box()
    assert box is not None and box["height"] < 40, "in one line"
    await expect(tab.page.locator(".compared tbody td").filter(has_text="batch_size 2")).to_have_css(
        "white-space", "normal"
    )
    assert "n_epochs" not in await tab.page.locator(".compared").inner_text(), "one of them alone has it"
    assert f"{unnamed}: nothing yet" in (await chart.get_attribute("aria-label") or "")


async def test_a_phone_shows_all_of_a_job_its_failed_share_and_the_models_name_to_copy(
    server: ApiServer, tab: Tab
) -> None:
    job = (await create(server.openai, suffix="failing")).id
    rows = [{"step": n, "version": n, "reward_mean": 0.5, "loss": 0.25, "failed_share": 0.25} for n in (1, 2)]
    await write_events(server, job, rows, version=2, last_reward=0.5, last_loss=0.25)
    await tab.page.set_viewport_size({"width": 390, "height": 800})
    await tab.enter(server.key)
    row = tab.page.locator(".jobs tbody tr")
    for text in ("failing", "25 % failed", "2/", "0.50", "0.250"):
        await expect(row.get_by_text(text).first).to_be_visible()
    said = "getComputedStyle(document.querySelector('.jobs .loss'), '::before').content"
    assert await tab.page.evaluate(said) == '"loss "', "no head names it there"
    assert await tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is beside the screen"
    await commit_version(server, job, 1)
    tuned = (await server.openai.fine_tuning.jobs.retrieve(job)).fine_tuned_model
    await tab.go(f"/job/{job}")
    await tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await tab.page.get_by_role("button", name="Copy").click()
    assert tuned and await tab.page.evaluate("navigator.clipboard.readText()") == tuned


async def test_a_thousand_jobs_and_ten_thousand_steps_are_shown(server: ApiServer, tab: Tab) -> None:
    job = (await create(server.openai, suffix="first")).id
    for first in range(1, 10_001, 1000):
        await write_steps(server, job, range(first, first + 1000))
    record = await server.api.redis.hgetall(server.bus.cell.job(job))
    tenant_jobs, pipe = server.bus.cell.tenant_jobs("default"), server.api.redis.pipeline(transaction=False)
    for number in range(999):
        spec = json.loads(record[b"spec"]) | {"id": f"ftjob-{number:024x}", "suffix": f"copy{number}"}
        pipe.hset(server.bus.cell.job(spec["id"]), mapping={"spec": JSON.encode(spec), "state": record[b"state"]})
        pipe.zadd(tenant_jobs, {spec["id"]: number})
    await pipe.execute()
    await tab.enter(server.key)
    await tab.page.get_by_text("1000 of 1000").wait_for()
    await tab.page.get_by_label("Find jobs").fill("first")
    await tab.page.get_by_role("link", name="first", exact=True).click()
    await tab.page.get_by_role("img", name="1 at step 10000").wait_for()
    assert tab.errors == []
