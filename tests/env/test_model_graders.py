"""Graders that are models: of this service, by turns of their own, and of the operator's choice of hosts."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from common.errors import InvalidInput
from common.settings import TINY
from common.tasks.graders import item_fields, model_graders, validate_grader
from common.text.tokens import ChatTokenizer
from common.wire.messages import (
    BASE,
    AdapterRef,
    Failure,
    GradeRequest,
    GradeResult,
    Parked,
    ScoredTrajectory,
    TurnRequest,
    Usage,
)
from env_service import work
from env_service.failures import GraderFailed
from env_service.graders.attempt import Attempt
from env_service.graders.endpoint import Endpoints
from env_service.graders.model import ModelEndpoints, ModelQuestion, question_of, read_keys, reward_of
from tests.env.test_env_handler import CELL, ITEM, Run, ids_of, result_of, start_of

TOKENIZER = ChatTokenizer.load(TINY)
ASKED = [
    {"role": "system", "content": "You compare."},
    {"role": "user", "content": [{"type": "input_text", "text": "{{item.answer}} or {{sample.output_text}}?"}]},
]
SCORE: dict[str, Any] = {"type": "score_model", "name": "s", "model": "tiny", "input": ASKED, "range": [0, 10]}
LABEL: dict[str, Any] = {
    "type": "label_model", "name": "l", "model": "ft:tiny:acme:x:job7@3", "input": ASKED,
    "labels": ["good", "fair", "bad"], "passing_labels": ["good", "fair"],
}  # fmt: skip
PYTHON = {"type": "python", "source": "def grade(sample, item):\n    return 100.0"}


def judged(grader: dict[str, Any], **changes: Any) -> Any:
    return start_of("single_turn", {"grader": grader}, **changes)


async def answer(run: Run, request: TurnRequest, text: str, stop: Any = "stop", **changes: Any) -> Any:
    [(_, message)] = await run.handle(result_of(request, text, stop, **changes))
    return message


async def asked(run: Run, start: Any, text: str) -> TurnRequest:
    """The question to the grader's model about an answer."""
    stream, request = await run.turn(await run.first(start), text)
    assert stream == CELL.rollout_first and isinstance(request, TurnRequest), request
    return request


# Models of this service ----------------------------------------------------------------------------------------------


async def test_a_model_of_this_service_scores_by_a_turn_of_its_own() -> None:
    run = Run()
    grader = SCORE | {"sampling_params": {"max_completions_tokens": 9, "temperature": 0.5, "top_p": 0.9}}
    request = await asked(run, judged(grader), "29842<|end|>")
    shown = TOKENIZER.decode(request.tokens.numpy().tolist(), skip_special=False)
    assert shown == "<|system|>You compare.<|end|><|user|>29842 or 29842?<|end|><|assistant|>"
    assert (request.adapter, request.judges) == (BASE, AdapterRef("acme", "job1", 4))
    assert (request.tenant, request.job, request.epoch, request.turn) == ("acme", "job1", 2, 1)
    assert request.id == "job1/11/5/1/0" and not request.written.numpy().any()
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.top_p) == (9, 0.5, 0.9)
    scored = await answer(run, request, "7.5<|end|>")
    assert isinstance(scored, ScoredTrajectory) and (scored.reward, scored.num_turns, scored.id) == (
        7.5,
        1,
        "job1/11/5/0/0",
    )
    assert scored.adapter == AdapterRef("acme", "job1", 4) and scored.output_text == "29842"
    assert scored.tokens.numpy().tolist()[-6:] == ids_of("29842<|end|>")
    assert scored.usage.sampled_tokens == 6 + 4


async def test_models_in_a_formula_are_asked_one_after_the_other_and_the_rest_runs_once() -> None:
    run = Run()
    parts = {"code": PYTHON, "style": SCORE, "tone": LABEL}
    multi = {"type": "multi", "graders": parts, "calculate_output": "code + 10 * tone + style"}
    first = await asked(run, judged(multi), "29842<|end|>")
    second = await answer(run, first, "2<|end|>")
    assert isinstance(second, TurnRequest) and (first.adapter, first.turn) == (BASE, 1)
    assert (second.adapter, second.turn, second.id) == (AdapterRef("acme", "job7", 3), 2, "job1/11/5/2/0")
    scored = await answer(run, second, "fair<|end|>")
    assert (scored.reward, scored.reward_parts) == (112.0, {"code": 100.0, "style": 2.0, "tone": 1.0})
    prompt = "system: You compare.\n\nuser: 29842 or 29842?"
    assert scored.verdicts == [
        {"grader": "style", "prompt": prompt, "reply": "2"},
        {"grader": "tone", "prompt": prompt, "reply": "fair"},
    ]


