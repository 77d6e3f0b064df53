"""A pass keeps the answers of a writer that fails, and nothing of a writer outlives its pass."""

import asyncio
import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest

from manager_service.export import writer
from manager_service.export.passes import JobRows, Order, PassAnswer, Passes, check_disk

HANGS = """
import json, subprocess, sys
first = json.load(sys.stdin)["jobs"][0]["job"]
print(json.dumps({"job": first, "error": ""}), flush=True)
child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=-3, stdout=-3, stderr=-3)
with open("child", "w") as file:
    file.write(str(child.pid))
"""
KEY = "0123456789abcdef"


def order(folder: Path, *jobs: str) -> Order:
    rows = [JobRows(job=job, project="p", name="", entity="", tags=(), config={}, rows=[], final=None) for job in jobs]
    return Order(folder=str(folder), key=KEY, base_url="", jobs=rows)


def passes(code: str, timeout_s: float) -> Passes:
    return Passes((sys.executable, "-c", code), timeout_s)


async def test_what_a_writer_did_before_it_hung_is_kept_and_only_the_job_at_which_it_hung_has_failed(
    tmp_path: Path,
) -> None:
    hanging = passes(HANGS + "import time; time.sleep(600)", 2.0)
    answers = await hanging.write("wandb", order(tmp_path, "one", "two", "three"))
    assert answers == {"one": PassAnswer("one"), "two": PassAnswer("two", error="wandb took more than 2 s")}


async def test_what_a_writer_started_in_a_session_of_its_own_ends_with_the_pass(tmp_path: Path) -> None:
    answers = await passes(HANGS, 60.0).write("wandb", order(tmp_path, "one", "two"))
    assert answers["two"].error == "the writer of wandb ended with status 0"
    ask = ["ps", "-o", "stat=", "-p", (tmp_path / "child").read_text()]
    async with asyncio.timeout(60):
        while subprocess.run(ask, capture_output=True, text=True).stdout.strip()[:1] not in ("", "Z"):
            await asyncio.sleep(0.05)


async def test_what_a_killed_exporter_left_running_ends_before_the_next_pass(tmp_path: Path) -> None:
    stray = subprocess.Popen(["sleep", "600"], env={**os.environ, "HOME": str(tmp_path / ".home")})
    await passes("", 60.0).write("wandb", order(tmp_path, "one"))
    assert stray.wait(60) == -9


def test_a_tenants_files_have_a_limit(tmp_path: Path) -> None:
    (tmp_path / "trackio").mkdir()
    for name in ("one", "trackio/two"):
        (tmp_path / name).write_bytes(bytes(500))
    check_disk(tmp_path, 1001)
    with pytest.raises(OSError, match="1,000 bytes here, at most 1,000"):
        check_disk(tmp_path, 1000)


@pytest.mark.parametrize("before", ["", "api:", "x", "xy"])
def test_no_form_of_a_key_that_a_server_quotes_is_in_an_error(before: str) -> None:
    quoted = base64.b64encode(f"{before}{KEY}".encode()).decode()

    def refuses() -> writer.Write:
        raise OSError(f"returned error 400: Basic {quoted}, {KEY}, {KEY.encode().hex()}")

    (answer,) = writer.answered({"key": KEY, "jobs": [{"job": "one"}]}, refuses)
    assert answer["error"] == "OSError, status 400 (a server's text is not shown: it may quote your key)"


def test_an_error_without_a_key_says_what_is_wrong() -> None:
    def refuses() -> writer.Write:
        raise OSError("the disk is full")

    (answer,) = writer.answered({"key": "", "jobs": [{"job": "one"}]}, refuses)
    assert answer["error"] == "OSError: the disk is full"
