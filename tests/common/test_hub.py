"""Base models by a hub's name, from a local server that speaks its protocol."""

import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from common.errors import InvalidInput
from common.settings import TINY, resolve_config, resolve_model
from tests.support.hub_server import TOKEN, Hub, running_hub

ROOT = Path(__file__).resolve().parents[2]
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def hub(tmp_path: Path) -> Generator[tuple[str, type[Hub]]]:
    for name in (OLD, NEW):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text((TINY / "config.json").read_text() + " " * (name == NEW))
        (tmp_path / name / "pickled.bin").write_bytes(b"nobody needs it")
    commits = {NEW: tmp_path / NEW, OLD: tmp_path / OLD}
    with running_hub({"org/open": commits, "org/gated": commits}, gated={"org/gated"}) as running:
        yield running


def environment_of(url: str, home: Path) -> dict[str, str]:
    variables = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
    return {name: value for name, value in os.environ.items() if name != "HF_TOKEN"} | variables


ASK = """
import sys
from common.errors import InvalidInput
from common.settings import *
for question in sys.argv[1:]:
    try:
        print("found", eval(question))
    except InvalidInput as error:
        print("refused", error)
"""


def asked(questions: list[str], url: str, home: Path, **environment: str) -> list[str]:
    """The values of calls of the settings' functions, in one process of its own: the hub's client reads its environment once."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, *questions],
        cwd=ROOT,
        env=environment_of(url, home) | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_name_is_pinned_to_the_newest_commit_and_a_pinned_one_stays(
    hub: tuple[str, type[Hub]], tmp_path: Path
) -> None:
    url, handler = hub
    calls = ["pinned('org/open')", f"pinned('org/open@{OLD}')", f"resolve_model('org/open@{OLD}')"]
    newest, pinned, resolved = asked(calls, url, tmp_path / "home")
    assert (newest, pinned) == (f"found org/open@{NEW}", f"found org/open@{OLD}")
    found = Path(resolved.removeprefix("found "))
    assert found.name == OLD and (found / "config.json").read_text() == (TINY / "config.json").read_text()
    assert not any("pickled" in name for name in handler.served)


def test_what_was_downloaded_once_needs_no_hub_and_workers_without_one_write_nothing(
    hub: tuple[str, type[Hub]], tmp_path: Path
) -> None:
    url, _ = hub
    home = tmp_path / "home"
    calls = [f"resolve_model('org/open@{OLD}')", "resolve_model('org/open')"]
    first = asked(calls, url, home)
    before = {file: file.lstat().st_mtime_ns for file in home.rglob("*")}
    again = asked([*calls, "resolve_config('org/open')"], "http://127.0.0.1:9", home, HF_HUB_OFFLINE="1")
    assert again == [*first, first[1]]
    assert {file: file.lstat().st_mtime_ns for file in home.rglob("*")} == before


def test_a_gated_model_asks_for_a_token_and_what_the_hub_does_not_have_is_named(
    hub: tuple[str, type[Hub]], tmp_path: Path
) -> None:
    url, _ = hub
    absent = ["org/nowhere", f"org/open@{'c' * 40}"]
    calls = [f"resolve_config({where!r})" for where in ("org/gated", *absent)]
    gated, *others = asked(calls, url, tmp_path / "home")
    assert "org/gated is gated: accept its licence on the hub, and set HF_TOKEN" in gated
    for where, told in zip(absent, others, strict=True):
        assert f"base model: {where} cannot be had from the hub" in told
    (found,) = asked(["resolve_config('org/gated')"], url, tmp_path / "home", HF_TOKEN=TOKEN)
    assert found.endswith(NEW)


@pytest.mark.parametrize("call", [resolve_model, resolve_config])
@pytest.mark.parametrize("where", ["./nowhere", "/nowhere", "~/nowhere", "here/config.json"])
def test_paths_that_are_no_folders_are_not_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[str], Path], where: str
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=f"{where} is neither a folder nor a hub name"):
        call(where)
