"""Trajectories from Start to ScoredTrajectory, with scripted model turns on the tiny tokenizer."""

import asyncio
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from common.bus.streams import Cell
from common.errors import InvalidInput, Unavailable
from common.tasks.environments import makes_items, reply_fault, reply_roles, validate_environment
from common.text.tokens import ChatTokenizer
from common.wire.codec import decode, encode
from common.wire.messages import (
    AdapterRef,
    EnvSpec,
    Failure,
    GradeRequest,
    GradeResult,
    Message,
    Parked,
    Sampling,
    ScoredTrajectory,
    Start,
    StopReason,
    TurnRequest,
    TurnResult,
    Usage,
    f32,
    i32,
)
from common.wire.transcript import wrote
from env_service.environments.catalogue import Catalogue
from env_service.environments.text_collections import Index, find_collection, read_collection
from env_service.graders.endpoint import Endpoints
from env_service.graders.runner import GraderRunner
from env_service.graders.text import TextComparer
from env_service.handler import EnvHandler
from env_service.live.sessions import Sessions
from env_service.sandbox.sandbox import Sandbox
from env_service.trajectory import decode_context

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
TOKENIZER = ChatTokenizer.load(TINY)
CELL = Cell("tiny")
EXACT = {
    "type": "string_check",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}
ITEM = {"messages": [{"role": "user", "content": "calc 347*86"}], "answer": "29842"}
CALL = "<tool_call>calculator:347*86</tool_call><|end|>"


def python(source: str) -> dict[str, Any]:
    return {"type": "python", "source": source}


class Run:
    """A handler, and the model's turns that a test writes."""

    def __init__(self, collections_dir: Path | None = None, tokenizer: ChatTokenizer = TOKENIZER) -> None:
        sandbox = Sandbox()
        graders = GraderRunner(
            sandbox=sandbox,
            endpoints=Endpoints(""),
            text_comparer=TextComparer(),
            timeout_s=8.0,
        )
        environments = Catalogue(graders=graders, sandbox=sandbox, collections_dir=collections_dir)
        self.handler = EnvHandler(cell=CELL, tokenizer=tokenizer, environments=environments, sessions=Sessions("env-0"))
        self.beats = 0

    def beat(self) -> None:
        self.beats += 1

    async def handle(self, message: Message) -> list[tuple[str, Message]]:
        """Handles a message as a worker would: over the wire and back."""
        out = await self.handler(decode(encode(message)), self.beat)
        return [(stream, decode(encode(each))) for stream, each in out]

    async def first(self, start: Start) -> TurnRequest:
        [(stream, request)] = await self.handle(start)
        assert stream == CELL.rollout, request
        assert isinstance(request, TurnRequest)
        return request

    async def turn(self, request: TurnRequest, text: str, stop: StopReason = "stop") -> tuple[str, Any]:
        [out] = await self.handle(result_of(request, text, stop))
        return out

    async def play(self, start: Start, *texts: str, stop: StopReason = "stop") -> ScoredTrajectory:
        """All turns but the last lead to another; `stop` is how the last ends."""
        request = await self.first(start)
        for text in texts[:-1]:
            stream, request = await self.turn(request, text)
            assert stream == CELL.rollout_first, request
        stream, scored = await self.turn(request, texts[-1], stop)
        assert stream == CELL.scored(start.partition)
        assert isinstance(scored, ScoredTrajectory), scored
        return scored


def start_of(name: str, args: dict[str, Any] | None = None, **changes: Any) -> Start:
    start = Start(
        id="start",
        tenant="acme",
        job="job1",
        partition=3,
        epoch=2,
        adapter=AdapterRef("acme", "job1", 4),
        purpose="train",
        seed=7,
        group=11,
        samples=(5,),
        item=ITEM,
        env=EnvSpec(name, args or {}),
        sampling=Sampling(max_tokens=64),
        tool_timeout_s=30.0,
    )
    return msgspec.structs.replace(start, **changes)


def ids_of(text: str) -> list[int]:
    """The ids of a model turn; special tokens are written as their text."""
    rendered = TOKENIZER._full.encode(text, add_special_tokens=False).ids  # pyright: ignore[reportPrivateUsage]
    assert TOKENIZER.decode(rendered, skip_special=False) == text
    return rendered


