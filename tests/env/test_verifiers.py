"""Packages for `verifiers`, played in a process of their own: what they ask becomes prompts, and turns their answers.

`verifiers` itself is a stand-in here, of what the host uses of it. The real ones: tests/system/test_verifiers_packages.py.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from common.errors import InvalidInput
from common.tasks.environments import makes_items, validate_environment, wants_tools
from common.text.tool_calls import ToolCall
from common.wire.messages import EnvSpec, StopReason, f32
from env_service.environment import Turn
from env_service.failures import EnvironmentFailed, NoRoom
from env_service.verifiers.environment import Verifiers
from env_service.verifiers.host_model import complete, generate
from env_service.verifiers.package_process import Hosts
from tests.env.test_env_handler import TINY, ids_of
from tests.env.test_live_sessions import EnvWorker, live_start

pytestmark = pytest.mark.asyncio(loop_scope="module")

STAND_IN = {
    "verifiers/__init__.py": """
import importlib
def load_environment(name, **args):
    return importlib.import_module(name).load_environment(**args)
""",
    "guess.py": """
import logging, os
NUMBERS = [3, 5, 8]
class Rubric:
    def _get_group_reward_func_names(self):
        return []
class Rows(list):
    def to_list(self):
        return list(self)
class Guess:
    rubric, dataset = Rubric(), True
    def __init__(self, moods):
        self.eval_dataset = None
        self.rows = Rows(
            {"prompt": [{"role": "user", "content": f"guess {n}"}], "answer": n, "mood": mood} for mood in moods for n in NUMBERS
        )
    def get_dataset(self):
        return self.rows
    get_eval_dataset = get_dataset
    async def _teardown(self):
        pass
    async def run_rollout(self, row, client, model, sampling, gen_sem, score_sem, score):
        mood = row["mood"]
        messages, tools = list(row["prompt"]), [{"type": "function", "function": {"name": "look", "parameters": {}}}]
        if mood == "silent":
            return {"reward": 1.0}
        said = []
        try:
            for _ in range(3):
                answer = await client.chat.completions.create(model=model, messages=messages, tools=tools)
                said.append(answer.choices[0].message)
                if mood == "dies":
                    os._exit(3)
                if mood == "raises":
                    raise KeyError("no such room")
                if mood == "explains":
                    trace = "Traceback (most recent call last):\\n  File x, line 1\\nKeyError: 'no such room'\\n"
                    raise RuntimeError(f"the harness ended with 1: {'x' * 500}\\n{trace}{trace}the end")
                if mood == "long":
                    messages.append({"role": "user", "content": "x" * (5 << 20)})
                if mood == "greedy":
                    hoard = bytearray(1 << 30)
                if said[-1].content == str(row["answer"]):
                    break
                messages += [said[-1].model_dump(exclude_none=True), {"role": "user", "content": "no"}]
                if mood == "rewrites":
                    del messages[0]
        except Exception as error:
            if "context length" not in str(error):
                raise
        if mood == "swallows":
            logging.getLogger("verifiers.rubrics.rubric.Rubric").error("Error calling reward function right: oh")
        metrics = {"turns": float(len(said)), "bad": float("inf")}
        if mood == "half a character":
            metrics[chr(0xD800)] = 1.0
        return {"reward": float("nan") if mood == "nan" else float(said[-1].content == str(row["answer"])), "metrics": metrics}
def load_environment(moods=("calm",)):
    if "absent" in moods:
        raise RuntimeError("the data is not there")
    return Guess(moods)
""",
    "verifiers/v1/__init__.py": "",
    "verifiers/v1/utils/__init__.py": "",
    "verifiers/v1/clients.py": """
from types import SimpleNamespace
class TrainClientConfig(SimpleNamespace): pass
class ModelContext(SimpleNamespace): pass
""",
    "verifiers/v1/utils/loaders.py": """
import asyncio, contextlib, json, os
from types import SimpleNamespace as Record
from urllib.error import HTTPError
from urllib.request import Request, urlopen
def resolve_env_config(config):
    return config
class Trace(Record):
    def stop(self, why):
        self.stopped = why
