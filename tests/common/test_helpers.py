"""Helper processes, as graders and the manager's API have them."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.children.helpers import HelperKilled, HelperOverran, HelperPool, tell
from common.errors import InvalidInput


@pytest.fixture
async def pool() -> AsyncIterator[HelperPool]:
    pool = HelperPool("tests.support.answering_helper", variables={})
    yield pool
    await pool.close()


async def ask(pool: HelperPool, question: bytes, seconds: float = 60) -> Any:
    async with pool.helper() as helper, asyncio.timeout(seconds):
        return await helper.ask(question)


async def test_a_helper_answers_one_question_after_the_other_of_any_size(pool: HelperPool) -> None:
    pid = await ask(pool, b"pid")
    large = os.urandom(1 << 20)
    assert [await ask(pool, question) for question in (b"", b"x", large)] == [b"", b"xx", large * 2]
    with pytest.raises(InvalidInput, match="no") as refused:
        await ask(pool, b"refuse")
    assert (refused.value.param, refused.value.code) == ("question", "refused")
    assert await ask(pool, b"pid") == pid


async def test_a_question_that_needs_more_memory_than_a_helper_has_is_refused(pool: HelperPool) -> None:
    pid = await ask(pool, b"pid")
    with pytest.raises(InvalidInput, match="more memory than one request may have") as refused:
        await ask(pool, b"fill")
    assert refused.value.code == "too_large"
    assert await ask(pool, b"pid") == pid


async def test_a_helper_that_dies_or_hangs_is_ended_and_another_takes_its_place(pool: HelperPool) -> None:
    with pytest.raises(ConnectionError) as caught:
        await ask(pool, b"die")
    assert not isinstance(caught.value, HelperKilled)
    pid = await ask(pool, b"pid")
    with pytest.raises(TimeoutError):
        await ask(pool, b"hang", seconds=0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert await ask(pool, b"x") == b"xx"


async def test_a_question_may_take_longer_than_its_processor_time_and_no_more_of_that() -> None:
    pool = HelperPool("tests.support.answering_helper", "0.2", variables={})
    try:
        assert await ask(pool, b"sleep") == b"awake"
        with pytest.raises(HelperOverran):
            await ask(pool, b"hang")
        assert await ask(pool, b"x") == b"xx"
    finally:
        await pool.close()


async def test_a_helper_that_died_while_idle_is_not_handed_out(pool: HelperPool) -> None:
    async with pool.helper() as helper:
        os.kill(await helper.ask(b"pid"), 9)
        while helper.alive:
            await asyncio.sleep(0.01)
    assert await ask(pool, b"x") == b"xx"


async def test_a_helper_whose_asker_is_cancelled_again_and_again_is_not_handed_out(pool: HelperPool) -> None:
    await ask(pool, b"x")
    asking = asyncio.create_task(ask(pool, b"hang"))
    await asyncio.sleep(0.1)
    while not asking.done():
        asking.cancel()
        await asyncio.sleep(0)
    assert await ask(pool, b"x") == b"xx"


async def test_a_process_that_has_just_ended_keeps_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a process that has ended, while the thread that waits for it has not come to run
    may_wait, waits = threading.Event(), os.waitpid

    def late(pid: int, options: int) -> tuple[int, int]:
        if threading.current_thread() is not threading.main_thread():
            may_wait.wait()
        return waits(pid, options)

    monkeypatch.setattr(os, "waitpid", late)
    process = await asyncio.create_subprocess_exec("sh", "-c", "exit 7")
    await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    # When it is told to end
    tell(process, signal.SIGTERM)
    may_wait.set()
    # Then its status is its own
    assert await process.wait() == 7
    tell(process, signal.SIGTERM)  # one that is known to have ended is told nothing


async def test_a_helper_that_others_kill_is_told_from_one_that_ends_by_itself(pool: HelperPool) -> None:
    pid = await ask(pool, b"pid")
    asking = asyncio.create_task(ask(pool, b"hang"))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(HelperKilled):
        await asking
