"""Real packages for real versions of `verifiers`, unmodified: learned from, and played as they play themselves."""

import json
import re
import zlib
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
from harness.live import is_balanced
from manager_service.local.supervisor import LocalCluster
from tests.env.test_env_handler import TINY, TOKENIZER, ids_of
from tests.support.forked import running
from tests.support.verifiers_python import model_by_script, plain, run, verifiers_python, with_packages

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
NUM_TASKS = 6
NUM_EVALUATED = 16
HYPER = addition.HYPER | {"batch_size": 8, "target_reward": 0.75}

TAGGED = """
import verifiers as vf
from datasets import Dataset
def load_environment():
    parser = vf.XMLParser(["answer"], answer_field="answer")
    def right(completion, answer, **kwargs):
        return float(parser.parse_answer(completion) == answer)
    terms = [(n, 7 * n % 5, 3 * n % 4) for n in range(20)]
    rows = [{"question": f"State the result: {a} + {b} - {c}", "answer": str(a + b - c)} for a, b, c in terms]
    rubric = vf.Rubric(funcs=[right, parser.get_format_reward_func()], weights=[1.0, 0.2], parser=parser)
    system = "Answer in this form: <answer>number</answer>"
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), system_prompt=system, parser=parser, rubric=rubric)
"""
"""An environment with a system prompt, a parser and a reward for the form."""

FAULTY = """
import verifiers as vf
from datasets import Dataset
def right(completion, answer, **kwargs):
    raise KeyError("no such answer")
def load_environment():
    return vf.SingleTurnEnv(dataset=Dataset.from_list([{"question": "add 1+1", "answer": "2"}]), rubric=vf.Rubric(funcs=[right]))
"""
"""verifiers logs what a reward raises, and counts 0."""

OWN_ROLLOUTS = """
import asyncio, json, logging, sys
import openai, verifiers as vf
logging.disable(logging.CRITICAL)
url, name, num = sys.argv[1], sys.argv[2], int(sys.argv[3])
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
print(json.dumps(told, default=plain))
"""


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


async def same_as_its_own(environment: Verifiers, own: list[Any]) -> list[float]:
    """Compares trajectories with the package's own rollouts: prompt, completion, reward, metrics. Returns the rewards."""
    environment.hosts, environment.base = Hosts(), TINY
    rewards: list[float] = []
    for task, (prompt, completion, reward, metrics) in enumerate(own):
        messages, tokens, got, parts = await played(environment, task)
        assert plain(messages) == plain(prompt) and plain(completion) == [("assistant", said(prompt))]
        assert list(tokens) == (TOKENIZER.render(prompt) if environment.taskset else [])
        assert (got, parts) == (reward, metrics)
        rewards.append(got)
    await environment.hosts.close()
    return rewards


@pytest.mark.parametrize(("version", "name"), [("0.3.1", "addition"), ("0.1.9", "tagged")])
async def test_a_package_of_load_environment_is_played_as_it_plays_itself(
    tmp_path: Path, version: str, name: str
) -> None:
    (tmp_path / "tagged.py").write_text(TAGGED)
    packages = addition.PACKAGES / "addition_v0" if name == "addition" else tmp_path
    interpreter = with_packages(tmp_path, verifiers_python(version), packages)

    class Package(Verifiers):
        python = str(interpreter)
        environment = name

    with model_by_script(said) as url:
        own = json.loads(await run(interpreter, "-c", OWN_ROLLOUTS, url, name, str(NUM_TASKS), cwd=tmp_path))
    assert len(own) == NUM_TASKS
    assert 0 < fmean(await same_as_its_own(Package(), own)) < 1


@pytest.mark.parametrize("version", ["0.3.1", "0.1.9"])
async def test_a_reward_that_raises_is_no_reward_of_0(tmp_path: Path, version: str) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)

    class Package(Verifiers):
        python = str(with_packages(tmp_path, verifiers_python(version), tmp_path))
        environment = "faulty"

    environment = Package()
    environment.hosts, environment.base = Hosts(), TINY
    with pytest.raises(EnvironmentFailed, match="Error calling reward function right"):
        await played(environment, 0)
    await environment.hosts.close()


@pytest.mark.parametrize("harness", ["addition", "null"])
async def test_a_package_of_v1_is_played_as_it_plays_itself(tmp_path: Path, harness: str) -> None:
    """`null` is verifiers' own harness: it starts a program for each trajectory, by uv."""
    python = verifiers_python("0.4.0", "uv")
    interpreter = with_packages(tmp_path, python, addition.PACKAGES / "addition_v1")
    agent = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}

    class Package(Verifiers):
        python = str(interpreter)
        taskset = "addition"
        env = {"agent": agent}

    words = f"""{python}/bin/vf-eval addition -n {NUM_TASKS} -m m --no-push --no-rich -o out
        --env.agent.harness.id {harness} --env.agent.runtime.type subprocess --client.api-key-var MODEL_KEY"""
    with model_by_script(said) as url:
        await run(interpreter, *words.split(), "--client.base-url", url, cwd=tmp_path)
    (traces,) = tmp_path.glob("out/*/traces.jsonl")
    episodes = [json.loads(line) for line in traces.read_text().splitlines()]
    own = [_own(episode["traces"][0]) for episode in sorted(episodes, key=lambda each: each["task"]["data"]["idx"])]
    assert 0 < fmean(await same_as_its_own(Package(), own)) < 1


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


@pytest.mark.parametrize("old", [False, True], ids=["v1", "load_environment"])
async def test_a_package_that_knows_verifiers_alone_is_learned_from(tmp_path: Path, old: bool) -> None:
    name, version = ("addition_v0", "0.3.1") if old else ("addition_v1", "0.4.0")
    python = verifiers_python(version) if old else verifiers_python(version, "uv")
    interpreter = with_packages(tmp_path, python, addition.PACKAGES / name)
    environment = addition.opened(tmp_path / "installed", interpreter, old=old)
    async with running(tmp_path / "data", environment=environment) as (cluster, api), client_of(cluster) as client:
        rewards = await learn(client, environment=addition.ENVIRONMENT, hyper=HYPER)
        (job,) = (await api.get("/fine_tuning/jobs"))["data"]
        ledger = await api.ledger(job["id"])
        path = f"/fine_tuning/jobs/{job['id']}/samples"
        lines = (await api.http.get(path, params={"format": "jsonl"})).text.splitlines()
        if not old:
            model = f"{job['fine_tuned_model']}@{job['version']}"
            assert await own_evaluation(python, interpreter, model, cluster, tmp_path) >= 0.8
    assert rewards[0] < 0.75 and job["stopped_early"] == "target_reward", rewards
    assert is_balanced(ledger) and ledger["trained"] + ledger["failed"] == ledger["issued"]
    assert ledger["failed"] <= (20 if old else 0), "verifiers 0.3 calls an empty answer an error"
    samples = [sample for line in lines if (sample := json.loads(line))["turns"] and not sample["failure"]]
    for sample in samples:  # the package's reward is that of what was sampled, for the question that was shown
        question = TOKENIZER.decode(sample["written"]["tokens"][: sample["written"]["lengths"][0]])
        a, b = map(int, re.findall(r"\d+", question))
        assert sample["reward"] == float(sample["text"] == str(a + b)) == sample["reward_parts"]["right"]
    assert samples
