"""Graders of long texts stop no one else's work: they run in helper processes, and a `multi` has one limit for all of it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import pytest
import pytest_asyncio

from common.cancellation import running
from common.tasks.graders import validate_grader
from env_service.failures import GraderFailed
from env_service.graders.attempt import Attempt
from env_service.graders.endpoint import Endpoints
from env_service.graders.runner import GraderRunner
from env_service.graders.text import TextComparer
from env_service.sandbox.sandbox import Sandbox

pytestmark = [pytest.mark.asyncio(loop_scope="module")]

LISTS = "[" + "[]," * 1_000_000 + "[]]"
PYTHON = {"type": "python", "source": "def grade(sample, item):\n    return float(len(sample['output_json']))"}
ENDPOINT = {"type": "endpoint", "url": "http://127.0.0.1:9/"}
LONG = "The answer is 3. " * 3000
MOST_S = 0.3
"""CPU time of the loop's thread without a break: several times what it takes, far less than what it took."""


def multi(part: dict[str, Any], num: int = 20) -> dict[str, Any]:
    return {"type": "multi", "graders": {f"g{i}": part for i in range(num)}, "calculate_output": "g0"}


def check(operation: str, times: int = 1) -> dict[str, Any]:
    text = "{{item.answer}}" * times
    return {"type": "string_check", "operation": operation, "input": text, "reference": text}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def given() -> AsyncGenerator[GraderRunner]:
    """One for many tests, for each of its helper processes takes a second to start."""
    async with runner(60) as made:
        yield made


@contextlib.asynccontextmanager
async def runner(timeout_s: float) -> AsyncGenerator[GraderRunner]:
    comparer, endpoints = TextComparer(), Endpoints("127.0.0.1")
    yield GraderRunner(sandbox=Sandbox(), endpoints=endpoints, text_comparer=comparer, timeout_s=timeout_s)
    await comparer.close()
    await endpoints.close()


def graded(given: GraderRunner, grader: dict[str, Any], text: str, answer: Any) -> Coroutine[Any, Any, float]:
    """Grades; the grader is checked before, as at a job's creation."""
    valid = validate_grader(grader)

    async def grade() -> float:
        return (await given.grade(valid, Attempt({"answer": answer}, text), key="k")).reward

    return grade()


async def longest_stop(work: Coroutine[Any, Any, Any]) -> float:
    """The most CPU time that the loop's thread spent at once while it did this work."""
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            longest = max(longest, time.thread_time() - before)

    async with running(watch()):
        await asyncio.sleep(0)  # it has begun to watch
        await work
        await asyncio.sleep(0.002)  # it has seen the end
    return longest


@pytest.mark.parametrize(
    ("grader", "text", "answer"),
    [
        ({"type": "math"}, LONG, LONG),
        (multi({"type": "math"}, num=2), LONG, LONG),
        (multi(check("ilike", times=20)), "", "\u0390" * 50_000),
        (multi(check("eq")), "", [[1]] * 40_000),
        (multi(check("eq", times=4000)), "", ""),
        (PYTHON, LISTS, ""),
        (ENDPOINT, LISTS, ""),
    ],
    ids=["math", "multi-math", "ilike", "lists", "variables", "python", "endpoint"],
)
async def test_no_grader_of_texts_stops_the_loop(
    given: GraderRunner, grader: dict[str, Any], text: str, answer: Any
) -> None:
    async def grade() -> None:
        with contextlib.suppress(GraderFailed):  # nobody answers at the endpoint
            await graded(given, grader, text, answer)

    assert await longest_stop(grade()) < MOST_S


async def test_the_graders_of_a_multi_share_one_limit() -> None:
    slow = {"type": "python", "source": "import time\ndef grade(s, i):\n    time.sleep(0.5)\n    return 1.0"}
    async with runner(2) as hasty:
        with pytest.raises(GraderFailed, match="longer than"):
            await graded(hasty, multi(slow), "", "")


async def test_a_cancelled_multi_ends_at_once_and_frees_its_place(given: GraderRunner) -> None:
    task = asyncio.create_task(graded(given, multi({"type": "math"}), LONG, LONG))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await graded(given, {"type": "math"}, LONG[:6000], "3") == 1.0


@pytest.mark.parametrize("text", ["3", LONG[:6000]])
async def test_a_long_text_has_the_reward_of_a_short_one(given: GraderRunner, text: str) -> None:
    assert await graded(given, {"type": "math"}, text, "3") == 1.0
    assert await graded(given, {"type": "math"}, text, "4") == 0.0
    assert await graded(given, check("ilike") | {"input": "{{sample.output_text}}"}, text, "3") == 1.0
    with pytest.raises(GraderFailed, match="math: the reference is empty"):
        await graded(given, {"type": "math"}, text, "")
    with pytest.raises(GraderFailed, match=r"math: .*item\.no"):
        await graded(given, {"type": "math", "reference": "{{item.no}}"}, text, "")
