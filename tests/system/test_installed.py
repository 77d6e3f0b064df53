"""A new user's first hour, from wheels alone: what the README says, in a folder that is not ours."""

import json
from pathlib import Path

import httpx
import pytest

from common.skills import generate
from harness.live import jsonl
from tests.support.installed import Installed, build, install, litter, up

MODULES = "common.settings, manager_service, rollout_service, env_service, trainer_service, base_model, examples"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_first_hour_without_a_clone(tmp_path: Path) -> None:
    # Given the wheel in an environment of its own, and a folder with packages of our names
    marlaas = install(build(tmp_path), tmp_path / "marlaas", borrowed=True)
    (folder := tmp_path / "user").mkdir()
    litter(folder)
    check_origin(marlaas, tmp_path)
    # When the service is started there
    with up(marlaas, folder) as cluster:
        # Then its page and the description of its API are there
        for path in ("/", "/docs"):
            assert httpx.get(cluster["url"] + path, trust_env=False).status_code == 200
        # And what the README says can be done
        train(marlaas, folder)


def check_origin(marlaas: Installed, root: Path) -> None:
    """Nothing is imported from the repository."""
    code = f"import json, sys, {MODULES}; print(json.dumps([sys.path, [m.__file__ for m in ({MODULES})]]))"
    path, files = json.loads(marlaas.run("python", "-c", code, cwd=root))
    assert all(Path(file).is_relative_to(marlaas.folder) for file in files)
    repository = Path(__file__).resolve().parents[2]
    assert not any(Path(entry) == repository for entry in path)


def train(marlaas: Installed, folder: Path) -> None:
    """Submits a job, watches it, and talks to what it made."""
    (folder / "add.jsonl").write_bytes(jsonl(generate("add", 1, 64, "train")))
    options = ["--grader", "string_check:answer", "--hyper", "max_steps=3", "--hyper", "batch_size=4"]
    job = json.loads(marlaas.run("marlaas", "submit", "add.jsonl", *options, "--json", cwd=folder))
    assert "succeeded, step 3/3" in marlaas.run("marlaas", "watch", job["id"], cwd=folder)
    (row,) = json.loads(marlaas.run("marlaas", "jobs", "--json", cwd=folder))
    assert marlaas.run("marlaas", "chat", row["fine_tuned_model"], "add 37+58", cwd=folder).strip().isdigit()
