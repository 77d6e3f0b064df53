"""Runs `verifiers` environments in the Python environment where they are installed: a program of its own.

It imports `verifiers`, the standard library and, of MARLaaS, only `host_model.py`. An env worker starts it with a socket,
over which both send lines of JSON:

    worker: {"load": {...}}                             first of all; see `Tasksets` and `Environments`
    host:   {"ready": true}  or  {"failed": why}
    worker: {"begin": id, "item": {...}}                a trajectory
    host:   {"asks": id, "tokens": [...]}               its environment asks the model, or
            {"asks": id, "messages": [...], "tools": [...]}
    worker: {"answer": id, "tokens": [...], "logprobs": [...], "text": "...", "calls": [...], "finish": "stop"}
        or  {"refuse": id}                              there is no further turn: the environment scores what there is
    host:   {"ends": id, "reward": 1.0, "parts": {...}}  or  {"fails": id, "why": "..."}
    worker: {"close": id}                               gives a trajectory up

The environment reaches its model by HTTP at a port of its own, as it reaches any: `verifiers.v1` by token ids at
`/inference/v1/generate`, packages with `load_environment` at `/v1/chat/completions`.
"""

import asyncio
import contextlib
import contextvars
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import logging
import math
import os
import pathlib
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any


def load_neighbour(name: str) -> Any:
    """Loads another file of this program, which belongs to no package where it runs."""
    spec: Any = importlib.util.spec_from_file_location(name, pathlib.Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


model = load_neighbour("host_model")
ModelRefused: Any = model.ModelRefused
MAX_SENT_BYTES = 4 * 1024 * 1024
MAX_PARTS = 64
"""Parts of a reward, metrics included."""
GRACE_S = 2.0
"""Seconds that environments have to end what they started once the worker is gone."""
KEY_VARIABLE = "MARLAAS_HOST_API_KEY"
"""Holds this process's key of the model; verifiers gives no harness program a variable of such a name."""
MAX_TASKS = 10_000
"""Tasks of a taskset without an end."""
HELD_OUT_PERIOD = 10
"""One task in so many is held out of a taskset, which has no split of its own."""


class Failed(Exception):
    """The trajectory has no reward; the message says why."""


class Episode:
    """A trajectory, as its environment sees it."""

    def __init__(self, name: str, send: Any) -> None:
        self.name = name
        self._send = send
        self._answer: Any = None
        self.refused = self.closed = False
        self.faults: list[str] = []
        """Faults in spite of which the environment went on."""
        self.traces: list[Any] = []
        """Traces of `verifiers.v1`."""

    async def ask(self, request: "dict[str, Any]") -> "dict[str, Any]":
        """The model's next turn. Raises ModelRefused."""
        if self._answer is not None:
            self.faults.append("the environment asked its model for two completions at once")
            raise ModelRefused(self.faults[-1])
        if not self.refused:
            self._answer = asyncio.get_running_loop().create_future()
            try:
                self._send({"asks": self.name, **request})
                answer = await self._answer
            except ValueError as error:
                self.faults.append(told(f"the environment's request to its model cannot be read: {error}"))
                raise ModelRefused(self.faults[-1]) from error
            finally:
                self._answer = None
            if answer is not None:
                return answer
        self.refused = True
        for trace in self.traces:
            trace.stop("max_turns")  # as at a limit of its own: it is scored as it is
        raise ModelRefused("the prompt exceeds the model's context length: no further turn is allowed")

    def answer(self, answer: "dict[str, Any] | None") -> None:
        """Gives the model's turn; None refuses it."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer)

    def end(self) -> None:
        """Lets go of a request that nobody answers any more."""
        if self._answer is not None:
            self._answer.cancel()


# ------------------------------------------------------------------------------------------------------- two generations


class Tasksets:
    """`verifiers.v1`: a taskset, played by its harness."""

    def __init__(self, load: "dict[str, Any]", url: str) -> None:
        """`load`: `config` (with `taskset`, `agent`), `tokenizer` (a folder), `renderer`. Raises the package's errors."""
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        clients = importlib.import_module("verifiers.v1.clients")
        self._env: Any = loaders.load_environment(loaders.resolve_env_config(load["config"]))
        renderer = {"renderer": load["renderer"]} if load.get("renderer") else {}
        client = clients.TrainClientConfig(
            base_url=f"{url}/v1", api_key_var=KEY_VARIABLE, renderer_model_name=load["tokenizer"], **renderer
        )
        self._context = clients.ModelContext(model=model.MODEL, client=client)
        taskset = self._env.taskset
        tasks = list(taskset if taskset.bounded else itertools.islice(taskset, MAX_TASKS))
        held_out = tasks[::HELD_OUT_PERIOD] if len(tasks) >= 2 * HELD_OUT_PERIOD else tasks
        train = [task for i, task in enumerate(tasks) if i % HELD_OUT_PERIOD] if len(held_out) < len(tasks) else tasks
        self._tasks, self._train, self._held_out = tasks, train, held_out
        self._by_trace: dict[str, Episode] = {}

    def serving(self) -> Any:
        return self._env.serving()

    def episode_of(self, session: str) -> "Episode | None":
        return self._by_trace.get(session)

    async def play(self, episode: Episode, item: "dict[str, Any]") -> "tuple[float, dict[str, float]]":
        def minted(trace: Any) -> None:
            episode.traces.append(trace)
            self._by_trace[trace.id] = episode

        (slot,) = self._env.slots(chosen(item, self._tasks, self._train, self._held_out))
        try:
            played = await self._env.run_slot(slot, self._context, on_trace=minted)
        finally:
            for trace in episode.traces:
                self._by_trace.pop(trace.id, None)
        return self._reward(played)

    def _reward(self, played: Any) -> "tuple[float, dict[str, float]]":
        errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
        if not played.ok:
            raise Failed(told(f"{errors[-1].type}: {errors[-1].message}") if errors else "the episode failed")
        if late := [trace.stop_condition for trace in played.traces if trace.is_timeout]:
            raise Failed(f"a time limit of the environment passed: {late[0]}")
        trained = [trace for trace in played.traces if trace.agent is None or trace.agent.trainable]
        if len(trained) != 1:
            raise Failed(f"the episode has {len(trained)} agents to train; one can be")
        (trace,) = trained
        if not trace.rewards or any(reward is None for reward in trace.rewards.values()):
            raise Failed("the environment gave no reward")
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return trace.reward, {**metrics, **{name: reward.value for name, reward in trace.rewards.items()}}


class Environments:
    """`load_environment(**args) -> vf.Environment`, up to verifiers 0.3."""

    def __init__(self, load: "dict[str, Any]", url: str) -> None:
        """`load`: `environment` (its name), `args`, `key`. Raises the package's errors."""
        verifiers: Any = importlib.import_module("verifiers")
        openai: Any = importlib.import_module("openai")
        self._env: Any = verifiers.load_environment(load["environment"], **load["args"])
        self._old = "gen_sem" in inspect.signature(self._env.run_rollout).parameters
        needs_group = (
            self._env.rubric._get_group_reward_func_names() if self._old else self._env.requires_group_rollouts
        )
        if needs_group:
            raise Failed("its rubric scores the rollouts of a group together; here each is scored alone")
        self._openai: Any = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=load["key"], max_retries=0, timeout=None)
        clients: Any = None if self._old else importlib.import_module("verifiers.clients")
        self._wrapped: Any = clients.OpenAIChatCompletionsClient if clients else _same
        self._train = self._env.get_dataset().to_list() if self._has("dataset") else []
        self._held_out = self._env.get_eval_dataset().to_list() or self._train
        self._train = self._train or self._held_out
        self._playing: dict[str, Episode] = {}
        self._current: contextvars.ContextVar[Episode] = contextvars.ContextVar("episode")
        self._hear_swallowed_errors()

    def _has(self, split: str) -> bool:
        if self._old:
            return getattr(self._env, split) is not None
        return getattr(self._env, split, None) is not None or getattr(self._env, f"{split}_source", None) is not None

    def _hear_swallowed_errors(self) -> None:
        """Rubrics log what a reward function raises, and give 0 for it."""
        hear = _Hearing(self._current)
        for name in ("verifiers", "verifiers.legacy"):
            logging.getLogger(name).addHandler(hear)

    @contextlib.asynccontextmanager
    async def serving(self) -> "AsyncGenerator[None]":
        try:
            yield
        finally:
            await self._env._teardown()

    def episode_of(self, session: str) -> "Episode | None":
        return self._playing.get(session)

    async def play(self, episode: Episode, item: "dict[str, Any]") -> "tuple[float, dict[str, float]]":
        row = dict(chosen(item, self._train, self._train, self._held_out))
        self._current.set(episode)
        self._playing[episode.name] = episode
        client = self._wrapped(self._openai.with_options(default_headers={model.SESSION_HEADER: episode.name}))
        sampling: dict[str, Any] = {}
        try:
            if self._old:
                free = _Free()
                state = await self._env.run_rollout(row, client, model.MODEL, sampling, free, free, score=True)
            else:
                state = await self._env.run_rollout(row, client, model.MODEL, sampling)
        finally:
            self._playing.pop(episode.name, None)
        if state.get("error") is not None:
            raise Failed(_error_of(state["error"]))
        if state.get("stop_condition") == "timeout_reached":
            raise Failed("a time limit of the environment passed")
        return state["reward"], state.get("metrics") or {}