@pytest.mark.parametrize(
    ("grader", "text", "reason"),
    [
        (SCORE, "11", "outside of 0 to 10"),
        (SCORE, "about 7", "'about 7', not one number"),
        (SCORE, "", "answered nothing"),
        (LABEL, "Good", "'Good', not one of the labels"),
        (SCORE | {"sampling_params": {"max_completions_tokens": 2047}}, None, "at most|less than or equal"),
        (
            SCORE | {"input": [{"role": "user", "content": "{{sample.output_text}}" * 500}]},
            None,
            "more than the context of 2048",
        ),
        (SCORE | {"input": [{"role": "user", "content": "{{sample.output_json.x}}"}]}, None, "not JSON|no such field"),
    ],
)
async def test_a_grader_whose_model_gives_no_score_masks_the_trajectory(
    grader: dict[str, Any], text: str | None, reason: str
) -> None:
    run = Run()
    message: Any
    [(_, message)] = await run.handle(judged(grader))
    if isinstance(message, TurnRequest):
        message = await answer(run, message, "29842<|end|>")
    scored = message if text is None else await answer(run, message, f"{text}<|end|>")
    assert isinstance(scored, ScoredTrajectory) and scored.reward is None and scored.failure is not None
    assert any(part in scored.failure.reason for part in reason.split("|")), scored.failure
    assert [verdict["reply"] for verdict in scored.verdicts] == ([] if text is None else [text])


def test_a_models_turn_that_failed_masks_the_trajectory_and_one_that_was_cancelled_cancels_it() -> None:
    async def go(**changes: Any) -> ScoredTrajectory:
        run = Run()
        return await answer(run, await asked(run, judged(SCORE), "29842<|end|>"), "7", **changes)

    failed = asyncio.run(go(stop="failed", failure=Failure("invalid", "adapter gone")))
    assert failed.failure == Failure("grader", "the grader's model: adapter gone")
    assert failed.output_text == "29842" and failed.adapter.version == 4
    cancelled = asyncio.run(go(stop="cancelled"))
    assert cancelled.failure is not None and cancelled.failure.kind == "cancelled"


async def test_a_pause_parks_the_models_turn_and_the_trajectory_ends_as_the_attempt_that_went_on() -> None:
    run = Run()
    request = await asked(run, judged(SCORE), "29842<|end|>")
    [(stream, parked)] = run.handler.park(result_of(request, "7<|end|>"))
    assert stream == CELL.scored(3) and isinstance(parked, Parked) and parked.request.judges == request.judges
    again = msgspec.structs.replace(
        parked.request,
        id="job1/11/5/1/1",
        epoch=4,
        trajectory=msgspec.structs.replace(request.trajectory, attempt=1),
    )
    scored = await answer(run, again, "7<|end|>")
    assert (scored.reward, scored.epoch, scored.trajectory.attempt, scored.id) == (7.0, 4, 1, "job1/11/5/0/1")


async def test_a_dead_letter_or_a_dropped_turn_of_a_model_is_told_as_its_trajectory() -> None:
    run = Run()
    request = await asked(run, judged(SCORE), "29842<|end|>")
    for result in (result_of(request, "7"), result_of(msgspec.structs.replace(request, context=b"?"), "7")):
        for [(stream, scored)] in (
            run.handler.failed(result, Failure("dead_letter", "x")),
            run.handler.drop(result),
        ):
            assert stream == CELL.scored(3) and isinstance(scored, ScoredTrajectory)
            assert (scored.adapter.version, scored.trajectory.sample) == (4, 5) and scored.failure is not None
            assert scored.usage.sampled_tokens == result.usage.sampled_tokens


