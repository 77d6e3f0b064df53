"""Real packages for real versions of `verifiers`, unmodified: learned from, and played as they play themselves."""

import asyncio
import contextlib
import json
import re
import zlib
from collections.abc import AsyncGenerator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from env_service.environment import Turn
from env_service.failures import EnvironmentFailed
from env_service.verifiers.environment import Verifiers
from env_service.verifiers.process import Hosts
from examples import verifiers_addition as addition
from examples.three_turns import client_of, learn
from harness.live import Api, is_balanced
from manager_service.local.supervisor import LocalCluster
from tests.env.test_env_handler import TINY, TOKENIZER, ids_of
from tests.support.forked import running
from tests.support.verifiers_python import model_by_script, plain, run, verifiers_python, with_packages, without_torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
NUM_TASKS = 6
NUM_STARTED = 3
FAULTY_TASK = 19
NUM_EVALUATED = 16
HYPER = addition.HYPER | {"batch_size": 8, "target_reward": 0.75}

TAGGED = """
import verifiers as vf
from datasets import Dataset
def load_environment():
    parser = vf.XMLParser(["answer"], answer_field="answer")
    def right(completion, answer, **kwargs):
        if answer == "21":
            raise KeyError("no such answer")
        return float(parser.parse_answer(completion) == answer)
    terms = [(n, 7 * n % 5, 3 * n % 4) for n in range(20)]
    rows = [{"question": f"State the result: {a} + {b} - {c}", "answer": str(a + b - c)} for a, b, c in terms]
    rubric = vf.Rubric(funcs=[right, parser.get_format_reward_func()], weights=[1.0, 0.2], parser=parser)
    system = "Answer in this form: <answer>number</answer>"
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), system_prompt=system, parser=parser, rubric=rubric)
"""
"""An environment with a system prompt, a parser and a reward for the form. One raises for the last task: verifiers logs it and counts 0."""

OWN_ROLLOUTS_FIRST = """
import asyncio, json, logging, pathlib, runpy, sys
import openai, verifiers as vf
told_in, url, name, num = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
env = vf.load_environment(name)
client = openai.AsyncOpenAI(base_url=url, api_key="any")
if hasattr(env, "requires_group_rollouts"):
    from verifiers.clients import OpenAIChatCompletionsClient
    client = OpenAIChatCompletionsClient(client)
rows = env.get_dataset().to_list()[:num]
made = asyncio.run(env.generate(rows, client=client, model="m"))
if "outputs" in made:
    told = [[row["prompt"], row["completion"], row["reward"], row["metrics"]] for row in made["outputs"]]
else:
    metrics = [{key: values[i] for key, values in made["metrics"].items()} for i in range(num)]
    told = [list(row) for row in zip(made["prompt"], made["completion"], made["reward"], metrics)]
def plain(value):
    return value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value
told_in.write_text(json.dumps(told, default=plain))
sys.argv = sys.argv[5:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Tells of the package's own rollouts, then runs the program that it is given in the same process: imports take it five seconds."""


def said(messages: list[dict[str, Any]]) -> str:
    """The sum that the last message asks for, or, as often, something else."""
    question = messages[-1]["content"]
    (terms,) = re.findall(r"\d+(?: ?[+-] ?\d+)+", question)
    right = sum(int(term.replace(" ", "")) for term in re.findall(r"[+-]? ?\d+", terms))
    told = right if zlib.crc32(question.encode()) % 2 else "many"
    return f"<answer>\n{told}\n</answer>" if "<answer>" in json.dumps(messages) else str(told)