def result_of(request: TurnRequest, text: str, stop: StopReason = "stop", **changes: Any) -> TurnResult:
    tokens = ids_of(text)
    result = TurnResult(
        id=request.id,
        tenant=request.tenant,
        job=request.job,
        partition=request.partition,
        epoch=request.epoch,
        request=request,
        adapter=request.adapter,
        tokens=i32(tokens),
        logprobs=f32([-0.5] * len(tokens)),
        stop_reason=stop,
        usage=request.usage + Usage(sampled_tokens=len(tokens)),
    )
    return msgspec.structs.replace(result, **changes)


def play(start: Start, *texts: str, stop: StopReason = "stop", collections_dir: Path | None = None) -> ScoredTrajectory:
    return asyncio.run(Run(collections_dir).play(start, *texts, stop=stop))


def single(**changes: Any) -> Start:
    return start_of("single_turn", {"grader": EXACT}, **changes)


# ---------------------------------------------------------------------------------------------------- beginning


def test_a_start_gives_one_request_a_sample_with_the_same_tokens() -> None:
    out = asyncio.run(Run().handle(single(samples=(0, 1, 2), attempt=1)))
    requests = [r for _, r in out if isinstance(r, TurnRequest)]
    assert [stream for stream, _ in out] == [CELL.rollout] * 3
    assert [r.id for r in requests] == ["job1/11/0/0/1", "job1/11/1/0/1", "job1/11/2/0/1"]
    assert len({r.tokens.data for r in requests}) == 1
    assert requests[0].tokens.numpy().tolist() == TOKENIZER.render(ITEM["messages"])  # pyright: ignore[reportArgumentType]
    assert not requests[0].written.numpy().any()
    assert (requests[0].epoch, requests[0].partition, requests[0].tenant) == (2, 3, "acme")


def test_a_start_with_a_home_sends_its_turns_there() -> None:
    out = asyncio.run(Run().handle(single(samples=(0, 1), home="rollout-1")))
    assert [stream for stream, _ in out] == [CELL.rollout_worker("rollout-1")] * 2


async def test_the_next_turn_goes_to_the_worker_of_the_last() -> None:
    run = Run()
    request = await run.first(start_of("calculator"))
    [(stream, following)] = await run.handle(result_of(request, CALL, worker="rollout-1"))
    assert stream == CELL.rollout_worker("rollout-1") and isinstance(following, TurnRequest)


def test_the_groups_that_began_and_the_time_that_their_prompts_took_are_counted() -> None:
    run = Run()
    for start in (single(samples=(0, 1, 2)), single(item={"answer": "1"})):
        asyncio.run(run.handle(start))
    counters = run.handler.counters()
    assert counters["starts"] == 1 and counters["start_s"] > 0, "a group without a prompt has not begun"


def test_a_prompt_that_leaves_no_room_fails_each_sample_with_the_reason() -> None:
    item = {"messages": [{"role": "user", "content": "x" * 2045}], "answer": ""}
    out = asyncio.run(Run().handle(single(item=item, samples=(0, 1))))
    assert [stream for stream, _ in out] == [CELL.scored(3)] * 2
    for _, scored in out:
        assert isinstance(scored, ScoredTrajectory)
        assert scored.failure and scored.failure.kind == "invalid"
        assert "2048 tokens" in scored.failure.reason
        assert (scored.reward, scored.stop_reason) == (None, "failed")


@pytest.mark.parametrize(
    ("start", "kind", "reason"),
    [
        (single(item={"answer": "1"}), "invalid", "no messages"),
        (single(item={"messages": [{"role": "robot", "content": ""}]}), "invalid", "role"),
        (single(item=None), "invalid", "training file"),
        (start_of("calculater"), "invalid", "did you mean 'calculator'"),
    ],
)
def test_a_start_that_cannot_be_done_fails_with_the_reason(start: Start, kind: str, reason: str) -> None:
    [(_, scored)] = asyncio.run(Run().handle(start))
    assert isinstance(scored, ScoredTrajectory)
    assert scored.failure and scored.failure.kind == kind
    assert reason in scored.failure.reason


# -------------------------------------------------------------------------------------------------- single turn