async def test_a_grader_is_tried_with_its_model() -> None:
    run = Run()
    about: Any = {"id": "g", "tenant": "acme", "job": "grade-1", "partition": 3, "weight": 2.0}
    spec = start_of("single_turn", {"grader": LABEL}).env
    request = GradeRequest(**about, env=spec, item=ITEM, output_text="x", reply_to="replies")
    [(stream, question)] = await run.handle(request)
    assert stream == CELL.rollout_first and isinstance(question, TurnRequest)
    usage = Usage(prompt_tokens=30, sampled_tokens=4)
    [(stream, result)] = await run.handle(result_of(question, "bad<|end|>", usage=usage))
    assert stream == "replies" and isinstance(result, GradeResult)
    assert (result.id, result.reward, result.usage) == ("g", 0.0, usage)


# What is asked, and what an answer means -----------------------------------------------------------------------------


def model(grader: dict[str, Any]) -> Any:
    return validate_grader(grader)


@pytest.mark.parametrize(
    ("text", "reward"), [("7", 7.0), (" 7.50\n", 7.5), ("1e1", 10.0), ('{"result": 3, "why": "x"}', 3.0), ("+.5", 0.5)]
)
def test_a_score_is_a_number_alone_or_a_json_objects_result(text: str, reward: float) -> None:
    assert reward_of(model(SCORE), text) == reward


@pytest.mark.parametrize(
    "text",
    [
        "٣",
        "nan",
        '{"score": 7}',
        '{"result": true}',
        "-1",
        '{"result": 1' + "0" * 400 + "}",
    ],
)
def test_anything_else_is_no_score(text: str) -> None:
    with pytest.raises(GraderFailed):
        reward_of(model(SCORE), text)


def test_a_label_passes_or_does_not() -> None:
    assert [reward_of(model(LABEL), text) for text in (" fair ", '{"result": "good"}', "bad")] == [1.0, 1.0, 0.0]


def test_openais_forms_of_contents_are_templates() -> None:
    content: list[Any] = [
        "a {{item.x}}",
        {"type": "output_text", "text": "b {{item.y}}"},
        [{"type": "input_text", "text": "c"}],
    ]
    grader = model(SCORE | {"input": [{"role": "user", "type": "message", "content": each} for each in content]})
    assert item_fields(grader) == {"x", "y"}
    assert [m["content"] for m in question_of(grader, Attempt({"x": 1, "y": 2}, "")).messages] == ["a 1", "b 2", "c"]
    assert [place for place, _ in model_graders({"type": "multi", "graders": {"a": SCORE, "b": PYTHON}})] == [
        "graders.a"
    ]
    assert not model_graders(SCORE | {"url": "https://x.org/v1"})


def test_a_question_has_a_bound_over_all_its_messages() -> None:
    grader = model(SCORE | {"input": [{"role": "user", "content": "{{item.x}}" * 32}] * 64})
    with pytest.raises(InvalidInput, match="more than"):
        question_of(grader, Attempt({"x": "x" * 60_000}, ""))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"range": [1, 0]}, "smaller first"),
        ({"range": [0]}, "range"),
        ({"modl": "x"}, "did you mean 'model'"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "role"),
        ({"input": [{"role": "user", "content": "{{sample.text}}"}]}, "output_text"),
        ({"sampling_params": {"seed": 1}}, "draws by the job's seed"),
        ({"url": "ftp://x"}, "http://"),
        ({"url": "https://x/v1/files?x="}, "no query"),
        ({"url": "https://x/v1/files#"}, "no query"),
        ({"type": "label_model", "range": [0, 1]}, "range"),
    ],
)
def test_a_wrong_model_grader_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        validate_grader(SCORE | changes)


@pytest.mark.parametrize("changes", [{"passing_labels": ["god"]}, {"labels": ["a", "a"]}, {"labels": [" a"]}])
def test_wrong_labels_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="label"):
        validate_grader(LABEL | changes)


# Elsewhere -----------------------------------------------------------------------------------------------------------


