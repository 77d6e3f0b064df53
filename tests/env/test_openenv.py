"""OpenEnv environments, over the real protocol: sessions, what the model sees and does, and what a server must not do.

Against a server of the real package: MARLAAS_TEST_OPENENV=PYTHON, a Python that has `openenv`; without it a stand-in of ours serves.
"""

import contextlib
import json
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from common.errors import InvalidInput
from common.tasks.environments import OpenEnvArgs, validate_environment
from common.text.tokens import ToolCall
from common.wire.messages import EnvSpec, Failure
from env_service.environment import Turn
from env_service.environments.openenv import OpenEnv, shape_of, shown, shown_result
from env_service.environments.openenv_server import MAX_TOLD, Schemas, Servers, read_servers
from env_service.failures import EnvironmentFailed, NoRoom
from env_service.graders.endpoint import Endpoints
from examples.openenv_job import serving
from harness.redis_server import free_port
from tests.common.test_worker import until
from tests.env.test_env_handler import CELL
from tests.env.test_live_sessions import EnvWorker, live_start

STANDIN = Path(__file__).parents[1] / "support" / "openenv_standin"
ANSWER: dict[str, Any] = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
MOVE: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
}
CALLS_TOOLS: dict[str, Any] = {
    "properties": {
        "type": {"const": "call_tool", "default": "call_tool"},
        "tool_name": {"type": "string"},
        "arguments": {},
    }
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncIterator[str]:
    real = os.environ.get("MARLAAS_TEST_OPENENV")
    async with serving(real or sys.executable, {} if real else {"PYTHONPATH": str(STANDIN)}) as url:
        yield url


@contextlib.asynccontextmanager
async def using(hosts: str = "127.0.0.1", *, named: str = "", **args: Any) -> AsyncGenerator[OpenEnv]:
    servers = Servers(Endpoints(hosts), named)
    yield OpenEnv(OpenEnvArgs(**args), servers)
    await servers.close()


def turn(text: str, index: int = 0, calls: tuple[ToolCall, ...] = (), timeout_s: float = 5.0) -> Turn:
    return Turn(item={}, text=text, index=index, calls=calls, tool_timeout_s=timeout_s)


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def right(question: str) -> str:
    return str(max(map(int, question.removeprefix("max ").split(","))))


@pytest.mark.asyncio(loop_scope="module")
async def test_an_episode_is_a_conversation(url: str) -> None:
    async with using(url=url, system="answer") as environment:
        session = await environment.open({"messages": [{"role": "user", "content": "hello"}]}, seed=7)
        *said, question = session.messages
        assert said == [{"role": "system", "content": "answer"}, {"role": "user", "content": "hello"}]
        first = await session.step(turn(right(question["content"])))
        assert (first.done, first.reward) == (False, 1 / 3)
        second = await session.step(turn("none", 1))
        assert (second.done, second.reward) == (False, 0.0)
        third = await session.step(turn(right(second.messages[0]["content"]), 2))
        assert (third.done, third.reward) == (True, 1 / 3)
        await session.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_sessions_with_the_same_seed_begin_alike_and_do_not_meet(url: str) -> None:
    async with using("", named=f"largest={url}", server="largest") as environment:
        one, two, other = [await environment.open({}, seed) for seed in (7, 7, 8)]
        assert one.messages == two.messages != other.messages
        after = await one.step(turn("5"))
        assert (await two.step(turn("5"))).messages == after.messages
        for session in (one, two, other):
            await session.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_hosts_need_the_operators_leave(url: str) -> None:
    async with using("", url=url) as environment:
        with pytest.raises(EnvironmentFailed, match=r"the operator does not allow the address of 127\.0\.0\.1"):
            await environment.open({}, 1)
    async with using("", named=f"largest={url}", server="largst") as environment:
        with pytest.raises(InvalidInput, match="no OpenEnv server 'largst' here; did you mean 'largest'"):
            await environment.open({}, 1)


# ---- a server that a test writes ------------------------------------------------------------------------------------

Handle = Callable[[ServerConnection], Awaitable[None]]


@contextlib.asynccontextmanager
async def written(handle: Handle, action: dict[str, Any] = ANSWER) -> AsyncGenerator[OpenEnv]:
    """An environment at a server whose side of a session is `handle`."""

    def schema(connection: ServerConnection, request: Any) -> Any:
        if request.path == "/schema":
            return connection.respond(200, json.dumps({"action": action}))
        return None

    async with serve(handle, "127.0.0.1", 0, process_request=schema) as server:
        port = server.sockets[0].getsockname()[1]
        async with using(url=f"http://127.0.0.1:{port}") as environment:
            yield environment


def observation(**fields: Any) -> str:
    data = {"observation": {"text": "go", "metadata": {}}, "reward": None, "done": False, **fields}
    return json.dumps({"type": "observation", "data": data})


def answering(*answers: str) -> Handle:
    async def handle(connection: ServerConnection) -> None:
        for answer in answers:
            with contextlib.suppress(ConnectionClosed):
                await connection.recv()
                await connection.send(answer)
        await connection.wait_closed()

    return handle


async def test_an_action_that_the_server_refuses_is_told_to_the_model() -> None:
    refusal = {"code": "VALIDATION_ERROR", "message": "Invalid message", "errors": [{"loc": ["answer"]}]}
    async with written(
        answering(observation(), json.dumps({"type": "error", "data": refusal}), observation(done=True))
    ) as env:
        session = await env.open({}, 1)
        step = await session.step(turn("?"))
        assert (step.done, step.reward) == (False, None)
        assert step.messages[0]["content"].startswith("error: Invalid message: [{'loc': ['answer']}]")
        assert (await session.step(turn("!", 1))).done
        await session.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            json.dumps({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "boom"}}),
            "the OpenEnv server: boom",
        ),
        (json.dumps({"type": "error", "data": {"message": "x" * 10_000}}), f"the OpenEnv server: x{{{MAX_TOLD}}}$"),
        ("[" * 100_000, "is no observation"),
        ("{}", "is no observation"),
        (observation(reward="much"), "is no observation"),
        (observation(observation={"text": "x" * 70_000}), "has 70000 characters, more than 65536"),
        ("x" * (1 << 19), "the connection to the OpenEnv server broke"),
        (observation(done=True), "is over at its reset"),
    ],
    ids=["raises", "verbose", "deep", "empty", "reward", "long", "huge", "over"],
)
async def test_a_server_that_answers_wrongly_masks_the_trajectory(answer: str, reason: str) -> None:
    async with written(answering(answer)) as env:
        with pytest.raises(EnvironmentFailed, match=reason):
            await env.open({}, 1)