def chosen(item: "dict[str, Any]", tasks: Any, train: Any, held_out: Any) -> Any:
    """The task that an item names, `{"task": place}`, or a drawn one, `{"seed": n, "held_out": false}`. Raises Failed."""
    place: Any = item.get("task")
    if place is None:
        split = held_out if item.get("held_out") else train
        if not split:
            raise Failed("the environment has no tasks")
        return split[item["seed"] % len(split)]
    if not isinstance(place, int) or not 0 <= place < len(tasks):
        raise Failed(f"`task` must be a number from 0 to {len(tasks) - 1}")
    return tasks[place]


def _same(client: Any) -> Any:
    return client


class _Free:
    """A semaphore that lets all pass."""

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...


class _Hearing(logging.Handler):
    def __init__(self, current: "contextvars.ContextVar[Episode]") -> None:
        super().__init__(logging.ERROR)
        self._current = current

    def emit(self, record: logging.LogRecord) -> None:
        episode = self._current.get(None)
        if episode is not None and record.getMessage().startswith(("Error calling reward", "Error calling group")):
            episode.faults.append(told(record.getMessage()))


def _error_of(error: Any) -> str:
    """The first error of a chain, be it one or its report."""
    if isinstance(error, dict):
        return told(str(error.get("error_chain_repr") or error.get("error") or error))
    cause = error
    while getattr(cause, "__cause__", None) is not None:
        cause = cause.__cause__
    of = f" ({told(repr(cause))})" if cause is not error else ""
    return told(f"{type(error).__name__}: {error}{of}")


