"""`marlaas env`, and a package that is installed while the service runs: on a cluster of real processes."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from harness.live import Api
from manager_service.local.supervisor import LocalCluster
from tests.support.forked import running
from tests.support.installed import ROOT

pytestmark = pytest.mark.slow
MODULE = """
from env_service.environment import Step

class Late:
    def __init__(self, flaw=""):
        self.flaw = flaw

    def make_item(self, seed, held_out):
        return {"number": seed % 7}

    def reset(self, item, seed):
        if self.flaw == "reset":
            raise RuntimeError("no board")
        return {"number": item["number"]}, [{"role": "user", "content": f"echo {item['number']}"}]

    async def step(self, state, turn):
        if self.flaw == "some" and state["number"] == 3:
            raise RuntimeError("no three")
        return Step(state=state, done=True, reward=0.5)
"""


def install(folder: Path) -> None:
    """The files that pip leaves."""
    (info := folder / "late-1.2.dist-info").mkdir(parents=True)
    (folder / "late_module.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[marlaas.environments]\nlate = late_module:Late\n")


async def marlaas(cluster: LocalCluster, *words: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command."""
    variables = {**os.environ, "MARLAAS_URL": cluster.base_url, "MARLAAS_API_KEY": cluster.api_key, "COLUMNS": "120"}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "marlaas_client.cli.main", *words, cwd=ROOT, env=variables, stdout=pipe, stderr=pipe
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def number_left(api: Api) -> list[int]:
    """Files, and tuned models."""
    models = (await api.get("/models"))["data"]
    return [len((await api.get("/files"))["data"]), sum(model["id"].startswith("ft:") for model in models)]


@pytest.mark.timeout(300)
async def test_an_environment_is_installed_and_checked_while_the_service_runs(tmp_path: Path) -> None:
    folder = tmp_path / "installed"
    async with running(tmp_path / "data", environment={"PYTHONPATH": str(folder)}) as (cluster, api):
        # Given workers that have looked for modules
        status, said, told = await marlaas(cluster, "env", "check", "calculator", "--hyper", "max_tokens=32")
        assert (status, said.count("[prompt]")) == (0, 10), told
        assert "10 items, 20 trajectories: mean reward" in said
        assert "unknown environment 'late'" in (await marlaas(cluster, "env", "check", "late"))[2]
        elsewhere = '{"url": "http://127.0.0.1:9"}'
        assert "MARLAAS_OPENENV_HOSTS" in (await marlaas(cluster, "env", "check", "openenv", "--args", elsewhere))[2]
        # When a package is installed
        install(folder)
        # Then it can be used
        assert "late 1.2" in (await marlaas(cluster, "env", "list"))[1]
        (items := tmp_path / "items.jsonl").write_text(
            "".join(f'{{"prompt": "go", "number": {n}}}\n' for n in range(4))
        )
        status, said, told = await marlaas(cluster, "env", "check", "late", str(items), "--json")
        played = [json.loads(line) for line in said.splitlines()]
        assert (status, len(played)) == (0, 20), told
        assert {(one["version"], one["reward"]) for one in played} == {(0, 0.5)}, "the base model played"
        # And what is wrong with it ends in an error
        status, _, told = await marlaas(cluster, "env", "check", "late", "--args", '{"flaw": "reset"}')
        assert status == 1 and "the environment late does not work" in told and "RuntimeError: no board" in told
        status, said, told = await marlaas(cluster, "env", "check", "late", str(items), "--args", '{"flaw": "some"}')
        assert status == 1 and "RuntimeError: no three" in told and "RuntimeError: no three" in said
        assert await number_left(api) == [0, 0]
