"""Completions through the `openai` client; a played rollout worker answers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from common.bus.bus import Bus
from common.cancellation import cancel_all
from common.wire.codec import decode
from common.wire.messages import Cancel, Failure, GradeRequest, GradeResult, TurnRequest, TurnResult, Usage
from tests.common.test_worker import until
from tests.support.api_server import GRADER, ApiServer, Script, create, played, played_grader, running_api, write_state

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
HELLO: Any = [{"role": "user", "content": "add 37+58"}]


SETTINGS = {"inference_silence_s": 0.4}


async def ask(server: ApiServer, **changes: Any) -> Any:
    """A completion of HELLO, or the stream of one."""
    body: dict[str, Any] = {"model": "tiny", "messages": HELLO, **changes}
    return await server.openai.chat.completions.create(**body)


async def text_of(answer: Any) -> str:
    """The text of the first choice, streamed or not."""
    if hasattr(answer, "choices"):
        return answer.choices[0].message.content
    return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])


async def test_a_question_is_answered_with_usage_and_version(server: ApiServer) -> None:
    async with played(Script(server.bus)) as script:
        raw = await server.openai.chat.completions.with_raw_response.create(
            model="tiny", messages=HELLO, temperature=0.5, top_p=0.9, max_tokens=8, seed=3, stop=["x"]
        )
    answer = raw.parse()
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("95", "stop")
    assert (answer.system_fingerprint, raw.headers["x-marlaas-version"], answer.model) == ("base", "base", "tiny")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (12, 3, 15)
    (request,) = script.seen
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.stop) == (0.5, 0.9, 8, ("x",))
    assert (request.trajectory.seed, request.trajectory.purpose, request.job[:5]) == (3, "chat", "chat-")
    report = (await server.http.get("/v1/usage")).json()
    assert (report["total"]["prompt_tokens"], report["total"]["sampled_tokens"], report["tokens_today"]) == (12, 3, 15)
    assert (report["data"][0]["job"], report["data"][0]["rollout_s"]) == ("inference", 0.25)


async def test_a_stream_gives_the_same_text_in_pieces(server: ApiServer) -> None:
    async with played(Script(server.bus, text="ein schöner Tag 🙂", chunk=3)):
        stream = await ask(server, stream=True, stream_options={"include_usage": True}, n=2)
        chunks = [chunk async for chunk in stream]
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["ein schöner Tag 🙂"] * 2
    assert len(chunks) > 8
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2 * len("ein schöner Tag 🙂".encode()) + 2
    assert {chunk.system_fingerprint for chunk in chunks} == {"base"}
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]].count("stop") == 2


async def test_text_ends_before_a_stop_string(server: ApiServer) -> None:
    async with played(Script(server.bus, text="one two three", chunk=2)):
        for stream in (False, True):
            assert await text_of(await ask(server, stop=[" thr", "zzz"], stream=stream)) == "one two"


async def test_logprobs_are_given_with_their_alternatives(server: ApiServer) -> None:
    async with played(Script(server.bus)):
        for stream, tops in ((False, ["9", "A"]), (True, ["9", "A"]), (True, [])):
            answer = await ask(server, logprobs=True, top_logprobs=len(tops), stream=stream)
            choices = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
            rows = [row for choice in choices if choice.logprobs for row in choice.logprobs.content or []]
            assert [(row.token, row.logprob, row.bytes) for row in rows] == [("9", -0.5, [57]), ("5", -0.5, [53])]
            assert [top.token for top in rows[0].top_logprobs or []] == tops


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_are_parsed(server: ApiServer, stream: bool) -> None:
    tools: Any = [CALCULATOR]
    async with played(Script(server.bus, text="Well<tool_call>calculator:3*4</tool_call>")) as script:
        answer = await ask(server, tools=tools, stream=stream)
        if stream:
            choices = [chunk.choices[0] async for chunk in answer]
            content = "".join(choice.delta.content or "" for choice in choices)
            (call,) = [call for choice in choices for call in choice.delta.tool_calls or []]
            reason = choices[-1].finish_reason
        else:
            message = answer.choices[0].message
            content, (call,), reason = message.content, message.tool_calls, answer.choices[0].finish_reason
        plain = await ask(server)
    assert (content, call.function.name, reason) == ("Well", "calculator", "tool_calls")
    assert json.loads(call.function.arguments) == {"expression": "3*4"}
    prompt = server.api.bases["tiny"].tokenizer.decode(list(script.seen[0].tokens.numpy()), skip_special=False)
    assert prompt.startswith("<|tools|>calculator<|end|>")
    assert plain.choices[0].message.content == script.text


async def test_a_malformed_call_stays_text(server: ApiServer) -> None:
    tools: Any = [CALCULATOR]
    async with played(Script(server.bus, text="<tool_call>calculator 3", stop_reason="length")):
        answer = await ask(server, tools=tools)
        stream = await ask(server, tools=tools, stream=True)
        streamed = await text_of(stream)
    assert answer.choices[0].message.content == streamed == "<tool_call>calculator 3"
    assert answer.choices[0].finish_reason == "length"


async def test_text_completions_take_strings_and_ids(server: ApiServer) -> None:
    async with played(Script(server.bus)) as script:
        for prompt in ("ab", [97, 98], ["ab", "c"], [[97], [98, 99]]):
            answer = await server.openai.completions.create(model="tiny", prompt=prompt, logprobs=1, n=1)
            assert {choice.text for choice in answer.choices} == {"95"}
            assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.tokens == ["9", "5"]
        stream = await server.openai.completions.create(model="tiny", prompt="ab", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "95"
    lengths = [len(request.tokens) for request in script.seen]
    assert lengths == [2, 2, 2, 1, 1, 2, 2]
    with pytest.raises(openai.BadRequestError, match="token ids are between 0 and 271"):
        await server.openai.completions.create(model="tiny", prompt=[272])


async def test_an_echo_begins_with_the_prompt_and_has_an_entry_for_every_token(server: ApiServer) -> None:
    create = server.openai.completions.create
    async with played(Script(server.bus)) as script:
        for prompt, text in (("abc", "abc95"), ([97, 257, 99], "a<|pad|>c95"), (["abc"], "abc95")):
            answer = await create(model="tiny", prompt=prompt, echo=True, logprobs=1, temperature=0, max_tokens=4)
            (choice,) = answer.choices
            assert choice.text == text and choice.logprobs is not None
            told = choice.logprobs
            assert "".join(told.tokens or []) == f"{text}<|end|>"
            assert told.token_logprobs == [None, -1.5, -1.5, -0.5, -0.5, -0.5]
            assert told.text_offset == [0, 1, len(text) - 3, len(text) - 2, len(text) - 1, len(text)]
            none, first, *_, last = told.top_logprobs or []
            assert none is None and first == {"B": -0.25, (told.tokens or [])[1]: -1.5} and last == {"<|end|>": -0.5}
        scored = await create(model="tiny", prompt=["ab", "c"], echo=True, logprobs=0, max_tokens=0)
        assert [choice.text for choice in scored.choices] == ["ab", "c"] and scored.usage is not None
        assert scored.usage.completion_tokens == 0
        told = scored.choices[0].logprobs
        assert told is not None and (told.token_logprobs, told.top_logprobs) == ([None, -1.5], [None, {"b": -1.5}])
        plain = await create(model="tiny", prompt="ab", echo=True, temperature=0.7)
        assert (plain.choices[0].text, plain.choices[0].logprobs) == ("ab95", None)
    assert {request.sampling.prompt_logprobs for request in script.seen} == {-1, 0}
    for wrong in ({"n": 2}, {"stream": True}, {"logprobs": 1, "temperature": 0.7}, {"echo": False, "max_tokens": 0}):
        body: dict[str, Any] = {"model": "tiny", "prompt": "ab", "echo": True, **wrong}
        with pytest.raises(openai.BadRequestError, match="echo"):
            await create(**body)


async def test_a_tuned_model_answers_with_its_newest_or_a_pinned_version(server: ApiServer) -> None:
    job = await create(server.openai, suffix="s")
    name = f"ft:tiny:default:s:{job.id}"
    for early in (name, f"{name}@0"):
        with pytest.raises(openai.NotFoundError, match="no version yet"):
            await ask(server, model=early)
        await write_state(server, job.id, status="running", version=0)
    await write_state(server, job.id, status="running", version=3)
    async with played(Script(server.bus)) as script:
        for model, version in ((name, 3), (f"{name}@1", 1), (f"{name}@0", 0)):
            answer = await ask(server, model=model)
            assert (answer.system_fingerprint, answer.model) == (f"{job.id}@{version}", model)
            assert (script.seen[-1].adapter.version, script.seen[-1].adapter.tenant) == (version, "default")
    for wrong in (f"{name}@4", f"{name}@", f"{name}@-1", f"{name}@x", f"ft:tiny:default:t:{job.id}", "ft:::", "tinny"):
        with pytest.raises(openai.NotFoundError):
            await ask(server, model=wrong)
    other = await server.new_tenant("acme")
    with pytest.raises(openai.NotFoundError):
        await other.chat.completions.create(model=name, messages=HELLO)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role"),
    (
        {"messages": [{"role": "user", "content": "x" * 2048}]},
        "maximum context length is 2048 tokens, and the prompt has 2051",
    ),
    ({"temperature": 3}, "temperature"),
    ({"n": 0}, "n: input should be"),
    ({"n": 17}, "n: input should be"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"top_p": 0}, "top_p"),
    ({"stop": [""]}, "stop"),
    ({"frequency_penalty": 0.5}, "frequency_penalty: not offered"),
    ({"response_format": {"type": "yaml"}}, "response_format: .*'json_schema'"),
    ({"top_logprobs": 2}, "needs logprobs=true"),
    ({"tools": [{"type": "function"}]}, r"tools\[0\]"),
    ({"tool_choice": "required"}, "tool_choice needs tools"),
    ({"extra_body": {"top_k": 3}}, "unknown parameter 'top_k'"),
    ({"stream_options": {"include_usage": True}}, "needs stream=true"),
]


async def test_what_cannot_be_done_is_refused_by_name(server: ApiServer) -> None:
    for changes, complaint in REFUSED:
        with pytest.raises(openai.BadRequestError, match=complaint):
            await ask(server, **changes)
    assert await server.api.redis.xlen(server.bus.cell.rollout_chat) == 0


# Workers that die, clients that leave -------------------------------------------------------------------------------


async def test_a_stream_whose_worker_dies_is_asked_for_again_from_what_was_seen(server: ApiServer) -> None:
    text = "a long answer"
    async with played(Script(server.bus, text=text, dies_after=4)) as script:
        answer = await ask(server, stream=True)
        told = await text_of(answer)
    assert told == text
    first, second = script.seen
    assert (first.trajectory.attempt, second.trajectory.attempt) == (0, 1)
    assert (second.num_partial, second.epoch, second.job) == (4, 1, first.job)
    assert second.logprobs.numpy()[-2:].tolist() == [-0.5, -0.5]
    while not (told := await cancels(server)):  # they are sent beside the answer
        await asyncio.sleep(0.01)
    assert [(c.job, c.epoch) for c in told] == [(first.job, 0)]


async def test_a_whole_answer_whose_worker_dies_is_left_to_whoever_goes_on_with_it(server: ApiServer) -> None:
    """Asked for again, it would begin anew: the tokens are in the progress of its entry."""
    asking = asyncio.create_task(ask(server))
    async with played(Script(server.bus, dies_after=1)) as script:
        await until(lambda: script.seen)
        await asyncio.sleep(1.2)
        await script.take_over()
        assert (await asking).choices[0].message.content == "95"
    assert len(script.seen) == 1 and not await cancels(server)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_its_worker_gives_back_is_asked_for_again_from_all_its_tokens(
    server: ApiServer, stream: bool
) -> None:
    text = "a long answer"
    async with played(Script(server.bus, text=text, gives_back_after=6)) as script:
        answer = await ask(server, stream=stream, logprobs=True)
        assert await text_of(answer) == text
    first, second = script.seen
    assert (second.num_partial, second.epoch, second.usage) == (6, 1, Usage(sampled_tokens=6))
    assert second.num_prompt == first.num_prompt


async def test_an_answer_that_its_replica_has_not_read_yet_is_not_asked_for_again(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entry is gone already: with many clients, or on a busy machine, for longer than the silence."""
    follow, followed = Bus.follow, asyncio.Event()

    async def late(*given: Any, **options: Any) -> Any:
        followed.set()
        found = await follow(*given, **options)
        await asyncio.sleep(1.2 if any(isinstance(message, TurnResult) for _, message in found) else 0)
        return found

    monkeypatch.setattr(Bus, "follow", late)
    await followed.wait()
    async with played(Script(server.bus)) as script:
        answer = await ask(server)
        assert answer.choices[0].message.content == "95"
    assert len(script.seen) == 1 and not await cancels(server)