def test_a_right_answer_is_scored_with_all_that_training_needs() -> None:
    scored = play(single(), "29842<|end|>")
    prompt = TOKENIZER.render(ITEM["messages"])  # pyright: ignore[reportArgumentType]
    assert (scored.reward, scored.failure, scored.stop_reason, scored.num_turns) == (1.0, None, "stop", 1)
    assert scored.output_text == "29842"
    assert scored.num_prompt == len(prompt)
    assert scored.tokens.numpy().tolist() == [*prompt, *ids_of("29842<|end|>")]
    assert scored.written.numpy().tolist() == [0] * len(prompt) + [1] * 6
    assert scored.logprobs.numpy().tolist() == [0.0] * len(prompt) + [-0.5] * 6
    assert scored.usage.sampled_tokens == 6
    assert scored.usage.env_s > 0


@pytest.mark.parametrize("stop", ["length", "context"])
def test_a_truncated_answer_is_graded_as_it_stands(stop: StopReason) -> None:
    scored = play(single(), "29842", stop=stop)
    assert (scored.reward, scored.stop_reason) == (1.0, stop)


async def test_a_stop_string_is_cut_from_the_text_but_not_from_the_tokens() -> None:
    run = Run()
    request = await run.first(single())
    [(_, scored)] = await run.handle(result_of(request, "29842\n\n", stop_string="\n\n"))
    assert isinstance(scored, ScoredTrajectory)
    assert (scored.output_text, scored.reward) == ("29842", 1.0)
    assert int(scored.written.numpy().sum()) == 7


async def test_a_part_that_was_sampled_before_is_not_counted_twice() -> None:
    run = Run()
    request = await run.first(single())
    partial = ids_of("298")
    request = msgspec.structs.replace(
        request,
        transcript=request.transcript + wrote(partial, [-1, -1, -1]),
        num_partial=3,
    )
    _, scored = await run.turn(request, "29842<|end|>")
    assert int(scored.written.numpy().sum()) == 6
    assert scored.logprobs.numpy()[-6:].tolist() == [-0.5] * 6


@pytest.mark.parametrize(
    "body",
    ["raise ValueError('no')", "import time; time.sleep(60)"],
)
def test_a_grader_that_fails_masks_the_trajectory(body: str) -> None:
    scored = play(start_of("single_turn", {"grader": python(f"def grade(sample, item):\n    {body}")}), "1<|end|>")
    assert scored.reward is None
    assert scored.failure and scored.failure.kind == "grader"
    assert scored.stop_reason == "failed"
    assert scored.num_prompt == 14
    assert len(scored.tokens) == 16


async def test_a_job_hears_why_its_grading_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    run = Run()
    start = start_of("single_turn", {"grader": python("def grade(s, i): return 1")})
    request = await run.first(start)
    with pytest.raises(Unavailable):
        await run.turn(request, "29842<|end|>")
    why = "the env worker's disk for temporary files: No such file or directory"
    assert run.handler.waiting.lately() == {start.job: why}


def test_a_turn_that_failed_becomes_a_failed_trajectory() -> None:
    async def go(**changes: Any) -> ScoredTrajectory:
        run = Run()
        [(_, scored)] = await run.handle(result_of(await run.first(single()), "", **changes))
        assert isinstance(scored, ScoredTrajectory)
        return scored

    failure = Failure("corrupt_adapter", "sha256 differs")
    assert asyncio.run(go(stop_reason="failed", failure=failure)).failure == failure
    cancelled = asyncio.run(go(stop_reason="cancelled"))
    assert cancelled.stop_reason == "cancelled"
    assert cancelled.failure and cancelled.failure.kind == "cancelled"


async def test_a_turn_of_another_version_is_an_error() -> None:
    run = Run()
    request = await run.first(single())
    result = result_of(request, "29842<|end|>", adapter=AdapterRef("acme", "job1", 5))
    [(_, scored)] = await run.handle(result)
    assert isinstance(scored, ScoredTrajectory) and scored.failure
    assert "job1@5 instead of job1@4" in scored.failure.reason


# --------------------------------------------------------------------------------------------------- calculator


def test_a_calculator_trajectory_fits_into_sixty_four_tokens() -> None:
    scored = play(start_of("calculator"), CALL, "29842<|end|>")
    assert (scored.reward, scored.stop_reason, scored.num_turns, scored.output_text) == (
        1.0,
        "stop",
        2,
        "29842",
    )
    assert len(scored.tokens) <= 64
    text = TOKENIZER.decode(scored.tokens.numpy().tolist(), skip_special=False)
    assert text.endswith(f"<|user|>calc 347*86<|end|><|assistant|>{CALL}<|tool|>29842<|end|><|assistant|>29842<|end|>")
    own = [bool(w) for w in scored.written.numpy()]
    model = [int(t) for t, w in zip(scored.tokens.numpy(), own, strict=True) if w]
    assert model == ids_of(CALL) + ids_of("29842<|end|>")
    assert (scored.logprobs.numpy()[np.array(own)] == -0.5).all()
    assert (scored.logprobs.numpy()[~np.array(own)] == 0).all()


