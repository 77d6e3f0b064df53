"""Shows the examples of supervised jobs: rendered as conversations are, sampled by nobody.

Start of a step's example      -> a ScoredTrajectory whose learned tokens count as written, at once
Start of a held-out example    -> a TurnRequest that asks for log-probs of its tokens
              its TurnResult   -> a ScoredTrajectory whose reward is the mean log-prob of the learned tokens
"""

import msgspec
import numpy as np

from common.errors import InvalidInput
from common.text.examples import Example, read_example
from common.text.tokens import ChatTokenizer
from common.wire.messages import ScoredTrajectory, Start, TurnRequest, TurnResult, Usage
from common.wire.transcript import transcript
from env_service.environment import Step
from env_service.outputs import first_requests
from env_service.trajectory import Context, decode_state, encode_context, encode_state

TOKENS = "tokens"
"""The part of a held-out example's reward that says how many tokens it is the mean over."""


def example_of(start: Start, tokenizer: ChatTokenizer) -> Example:
    """Raises InvalidInput for what is no example, or too long for the base model."""
    try:
        example = read_example(start.item or {}, tokenizer.told(start.env.chat_template_kwargs))
    except ValueError as error:
        raise InvalidInput(str(error)) from error
    if len(example.tokens) >= tokenizer.context:
        raise InvalidInput(f"the example has {len(example.tokens)} tokens; the model's context is {tokenizer.context}")
    return example


def trained_on(start: Start, example: Example, text: str, usage: Usage) -> list[ScoredTrajectory]:
    """The example as it goes into a step's batch. It has no reward to speak of: 0."""
    requests = first_requests(start, example.tokens, b"", usage)
    return [
        ScoredTrajectory(
            **start.about(),
            id=request.id,
            adapter=start.adapter,
            trajectory=request.trajectory,
            transcript=transcript(example.tokens, np.zeros(len(example.tokens)), example.written),
            num_prompt=example.written.index(1),
            reward=0.0,
            stop_reason="stop",
            num_turns=1,
            output_text=text,
            usage=usage,
        )
        for request in requests
    ]


def measured_by(start: Start, example: Example, usage: Usage) -> list[TurnRequest]:
    """Asks rollout for the log-probs of a held-out example; the one token that it samples is not read."""
    learned = np.flatnonzero(np.diff([0, *example.written, 0])).tolist()  # begins and ends of segments
    sampling = msgspec.structs.replace(start.sampling, max_tokens=1, prompt_logprobs=len(example.tokens) - learned[0])
    context = Context(
        env=start.env,
        item={},
        state=encode_state(learned),
        num_prompt=learned[0],
        max_turns=1,
        tool_timeout_s=start.tool_timeout_s,
        weight=start.weight,
    )
    requests = first_requests(start, example.tokens, encode_context(context), usage)
    return [msgspec.structs.replace(request, sampling=sampling) for request in requests]


def log_prob(result: TurnResult, context: Context) -> Step:
    """The mean log-prob of the learned tokens. Raises InvalidInput if the engine did not measure them."""
    logprobs = result.prompt_logprobs.numpy()
    bounds = decode_state(context.state)
    parts = [logprobs[start:end] for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
    learned = np.concatenate(parts).astype(np.float64)
    if len(logprobs) < bounds[-1] or not np.isfinite(learned).all():
        raise InvalidInput("the rollout worker did not give the log-probs of the example's tokens")
    return Step(state=None, done=True, reward=float(learned.mean()), parts={TOKENS: float(len(learned))})