async def test_a_turn_that_is_asked_for_again_leaves_the_others_of_its_completion_alone(server: ApiServer) -> None:
    """A cancellation names a job and an epoch: it would end them too, with the tokens that are in their progress."""
    asking = asyncio.create_task(ask(server, n=2))
    async with played(Script(server.bus, gives_back_after=1, silent_sample=1)) as script:
        await until(lambda: len(script.seen) == 3)
        await script.take_over()
        assert [choice.message.content for choice in (await asking).choices] == ["95", "95"]
    assert sorted((r.trajectory.sample, r.epoch) for r in script.seen) == [(0, 0), (0, 1), (1, 0)]
    while not (told := await cancels(server)):  # the attempt that was given back, and whoever else may have it
        await asyncio.sleep(0.01)
    assert [cancel.epoch for cancel in told] == [2**31]


async def test_once_an_older_attempt_has_answered_the_newer_one_ends(server: ApiServer) -> None:
    answer = await ask(server, stream=True)
    async with played(Silent(server.bus)) as script:
        await until(lambda: len(script.seen) == 2)
        await script.take_over(count=1)
        assert await text_of(answer) == "95"
    while len(told := await cancels(server)) < 2:
        await asyncio.sleep(0.01)
    assert [cancel.epoch for cancel in told] == [0, 2**31]