@pytest.mark.parametrize(
    ("call", "reply"),
    [
        ("calculator:1/0", "error: division by zero"),
        ("calculator:x", "error: unknown name x"),
        ("calculator:__import__('os')", "error: no function __import__"),
        ("calculater:1", "error: no tool calculater"),
        ("nonsense", "error: "),
    ],
)
async def test_a_tool_that_answers_with_an_error_has_not_failed(call: str, reply: str) -> None:
    run = Run()
    stream, request = await run.turn(await run.first(start_of("calculator")), f"<tool_call>{call}</tool_call><|end|>")
    assert stream == CELL.rollout_first
    assert request.id == "job1/11/5/1/0"
    assert request.turn == 1
    assert f"<|tool|>{reply}" in (TOKENIZER.decode(request.tokens.numpy().tolist(), skip_special=False))


@pytest.mark.parametrize(
    ("max_turns", "texts", "stop", "expected"),
    [
        (8, ["<tool_call>calculator:347*8"], "length", ("length", 0.0, 1)),
        (8, ["<tool_call>calculator:347*86</tool_call>"], "length", ("length", 0.0, 1)),
        (2, [CALL, CALL], "stop", ("max_turns", 0.0, 2)),
        (2, [CALL, "29842<|end|>"], "stop", ("stop", 1.0, 2)),
    ],
    ids=["cut off", "cut off after a call", "a call on the last turn", "an answer on the last turn"],
)
def test_after_length_or_the_last_turn_allowed_no_tool_is_called(
    max_turns: int, texts: list[str], stop: StopReason, expected: tuple[str, float, int]
) -> None:
    scored = play(start_of("calculator", max_turns=max_turns), *texts, stop=stop)
    assert (scored.stop_reason, scored.reward, scored.num_turns) == expected


def test_a_reply_that_does_not_fit_into_the_context_ends_the_trajectory() -> None:
    item = {"messages": [{"role": "user", "content": "x" * 2003}], "answer": "1"}
    scored = play(start_of("calculator", item=item), "<tool_call>calculator:10^9</tool_call><|end|>")
    assert (scored.stop_reason, scored.reward, scored.num_turns) == ("context", 0.0, 1)
    assert len(scored.tokens) <= 2048


def test_a_job_s_own_context_bounds_its_trajectories_over_all_turns() -> None:
    item = {"messages": [{"role": "user", "content": "x" * 100}], "answer": "1"}

    def scored(max_context: int, *texts: str) -> ScoredTrajectory:
        start = start_of("calculator", item=item, sampling=Sampling(max_tokens=64, max_context=max_context))
        return play(start, *texts)

    free = scored(0, CALL, "29842<|end|>")
    bound = scored(len(free.tokens), CALL, "29842<|end|>")
    assert free.stop_reason == bound.stop_reason == "stop"
    most = free.num_prompt + len(ids_of(CALL)) + 1
    first = scored(most, CALL)
    assert (first.stop_reason, first.num_turns, len(first.tokens)) == ("context", 1, most - 1)
    start = start_of("calculator", item=item, sampling=Sampling(max_context=free.num_prompt))
    [(_, none)] = asyncio.run(Run().handle(start))
    assert isinstance(none, ScoredTrajectory)
    assert none.failure is not None
    assert f"the job's max_context of {free.num_prompt} leaves no room" in none.failure.reason


def test_made_items_depend_on_seed_and_group_and_evaluations_use_held_out_ones() -> None:
    async def prompt(**changes: Any) -> bytes:
        request = await Run().first(start_of("calculator", item=None, **changes))
        return request.tokens.data

    async def go() -> list[bytes]:
        return [
            await prompt(),
            await prompt(samples=(1,), attempt=2),
            await prompt(group=12),
            await prompt(seed=8),
            await prompt(purpose="eval"),
            await prompt(purpose="eval_greedy"),
        ]

    same, again, group, seed, held_out, greedy = asyncio.run(go())
    assert same == again
    assert len({same, group, seed, held_out}) == 4
    assert held_out == greedy


# ------------------------------------------------------------------------------------------------- search, python