class Models(BaseHTTPRequestHandler):
    """An API like OpenAI's; the model's name says how it behaves."""

    seen: list[tuple[str, str | None, Any]]
    gate: threading.Event
    most: list[int]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, self.headers["Authorization"], body))
        self.most[0] += 1
        self.most[1] = max(self.most[:2])
        if body["model"] == "slow":
            self.gate.wait(3)
        self.most[0] -= 1
        self.send_response({"moved": 307, "broken": 500}.get(body["model"], 200))
        if body["model"] == "moved":
            self.send_header("Location", "/v1/chat/completions")
        self.end_headers()
        said: Any = {"refuses": None}.get(body["model"], "8")
        answer = {"choices": [{"message": {"content": said}}], "usage": {"total_tokens": 21}}
        with contextlib.suppress(ConnectionError):
            self.wfile.write(json.dumps({} if body["model"] == "empty" else answer).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def api() -> Iterator[tuple[str, type[Models]]]:
    kind = type("Fresh", (Models,), {"seen": [], "gate": threading.Event(), "most": [0, 0]})
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}/v1", kind
    kind.gate.set()
    httpd.shutdown()
    httpd.server_close()


def question(name: str = "judge") -> ModelQuestion:
    return ModelQuestion(name, [{"role": "user", "content": "x"}], 9, 0.0, 1.0, 5)


async def ask(url: str, *names: str, hosts: str = "127.0.0.1", keys: str = "", **limits: Any) -> tuple[list[str], int]:
    """The answers, and the tokens that they have cost."""
    models = ModelEndpoints(Endpoints(hosts), keys, **limits)
    doing = work.begin(lambda: None, "acme")
    try:
        return list(
            await asyncio.gather(*(models.ask(url, question(name), key="k") for name in names))
        ), doing.grader_tokens
    finally:
        await models.close()


def test_a_model_elsewhere_answers_and_its_tokens_are_counted(api: tuple[str, type[Models]]) -> None:
    url, seen = api[0], api[1].seen
    assert asyncio.run(ask(url, "judge", keys=f"{url}=sk-1")) == (["8"], 21)
    assert seen[0][:2] == ("/v1/chat/completions", "Bearer sk-1")
    asked = {"model": "judge", "messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 9}
    assert seen[0][2] == asked | {"temperature": 0.0, "top_p": 1.0, "seed": 5}


def test_a_key_goes_to_its_own_address_alone(api: tuple[str, type[Models]]) -> None:
    for keys in (
        "http://127.0.0.1=sk-1",
        api[0].replace("http:", "https:") + "=sk-1",
        f"http://localhost:{api[0][17:22]}=sk-1",
    ):
        asyncio.run(ask(api[0], "judge", keys=keys))
    assert [key for _, key, _ in api[1].seen] == [None] * 3


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("moved", "status 307"),
        ("broken", "status 500"),
        ("empty", "no chat completion"),
        ("refuses", "no text"),
        ("slow", "within 0.5 seconds"),
    ],
)
def test_a_model_elsewhere_that_misbehaves_fails_the_grader(
    api: tuple[str, type[Models]], name: str, reason: str
) -> None:
    with pytest.raises(GraderFailed, match=reason):
        asyncio.run(ask(api[0], name, timeout_s=0.5))
    assert len(api[1].seen) == 1


@pytest.mark.parametrize("hosts", ["", "example.org", "localhost"])
def test_a_host_that_the_operator_does_not_allow_is_never_asked(api: tuple[str, type[Models]], hosts: str) -> None:
    for host in ("127.0.0.1", "localhost"):
        with pytest.raises(GraderFailed, match="does not allow"):
            asyncio.run(ask(api[0].replace("127.0.0.1", host), "judge", hosts=hosts))
    assert api[1].seen == []


async def test_so_many_questions_of_a_tenant_are_asked_at_once_and_no_more(api: tuple[str, type[Models]]) -> None:
    asking = asyncio.create_task(ask(api[0], *["slow"] * 6, most=2))
    while api[1].most[0] < 2:
        await asyncio.sleep(0.01)
    api[1].gate.set()
    assert await asking == (["8"] * 6, 6 * 21)
    assert api[1].most[1] == 2


@pytest.mark.parametrize("text", ["x", "x=y", "https://h", "https://h=", "ftp://h=k", "https://h=a\u00e9"])
def test_keys_that_cannot_be_read_are_refused_and_do_not_print(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^MARLAAS_GRADER_KEYS: write https://host=key, comma-separated$"):
        read_keys(text)