class Silent(Script):
    """A worker of which nothing is heard."""

    def is_silent(self, request: TurnRequest) -> bool:
        return True


async def cancels(server: ApiServer) -> list[Cancel]:
    entries = await server.api.redis.xrange(server.bus.cell.control)
    found = [decode(fields[b"payload"]) for _, fields in entries]
    return [message for message in found if isinstance(message, Cancel)]


async def test_a_request_that_waits_in_the_queue_is_not_asked_twice(server: ApiServer) -> None:
    asking = asyncio.create_task(ask(server))
    await asyncio.sleep(1.2)
    async with played(Script(server.bus)) as script:
        assert (await asking).choices[0].message.content == "95"
    assert len(script.seen) == 1


async def test_without_workers_the_answer_is_503_after_the_time_limit(redis_url: str, tmp_path: Path) -> None:
    async with running_api(redis_url, tmp_path / "data", inference_silence_s=0.4, inference_timeout_s=1.0) as server:
        with pytest.raises(openai.APIStatusError, match="no rollout worker answered") as refused:
            await ask(server)
        assert refused.value.status_code == 503
        stream = await ask(server, stream=True)
        with pytest.raises(openai.APIError, match="no rollout worker answered"):
            await text_of(stream)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_the_workers(server: ApiServer, stream: bool) -> None:
    body = {"model": "tiny", "messages": HELLO, "stream": stream}
    asking = asyncio.create_task(server.http.post("/v1/chat/completions", json=body))
    while not (entries := await server.api.redis.xrange(server.bus.cell.rollout_chat)):
        await asyncio.sleep(0.01)
    await cancel_all([asking])
    while not (found := await cancels(server)):
        await asyncio.sleep(0.01)
    ((_, fields),) = entries
    request = decode(fields[b"payload"])
    assert isinstance(request, TurnRequest)
    assert (found[0].job, found[0].epoch >= request.epoch) == (request.job, True)


