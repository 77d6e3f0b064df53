"""The unmodified `tinker` SDK against a whole cluster of real processes."""

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from common.objects import Objects
from manager_service.local.supervisor import LocalCluster
from manager_service.runs.records import run_of
from tests.common.test_worker import until
from tests.support.forked import running
from tests.support.tinker_sdk import VERSION, run_sdk, sdk_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
LOOP = Path(__file__).resolve().parents[2] / "examples" / "tinker_loop.py"
TENANT = "default"

HEAD = """
import json, tinker
from tinker import types
service = tinker.ServiceClient()
def datum(n):
    tokens = [(7 * n + i) % 200 for i in range(12)]
    inputs = {"target_tokens": tokens[1:] + [0], "weights": [1.0] * 12}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
"""
STEPS = 6
TRAIN = (
    HEAD
    + f"""
client = service.create_lora_training_client("tiny", rank=8, seed=3).result()
for step in range({STEPS}):
    for part in range(3):
        client.forward_backward([datum(3 * step + part)], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
kept = client.save_state("end").result().path
print(json.dumps(kept))
"""
)


async def versions_are(cluster: LocalCluster, path: str, expected: set[int]) -> bool:
    """Are the files of these versions of a run there, and no others? `path`: of one of its checkpoints."""
    run = run_of(path.removeprefix("tinker://").partition("/")[0])
    found = await Objects.open((cluster.data_dir / "store").as_uri()).paths(f"adapters/{TENANT}/{run}")
    return {int(file.split("/")[3]) for file in found if file.endswith(".safetensors")} == expected


async def sdk(cluster: LocalCluster, program: str) -> Any:
    return await run_sdk(program, url=cluster.base_url, key=cluster.api_key)


async def test_the_loop_that_ships_raises_the_reward(tmp_path: Path) -> None:
    async with running(tmp_path) as (cluster, _):
        variables = {
            "TINKER_BASE_URL": cluster.base_url,
            "TINKER_API_KEY": f"tml-{cluster.api_key}",
            "PATH": os.environ["PATH"],
        }
        process = await asyncio.create_subprocess_exec(sdk_python(VERSION), LOOP, "--steps", "12", env=variables)
        assert await process.wait() == 0


async def test_a_runs_version_is_chatted_with_and_gone_on_from(tmp_path: Path) -> None:
    """One store of versions: of a run by `openai` and by a job, of a job by a run. What nobody names is deleted."""
    async with running(tmp_path) as (cluster, api):
        path = await sdk(cluster, TRAIN)
        asked: Any = [{"role": "user", "content": "add 37+58"}]
        async with AsyncOpenAI(base_url=f"{cluster.base_url}/v1", api_key=cluster.api_key) as client:
            answer = await client.chat.completions.create(model=path, messages=asked, max_tokens=8)
        assert re.fullmatch(rf"run-[0-9a-f]{{16}}-0@{STEPS}", answer.system_fingerprint or "")
        job = await api.submit("add", model=path, max_steps=2, batch_size=2, group_size=2)
        (done,) = await api.until_done(job)
        assert done["status"] == "succeeded", done["error"]
        went_on = await sdk(
            cluster,
            HEAD
            + f"""
client = service.create_training_client_from_state("tinker://{job}/sampler_weights/2").result()
def stepped():
    client.forward_backward([datum(1)], "cross_entropy")
    return client.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics["version"]
first = stepped()
client.load_state("{path}").result()
print(json.dumps([first, stepped()]))
""",
        )
        assert went_on == [1, 3]
        await until(lambda: versions_are(cluster, path, {STEPS - 1, STEPS}), seconds=90)
