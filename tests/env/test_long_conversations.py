"""Long conversations are rendered and read beside the event loop, and charged for it."""

import asyncio
import json
import operator
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from common.text.tokens import ChatTokenizer
from common.wire.messages import TurnRequest
from env_service import work
from env_service.environments.catalogue import Catalogue
from env_service.graders.endpoint import Endpoints
from env_service.graders.runner import GraderRunner
from env_service.graders.text import TextComparer
from env_service.handler import EnvHandler
from env_service.live.sessions import Sessions
from env_service.sandbox.sandbox import Sandbox
from tests.common.test_worker import until
from tests.env.test_env_handler import CELL, TINY, TOKENIZER, single
from tests.env.test_long_texts import longest_stop

LONG = "What is 347*86? The quick brown fox says no.\n" * 8_000
QUESTION = {"messages": [{"role": "user", "content": LONG}], "answer": "29842"}
PART = 1 / 2
"""A part of the work's own CPU time; the loop's thread had all of it, or half where the work was done in two pieces."""


@pytest.fixture(scope="module")
def handler(tmp_path_factory: pytest.TempPathFactory) -> EnvHandler:
    """A handler of a base model with a context of a million tokens."""
    folder = tmp_path_factory.mktemp("base")
    for file in (*TINY.glob("*.json"), *TINY.glob("*.jinja")):
        shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 1 << 20}
    (folder / "config.json").write_text(json.dumps(config))
    return handler_of(ChatTokenizer.load(folder))


def handler_of(tokenizer: ChatTokenizer) -> EnvHandler:
    sandbox = Sandbox()
    graders = GraderRunner(sandbox=sandbox, endpoints=Endpoints(""), text_comparer=TextComparer(), timeout_s=20.0)
    return EnvHandler(
        cell=CELL,
        tokenizer=tokenizer,
        environments=Catalogue(graders=graders, sandbox=sandbox),
        sessions=Sessions("env-0"),
    )


async def handled(handler: EnvHandler, message: Any) -> tuple[Any, float]:
    """The message that the handler makes of this one, and the most CPU time that the loop's thread spent on it at once."""
    made: list[Any] = []

    async def handle() -> None:
        made.extend(message for _, message in await handler(message, lambda: None))

    stop_s = await longest_stop(handle())
    return made[0], stop_s


def cpu_s(function: Callable[[], object]) -> float:
    began = time.thread_time()
    function()
    return time.thread_time() - began


async def test_a_long_prompt_is_rendered_beside_the_loop(handler: EnvHandler) -> None:
    own_s = cpu_s(lambda: TOKENIZER.render(QUESTION["messages"]))  # pyright: ignore[reportArgumentType]
    request, stop_s = await handled(handler, single(item=QUESTION))
    assert isinstance(request, TurnRequest) and len(request.tokens) > 250_000
    assert stop_s < PART * own_s
    assert request.usage.env_s > PART * own_s, "the thread's time is charged"


async def test_long_texts_of_one_tenant_keep_no_other_waiting() -> None:
    # Given as many calls of one tenant as there could be threads, and none that ends
    threads, release, begun, beats = work.Threads(2), threading.Event(), list[str](), list[int]()

    async def call(tenant: str, function: Callable[[], object]) -> None:
        number = len(beats)
        beats.append(0)
        work.begin(lambda: operator.setitem(beats, number, beats[number] + 1), tenant)
        await threads.run(lambda: (begun.append(tenant), function()))

    waiting = [asyncio.create_task(call("greedy", release.wait)) for _ in range(40)]
    try:
        await until(lambda: len(begun) == 2)
        # When another asks, it is served while they run
        await asyncio.wait_for(asyncio.create_task(call("other", lambda: None)), 60)
        assert begun == ["greedy", "greedy", "other"]
        # And those that wait are not taken over meanwhile
        await until(lambda: all(beats[:-1]))
    finally:
        release.set()
        await asyncio.gather(*waiting)
