"""The unmodified `tinker` SDK against a whole cluster of real processes.

A tour is made with the newest version alone unless `MARLAAS_TEST_SDKS` names others; `make tinker-sdks` goes through all that are
promised.
"""

import asyncio
import os
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI

from common.store.objects import Objects
from harness.live import Api
from manager_service.launcher.supervisor import LocalCluster
from manager_service.records.run_records import run_of
from tests.common.test_worker import until
from tests.support.forked import running
from tests.support.tinker_sdk import VERSION, run_sdk, sdk_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420), pytest.mark.asyncio(loop_scope="module")]
SDKS = os.environ.get("MARLAAS_TEST_SDKS", VERSION).split(",")
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
STEPS = 4
TRAIN = (
    HEAD
    + f"""
client = service.create_lora_training_client("tiny", rank=8, seed=3).result()
for step in range({STEPS}):
    for part in range(2):
        client.forward_backward([datum(2 * step + part)], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
kept = client.save_state("end").result().path
print(json.dumps(kept))
"""
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[tuple[LocalCluster, Api]]:
    """One cluster for all."""
    folder: Path = tmp_path_factory.mktemp("cluster")
    async with running(folder) as started:
        yield started


@pytest.fixture
def cluster(service: tuple[LocalCluster, Api]) -> LocalCluster:
    return service[0]


async def versions_are(cluster: LocalCluster, path: str, expected: set[int]) -> bool:
    """Are the files of these versions of a run there, and no others? `path`: of one of its checkpoints."""
    run = run_of(path.removeprefix("tinker://").partition("/")[0])
    found = await Objects.open((cluster.data_dir / "store").as_uri()).paths(f"adapters/{TENANT}/{run}")
    return {int(file.split("/")[3]) for file in found if file.endswith(".safetensors")} == expected


async def sdk(cluster: LocalCluster, program: str) -> Any:
    return await run_sdk(program, url=cluster.base_url, key=cluster.api_key)


async def test_the_loop_that_ships_raises_the_reward(cluster: LocalCluster) -> None:
    variables = {
        "TINKER_BASE_URL": cluster.base_url,
        "TINKER_API_KEY": f"tml-{cluster.api_key}",
        "PATH": os.environ["PATH"],
    }
    process = await asyncio.create_subprocess_exec(sdk_python(VERSION), LOOP, "--steps", "12", env=variables)
    assert await process.wait() == 0


async def test_a_runs_version_is_chatted_with_and_gone_on_from(service: tuple[LocalCluster, Api]) -> None:
    """One store of versions: of a run by `openai` and by a job, of a job by a run. What nobody names is deleted."""
    cluster, api = service
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


# ---- several versions of the SDK -------------------------------------------------------------------------------------

TOUR = """
import json, typing, tinker
from tinker import types
def done(found):                       # what older ones give at once is a future in newer ones
    return found.result() if hasattr(found, "result") else found
def told(make):
    try:
        return str(done(make()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
def datum(n, **inputs):
    tokens = [(7 * n + i) % 200 for i in range(12)]
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": tokens[1:] + [0], **inputs})
service = tinker.ServiceClient()
client = done(service.create_lora_training_client("tiny", rank=8, seed=3))
ones = types.TensorData(data=[1.0] * 12, dtype="float32", shape=[12])
steps, policy = [], {"logprobs": [-1.0] * 12, "advantages": [1.0] * 12}
known = typing.get_args(types.LossFnType)
for loss, inputs in [("cross_entropy", {"weights": [1.0] * 12}), ("importance_sampling", policy), ("ppo", policy), ("cispo", policy),
                     ("dro", policy), ("gspo", {**policy, "sequence_ratio_mask": ones})]:
    if loss not in known:
        continue
    gradient, update = client.forward_backward([datum(1, **inputs), datum(2, **inputs)], loss), \
        client.optim_step(types.AdamParams(learning_rate=1e-3))
    found = gradient.result()
    steps.append([loss, found.metrics["loss:sum"], len(found.loss_fn_outputs[1]["logprobs"].tolist()), update.result().metrics["version"]])
before = done(client.forward([datum(1)], "cross_entropy")).loss_fn_outputs[0]["logprobs"].tolist()
state = done(client.save_state("tour")).path
again = done(service.create_training_client_from_state(state))
after = done(again.forward([datum(1)], "cross_entropy")).loss_fn_outputs[0]["logprobs"].tolist()
sampler = done(client.save_weights_and_get_sampling_client("tour"))
prompt = types.ModelInput.from_ints([259, *b"add 37+58", 256, 260])
how = types.SamplingParams(max_tokens=8, seed=5, temperature=0.7, top_k=50, stop=[256])
samples = [[list(s.tokens) for s in done(sampler.sample(prompt, 3, how)).sequences] for _ in range(2)]
base = done(service.create_sampling_client(base_model="tiny"))
scored = done(base.compute_logprobs(prompt))
saved = done(client.save_weights_for_sampler("kept")).path
by_path = done(done(service.create_sampling_client(model_path=saved)).sample(prompt, 1, types.SamplingParams(max_tokens=4)))
rest = service.create_rest_client()
print(json.dumps({
    "models": [model.model_name for model in done(service.get_server_capabilities()).supported_models],
    "rank": done(client.get_info()).model_data.model_name, "steps": steps, "before": before, "after": after, "samples": samples,
    "reasons": [s.stop_reason for s in by_path.sequences], "scored": scored,
    "checkpoints": [row.checkpoint_id for row in done(rest.list_checkpoints(client.model_id)).checkpoints],
    "lacks": told(lambda: client.forward_backward([datum(3)], "ppo")),
    "failed_step": told(lambda: client.optim_step(types.AdamParams())),
    "nameless": told(lambda: service.create_training_client_from_state(f"tinker://{client.model_id}/weights/nobody")),
    "too_wide": told(lambda: service.create_lora_training_client("tiny", rank=4096)),
    "next": client.forward_backward([datum(3)], "cross_entropy").result().metrics["loss:sum"] > 0}))
"""

OWN_LOSS = """
import json, sys
sys.path.append({packages!r})                   # torch, which the SDK's own environment lacks
import tinker, torch
from tinker import types
service, weights = tinker.ServiceClient(), [0.0, 2.0, -1.0, 0.5] * 3
def datum(n, **inputs):
    tokens = [(7 * n + i) % 200 for i in range(12)]
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={{"target_tokens": tokens[1:] + [0], **inputs}})
def own(data, logprobs):
    return -sum((torch.tensor(weights) * each).sum() for each in logprobs), {{"own:mean": float(len(data))}}
def norms(passed):
    client = service.create_lora_training_client("tiny", rank=8, seed=3).result()
    steps = [(passed(client, step), client.optim_step(types.AdamParams(learning_rate=1e-3))) for step in range(2)]
    return [[gradient.result().metrics, update.result().metrics["grad_norm"]] for gradient, update in steps]
print(json.dumps([
    norms(lambda client, step: client.forward_backward_custom([datum(step), datum(step + 1)], own)),
    norms(lambda client, step: client.forward_backward([datum(n, weights=weights) for n in (step, step + 1)], "cross_entropy"))]))
"""


@pytest.mark.parametrize("version", SDKS)
async def test_an_sdk_does_the_tour(cluster: LocalCluster, version: str) -> None:
    told: Any = await run_sdk(TOUR, url=cluster.base_url, key=cluster.api_key, version=version)
    assert "tiny" in told["models"]
    losses = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"][: len(told["steps"])]
    assert len(losses) >= 5, "older SDKs know all but gspo"
    assert [(name, length, number) for name, _, length, number in told["steps"]] == [
        (name, 12, number) for number, name in enumerate(losses, 1)
    ]
    assert told["after"] == pytest.approx(told["before"], abs=1e-4), "a run from a checkpoint begins at its weights"
    first, second = told["samples"]
    assert first == second and len(first) == 3, "equal seeds give equal tokens"
    assert told["reasons"][0] in ("length", "stop")
    assert told["scored"][0] is None and all(value < 0 for value in told["scored"][1:])
    assert {"weights/tour", "sampler_weights/kept"} <= set(told["checkpoints"])
    assert "lacks 'logprobs'" in told["lacks"] and "gradient is not whole" in told["failed_step"]
    assert "there is no" in told["nameless"] and "rank" in told["too_wide"] and told["next"]


async def test_a_loss_of_ones_own_has_the_gradient_that_the_service_has_for_it(cluster: LocalCluster) -> None:
    """The client asks for log-probs, computes its loss, and sends back what each position weighs, with steps behind it already sent."""
    packages = str(Path(torch.__file__).parents[1])
    own, known = await run_sdk(OWN_LOSS.format(packages=packages), url=cluster.base_url, key=cluster.api_key)
    for (metrics, norm), (due, due_norm) in zip(own, known, strict=True):
        assert norm == pytest.approx(due_norm, rel=1e-4) and norm > 0
        assert metrics["loss:sum"] == pytest.approx(due["loss:sum"], rel=1e-4)
        assert metrics["own:mean"] == 2