async def test_a_failed_turn_is_an_error_with_its_reason(server: ApiServer) -> None:
    class Failing(Script):
        def result(self, request: TurnRequest, tokens: Any = None) -> Any:
            stream, result = super().result(request, [])
            assert isinstance(result, TurnResult)
            failure = Failure("corrupt_adapter", "its sha256 is wrong")
            return stream, msgspec.structs.replace(result, failure=failure, stop_reason="failed")

    async with played(Failing(server.bus)):
        with pytest.raises(openai.APIStatusError, match="the version is damaged: its sha256 is wrong"):
            await ask(server)


async def test_the_reply_stream_stays_empty_and_has_a_time_to_live(server: ApiServer) -> None:
    async with played(Script(server.bus, text="x" * 50)):
        for _ in range(3):
            await (await ask(server, stream=True)).close()
            await ask(server)
    (key,) = await server.api.redis.keys("*reply:*")
    while await server.api.redis.xlen(key):
        await asyncio.sleep(0.01)
    while await server.api.redis.xlen(key):
        await asyncio.sleep(0.01)
    assert 0 < await server.api.redis.ttl(key) <= 60


# Graders -------------------------------------------------------------------------------------------------------------


async def test_a_grader_is_validated_and_run(server: ApiServer) -> None:
    grader: Any = GRADER
    validated = await server.openai.fine_tuning.alpha.graders.validate(grader=grader)
    assert validated.grader is not None
    seen: list[GradeRequest] = []

    def reward(request: GradeRequest) -> GradeResult:
        seen.append(request)
        failure = None if request.output_text == "3" else Failure("grader", "it raised")
        reward = None if failure else 1.0
        return GradeResult(**request.about(), id=request.id, reward=reward, seconds=0.5, failure=failure)

    async with played_grader(server.bus, reward):
        graders = server.openai.fine_tuning.alpha.graders
        result = await graders.run(grader=grader, model_sample="3", item={"answer": "3"})
        assert (result.reward, result.metadata.execution_time, result.metadata.name) == (1.0, 0.5, "exact")
        failed = await graders.run(grader=grader, model_sample="4", item={"answer": "3"})
        assert failed.metadata.errors.other_error
        assert failed.to_dict()["failure"] == {"kind": "grader", "reason": "it raised"}
    assert (seen[0].env.name, seen[0].env.args["grader"], seen[0].item) == ("single_turn", GRADER, {"answer": "3"})
    with pytest.raises(openai.BadRequestError, match="no such field"):
        await graders.run(grader=grader, model_sample="3")
    with pytest.raises(openai.BadRequestError, match="operation"):
        await graders.validate(grader=grader | {"operation": "is"})


async def test_too_long_a_text_is_refused_by_the_name_of_its_field(server: ApiServer) -> None:
    contents: list[Any] = ["x" * 3000, "x" * 500_000, [{"type": "text", "text": "x" * 3000}]]
    asked = [("messages", [{"role": "user", "content": content}]) for content in contents]
    asked += [("prompt", prompt) for prompt in ("x" * 3000, "x" * 500_000, [1] * 3000, ["x", "x" * 3000])]
    for field, value in asked:
        path = "/v1/chat/completions" if field == "messages" else "/v1/completions"
        error = (await server.http.post(path, json={"model": "tiny", field: value})).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        assert error["message"].startswith("This model's maximum context length is 2048 tokens")
        assert f"shorten the {field}" in error["message"]