async def test_a_full_server_is_waited_for_in_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("env_service.handler.PUT_BACK_S", 0.01)
    full = json.dumps({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "at capacity"}})

    async def handle(connection: ServerConnection) -> None:
        await connection.send(full)

    async with written(handle) as env:
        worker = EnvWorker("a", openenv=env._servers)  # pyright: ignore[reportPrivateUsage]
        start = live_start("openenv", args={"url": env._args.url}, item={})  # pyright: ignore[reportPrivateUsage]
        # While it is full the Start goes back to the end of the stream, and holds no place
        for _ in range(2):
            [(stream, message)] = await worker.handle(start)
            assert (stream, message) == (CELL.env, start)
            assert worker.handler.waiting.lately() == {
                start.job: "the OpenEnv server has no room for a session: at capacity"
            }
        await until(lambda: len(worker.sessions) == 0)
        # And after a while the trajectory fails
        monkeypatch.setattr("env_service.live.trajectories.WAIT_S", 0.0)
        [(_, scored)] = await worker.handle(start)
        reason = "the OpenEnv server has no room for a session: at capacity"
        assert scored.failure == Failure("infrastructure", reason)


async def test_a_step_has_the_jobs_time_limit() -> None:
    async with written(answering(observation())) as env:
        session = await env.open({}, 1)
        with pytest.raises(EnvironmentFailed, match=r"took longer than 0\.1 seconds for a step"):
            await session.step(turn("?", timeout_s=0.1))
        await session.close()


async def test_a_server_that_refuses_connections_is_waited_for_and_its_address_is_not_told() -> None:
    async with using("", named=f"largest=http://127.0.0.1:{free_port()}", server="largest") as environment:
        with pytest.raises(NoRoom, match=r"^the OpenEnv server cannot be reached: ConnectionRefusedError$"):
            await environment.open({}, 1)
    # Also at a name with several addresses
    async with using("", named=f"largest=http://localhost:{free_port()}", server="largest") as environment:
        with pytest.raises(NoRoom, match="cannot be reached"):
            await environment.open({}, 1)


async def test_a_redirect_is_not_followed() -> None:
    async with written(answering(observation())) as env:
        target = env._args.url  # pyright: ignore[reportPrivateUsage]

        def away(connection: ServerConnection, request: Any) -> Any:
            response = connection.respond(302 if request.path == "/ws" else 200, json.dumps({"action": ANSWER}))
            response.headers["Location"] = f"ws{target.removeprefix('http')}/ws"
            return response

        async with serve(answering(), "127.0.0.1", 0, process_request=away) as server:
            port = server.sockets[0].getsockname()[1]
            async with using(url=f"http://127.0.0.1:{port}") as redirected:
                with pytest.raises(EnvironmentFailed, match="cannot be reached: InvalidStatus 302"):
                    await redirected.open({}, 1)


# ---- actions and observations ---------------------------------------------------------------------------------------


