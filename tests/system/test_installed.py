"""A new user's first hour, from wheels alone: what the READMEs say, in a folder that is not ours."""

import json
import re
from pathlib import Path

import httpx
import pytest

from common.tasks.skills import generate
from harness.live import jsonl
from tests.support.installed import ROOT, Installed, build, install, litter, up

NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"
IN_TURN = """
import asyncio, json, sys
async def run(programs):
    for program in programs:
        exec(compile(program, "program", "exec"), {})
        print("\f")
asyncio.run(run(json.loads(sys.argv[1])))
"""
"""Runs programs in one process, for imports take it a second, and as in a notebook's: beside an event loop."""
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
    assert {turn["by"] for sample in client.samples(job["id"], version=2) for turn in sample["turns"]} == {"prompt", "model"}
    for name in (job["id"], job["fine_tuned_model"] + "@1"):
        pulled = client.pull(name, to=Path("adapter") / name)
        base = json.loads((pulled.folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert Path(base, "tokenizer.json").is_file()
    try:
        client.act(job["id"], "pause")
    except Refused as refused:
        print(refused)
"""


def code() -> str:
    """The program of the README."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return block


def test_the_notebook_has_no_outputs() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all((cell["outputs"], cell["execution_count"]) == ([], None) for cell in cells), "clear them first"


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
            assert httpx.get(cluster["url"] + path, trust_env=False, timeout=60).status_code == 200
        # And what the READMEs say can be done, without torch or the services
        train(client, folder)
        programs = [CLIENT, *shorter(code().replace("http://127.0.0.1:8000", cluster["url"]), "\n".join(cells()))]
        said = client.run("python", "-c", IN_TURN, json.dumps(programs), cwd=folder)
    refused, lines, notebook = (text.strip().splitlines() for text in said.split("\f")[:3])
    assert any("there is nothing to pause" in line for line in refused)
    assert lines[-1].startswith("ftjob-")
    # And the notebook measures what its model learned
    assert [line[:8] for line in notebook if line.startswith("step")] == ["step   1", "step   2"]
    assert any(re.fullmatch(r"\d+% before, \d+% after, with ft:tiny:.*first-hour.*", line) for line in notebook), (
        notebook
    )


def cells() -> list[str]:
    """The code of the notebook."""
    return [
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]


def shorter(*programs: str) -> list[str]:
    """Two small steps in place of more, and fewer items to measure with."""
    small = [re.sub(r'"max_steps": \d+', '"max_steps": 2, "batch_size": 4', program) for program in programs]
    return [program.replace("items[:80]", "items[:8]") for program in small]


def check_origin(services: Installed, root: Path) -> None:
    """Nothing is imported from the repository."""
    code = f"import json, sys, {MODULES}; print(json.dumps([sys.path, [m.__file__ for m in ({MODULES})]]))"
    path, files = json.loads(services.run("python", "-c", code, cwd=root))
    assert all(Path(file).is_relative_to(services.folder) for file in files)
    assert str(ROOT) not in path


def train(client: Installed, folder: Path) -> None:
    """Submits a job, watches it, and talks to what it made, from the shell."""
    (folder / "add.jsonl").write_bytes(jsonl(generate("add", 1, 64, "train")))
    options = ["--grader", "string_check:answer", "--hyper", "max_steps=2", "--hyper", "batch_size=4"]
    job = json.loads(client.run("marlaas", "submit", "add.jsonl", *options, "--json", cwd=folder))
    assert "succeeded, step 2/2" in client.run("marlaas", "watch", job["id"], cwd=folder)
    (row,) = json.loads(client.run("marlaas", "jobs", "--json", cwd=folder))
    assert client.run("marlaas", "chat", row["fine_tuned_model"], "add 37+58", cwd=folder).strip().isdigit()
