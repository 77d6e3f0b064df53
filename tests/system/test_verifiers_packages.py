"""Real packages of `load_environment` for real versions of `verifiers`, unmodified: played as they play themselves.

Those of `verifiers.v1`, and both through all services: test_environments.py.
"""

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
from env_service.verifiers.package_process import Hosts
from tests.env.test_env_handler import TINY, ids_of
from tests.support.verifiers_python import model_by_script, plain, verifiers_python, with_packages

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NUM_TASKS = 6
FAULTY_TASK = 19

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


async def played(environment: Verifiers, task: int) -> tuple[list[dict[str, Any]], float, dict[str, float]]:
    """Its prompt, and what the trajectory is worth, with the model of the script."""
    session = await environment.open({"task": task}, 0)
    messages: Any = session.messages
    answer = said(messages)
    tokens = ids_of(f"{answer}<|end|>")
    step = await session.step(Turn(item={}, text=answer, tokens=tokens, logprobs=[-0.5] * len(tokens)))
    assert step.done and step.reward is not None
    await session.close()
    return messages, step.reward, dict(step.parts)


@contextlib.asynccontextmanager
async def hosted(environment: Verifiers) -> AsyncGenerator[Verifiers]:
    environment.hosts, environment.base = Hosts(), TINY
    yield environment
    await environment.hosts.close()


async def same_as_its_own(environment: Verifiers, own: list[Any]) -> list[float]:
    """Compares trajectories with the package's own rollouts: prompt, completion, reward, metrics. Returns the rewards."""
    rewards: list[float] = []
    for task, (prompt, completion, reward, metrics) in enumerate(own):
        messages, got, parts = await played(environment, task)
        assert plain(messages) == plain(prompt) and plain(completion) == [("assistant", said(prompt))]
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
