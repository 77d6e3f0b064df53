"""Each benchmark runs with `--quick`, as far as what it needs is installed, and says what it measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.browser import find_browser
from manager_service.launcher.supervisor import ROOT

OWN = (
    "bus",
    "elastic",
    "fused",
    "later_turns",
    "losses",
    "own_streams",
    "planned_memory",
    "pool",
    "rollout",
    "scale",
    "takeover",
    "training",
)
WITH_OPTIONS = {
    "gpu": ("--device", "cpu", "--shapes", "tiny", "--jobs", "1", "--kernels"),
    "isolation": ("--mode", "default", "--out", "results"),
    "paper": ("--jobs", "2", "--policies", "marlaas", "--workloads", "tail", "--steps", "1", "--out", "results"),
    "peers": ("--jobs", "1", "--systems", "marlaas", "--steps", "1", "--out", "results"),
}
"""Options of those that need more than `--quick` to be short, or to do without what is not installed."""
CASES = {**dict.fromkeys(OWN, ()), **WITH_OPTIONS}


def measured(name: str, folder: Path, *options: str) -> dict[str, object]:
    """The figures and goals of a quick run."""
    file = folder / "found.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", *options, "--json", str(file)]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_a_quick_run_measures_something(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = measured(name, tmp_path, *CASES[name])
    assert found["figures"] and {"goals", "machine"} <= set(found)
    if name == "gpu":
        assert found["figures"]["failures"] == []  # pyright: ignore[reportIndexIssue]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_browser() is None, reason="there is no Chromium here")
def test_the_page_is_measured_where_there_is_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert measured("page", tmp_path)["goals"]