DOCUMENTS = [
    {"id": "fr", "text": "Paris is the capital of France."},
    {"id": "it", "text": "Rome is the capital of Italy."},
]


async def test_search_finds_and_the_answer_is_graded() -> None:
    run = Run()
    item = {"messages": [{"role": "user", "content": "capital of Italy?"}], "answer": "Rome"}
    request = await run.first(start_of("search", {"documents": DOCUMENTS, "top_k": 1}, item=item))
    _, request = await run.turn(request, "<tool_call>search:Italy capital</tool_call><|end|>")
    assert "[it] Rome is the capital of Italy." in TOKENIZER.decode(request.tokens.numpy().tolist())
    _, request = await run.turn(request, "<tool_call>search:zebra</tool_call><|end|>")
    assert "nothing found" in TOKENIZER.decode(request.tokens.numpy().tolist())
    _, scored = await run.turn(request, "Rome<|end|>")
    assert (scored.reward, scored.num_turns) == (1.0, 3)


def test_a_collection_is_read_from_the_operators_folder_only(tmp_path: Path) -> None:
    (tmp_path / "texts" / "wiki").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "texts" / "wiki" / "a.jsonl").write_text("\n".join(json.dumps(d) for d in DOCUMENTS))
    (tmp_path / "texts" / "wiki" / "b.txt").write_text("Berlin is the capital of Germany.")
    (tmp_path / "texts" / "wiki" / "link.txt").symlink_to(tmp_path / "secret.txt")
    documents = read_collection(find_collection("wiki", tmp_path / "texts"), tmp_path / "texts")
    assert [d.id for d in documents] == ["fr", "it", "b"]
    assert Index(documents).search("Germany", 3)[0].id == "b"
    for name in ("../secret.txt", str(tmp_path / "secret.txt"), "wiki/link.txt", "", ".", "none"):
        with pytest.raises(InvalidInput):
            read_collection(find_collection(name, tmp_path / "texts"), tmp_path / "texts")
    with pytest.raises(InvalidInput, match="no text collections"):
        find_collection("wiki", None)


async def test_python_runs_in_the_sandbox_and_its_errors_are_answers() -> None:
    run = Run()
    request = await run.first(start_of("python"))
    _, request = await run.turn(request, "<tool_call>python:print(347*86)</tool_call><|end|>")
    _, request = await run.turn(request, "<tool_call>python:import socket; socket.socket()</tool_call><|end|>")
    _, request = await run.turn(request, "<tool_call>python:1/0</tool_call><|end|>")
    _, scored = await run.turn(request, "It is 29842.<|end|>")
    assert scored.reward == 1.0
    text = TOKENIZER.decode(scored.tokens.numpy().tolist(), skip_special=False)
    assert "<|tool|>29842<|end|>" in text
    assert "error: line 1: ZeroDivisionError" in text
    assert "PermissionError" in text


def test_a_tool_that_hangs_is_a_tool_error_and_never_an_answer() -> None:
    scored = play(
        start_of("python", tool_timeout_s=0.5), "<tool_call>python:import time; time.sleep(60)</tool_call><|end|>"
    )
    assert (scored.reward, scored.stop_reason) == (None, "tool_error")
    assert scored.failure and scored.failure.kind == "tool"


async def test_calls_of_a_turn_run_at_the_same_time() -> None:
    run = Run()
    code = "import time; began = time.time(); time.sleep(1.5); print(began, time.time(), ';')"
    request = await run.first(start_of("python", tool_timeout_s=30))
    _, after = await run.turn(request, f"<tool_call>python:{code}</tool_call>" * 2 + "<|end|>")
    (began, ended), (other_began, other_ended) = re.findall(
        r"(\d+\.\d+) (\d+\.\d+)", (TOKENIZER.decode(after.tokens.numpy()[request.num_prompt :].tolist()))
    )
    assert max(float(began), float(other_began)) < min(float(ended), float(other_ended))


def test_work_that_advances_beats() -> None:
    run = Run()
    asyncio.run(run.play(start_of("calculator"), CALL, "29842<|end|>"))
    assert run.beats >= 4


# ------------------------------------------------------------------------------------- environments of operators

