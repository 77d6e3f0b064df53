"""Environments and graders that are not the service's own, through all services, on one cluster of real processes.

What they reward is computed again here, from what was sampled. That rewards are learned from: test_e2e.py.
"""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from common.tasks.skills import generate
from examples import verifiers_addition as addition
from examples.openenv_job import serving
from examples.simulated_user import NUM_TURNS
from examples.three_turns import ENVIRONMENT, client_of, learn
from harness.live import Api, is_balanced, jsonl
from manager_service.launcher.supervisor import LocalCluster
from marlaas_client.cli.main import make_app
from tests.env.test_env_handler import TINY, TOKENIZER
from tests.support.forked import running
from tests.support.verifiers_python import model_by_script, verifiers_python, with_packages, without_torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="module")]
STANDIN = Path(__file__).parents[1] / "support" / "openenv_standin"
NUM_EVALUATED = 8
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

BY_NULL = 'env = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}'
"""verifiers' own harness, which starts a program for each trajectory, by uv; that of the package asks in its own process."""

OWN_EVALUATION_BESIDE = """
import json, os, pathlib, runpy, sys
import transformers
from verifiers.v1.cli.eval.main import main
folder = pathlib.Path(sys.argv[1])
if os.fork() == 0:
    words, os.environ["MODEL_KEY"] = json.loads((folder / "evaluation.json").read_text())
    try:
        main(words)
    finally:
        (folder / "evaluated").touch()
        os._exit(0)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs the program that it is given, and verifiers' own command line in a fork of it: imports take them five seconds."""

LETTER_E: dict[str, Any] = {
    "type": "score_model",
    "name": "letters",
    "model": "tiny",
    "input": [{"role": "user", "content": "count e in {{sample.output_text}}"}],
    "range": [0, 9],
}

JUDGED: dict[str, Any] = {
    "type": "score_model",
    "name": "judge",
    "model": "judge",
    "input": [{"role": "user", "content": "{{item.question}} -> {{sample.output_text}}"}],
}


def judge(messages: list[dict[str, Any]]) -> str:
    """Alone knows what is right."""
    question, _, answer = messages[-1]["content"].partition(" -> ")
    return str(int(is_sum(question, answer)))


def is_sum(question: str, answer: str) -> bool:
    return answer == str(sum(map(int, re.findall(r"\d+", question))))


@dataclass
class World:
    cluster: LocalCluster
    api: Api
    folder: Path
    judge_url: str

    async def train(self, how: Mapping[str, Any], items: Sequence[Any] = (), **hyper: Any) -> tuple[Any, list[Any]]:
        """A job on an environment or a grader, and its samples."""
        method = {"type": "reinforcement", "reinforcement": {**how, "hyperparameters": {"max_tokens": 8, **hyper}}}
        body: dict[str, Any] = {"model": "tiny", "method": method, "seed": 7}
        if items:
            body["training_file"] = await self.api.upload("items.jsonl", jsonl(items))
        (job,) = await self.api.until_done((await self.api.post("/fine_tuning/jobs", body))["id"], seconds=600)
        assert job["status"] == "succeeded", job["error"]
        return job, await self.samples(job)

    async def samples(self, job: Any) -> list[Any]:
        """Samples that have a reward; all others are failures."""
        path = f"/fine_tuning/jobs/{job['id']}/samples"
        lines = (await self.api.http.get(path, params={"format": "jsonl"})).text.splitlines()
        samples = [sample for line in lines if (sample := json.loads(line))["reward"] is not None]
        assert samples
        return samples

    async def failed(self, job: Any) -> int:
        """The trajectories that failed; all others were trained on."""
        ledger = await self.api.ledger(job["id"])
        assert is_balanced(ledger) and ledger["trained"] + ledger["failed"] == ledger["issued"], ledger
        return ledger["failed"]

    async def usage(self, job: Any) -> Any:
        return await self.api.get(f"/fine_tuning/jobs/{job['id']}/usage")

    async def marlaas(self, *words: str) -> tuple[int, str, str]:
        """Exit status, output and error of a command."""
        variables = {"MARLAAS_URL": self.cluster.base_url, "MARLAAS_API_KEY": self.cluster.api_key, "COLUMNS": "120"}
        ended = await asyncio.to_thread(CliRunner().invoke, make_app(), words, env=variables)
        return ended.exit_code, ended.stdout, f"{ended.stderr}{ended.exception or ''}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[World]:
    """A cluster whose operator opens to jobs packages for both generations of verifiers, a user, an OpenEnv server and a judge elsewhere;
    and has a folder for packages, where there is none yet."""
    folder = tmp_path_factory.mktemp("world")
    async with serving(sys.executable, {"PYTHONPATH": str(STANDIN)}) as openenv:
        hosts = {"MARLAAS_GRADER_HOSTS": "127.0.0.1", "MARLAAS_OPENENV_SERVERS": f"largest={openenv}"}
        settings = opened(folder) | hosts
        with model_by_script(judge) as url:
            async with running(folder / "data", environment=settings) as (cluster, api):
                yield World(cluster, api, folder, url)