class Echo:
    def __init__(self, config):
        self.times = config["taskset"]["times"]
        self.taskset = type("Tasks", (list,), {"bounded": True})([[1, 2], [3, 4]])
    @contextlib.asynccontextmanager
    async def serving(self):
        yield
    def slots(self, task):
        return [task]
    async def run_slot(self, task, context, on_trace):
        if self.times == "tell variables":
            raise KeyError(" ".join(os.environ))
        config, prompt, said = context.client, list(task), []
        assert config.renderer_model_name.endswith("tiny") and config.renderer == {"name": "default"}
        trace = Trace(id=f"trace {id(prompt)}", errors=[], is_timeout=False, agent=None, metrics={"bad": None}, stopped="")
        on_trace(trace)
        headers = {"X-Session-ID": trace.id, "Authorization": f"Bearer {os.environ[config.api_key_var]}"}
        url = config.base_url.removesuffix("/v1") + "/inference/v1/generate"
        for _ in range(self.times):
            body = json.dumps({"model": context.model, "token_ids": prompt}).encode()
            try:
                reply = await asyncio.to_thread(lambda: urlopen(Request(url, body, headers)).read())
            except HTTPError as error:
                if error.code == 400 and trace.stopped == "max_turns":
                    break
                raise
            choice = json.loads(reply)["choices"][0]
            content = choice["logprobs"]["content"]
            assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
            said.append(sum(entry["logprob"] for entry in content))
            prompt = [*prompt, *choice["token_ids"], 7]
        trace.rewards, trace.reward = {"sum": Record(value=sum(said))}, sum(said)
        return Record(ok=True, errors=[], traces=[trace])
def load_environment(config):
    return Echo(config)
""",
}
"""`guess`, an environment as up to verifiers 0.3, and `Echo`, one as `verifiers.v1` makes them."""


class Guess(Verifiers):
    environment = "guess"
    job_args = ("moods",)


class Moody(Guess):
    """Has a mood in each of its tasks: three tasks for each mood."""

    args = {
        "moods": [
            "calm",
            "silent",
            "rewrites",
            "raises",
            "explains",
            "swallows",
            "nan",
            "half a character",
            "long",
            "greedy",
            "dies",
        ]
    }

    @classmethod
    def task(cls, mood: str, number: int = 0) -> dict[str, int]:
        return {"task": 3 * cls.args["moods"].index(mood) + number}


class Echo(Verifiers):
    taskset = "echo"
    args = {"times": 2}
    job_args = ("times",)
    renderer = {"name": "default"}


@pytest.fixture(scope="module", autouse=True)
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the stand-in."""
    folder = tmp_path_factory.mktemp("packages")
    for name, text in STAND_IN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    Guess.python = Echo.python = str(folder / "python")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hosts() -> AsyncGenerator[Hosts]:
    hosts = Hosts(memory_bytes=1 << 29)
    yield hosts
    await hosts.close()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "operators-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: operators\nVersion: 1\n")
    lines = [f"{cls.__name__.lower()} = {cls.__module__}:{cls.__name__}\n" for cls in (Guess, Echo)]
    (info / "entry_points.txt").write_text(f"[marlaas.environments]\n{''.join(lines)}")
    monkeypatch.syspath_prepend(tmp_path)


def ready(environment: Verifiers, hosts: Hosts) -> Verifiers:
    environment.hosts, environment.base = hosts, TINY
    return environment


def turn(text: str, index: int = 0, *, stop: StopReason = "stop", calls: tuple[ToolCall, ...] = ()) -> Turn:
    tokens = [*text.encode(), 256]
    logprobs = [-0.5 - index] * len(tokens)
    return Turn(item={}, text=text, index=index, tokens=tokens, logprobs=logprobs, stop_reason=stop, calls=calls)


async def question(environment: Verifiers, item: dict[str, Any]) -> str:
    session = await environment.open(item, 0)
    await session.close()
    return str(session.messages[0]["content"])


async def test_an_environment_of_messages_asks_and_scores(hosts: Hosts) -> None:
    guess = ready(Guess(), hosts)
    session = await guess.open({"task": 1}, 0)
    assert session.messages == [{"role": "user", "content": "guess 5"}]
    assert session.tools[0]["function"]["name"] == "look"
    step = await session.step(turn("4"))
    assert not step.done and step.messages == [{"role": "user", "content": "no"}]
    look = ToolCall(name="look", arguments={"at": "it"}, text="look:it")
    step = await session.step(turn("", 1, calls=(look,)))
    assert not step.done and step.messages == [{"role": "user", "content": "no"}], "calls are known again"
    step = await session.step(turn("5", 2))
    assert step.done and step.reward == 1.0 and step.parts == {"turns": 3.0}
    await session.close()


