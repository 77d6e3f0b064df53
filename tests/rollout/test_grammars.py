"""Turns that follow grammars, in every engine that can: `running` gives it, as in `test_engine_contract.py`."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from common.errors import InvalidInput
from common.text.grammars import LIMITS, call_grammar, json_grammar
from manager_service.http.reading.tasks import Constrain, do
from rollout_service.engine import CorruptAdapter, Generated
from tests.support.engines_under_test import KINDS, Running, process_engine
from tests.support.fake_core import FakeCore
from tests.support.rollout_cases import bits, broken_files, files_of, nearly, one, prompt, ref, request, tokenizer
from tests.support.rollout_cases import running as running_torch

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]
MASKING = [kind for kind in KINDS if kind != "fake"]
masking = pytest.mark.parametrize("running", MASKING, indirect=True)

PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "nights": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "nights"],
    "additionalProperties": False,
}


def asked(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "grammar": json_grammar(PLACE),
        "max_tokens": 64,
        "purpose": "chat",
        "tokens": prompt("sort 40213"),
    }
    return request(**(values | changes))


def value(tokens: list[int]) -> Any:
    return json.loads(tokenizer().decode(tokens))


@masking
async def test_turns_follow_their_grammars_to_the_end_beside_rows_without_one(running: Running) -> None:
    free = [request(ref("a"), tokens=prompt("add 1+2"), sample=i, temperature=0.0) for i in range(4)]
    bound = [
        asked(sample=i, temperature=(1.0, 0.0, 0.7)[i % 3], adapter=(ref("a"), request().adapter)[i % 2])
        for i in range(8)
    ]
    async with running(adapters={ref("a"): files_of(1)}) as engine:
        alone = [await one(engine, each) for each in free]
        mixed = await asyncio.gather(
            *[one(engine, each) for pair in zip(free * 2, bound, strict=True) for each in pair]
        )
    for answer in mixed[1::2]:
        found = value(answer.tokens)
        assert (answer.stop_reason, [*found], found["city"] in ("Oslo", "Rome")) == ("stop", ["city", "nights"], True)
    assert len({tuple(answer.tokens) for answer in mixed[1::2]}) > 2
    beside = mixed[0:8:2]
    assert [answer.tokens for answer in beside] == [answer.tokens for answer in alone]
    assert not running.exact or [bits(answer) for answer in beside] == [bits(answer) for answer in alone]


@masking
async def test_a_mask_is_for_the_choice_and_log_probs_are_of_the_whole_vocabulary(running: Running) -> None:
    async with running() as engine:
        answer = await one(engine, asked(temperature=0.0))
        whole = [*prompt("sort 40213"), *answer.tokens]
        read = await one(
            engine, request(tokens=whole, temperature=0.0, max_tokens=1, prompt_logprobs=len(answer.tokens))
        )
    expected = read.prompt_logprobs.numpy()[-len(answer.tokens) :]
    assert min(expected) < -3
    if running.scales_prompts:
        assert np.allclose(answer.logprobs, expected, atol=1e-3)
    else:
        assert np.greater_equal(answer.logprobs, expected - 1e-3).all()


@masking
async def test_a_moved_turn_goes_on_in_its_grammar_or_is_refused(running: Running) -> None:
    async with running() as engine:
        whole = await one(engine, asked(temperature=0.0))
        for cut in (1, 5, len(whole.tokens) - 1, len(whole.tokens)):
            moved = asked(temperature=0.0, partial=(whole.tokens[:cut], whole.logprobs[:cut]))
            if running.scales_prompts:
                assert nearly(await one(engine, moved), whole)
            else:
                with pytest.raises(InvalidInput, match="cannot follow a grammar"):
                    await one(engine, moved)


async def test_a_turn_that_cannot_follow_its_grammar_fails_alone() -> None:
    async with running_torch() as engine:
        odd = [asked(grammar="start: nowhere"), asked(grammar='start: "a"', partial=([98], [-1.0]))]
        *failed, answer = await asyncio.gather(*[one(engine, each) for each in (*odd, asked())], return_exceptions=True)
    assert all("the answer cannot follow its grammar" in str(error) for error in failed)
    assert isinstance(answer, Generated) and value(answer.tokens)


async def test_scores_that_are_no_numbers_are_the_adapters_fault_and_not_the_grammars() -> None:
    async with running_torch(adapters={ref("bad"): broken_files()}) as engine:
        for temperature in (0.0, 1.0):
            with pytest.raises(CorruptAdapter):
                await one(engine, asked(adapter=ref("bad"), temperature=temperature))


async def test_an_engine_whose_process_masks_nothing_refuses_grammars() -> None:
    engine = process_engine(lambda: FakeCore(272, 5))
    await engine.start()
    try:
        with pytest.raises(InvalidInput, match="cannot follow a grammar here: leave out response_format"):
            await one(engine, asked())
    finally:
        await engine.stop()


def follows(grammar: str, answer: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=LIMITS)
    return matcher.try_consume_tokens(list(answer.encode())) == len(answer) and matcher.is_accepting()


def follows_schema(schema: Any, answer: str) -> bool:
    return follows(json_grammar(schema), answer)


async def test_an_answer_may_be_a_call_or_json() -> None:
    functions = [{"name": name, "parameters": {"properties": {name: {"type": "integer"}}}} for name in ("a", "b")]
    grammar = call_grammar(functions, tags_are_tokens=False, instead=json_grammar(PLACE))
    call = '<tool_call>\n{"name": "b", "arguments": {"b": 3}}\n</tool_call>'
    place = '{"city":"Oslo","nights":3}'
    assert follows(grammar, call) and follows(grammar, place)
    for neither in ("Oslo", call + place, call + call, call.replace('"b": 3', '"a": 3')):
        assert not follows(grammar, neither)


async def test_an_object_has_the_properties_of_all_the_schemas_that_describe_it() -> None:
    def named(name: str, **more: Any) -> Any:
        return {"type": "object", "properties": {name: {"type": "integer"}}, **more}

    bases = {"$defs": {"Base": named("a", required=["a"])}}
    base = {"$ref": "#/$defs/Base"}
    for joined in (
        {"allOf": [base, named("b")]},
        named("b", allOf=[base]),
        named("b", **base),
        named("b", anyOf=[base, named("c")]),
    ):
        answers = ('{"a":1,"b":2}', '{"b":2,"a":1}')
        assert any(follows_schema({**joined, **bases}, answer) for answer in answers)
    for alone in (base, {"allOf": [base]}, {"anyOf": [base, named("c")]}):
        assert follows_schema({**alone, **bases}, '{"a":1}') and not follows_schema({**alone, **bases}, '{"a":1,"b":2}')


async def test_a_schema_of_too_many_levels_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(500):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidInput, match=r"recursion (depth|limit)"):
        do(Constrain("tiny", schema, []), {"tiny": tokenizer()})


async def test_a_schema_that_cannot_be_followed_is_named_without_options_of_the_library() -> None:
    with pytest.raises(ValueError, match=r"^oneOf constraints are not supported\.$"):
        json_grammar({"oneOf": [{"type": "integer"}, {"minimum": 3}]})


async def test_choices_of_one_request_share_the_cost_of_their_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(tokenizer: Any, grammar: str, **options: Any) -> LLMatcher:
        made.append(grammar)
        return LLMatcher(tokenizer, grammar, **options)

    monkeypatch.setattr("rollout_service.grammar.LLMatcher", counted)
    async with running_torch() as engine:
        answers = await asyncio.gather(*[one(engine, asked(sample=i)) for i in range(16)])
    assert len(made) == 1
    assert all(value(answer.tokens) for answer in answers)


async def test_grammars_that_cost_much_to_follow_are_refused_alone_and_together() -> None:
    def schema(first: int, last: int) -> Any:
        numbers = {f"n{i}": {"type": "integer", "multipleOf": 9973 - i} for i in range(first, last)}
        return {"type": "object", "properties": numbers}

    json_grammar(schema(0, 1))
    with pytest.raises(ValueError, match="costs too much"):
        json_grammar(schema(0, 40))
    many = [{"name": f"f{i}", "parameters": schema(i, i + 1)} for i in range(100)]
    with pytest.raises(ValueError, match=r"the parameters of f[1-9].*: following it costs too much"):
        call_grammar(many, tags_are_tokens=True)
