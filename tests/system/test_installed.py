"""A new user's first hour, from wheels alone: what the READMEs say, in a folder that is not ours."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import nbformat
import pytest
from nbclient import NotebookClient

from common.skills import generate
from harness.live import jsonl
from tests.support.installed import ROOT, Installed, build, environment, install, litter, up

NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"
MODULES = "common.settings, manager_service, rollout_service, env_service, trainer_service, base_model, examples"
CLIENT = """
import importlib.util, json
from pathlib import Path
from marlaas_client import Client, Refused
assert not any(map(importlib.util.find_spec, ("torch", "redis", "base_model")))
with Client() as client:
    (job,) = client.jobs()
    assert [event["message"] for event in client.follow(job["id"])][-1] == "The job has successfully completed"
    assert client.wait(job["id"])["status"] == "succeeded"
    ledger = client.ledger(job["id"])
    assert ledger["issued"] == ledger["trained"] + ledger["filtered"] + ledger["stale"] + ledger["failed"], ledger
    assert {turn["by"] for sample in client.samples(job["id"], version=3) for turn in sample["turns"]} == {"prompt", "model"}
    for name in (job["id"], job["fine_tuned_model"] + "@2"):
        pulled = client.pull(name, to=Path("adapter") / name)
        base = json.loads((pulled.folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert Path(base, "tokenizer.json").is_file()
    try:
        client.act(job["id"], "pause")
    except Refused as refused:
        print(refused)
"""


def code() -> str:
    """The ten lines of the README."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return block


def test_the_notebook_has_no_outputs() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all((cell["outputs"], cell["execution_count"]) == ([], None) for cell in cells), "clear them first"


def test_the_code_is_ten_lines() -> None:
    assert len(code().strip().splitlines()) <= 11


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_first_hour_without_a_clone(tmp_path: Path) -> None:
    # Given the wheels in environments of their own, and a folder with packages of our names
    services = install(build(tmp_path), tmp_path / "services", borrowed=True)
    client = install(build(tmp_path, "marlaas_client"), tmp_path / "client")
    check_origin(services, tmp_path)
    litter(folder := tmp_path / "user")
    # When the service is started there
    with up(services, folder) as cluster:
        # Then its page and the description of its API are there
        for path in ("/", "/docs"):
            assert httpx.get(cluster["url"] + path, trust_env=False).status_code == 200
        # And what the READMEs say can be done, without torch or the services
        train(client, folder)
        assert "there is nothing to pause" in client.run("python", "-c", CLIENT, cwd=folder)
        shorter = code().replace('"max_steps": 15', '"max_steps": 3').replace("http://127.0.0.1:8000", cluster["url"])
        lines = client.run("python", "-c", shorter, cwd=folder)
        # And the notebook's model answers better than its base
        before, after = map(int, re.findall(r"(\d+)% ", run_notebook(client, folder)))
        assert after > before, (before, after)
    said = lines.splitlines()
    assert any(line.startswith("Step 3/3: reward") for line in said)
    assert said[-2] == "The job has successfully completed"
    assert said[-1].isdigit(), "an answer to a sum; which one is the model's business"


def run_notebook(client: Installed, folder: Path) -> str:
    """Runs it with the client's wheel, in a kernel of this environment, for half of its steps; what it says it learned."""
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell["source"] = cell["source"].replace('"max_steps": 20', '"max_steps": 10')
    executed = NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder)}})
    executed.execute(env={**environment(), "PYTHONPATH": str(client.packages)})
    said = ["".join(output.get("text", "") for output in cell.get("outputs", [])) for cell in notebook.cells]
    return next(text for text in said if " after, " in text)


def check_origin(services: Installed, root: Path) -> None:
    """Nothing is imported from the repository."""
    code = f"import json, sys, {MODULES}; print(json.dumps([sys.path, [m.__file__ for m in ({MODULES})]]))"
    path, files = json.loads(services.run("python", "-c", code, cwd=root))
    assert all(Path(file).is_relative_to(services.folder) for file in files)
    assert str(ROOT) not in path


def train(client: Installed, folder: Path) -> None:
    """Submits a job, watches it, and talks to what it made, from the shell."""
    (folder / "add.jsonl").write_bytes(jsonl(generate("add", 1, 64, "train")))
    options = ["--grader", "string_check:answer", "--hyper", "max_steps=3", "--hyper", "batch_size=4"]
    job = json.loads(client.run("marlaas", "submit", "add.jsonl", *options, "--json", cwd=folder))
    assert "succeeded, step 3/3" in client.run("marlaas", "watch", job["id"], cwd=folder)
    (row,) = json.loads(client.run("marlaas", "jobs", "--json", cwd=folder))
    assert client.run("marlaas", "chat", row["fine_tuned_model"], "add 37+58", cwd=folder).strip().isdigit()