async def test_an_item_names_a_task_or_leaves_it_to_chance(hosts: Hosts) -> None:
    guess = ready(Guess(), hosts)
    assert await question(guess, {"task": 2}) == "guess 8"
    assert {await question(guess, guess.make_item(seed, False)) for seed in range(12)} == {
        "guess 3",
        "guess 5",
        "guess 8",
    }
    with pytest.raises(EnvironmentFailed, match="`task` must be a number from 0 to 2"):
        await guess.open({"task": 3}, 0)
    with pytest.raises(InvalidInput, match="must name one of the environment's tasks"):
        await guess.open({"messages": []}, 0)


async def test_the_last_turn_is_scored_though_the_environment_wants_more(hosts: Hosts) -> None:
    session = await ready(Guess(), hosts).open({"task": 0}, 0)
    assert not (await session.step(turn("9"))).done
    step = await session.end()
    assert step.done and step.reward == 0.0 and step.parts == {"turns": 1.0}


async def test_an_environment_that_never_asks_or_cannot_be_loaded_fails_at_once(hosts: Hosts) -> None:
    with pytest.raises(EnvironmentFailed, match="without asking its model anything"):
        await ready(Moody(), hosts).open(Moody.task("silent"), 0)
    for _ in range(2):
        with pytest.raises(EnvironmentFailed, match="cannot be loaded: RuntimeError: the data is not there"):
            await ready(Guess(moods=["absent"]), hosts).open({"task": 0}, 0)


@pytest.mark.parametrize(
    ("mood", "why"),
    [
        ("rewrites", "does not go on where the model's turn ended"),
        ("raises", "KeyError: 'no such room'"),
        ("explains", r"^RuntimeError: the harness ended with 1: x+ KeyError: 'no such room'$"),
        ("swallows", "Error calling reward function right: oh"),
        ("nan", "the environment's reward is nan"),
        ("half a character", "surrogates not allowed"),
        ("long", "the environment's request to its model cannot be read: it has 5[0-9]* bytes, more than 4194304"),
        ("greedy", "MemoryError"),
        ("dies", "the environment's process ended"),  # the last one: it takes the process of the others with it
    ],
)
async def test_what_goes_wrong_fails_the_trajectory_with_the_reason(hosts: Hosts, mood: str, why: str) -> None:
    guess = ready(Moody(), hosts)
    other = await guess.open(Moody.task("calm", 1), 0)
    for _ in range(2):  # the process goes on, or another one does
        session = await guess.open(Moody.task(mood), 0)
        with pytest.raises(EnvironmentFailed, match=why):
            await session.step(turn("3" if mood in ("swallows", "nan", "half a character") else "4"))
        await session.close()
    # Then the other trajectories of that process are still heard
    with pytest.raises(EnvironmentFailed) as told:
        await other.end()
    assert ("process ended" in str(told.value)) == (mood == "dies")
    await other.close()


async def test_an_interpreter_that_is_not_there_is_named(hosts: Hosts, tmp_path: Path) -> None:
    class Nowhere(Guess):
        python = str(tmp_path / "nowhere")

    with pytest.raises(EnvironmentFailed, match="interpreter cannot be started"):
        await ready(Nowhere(), hosts).open({"task": 0}, 0)


async def test_jobs_give_no_arguments_but_those_that_the_operator_opens(installed: None) -> None:
    validate_environment(EnvSpec("guess", {"moods": ["calm"]}))
    assert makes_items(EnvSpec("guess", {})) and not wants_tools(EnvSpec("guess", {}))
    with pytest.raises(InvalidInput, match="unknown field 'task'"):
        validate_environment(EnvSpec("guess", {"task": {"rewards": {"right": {"fn": "os:system"}}}}))
    with pytest.raises(InvalidInput, match="args have 70012 bytes, more than 65536"):
        validate_environment(EnvSpec("guess", {"moods": "x" * 70_000}))
    with pytest.raises(InvalidInput, match="one of them"):
        Verifiers()


async def test_processes_are_bounded_and_idle_ones_make_room() -> None:
    hosts = Hosts(most=1)
    session = await ready(Echo(times=1), hosts).open({"task": 0}, 0)
    with pytest.raises(NoRoom, match="all at work"):
        await ready(Echo(times=2), hosts).open({"task": 0}, 0)
    await session.close()
    session = await ready(Echo(times=2), hosts).open({"task": 0}, 0)
    assert session.tokens == [1, 2]
    await hosts.close()