def told(text: str) -> str:
    """One line of at most 400 characters. Of tracebacks only the line that says what was raised last."""
    before, trace, after = text.rpartition("Traceback (most recent call last):")
    if trace:
        lines = [line for line in after.splitlines() if line.strip()] or [""]
        raised = next((line for line in lines if not line[0].isspace()), lines[-1])
        text = f"{before.partition('Traceback (most')[0][:100]} {raised}"
    return " ".join(text.encode(errors="replace").decode().split())[:400]


# ----------------------------------------------------------------------------------------------------------- the host


class Player:
    """Plays the worker's trajectories until its socket closes."""

    def __init__(self, played: Any, writer: asyncio.StreamWriter) -> None:
        self._played = played
        self._writer = writer
        self._episodes: dict[str, Episode] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def send(self, message: "dict[str, Any]") -> None:
        """Raises ValueError for what the worker would not take: NaN, half a character, too much."""
        line = json.dumps(message, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        if len(line) > MAX_SENT_BYTES:
            raise ValueError(f"it has {len(line)} bytes, more than {MAX_SENT_BYTES}")
        self._writer.write(line)

    async def run(self, reader: asyncio.StreamReader) -> None:
        async with self._played.serving():
            self.send({"ready": True})
            try:
                while line := await reader.readline():
                    self._obey(json.loads(line))
            finally:
                for name, task in self._tasks.items():
                    self._episodes[name].closed = True
                    task.cancel()
                await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _obey(self, order: "dict[str, Any]") -> None:
        if (name := order.get("begin")) is not None:
            episode = self._episodes[name] = Episode(name, self.send)
            task = self._tasks[name] = asyncio.ensure_future(self._play(episode, order["item"]))
            task.add_done_callback(functools.partial(self._forget, episode))
        elif (name := order.get("close")) is not None:
            if task := self._tasks.get(name):
                self._episodes[name].closed = True
                task.cancel()
        elif episode := self._episodes.get(order.get("answer") or order.get("refuse") or ""):
            episode.answer(order if "answer" in order else None)

    async def _play(self, episode: Episode, item: "dict[str, Any]") -> None:
        try:
            reward, parts = await self._played.play(episode, item)
            if episode.faults:
                raise Failed(episode.faults[0])
            self.send({"ends": episode.name, "reward": checked(reward), "parts": finite(parts)})
        except Failed as error:
            self.send({"fails": episode.name, "why": told(str(error))})
        except asyncio.CancelledError:
            if episode.closed:
                raise
            self.send({"fails": episode.name, "why": "CancelledError: nobody cancelled it"})
        except Exception as error:
            self.send({"fails": episode.name, "why": (episode.faults or [told(f"{type(error).__name__}: {error}")])[0]})

    def _forget(self, episode: Episode, played: object) -> None:
        """Called also if it was given up before it began."""
        episode.end()
        del self._episodes[episode.name], self._tasks[episode.name]


def checked(reward: Any) -> float:
    """Raises Failed."""
    if not math.isfinite(reward):
        raise Failed(f"the environment's reward is {reward}")
    return float(reward)


def finite(parts: "dict[str, Any]") -> "dict[str, float]":
    numbers = {str(name): float(value) for name, value in itertools.islice(parts.items(), MAX_PARTS)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


async def serve(channel: socket.socket, played: Any, server: Any) -> None:
    reader, writer = await asyncio.open_connection(sock=channel, limit=model.MAX_BYTES)
    server.loop, server.episode_of = asyncio.get_running_loop(), played.episode_of
    with contextlib.suppress(ConnectionError):
        await Player(played, writer).run(reader)


def end_with_worker() -> None:
    """Ends this process and all it started once the worker is gone, even if the event loop is blocked."""
    worker = os.getppid()

    def watch() -> None:
        while os.getppid() == worker:
            time.sleep(0.5)
        time.sleep(GRACE_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    end_with_worker()
    channel = socket.socket(fileno=int(sys.argv[1]))
    load = json.loads(channel.makefile("rb", buffering=0).readline())["load"]
    resource.setrlimit(resource.RLIMIT_DATA, (load["memory_bytes"], load["memory_bytes"]))
    server = model.ModelServer(load["key"])
    try:
        played: Any = (Tasksets if "config" in load else Environments)(load, server.url)
    except Exception as error:
        logging.exception("the environment cannot be loaded")
        channel.sendall(json.dumps({"failed": told(f"{type(error).__name__}: {error}")}).encode() + b"\n")
        return
    asyncio.run(serve(channel, played, server))


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder, whose names are not the environments'
    main()