def opened(folder: Path) -> dict[str, str]:
    (folder / "own_evaluation_beside.py").write_text(OWN_EVALUATION_BESIDE)
    python = without_torch(verifiers_python("0.4.0", "uv"))
    beside = [str(folder / "own_evaluation_beside.py"), str(folder)]
    pythons = {
        addition.NEW: with_packages(folder, python, addition.PACKAGES / addition.NEW, *beside),
        addition.OLD: with_packages(folder, verifiers_python("0.3.1"), addition.PACKAGES / addition.OLD),
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(addition.WORDS[addition.NEW], "more", BY_NULL)
        settings = addition.opened(folder / "opened", pythons)
    with next((folder / "opened").glob("*/entry_points.txt")).open("a") as lines:
        lines.write("\nsimulated_user = examples.simulated_user:SimulatedUser\n")
    return {"PYTHONPATH": f"{folder / 'late'}{os.pathsep}{settings['PYTHONPATH']}"}


def install(folder: Path) -> None:
    """The files that pip leaves."""
    (info := folder / "late-1.2.dist-info").mkdir(parents=True)
    (folder / "late_module.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[marlaas.environments]\nlate = late_module:Late\n")


async def number_left(api: Api) -> list[int]:
    """Files, and tuned models."""
    models = (await api.get("/models"))["data"]
    return [len((await api.get("/files"))["data"]), sum(model["id"].startswith("ft:") for model in models)]


async def test_an_environment_is_installed_and_checked_while_the_service_runs(world: World, tmp_path: Path) -> None:
    before = await number_left(world.api)
    # Given workers that have looked for modules
    status, said, told = await world.marlaas("env", "check", "calculator", "--hyper", "max_tokens=32")
    assert (status, said.count("[prompt]")) == (0, 10), told
    assert "10 items, 20 trajectories: mean reward" in said
    assert "unknown environment 'late'" in (await world.marlaas("env", "check", "late"))[2]
    elsewhere = '{"url": "http://127.0.0.1:9"}'
    assert "MARLAAS_OPENENV_HOSTS" in (await world.marlaas("env", "check", "openenv", "--args", elsewhere))[2]
    # When a package is installed
    install(world.folder / "late")
    # Then it can be used
    assert "late 1.2" in (await world.marlaas("env", "list"))[1]
    (items := tmp_path / "items.jsonl").write_text("".join(f'{{"prompt": "go", "number": {n}}}\n' for n in range(4)))
    status, said, told = await world.marlaas("env", "check", "late", str(items), "--json")
    played = [json.loads(line) for line in said.splitlines()]
    assert (status, len(played)) == (0, 20), told
    assert {(one["version"], one["reward"]) for one in played} == {(0, 0.5)}, "the base model played"
    # And what is wrong with it ends in an error
    status, _, told = await world.marlaas("env", "check", "late", "--args", '{"flaw": "reset"}')
    assert status == 1 and "the environment late does not work" in told and "RuntimeError: no board" in told
    status, said, told = await world.marlaas("env", "check", "late", str(items), "--args", '{"flaw": "some"}')
    assert status == 1 and "RuntimeError: no three" in told and "RuntimeError: no three" in said
    assert await number_left(world.api) == before


@pytest.mark.parametrize(
    "environment", [ENVIRONMENT, {"name": "openenv", "args": {"server": "largest"}}], ids=["a user", "openenv"]
)
async def test_who_goes_on_talking_hears_three_answers_and_rewards_each(world: World, environment: Any) -> None:
    hyper = {"max_tokens": 8, "batch_size": 4, "group_size": 4, "max_steps": 2}
    async with client_of(world.cluster) as client:
        rewards = await learn(client, seed=7, environment=environment, hyper=hyper)
    job = (await world.api.get("/fine_tuning/jobs"))["data"][0]
    samples = await world.samples(job)
    assert len(rewards) == 2 and await world.failed(job) == 0
    assert job["method"]["reinforcement"]["environment"]["name"] == environment["name"]
    talks = [(sample["turns"], sample["reward"]) for sample in samples if sample["turns"]]  # not all tokens are kept
    assert [reward for _, reward in talks] == pytest.approx([earned(turns) for turns, _ in talks])
    assert 0 < fmean(reward for _, reward in talks) < 1


def earned(turns: list[Any]) -> float:
    """Also asserts that it was asked for the largest of the model's own answer and new numbers."""
    answers = [turn["text"].removesuffix("<|end|>") for turn in turns if turn["by"] == "model"]
    asked = [re.findall(r"max ([\d,]+)", turn["text"])[-1] for turn in turns if turn["by"] != "model"]
    numbers = [list(map(int, question.split(","))) for question in asked]
    assert len(answers) == len(numbers) == NUM_TURNS, turns
    for answer, own, following in zip(answers, numbers, numbers[1:], strict=False):
        assert following[0] == (int(answer) if re.fullmatch(r"[0-9]{1,2}", answer) else max(own)), turns
    right = [answer == str(max(own)) for answer, own in zip(answers, numbers, strict=True)]
    return sum(right) / NUM_TURNS


async def test_packages_that_know_verifiers_alone_reward_what_was_sampled(world: World) -> None:
    """And verifiers' own command line plays the same tasks, by its TrainClient, which samples tokens from this service."""
    words = f"""addition -n {NUM_EVALUATED} -m tiny --no-push --no-rich -o {world.folder}/evaluation
        --env.agent.runtime.type subprocess --sampling.temperature 0 --sampling.max-tokens 8
        --client.type train --client.renderer-model-name {TINY} --client.api-key-var MODEL_KEY
        --client.base-url {world.cluster.base_url}/v1"""
    (world.folder / "evaluation.json").write_text(json.dumps([words.split(), world.cluster.api_key]))
    tasks = [{"messages": [{"role": "user", "content": "not shown"}], "task": task} for task in range(NUM_EVALUATED)]
    new, old = [{"environment": addition.environment(name)} for name in (addition.NEW, addition.OLD)]
    (job, samples), (old_job, old_samples) = await asyncio.gather(
        world.train(new, tasks, batch_size=1, group_size=2, max_steps=1),
        world.train(old, tasks, batch_size=2, group_size=4, max_steps=1),
    )
    assert await world.failed(job) == 0
    assert await world.failed(old_job) <= 4, "verifiers 0.3 calls an empty answer an error"
    own = await own_evaluation(world.folder)
    for sample in [*samples, *old_samples]:
        prompt, answer = prompt_of(sample), sample["text"]
        assert prompt in [TOKENIZER.render(prompt) for prompt, _, _ in own]
        right = float(is_sum(TOKENIZER.decode(prompt), answer))
        assert sample["reward"] == right
        assert sample["reward_parts"].items() >= {"right": right, "length": len(answer)}.items()
    for prompt, answer, parts in own:
        assert parts == {"right": is_sum(prompt[-1]["content"], answer), "length": len(answer)}
    assert fmean(parts["right"] for _, _, parts in own) > 0.5


def prompt_of(sample: Any) -> list[int]:
    return sample["written"]["tokens"][: sample["written"]["lengths"][0]]


async def own_evaluation(folder: Path) -> list[tuple[list[Any], str, dict[str, float]]]:
    """The prompt, the answer and what it is worth, of each task that verifiers played itself."""
    while not (folder / "evaluated").exists():
        await asyncio.sleep(0.1)
    (traces,) = folder.glob("evaluation/*/traces.jsonl")
    episodes = [json.loads(line) for line in traces.read_text().splitlines()]
    assert len(episodes) == NUM_EVALUATED and all(episode["ok"] for episode in episodes)
    return [_own(episode["traces"][0]) for episode in episodes]


def _own(trace: Any) -> tuple[list[Any], str, dict[str, float]]:
    *asked, said = trace["nodes"]
    assert said["sampled"] and said["token_ids"][-1] == 256 and len(said["logprobs"]) == sum(said["mask"])
    parts = {name: reward["score"] * reward["weight"] for name, reward in trace["rewards"].items()}
    return [node["message"] for node in asked], said["message"]["content"], {**trace["metrics"], **parts}


async def test_a_judge_elsewhere_grades_the_answers_of_a_job(world: World) -> None:
    asked = [row["messages"] for row in generate("add", 1, 16)]
    items = [{"messages": messages, "question": messages[0]["content"]} for messages in asked]
    grader = JUDGED | {"url": world.judge_url}
    job, samples = await world.train({"grader": grader}, items, batch_size=4, group_size=4, max_steps=2)
    assert await world.failed(job) == 0
    for sample in samples:
        assert sample["reward"] == float(is_sum(sample["prompt"], sample["text"])), sample
    assert 0 < fmean(sample["reward"] for sample in samples) < 1
    assert (await world.usage(job))["grader_tokens"] == 2 * 2 * 16, "each call reads one token and writes one"


async def test_a_base_model_and_a_tuned_one_grade_the_answers_of_jobs(world: World) -> None:
    items = generate("reverse", 1, 64)
    hyper = {"group_size": 4, "max_steps": 1, "max_tokens": 16}
    job, samples = await world.train({"grader": LETTER_E}, items, batch_size=8, **hyper)
    assert fmean(sample["reward"] == sample["text"].count("e") for sample in samples) > 0.8, samples
    assert max(sample["reward"] for sample in samples) >= 1
    # a prompt of the job has at most 17 tokens, and a question to the grader's model as many at least
    assert (await world.usage(job))["prompt_tokens"] > 32 * 28
    tried = {"grader": LETTER_E, "model_sample": "eee", "item": {}}
    assert (await world.api.post("/fine_tuning/alpha/graders/run", tried))["reward"] == 3.0
    both = {"tuned": LETTER_E | {"model": job["fine_tuned_model"]}, "plain": LETTER_E}
    multi = {"type": "multi", "name": "both", "graders": both, "calculate_output": "plain + 0 * tuned"}
    again, samples = await world.train({"grader": multi}, items, batch_size=2, **hyper)
    assert all(set(sample["reward_parts"]) == {"plain", "tuned"} for sample in samples), samples
    assert all(sorted(one["grader"] for one in sample["verdicts"]) == ["plain", "tuned"] for sample in samples), samples
    assert all(sample["text"] in one["prompt"] for sample in samples for one in sample["verdicts"]), samples
    assert await world.failed(job) == await world.failed(again) == 0