async def test_a_package_sees_no_secrets_of_the_worker(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "REDIS_PASSWORD", "MARLAAS_REDIS_URL", "JUDGE_KEY", "HF_HOME"):
        monkeypatch.setenv(name, "x")

    class Judged(Echo):
        variables = ("JUDGE_KEY",)

    with pytest.raises(EnvironmentFailed) as told:
        await ready(Judged(times="tell variables"), hosts).open({"task": 0}, 0)
    names = set(str(told.value).split("'")[1].split())
    assert names >= {"PATH", "JUDGE_KEY", "HF_HOME"}
    assert not names & {"AWS_SECRET_ACCESS_KEY", "REDIS_PASSWORD", "MARLAAS_REDIS_URL"}


async def test_a_package_ends_with_its_worker(python: Path, tmp_path: Path) -> None:
    # Given a worker that is killed while a package loads, and hears nothing
    (tmp_path / "verifiers.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)")
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}:{python.parent} exec {sys.executable} "$@" >{tmp_path}/pid\n')
    wrapper.chmod(0o755)
    script = f"""
import asyncio
from env_service.verifiers.package_process import Hosts
asyncio.run(Hosts().begin({str(wrapper)!r}, {{"environment": "guess", "args": {{}}}}, {{"task": 0}}))
"""
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    async with asyncio.timeout(60):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            await asyncio.sleep(0.05)
        pid = int((tmp_path / "pid").read_text())
        worker.kill()
        await worker.wait()
        while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
            await asyncio.sleep(0.05)


async def test_an_environment_of_tokens_goes_on_where_the_turn_ended(hosts: Hosts) -> None:
    session = await ready(Echo(), hosts).open({"task": 1}, 0)
    assert session.tokens == [3, 4] and not session.messages
    step = await session.step(turn("ab"))
    assert step.tokens == [7] and not step.done
    step = await session.step(turn("c", 1))
    assert step.done and step.reward == pytest.approx(3 * -0.5 + 2 * -1.5) and step.parts == {"sum": step.reward}


async def test_the_last_turn_of_an_environment_of_tokens_is_scored(hosts: Hosts) -> None:
    session = await ready(Echo(), hosts).open({"seed": 5, "held_out": True}, 0)
    assert not (await session.step(turn("ab"))).done
    assert (await session.end()).reward == -1.5


async def test_what_is_trained_is_what_was_sampled_also_after_a_replay(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an operator's package of tokens, and two env workers
    monkeypatch.setattr(Echo, "args", {"times": 3})
    first, second = EnvWorker("a"), EnvWorker("b")
    # When the second one gets the second turn
    request = await first.first(live_start("echo", args={}, item={"task": 1}))
    request = await first.turn(request, "ab", logprobs=f32([-0.25, -0.125, -0.5]))
    request = await second.turn(request, "c", logprobs=f32([-1.0, -2.0]))
    scored = await second.turn(request, "d", logprobs=f32([-4.0, -8.0]))
    # Then all tokens and log-probs are those of the turns, and the environment has seen the same
    turns = [ids_of(f"{text}<|end|>") for text in ("ab", "c", "d")]
    assert scored.tokens.numpy().tolist() == [3, 4, *turns[0], 7, *turns[1], 7, *turns[2]]
    assert scored.logprobs.numpy().tolist() == [0, 0, -0.25, -0.125, -0.5, 0, -1.0, -2.0, 0, -4.0, -8.0]
    assert scored.written.numpy().tolist() == [0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1]
    assert (scored.reward, scored.failure) == (-15.875, None)
    for worker in (first, second):
        await worker.sessions.close()
        await worker.environments.close()


async def test_samples_of_a_job_follow_no_grammar() -> None:
    def ask(_: Any) -> dict[str, Any]:
        return {"text": "7", "tokens": [55], "logprobs": [0.0], "calls": [], "finish": "stop"}

    form, named = {"type": "json_object"}, {"type": "function", "function": {"name": "look"}}
    asked: list[dict[str, Any]] = [{"response_format": form}, {"tool_choice": "required"}, {"tool_choice": named}]
    for body in asked:
        with pytest.raises(ValueError, match="a job's samples follow no grammar: leave out response_format"):
            complete({"messages": [], **body}, ask)
    with pytest.raises(ValueError, match="structured_outputs"):
        generate({"token_ids": [1], "sampling_params": {"structured_outputs": {"json": {}}}}, ask)
    free = {"messages": [], "tool_choice": "auto", "response_format": {"type": "text"}}
    assert complete(free, ask)["choices"][0]["message"]["content"] == "7"