async def played(environment: Verifiers, task: int) -> tuple[list[dict[str, Any]], Any, float, dict[str, float]]:
    """Its prompt, the tokens of it, and what the trajectory is worth, with the model of the script."""
    session = await environment.open({"task": task}, 0)
    messages: Any = session.messages
    if session.tokens:
        text = TOKENIZER.decode(list(session.tokens), skip_special=False)
        messages = [{"role": "user", "content": re.findall(r"<\|user\|>(.*?)<\|end\|>", text)[-1]}]
    answer = said(messages)
    tokens = ids_of(f"{answer}<|end|>")
    step = await session.step(Turn(item={}, text=answer, tokens=tokens, logprobs=[-0.5] * len(tokens)))
    assert step.done and step.reward is not None
    await session.close()
    return messages, session.tokens, step.reward, dict(step.parts)


@contextlib.asynccontextmanager
async def hosted(environment: Verifiers) -> AsyncGenerator[Verifiers]:
    environment.hosts, environment.base = Hosts(), TINY
    yield environment
    await environment.hosts.close()


async def same_as_its_own(environment: Verifiers, own: list[Any]) -> list[float]:
    """Compares trajectories with the package's own rollouts: prompt, completion, reward, metrics. Returns the rewards."""
    rewards: list[float] = []
    for task, (prompt, completion, reward, metrics) in enumerate(own):
        messages, tokens, got, parts = await played(environment, task)
        assert plain(messages) == plain(prompt) and plain(completion) == [("assistant", said(prompt))]
        assert list(tokens) == (TOKENIZER.render(prompt) if environment.taskset else [])
        assert (got, parts) == (reward, metrics)
        rewards.append(got)
    return rewards


@pytest.mark.parametrize("version", ["0.3.1", "0.1.9"])
async def test_a_package_of_load_environment_is_played_as_it_plays_itself(tmp_path: Path, version: str) -> None:
    (tmp_path / "tagged.py").write_text(TAGGED)
    (tmp_path / "own_first.py").write_text(OWN_ROLLOUTS_FIRST)
    told = tmp_path / "own.json"
    with model_by_script(said) as url:
        first = [str(tmp_path / "own_first.py"), str(told), url, "tagged", str(NUM_TASKS)]

        class Package(Verifiers):
            python = str(with_packages(tmp_path, verifiers_python(version), tmp_path, *first))
            environment = "tagged"

        async with hosted(Package()) as package:
            with pytest.raises(EnvironmentFailed, match="Error calling reward function right"):  # no reward of 0
                await played(package, FAULTY_TASK)
            own = json.loads(told.read_text())
            assert len(own) == NUM_TASKS
            assert 0 < fmean(await same_as_its_own(package, own)) < 1


async def test_a_package_of_v1_is_played_as_it_plays_itself(tmp_path: Path) -> None:
    """Plays by `null`, verifiers' own harness, which starts a program for each trajectory, by uv."""
    python = without_torch(verifiers_python("0.4.0", "uv"))
    interpreter = with_packages(tmp_path, python, addition.PACKAGES / addition.NEW)
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}

    class Package(Verifiers):
        python = str(interpreter)
        taskset = "addition"
        env = {"agent": agent}

    words = f"""{python}/bin/vf-eval addition -n {NUM_STARTED} -m m --no-push --no-rich -o out
        --env.agent.harness.id null --env.agent.runtime.type subprocess --client.api-key-var MODEL_KEY"""
    with model_by_script(said) as url:
        await run(interpreter, *words.split(), "--client.base-url", url, cwd=tmp_path)
    (traces,) = tmp_path.glob("out/*/traces.jsonl")
    episodes = [json.loads(line) for line in traces.read_text().splitlines()]
    own = [_own(episode["traces"][0]) for episode in sorted(episodes, key=lambda each: each["task"]["data"]["idx"])]
    async with hosted(Package()) as package:
        assert 0 < fmean(await same_as_its_own(package, own)) < 1


def _own(trace: Any) -> tuple[Any, Any, float, dict[str, float]]:
    messages = [node["message"] for node in trace["nodes"]]
    rewards = {name: reward["score"] * reward["weight"] for name, reward in trace["rewards"].items()}
    return messages[:-1], messages[-1:], sum(rewards.values()), {**trace["metrics"], **rewards}


