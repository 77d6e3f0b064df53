"""Chat templates with variables of their own, such as `enable_thinking`: who may tell them what, and what is refused by name."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from common.text.tokens import ChatTokenizer
from tests.support.api_server import (
    ApiServer,
    Script,
    create,
    item,
    jsonl,
    method,
    played,
    running_api,
    spec_of,
    upload,
)
from tests.support.thinking import thinking_base

NO_THOUGHT = {"enable_thinking": False}
HELLO: Any = [{"role": "user", "content": "add 1+2"}]
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"enable_thinkin": False},
        "reads no 'enable_thinkin'; its own are effort, enable_thinking; did you mean 'enable_thinking'",
    ),
    ({"messages": "x"}, "reads no 'messages'"),
    ({"effort": "x" * 2000}, "at most 1024 characters"),
]


@pytest.fixture
async def thinker(redis_url: str, tmp_path: Path) -> AsyncIterator[ApiServer]:
    base = thinking_base(tmp_path / "base")
    async with running_api(redis_url, tmp_path / "data", base_models=f"tiny={base}") as server:
        yield server


async def test_chat_tells_the_template_what_its_user_says(thinker: ApiServer, tmp_path: Path) -> None:
    async with played(Script(thinker.bus)) as script:
        for extra in ({}, {"chat_template_kwargs": NO_THOUGHT}):
            await thinker.openai.chat.completions.create(model="tiny", messages=HELLO, extra_body=extra)
    tokenizer = ChatTokenizer.load(tmp_path / "base")
    texts = [tokenizer.decode(request.tokens.numpy().tolist()) for request in script.seen]
    assert [text.removeprefix("add 1+2") for text in texts] == ["", "()\n"]


async def test_a_variable_that_the_template_does_not_read_is_refused_by_name(thinker: ApiServer) -> None:
    score = {"type": "score_model", "model": "tiny", "input": HELLO}
    for told, reason in WRONG:
        kwargs: dict[str, Any] = {"chat_template_kwargs": told}
        with pytest.raises(openai.BadRequestError, match=re.escape(reason)) as refused:
            await thinker.openai.chat.completions.create(model="tiny", messages=HELLO, extra_body=kwargs)
        assert refused.value.param == "chat_template_kwargs"
        for how in (method(**kwargs), {"type": "reinforcement", "reinforcement": {"grader": score | kwargs}}):
            with pytest.raises(openai.BadRequestError, match=re.escape(reason)):
                await create(thinker.openai, method=how)
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
        await thinker.openai.chat.completions.create(
            model="tiny", messages=HELLO, extra_body={"chat_template_kwargs": {"documents": [1]}}
        )


async def test_a_job_keeps_what_its_template_is_told(thinker: ApiServer) -> None:
    job = await create(thinker.openai, method=method(chat_template_kwargs=NO_THOUGHT))
    spec = await spec_of(thinker, job.id)
    assert spec.env.chat_template_kwargs == NO_THOUGHT
    shown: Any = job.method
    assert shown.reinforcement.hyperparameters.chat_template_kwargs == NO_THOUGHT


async def test_what_no_template_shows_or_all_rows_share_is_refused(thinker: ApiServer) -> None:
    with pytest.raises(openai.BadRequestError, match="line 1: chat_template_kwargs belongs into a job's hyperparam"):
        await upload(thinker.openai, jsonl(item() | {"chat_template_kwargs": NO_THOUGHT}))
    texts = await upload(thinker.openai, jsonl({"prompt": "1+2=", "completion": "3"}))
    how = {"type": "supervised", "supervised": {"hyperparameters": {"chat_template_kwargs": NO_THOUGHT}}}
    with pytest.raises(openai.BadRequestError, match="training_file has texts, which are learned without a chat temp"):
        await create(thinker.openai, method=how, training_file=texts)


async def test_prompts_are_measured_as_they_are_told(thinker: ApiServer) -> None:
    told = {"enable_thinking": False, "effort": "x" * 900}
    with pytest.raises(openai.BadRequestError, match=r"longer than \d+ tokens"):
        await create(thinker.openai, method=method(chat_template_kwargs=told, max_tokens=1200))
