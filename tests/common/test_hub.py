"""Base models by a hub's name, from a local server that speaks its protocol."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from common.bus import Bus
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


def asked(call: str, where: str, url: str, home: Path, **environment: str) -> str:
    """The value of a function of the settings, in a process of its own: the hub's client reads its environment once."""
    code = f"from common.settings import *; print('found', {call}({where!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment_of(url, home) | environment,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_a_name_is_pinned_to_the_newest_commit_and_a_pinned_one_stays(
    hub: tuple[str, type[Hub]], tmp_path: Path
) -> None:
    url, handler = hub
    assert asked("pinned", "org/open", url, tmp_path / "home") == f"found org/open@{NEW}"
    assert asked("pinned", f"org/open@{OLD}", url, tmp_path / "home") == f"found org/open@{OLD}"
    found = Path(asked("resolve_model", f"org/open@{OLD}", url, tmp_path / "home").removeprefix("found "))
    assert found.name == OLD and (found / "config.json").read_text() == (TINY / "config.json").read_text()
    assert not any("pickled" in name for name in handler.served)


def test_what_was_downloaded_once_needs_no_hub(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    url, _ = hub
    first = asked("resolve_model", f"org/open@{OLD}", url, tmp_path / "home")
    assert (
        asked("resolve_model", f"org/open@{OLD}", "http://127.0.0.1:9", tmp_path / "home", HF_HUB_OFFLINE="1") == first
    )


@pytest.mark.parametrize("call", ["resolve_model", "resolve_config"])
def test_workers_without_a_hub_read_the_cache_and_write_nothing(
    hub: tuple[str, type[Hub]], tmp_path: Path, call: str
) -> None:
    url, _ = hub
    home = tmp_path / "home"
    first = asked("resolve_model", "org/open", url, home)
    before = {file: file.lstat().st_mtime_ns for file in home.rglob("*")}
    assert asked(call, "org/open", "http://127.0.0.1:9", home, HF_HUB_OFFLINE="1") == first
    assert {file: file.lstat().st_mtime_ns for file in home.rglob("*")} == before


def test_a_gated_model_asks_for_a_token(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    url, _ = hub
    refused = asked("resolve_config", "org/gated", url, tmp_path / "home")
    assert "org/gated is gated: accept its licence on the hub, and set HF_TOKEN" in refused
    assert asked("resolve_config", "org/gated", url, tmp_path / "home", HF_TOKEN=TOKEN).endswith(NEW)


@pytest.mark.parametrize("where", ["org/nowhere", f"org/open@{'c' * 40}"])
def test_what_the_hub_does_not_have_is_named(hub: tuple[str, type[Hub]], tmp_path: Path, where: str) -> None:
    url, _ = hub
    assert f"base model: {where} cannot be had from the hub" in asked("resolve_config", where, url, tmp_path / "home")


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


async def test_a_worker_that_downloads_ends_when_it_is_told_to(
    hub: tuple[str, type[Hub]], tmp_path: Path, bus: Bus, redis_url: str
) -> None:
    url, running = hub
    for folder in running.commits["org/open"].values():
        (folder / "model.safetensors").write_bytes(b"0" * 1000)
    own = {
        "MARLAAS_BASE_MODELS": f"{bus.cell.base_model}=org/open",
        "MARLAAS_DATA_DIR": str(tmp_path),
        "MARLAAS_REDIS_URL": redis_url,
    }
    worker = subprocess.Popen(
        [sys.executable, "-m", "rollout_service"], cwd=ROOT, env=environment_of(url, tmp_path / "home") | own
    )
    try:
        async with asyncio.timeout(60):
            while not await _downloads(bus):
                await asyncio.sleep(0.1)
        worker.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait, 20) == 0
        assert not running.go_on.is_set()
    finally:
        worker.kill()


async def _downloads(bus: Bus) -> bool:
    entries = await bus.follow(bus.cell.telemetry, "0", block_ms=None)
    return any("downloading org/open" in getattr(report, "reason", "") for _, report in entries)