PACKAGE = """
import asyncio
import random
import sys

from pydantic import BaseModel, ConfigDict


class Args(BaseModel):
    model_config = ConfigDict(extra="forbid")
    target: int = 3
    mode: str = ""


class Plain:
    def __init__(self, target, level=1):
        self.target = target


class Open:
    def __init__(self, **options):
        self.options = options


class Talker:
    reply_roles = ("user", "system")

    def __init__(self, *roles, said=()):
        self.said = list(said)

    def reset(self, item, seed):
        return None, item["messages"]

    async def step(self, state, turn):
        from env_service.environment import Step
        return Step(state=None, messages=self.said, done=turn.index == 1, reward=1.0)


class Confused(Talker):
    reply_roles = ("assistant",)


class Countdown:
    Args = Args

    def __init__(self, target=3, mode=""):
        if target < 1:
            raise ValueError("target must be positive")
        self.target, self.mode = target, mode

    def make_item(self, seed, held_out):
        return {"start": seed % 5}

    def reset(self, item, seed):
        if self.mode == "raise":
            raise RuntimeError("broken\\nindeed")
        if self.mode == "half":
            raise ValueError(chr(0xd800))
        if self.mode == "library":
            random.sample([], 1)
        if self.mode == "exit":
            sys.exit(4)
        state = {"left": self.target}
        if self.mode == "large":
            state["x"] = "x" * 70000
        if self.mode == "object":
            state["x"] = object()
        return state, [{"role": "user", "content": f"count down from {self.target}"}]

    async def step(self, state, turn):
        from env_service.environment import Step
        left = state["left"] - 1
        if self.mode == "exit late":
            await asyncio.to_thread(sys.exit, "over")
        if self.mode == "cancelled":
            raise asyncio.CancelledError
        if self.mode == "tuple":
            return state, [], True, 1.0
        if self.mode == "nothing":
            return Step(state=state, done=True)
        if self.mode == "half a name":
            return Step(state=state, done=True, reward=1.0, parts={chr(0xd800): 1.0})
        if self.mode == "half a message":
            return Step(state=state, done=False, messages=[{"role": "tool", "content": chr(0xd800)}])
        if self.mode == "half a state":
            return Step(state={"x": chr(0xd800)}, done=False, messages=[{"role": "tool", "content": "x"}])
        if self.mode == "no number":
            return Step(state=state, done=True, reward=1.0, parts={"x": "y"})
        if self.mode == "nan":
            return Step(state=state, done=True, reward=float("nan"))
        reward = float(turn.text == str(state["left"]))
        messages = [{"role": "tool", "content": "go on"}]
        return Step(state={"left": left}, messages=messages, done=left == 0, reward=reward, parts={f"turn{turn.index}": reward})
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "countdown_env.py").write_text(textwrap.dedent(PACKAGE))
    info = tmp_path / "countdown_env-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: countdown-env\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[marlaas.environments]\ncountdown = countdown_env:Countdown\nplain = countdown_env:Plain\n"
        "open = countdown_env:Open\nmissing = none:X\ntalker = countdown_env:Talker\nconfused = countdown_env:Confused\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("countdown_env", None)


@pytest.mark.usefixtures("installed")
def test_an_installed_environment_plays_and_its_rewards_add_up() -> None:
    scored = play(start_of("countdown", item=None), "3<|end|>", "2<|end|>", "0<|end|>")
    assert (scored.reward, scored.stop_reason, scored.num_turns) == (2.0, "stop", 3)
    assert scored.reward_parts == {"turn0": 1.0, "turn1": 1.0, "turn2": 0.0}
    assert makes_items(EnvSpec("countdown"))


async def test_a_worker_goes_on_while_it_imports_an_environment(installed: None, tmp_path: Path) -> None:
    """It must say that it is alive: some need half a minute when they are new."""
    waits = "import os, time\nwhile not os.path.exists({!r}):\n    time.sleep(0.01)\n"
    module, go_on = tmp_path / "countdown_env.py", tmp_path / "go_on"
    module.write_text(waits.format(str(go_on)) + module.read_text())
    run = Run()
    handling = asyncio.create_task(run.handle(start_of("countdown", item=None)))
    for _ in range(200):  # a loop that waits for the import never comes here
        await asyncio.sleep(0 if run.beats else 0.01)
    beats = run.beats
    go_on.touch()
    [(stream, _)] = await handling
    assert stream == CELL.rollout
    assert beats, "or another worker takes the work over"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("mode", "kind", "reason"),
    [
        ("large", "environment", "more than 65536"),
        ("object", "environment", "cannot be packed"),
        ("raise", "environment", "RuntimeError: broken indeed (countdown_env.py:"),
        ("library", "environment", "(countdown_env.py:"),
        ("exit", "environment", "SystemExit: 4 (countdown_env.py:"),
        ("exit late", "environment", "SystemExit: over"),
        ("cancelled", "environment", "CancelledError: nobody cancelled it (countdown_env.py:"),
        ("tuple", "environment", "return env_service.environment.Step, not tuple"),
        ("nothing", "environment", "without a reward"),
        ("nan", "grader", "nan"),
        ("half", "environment", "ValueError: \\ud800 (countdown_env.py:"),
        ("half a name", "environment", "is named '\\ud800', which is no text"),
        ("half a message", "environment", "surrogates not allowed"),
        ("half a state", "environment", "cannot be packed"),
        ("no number", "environment", "is 'y', not a number"),
    ],
)
async def test_an_environment_that_fails_masks_the_trajectory(mode: str, kind: str, reason: str) -> None:
    run = Run()
    [(stream, message)] = await run.handle(start_of("countdown", {"mode": mode}))
    if isinstance(message, TurnRequest):
        stream, message = await run.turn(message, "3<|end|>")
    assert stream == CELL.scored(3)
    scored: Any = message
    assert scored.reward is None
    assert scored.failure.kind == kind
    assert reason in scored.failure.reason
    assert decode(encode(scored)) is not None


@pytest.mark.usefixtures("installed")
def test_users_and_the_system_may_answer_and_what_was_sampled_stays_as_it_is() -> None:
    said = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "<|end|>"},
        {"role": "user", "content": "ö"},
    ]
    scored = play(start_of("talker", {"said": said}), "o<tool_call>k", "bye<|end|>")
    shown = TOKENIZER.decode(scored.tokens.numpy().tolist(), skip_special=False)
    assert shown == (
        "<|user|>calc 347*86<|end|><|assistant|>o<tool_call>k<|end|>"
        "<|system|>be brief<|end|><|user|><|end|><|end|><|user|>ö<|end|><|assistant|>bye<|end|>"
    )
    sampled = [[*ids_of("o<tool_call>k"), *TOKENIZER.end_of_turn_ids[:1]], ids_of("bye<|end|>")]
    written = scored.written.numpy().astype(bool)
    # the stop string that ended the first turn is no token of the model's: its end is the environment's
    assert scored.tokens.numpy()[written].tolist() == [*sampled[0][:-1], *sampled[1]]
    assert scored.tokens.numpy()[~written].tolist().count(sampled[0][-1]) == 5


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([], "one or more messages of roles tool, user, system"),
        ([{"role": "assistant", "content": "I"}], "roles tool, user"),
    ],
)
def test_an_answer_that_no_template_shows_masks_the_trajectory(said: list[Any], reason: str) -> None:
    scored = play(start_of("talker", {"said": said}), "ok<|end|>")
    assert scored.failure is not None and scored.failure.kind == "environment" and reason in scored.failure.reason


@pytest.mark.usefixtures("installed")
def test_the_roles_of_an_environments_messages_are_those_that_it_says() -> None:
    assert reply_roles(EnvSpec("talker")) == ("user", "system")
    assert [reply_roles(EnvSpec(name)) for name in ("plain", "calculator", "single_turn")] == [("tool",), ("tool",), ()]
    with pytest.raises(InvalidInput, match="reply_roles must be a list of tool, user, system"):
        reply_roles(EnvSpec("confused"))
    assert not reply_fault(TOKENIZER, ("tool", "user", "system"))


@pytest.mark.usefixtures("installed")
def test_installed_environments_are_validated_by_their_own_model() -> None:
    validate_environment(EnvSpec("countdown", {"target": 2}))
    with pytest.raises(InvalidInput, match="did you mean 'target'"):
        validate_environment(EnvSpec("countdown", {"targt": 2}))
    with pytest.raises(InvalidInput, match="did you mean 'countdown'"):
        validate_environment(EnvSpec("countdwn"))
    with pytest.raises(InvalidInput, match="cannot be loaded"):
        validate_environment(EnvSpec("missing"))


@pytest.mark.usefixtures("installed")
def test_an_installed_environment_without_a_model_is_validated_by_its_arguments() -> None:
    validate_environment(EnvSpec("plain", {"target": 2}))
    with pytest.raises(InvalidInput, match=r"unknown field 'levl' in environment.args; did you mean 'level'"):
        validate_environment(EnvSpec("plain", {"target": 2, "levl": 1}))
    with pytest.raises(InvalidInput, match=r"environment\.args\.target is missing"):
        validate_environment(EnvSpec("plain", {"level": 2}))
    validate_environment(EnvSpec("open", {"anything": 2}))


@pytest.mark.parametrize(
    ("spec", "message", "param"),
    [
        (EnvSpec("serch"), "did you mean 'search'", "environment.name"),
        (EnvSpec("calculator", {"skil": "calc"}), "did you mean 'skill'", "environment.args.skil"),
        (EnvSpec("calculator", {"skill": "sort"}), "'calc'", "environment.args.skill"),
        (EnvSpec("single_turn"), "grader is missing", "environment.args.grader"),
        (
            EnvSpec("single_turn", {"grader": {"type": "maths"}}),
            "did you mean 'math'",
            "environment.args.grader.type",
        ),
        (EnvSpec("search"), "either collection or documents", "environment.args"),
        (EnvSpec("search", {"documents": [{"text": "x" * 70000}]}), "use a collection", "environment.args"),
        (
            EnvSpec("search", {"documents": [{"txt": "x"}]}),
            "did you mean 'text'",
            "environment.args.documents.0.txt",
        ),
    ],
)
def test_a_wrong_environment_is_refused_by_name(spec: EnvSpec, message: str, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        validate_environment(spec)
    assert message in str(caught.value)
    assert (caught.value.param or "").startswith(param)


# ------------------------------------------------------------------------------------------ grading, park, failed


def request_to_grade(grader: dict[str, Any], tenant: str = "acme") -> GradeRequest:
    return GradeRequest(
        id="g1",
        tenant=tenant,
        job="",
        partition=3,
        env=EnvSpec("single_turn", {"grader": grader}),
        item={"answer": "95"},
        output_text="95",
        reply_to=CELL.reply("api1"),
    )


def test_a_grade_request_is_answered_to_whom_it_names() -> None:
    [(stream, result)] = asyncio.run(Run().handle(request_to_grade(EXACT)))
    assert isinstance(result, GradeResult)
    assert (stream, result.id, result.reward, result.failure) == (CELL.reply("api1"), "g1", 1.0, None)


def test_a_grade_request_that_fails_is_answered_with_the_reason() -> None:
    [(_, result)] = asyncio.run(Run().handle(request_to_grade({"type": "mth"})))
    assert isinstance(result, GradeResult) and result.reward is None
    assert result.failure and result.failure.kind == "invalid"


async def test_a_tenants_weight_stays_with_its_trajectory() -> None:
    run = Run()
    request = await run.first(start_of("calculator", weight=4.0))
    assert decode_context(request.context).weight == 4.0
    assert decode_context(((await run.turn(request, CALL))[1]).context).weight == 4.0


async def test_a_parked_turn_is_its_request_and_a_parked_start_is_nothing() -> None:
    run = Run()
    request = await run.first(start_of("calculator"))
    _, second = await run.turn(request, CALL)
    [(stream, parked)] = run.handler.park(result_of(second, "29842<|end|>"))
    assert stream == CELL.scored(3)
    assert isinstance(parked, Parked)
    assert parked.request.tokens == second.tokens
    assert parked.request.usage.sampled_tokens == len(ids_of(CALL)) + 6
    assert run.handler.park(single()) == []
    assert run.handler.hand_back(single()) is None


async def test_a_dead_letter_tells_the_owner_of_each_trajectory() -> None:
    run = Run()
    failure = Failure("dead_letter", "delivered 11 times")
    out = run.handler.failed(single(samples=(0, 1)), failure)
    assert [(s, m.trajectory.sample, m.failure, m.reward) for s, m in out if isinstance(m, ScoredTrajectory)] == [
        (CELL.scored(3), 0, failure, None),
        (CELL.scored(3), 1, failure, None),
    ]
    request = await run.first(single())
    [(_, scored)] = run.handler.failed(result_of(request, "1<|end|>"), failure)
    assert isinstance(scored, ScoredTrajectory)
    assert (scored.failure, scored.stop_reason, scored.num_turns) == (failure, "failed", 1)
    [(stream, result)] = run.handler.failed(request_to_grade(EXACT), failure)
    assert isinstance(result, GradeResult)
    assert (stream, result.failure) == (CELL.reply("api1"), failure)
