"""Checks what a request for samples asks for; and what a sample is."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from common.errors import InvalidInput
from common.wire.messages import EMPTY_F32, Array, Sampling, i32
from manager_service.http.reading.json_values import decode_body

MAX_SAMPLES = 1024
"""Samples of one request."""
MOST_TOP_K = 2**31 - 1  # above it, as above the vocabulary, all tokens are kept
MAX_STOPS, MAX_STOP_CHARACTERS = 64, 1024

NOT_OFFERED: Mapping[str, str] = {
    "topk_prompt_logprobs": "alternatives to the prompt's tokens are not offered: leave it out",
    "topk_sample_logprobs": "alternatives to the sampled tokens are not offered: leave it out",
    "target_prompt_logprobs": "it is not offered: leave it out",
    "prompt_alt_tokens_k": "it is not offered: leave it out",
}


Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Numbers that travel on: larger ones could never be sent to a worker."""


class Chunk(msgspec.Struct):
    type: str = "encoded_text"
    tokens: list[int] = []


class ModelInput(msgspec.Struct):
    chunks: list[Chunk]


class TinkerSamplingParams(msgspec.Struct):
    max_tokens: Int | None = None
    seed: int | None = None
    stop: str | list[str | TokenId] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    response_format: Any = None  # refused, as is vLLM's name for it
    structured_outputs: Any = None


class SampleGiven(msgspec.Struct):
    """The body of `asample`."""

    prompt: ModelInput
    sampling_params: TinkerSamplingParams
    num_samples: int = 1
    sampling_session_id: str | None = None
    seq_id: Int | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: Int | None = None


class CheckedSample(msgspec.Struct, frozen=True):
    """A request for samples that can be sent on, once its prompt fits the model."""

    prompt: Array  # i4
    num_samples: int
    seed: int | None
    sampling: Sampling  # its max_tokens is 0 if the request does not say
    sampler: str | None
    seq: int | None
    base_model: str | None
    model_path: str | None


class TinkerSample(msgspec.Struct, frozen=True):
    """One sample."""

    tokens: Array  # i4 [T]
    logprobs: Array  # f4 [T]
    stop_reason: Literal["stop", "length"]
    prompt_logprobs: Array = EMPTY_F32  # f4 [tokens of the prompt], NaN where none was asked for; of the first sample


def read_sample(body: bytes) -> CheckedSample:
    """Raises InvalidInput."""
    given = decode_body(body, SampleGiven)
    for name, hint in NOT_OFFERED.items():
        if getattr(given, name):
            raise InvalidInput(f"{name}: {hint}", param=name, code="not_offered")
    if not 1 <= given.num_samples <= MAX_SAMPLES:
        raise InvalidInput(f"num_samples is between 1 and {MAX_SAMPLES}", param="num_samples")
    params = given.sampling_params
    return CheckedSample(
        prompt=_prompt(given.prompt),
        num_samples=given.num_samples,
        seed=None if params.seed is None else params.seed % 2**53,
        sampling=_sampling(params, _prompt_logprobs(given)),
        sampler=given.sampling_session_id,
        seq=given.seq_id,
        base_model=given.base_model,
        model_path=given.model_path,
    )


def _prompt(prompt: ModelInput) -> Array:
    for chunk in prompt.chunks:
        if chunk.type != "encoded_text":
            raise InvalidInput(
                f"prompt: this service takes only text, not chunks of kind {chunk.type!r}", param="prompt"
            )
    tokens = [token for chunk in prompt.chunks for token in chunk.tokens]
    if not all(0 <= token < 2**31 for token in tokens):
        raise InvalidInput("prompt: token ids are between 0 and 2^31 - 1", param="prompt")
    return i32(tokens)


def _prompt_logprobs(given: SampleGiven) -> int:
    """See `Sampling.prompt_logprobs`."""
    last = given.prompt_logprobs_last_n
    if last is not None and last < 1:
        raise InvalidInput("prompt_logprobs_last_n must be at least 1", param="prompt_logprobs_last_n")
    return last or (-1 if given.prompt_logprobs else 0)


def _sampling(params: TinkerSamplingParams, prompt_logprobs: int) -> Sampling:
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InvalidInput("sampling_params.max_tokens must be at least 1", param="sampling_params.max_tokens")
    if not 0 <= params.temperature <= 100:
        raise InvalidInput("sampling_params.temperature is between 0 and 100", param="sampling_params.temperature")
    if not 0 < params.top_p <= 1:
        raise InvalidInput("sampling_params.top_p is above 0, and at most 1", param="sampling_params.top_p")
    if params.top_k < -1:
        raise InvalidInput("sampling_params.top_k is at least 1, or -1 for all tokens", param="sampling_params.top_k")
    for name in ("response_format", "structured_outputs"):
        if getattr(params, name) is not None:
            hint = "samples to learn from follow no grammar: leave it out"
            raise InvalidInput(f"sampling_params.{name}: {hint}", param=f"sampling_params.{name}", code="not_offered")
    words, ids = _stops(params.stop)
    return Sampling(
        temperature=params.temperature,
        max_tokens=params.max_tokens or 0,
        top_p=params.top_p,
        stop=words,
        top_k=min(max(0, params.top_k), MOST_TOP_K),
        stop_ids=ids,
        prompt_logprobs=prompt_logprobs,
    )


def _stops(stop: str | Sequence[str | int] | None) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """The strings, and the ids in place of the model's own; None: its own; empty: only its length ends a sample."""
    stops = (stop,) if isinstance(stop, str) else stop
    if stops is None:
        return (), None
    words = tuple(word for word in stops if isinstance(word, str))
    ids = tuple(token for token in stops if isinstance(token, int))
    if len(stops) > MAX_STOPS or not all(0 < len(word) <= MAX_STOP_CHARACTERS for word in words):
        raise InvalidInput(
            f"sampling_params.stop: at most {MAX_STOPS} token ids, and strings of 1 to {MAX_STOP_CHARACTERS} characters",
            param="sampling_params.stop",
        )
    return words, ids if ids or not words else None