def test_an_action_of_one_text_takes_the_models_text_and_others_are_calls() -> None:
    metadata = {"metadata": {"type": "object"}}
    one = ANSWER | {"properties": ANSWER["properties"] | metadata}
    assert shape_of(Schemas(one)).text_field == "answer"
    optional = {"properties": one["properties"] | {"hint": {"type": "string", "default": ""}}, "required": ["answer"]}
    assert shape_of(Schemas(optional)).text_field == "answer"
    moves = shape_of(Schemas(MOVE | {"properties": MOVE["properties"] | metadata}))
    assert (moves.text_field, moves.tools[0]["function"]["name"]) == ("", "act")
    assert moves.tools[0]["function"]["parameters"] == MOVE
    choice = {"properties": {"way": {"type": "string", "enum": ["left", "right"]}}, "required": ["way"]}
    assert shape_of(Schemas(choice)).tools
    assert shape_of(Schemas(CALLS_TOOLS)).asks_for_tools


async def test_a_call_is_an_action_and_a_turn_without_one_ends_the_episode() -> None:
    asked: list[dict[str, Any]] = []

    async def handle(connection: ServerConnection) -> None:
        async for message in connection:
            asked.append(json.loads(message)["data"])
            await connection.send(observation(reward=0.5, observation={"at": [1, 2], "wall": True}))

    async with written(handle, MOVE) as env:
        session = await env.open({}, 1)
        calls = (call("act", x=1, y=2), call("jump"), call("act", x=3, y=4), *[call("jump")] * 5, call("act", x=5, y=6))
        step = await session.step(turn("", calls=calls))
        assert step.messages[-1]["content"] == "error: too many calls"
        assert asked[1:] == [{"x": 1, "y": 2}, {"x": 3, "y": 4}]
        assert (step.done, step.reward) == (False, 1.0)
        assert [each["content"] for each in step.messages[:3]] == [
            '{"at":[1,2],"wall":true}',
            "error: no tool jump",
            '{"at":[1,2],"wall":true}',
        ]
        last = await session.step(turn("enough", 1))
        assert (last.done, last.reward) == (True, 0)
        await session.close()


async def test_an_environment_of_tools_tells_them_and_takes_their_calls() -> None:
    tool = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
    listed, result = (
        observation(observation={"tools": [tool]}),
        observation(observation={"result": {"data": "a door"}}, reward=1),
    )
    async with written(answering(observation(), listed, result), CALLS_TOOLS) as env:
        session = await env.open({}, 1)
        assert [each["function"]["name"] for each in session.tools] == ["look"]
        step = await session.step(turn("", calls=(call("look"),)))
        assert (step.messages[0]["content"], step.reward) == ("a door", 1.0)
        await session.close()


async def test_tools_beyond_all_bounds_are_refused() -> None:
    tool = {"name": "look", "description": "x" * 70_000, "input_schema": {}}
    async with written(answering(observation(), observation(observation={"tools": [tool]})), CALLS_TOOLS) as env:
        with pytest.raises(EnvironmentFailed, match=r"the OpenEnv server's tools have 70[0-9]* bytes, more than 65536"):
            await env.open({}, 1)


def test_the_model_sees_a_field_the_only_field_or_all_of_them() -> None:
    assert shown({"question": "max 1,2", "metadata": {"answer": 2}}) == "max 1,2"
    assert shown({"board": [1, 2], "turn": "x", "metadata": {}}) == '{"board":[1,2],"turn":"x"}'
    assert shown({"board": [1, 2], "turn": "x"}, "turn") == "x"
    assert shown({"metadata": {}}) == ""
    with pytest.raises(EnvironmentFailed, match="no 'bord'; it has board"):
        shown({"board": 1}, "bord")
    assert shown_result({"result": {"data": 3}}) == "3"
    assert shown_result({"result": None, "error": {"message": "no such tool"}}) == 'error: {"message":"no such tool"}'


def test_a_job_names_one_server() -> None:
    validate_environment(EnvSpec("openenv", {"url": "http://example.org:8000"}))
    for args in ({}, {"url": "http://a", "server": "b"}, {"url": "ftp://a"}, {"sever": "maze"}):
        with pytest.raises(InvalidInput):
            validate_environment(EnvSpec("openenv", args))
    assert read_servers("maze=http://10.0.0.5:8000/, chess=https://x.org") == {
        "maze": "http://10.0.0.5:8000",
        "chess": "https://x.org",
    }
    with pytest.raises(InvalidInput, match="args have 700"):
        validate_environment(EnvSpec("openenv", {"server": "maze", "reset": {"map": "x" * 70_000}}))
    with pytest.raises(InvalidInput, match="MARLAAS_OPENENV_SERVERS: write name="):
        read_servers("http://10.0.0.5")
