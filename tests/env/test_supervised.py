"""Examples of supervised jobs in an env worker: nobody samples them."""

import asyncio
from typing import Any

import msgspec
import numpy as np

from common.tasks.environments import SUPERVISED
from common.wire.messages import ScoredTrajectory, Start, TurnRequest, f32
from env_service.examples import TOKENS
from tests.env.test_env_handler import CELL, TOKENIZER, Run, result_of, start_of

ITEM = {"messages": [{"role": "user", "content": "min 3,1,2"}, {"role": "assistant", "content": "1"}]}


def start(**changes: Any) -> Start:
    return start_of(SUPERVISED, **({"item": ITEM} | changes))


def handled(message: Any) -> list[tuple[str, Any]]:
    return asyncio.run(Run().handle(message))


def test_an_example_goes_straight_into_its_jobs_batch() -> None:
    [(stream, scored)] = handled(start())
    assert stream == CELL.scored(3) and isinstance(scored, ScoredTrajectory)
    prompt = TOKENIZER.render(ITEM["messages"][:1])
    assert scored.tokens.numpy().tolist()[: len(prompt)] == prompt
    assert scored.written.numpy().tolist() == [0] * len(prompt) + [1, 1]
    assert not scored.logprobs.numpy().any() and len(scored.logprobs) == len(scored.tokens)
    assert (scored.id, scored.num_prompt, scored.output_text, scored.failure) == (
        "job1/11/5/0/0",
        len(prompt),
        "1",
        None,
    )
    assert scored.usage.sampled_tokens == scored.usage.prompt_tokens == 0


def test_a_held_out_example_is_measured_by_an_engine() -> None:
    [(stream, request)] = handled(start(purpose="eval"))
    assert stream == CELL.rollout and isinstance(request, TurnRequest)
    assert (request.sampling.max_tokens, request.sampling.prompt_logprobs, request.sampling.temperature) == (1, 2, 1.0)
    logprobs = np.full(len(request.tokens), np.nan, np.float32)
    logprobs[-2:] = (-0.5, -0.25)
    result = result_of(request, "x", "length", prompt_logprobs=f32(logprobs))
    [(stream, scored)] = handled(result)
    assert stream == CELL.scored(3) and scored.failure is None
    assert (scored.reward, scored.reward_parts) == (-0.375, {TOKENS: 2.0})
    [(_, scored)] = handled(msgspec.structs.replace(result, prompt_logprobs=f32([])))
    assert scored.failure and "did not give the log-probs" in scored.failure.reason


def test_an_example_that_cannot_be_learned_fails_with_its_reason() -> None:
    [(_, scored)] = handled(start(item={"messages": ITEM["messages"][:1]}))
    assert scored.failure.kind == "invalid" and "must be the assistant's" in scored.failure.reason
    long = [ITEM["messages"][0], {"role": "assistant", "content": "1" * TOKENIZER.context}]
    [(_, scored)] = handled(start(item={"messages": long}))
    assert scored.failure and "context is 2048" in scored.failure.reason