async def own_evaluation(python: Path, interpreter: Path, model: str, cluster: LocalCluster, folder: Path) -> float:
    """The mean reward of verifiers' own command line, whose TrainClient samples tokens from this service."""
    words = f"""{python}/bin/vf-eval addition -n {NUM_EVALUATED} -m {model} --no-push --no-rich -o evaluated
        --env.agent.runtime.type subprocess --sampling.temperature 0 --sampling.max-tokens 8
        --client.type train --client.renderer-model-name {TINY} --client.api-key-var MODEL_KEY
        --client.base-url {cluster.base_url}/v1"""
    await run(interpreter, *words.split(), cwd=folder, key=cluster.api_key)
    (traces,) = folder.glob("evaluated/*/traces.jsonl")
    episodes = [json.loads(line) for line in traces.read_text().splitlines()]
    assert len(episodes) == NUM_EVALUATED and all(episode["ok"] for episode in episodes)
    nodes = [node for episode in episodes for node in episode["traces"][0]["nodes"] if node["sampled"]]
    assert all(node["token_ids"][-1] == 256 and len(node["logprobs"]) == sum(node["mask"]) for node in nodes)
    return fmean(episode["traces"][0]["rewards"]["right"]["score"] for episode in episodes)


async def test_packages_that_know_verifiers_alone_are_learned_from(tmp_path: Path) -> None:
    python = without_torch(verifiers_python("0.4.0", "uv"))
    interpreter = with_packages(tmp_path, python, addition.PACKAGES / addition.NEW)
    older = with_packages(tmp_path, verifiers_python("0.3.1"), addition.PACKAGES / addition.OLD)
    environment = addition.opened(tmp_path / "installed", {addition.NEW: interpreter, addition.OLD: older})
    async with running(tmp_path / "data", environment=environment) as (cluster, api), client_of(cluster) as client:
        rewards, _ = await asyncio.gather(
            learn(client, environment=addition.environment(addition.NEW), hyper=HYPER),
            learn(client, environment=addition.environment(addition.OLD), hyper=HYPER | {"max_steps": 2}),
        )
        jobs = (await api.get("/fine_tuning/jobs"))["data"]
        named = {job["method"]["reinforcement"]["environment"]["name"]: job for job in jobs}
        new, old = named[addition.NEW], named[addition.OLD]
        assert rewards[0] < 0.75 and new["stopped_early"] == "target_reward", rewards
        model = f"{new['fine_tuned_model']}@{new['version']}"
        assert await own_evaluation(python, interpreter, model, cluster, tmp_path) >= 0.8
        assert await failed_of(api, new["id"]) == 0
        assert await failed_of(api, old["id"]) <= 20, "verifiers 0.3 calls an empty answer an error"
        for job in (new, old):
            await rewards_are_of_what_was_sampled(api, job["id"])


async def failed_of(api: Api, job: str) -> int:
    """The trajectories of a job that failed; all others were trained on."""
    ledger = await api.ledger(job)
    assert is_balanced(ledger) and ledger["trained"] + ledger["failed"] == ledger["issued"]
    return ledger["failed"]


async def rewards_are_of_what_was_sampled(api: Api, job: str) -> None:
    """Does the package's reward fit the answer, to the question that was shown?"""
    lines = (await api.http.get(f"/fine_tuning/jobs/{job}/samples", params={"format": "jsonl"})).text.splitlines()
    samples = [sample for line in lines if (sample := json.loads(line))["turns"] and not sample["failure"]]
    for sample in samples:
        question = TOKENIZER.decode(sample["written"]["tokens"][: sample["written"]["lengths"][0]])
        a, b = map(int, re.findall(r"\d+", question))
        assert sample["reward"] == float(sample["text"] == str(a + b)) == sample["reward_parts"]["right"]
    assert samples
