"""The parameters that chat and text completions share, and the request for turns that a body becomes."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from common.errors import InvalidInput
from common.messages import TEMPERATURE, Sampling
from manager_service.api.model_names import Named
from manager_service.api.sampling.shares import InferenceRequest

MAX_CHOICES = 64
"""Choices of one request, over all its prompts."""

StopString = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool | None = None


class SamplingGiven(BaseModel):
    """Parameters of both calls. Those that cannot be honoured are accepted at their neutral value only."""

    model_config = ConfigDict(extra="forbid")

    model: str
    n: int | None = Field(None, ge=1, le=16)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    max_tokens: int | None = Field(None, ge=1)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # not used: OpenAI's own abuse checks need it
    frequency_penalty: float | None = Field(None, description="Only 0")
    presence_penalty: float | None = Field(None, description="Only 0")
    logit_bias: dict[str, Any] | None = Field(None, description="Only empty")

    @field_validator("frequency_penalty", "presence_penalty", "logit_bias")
    @classmethod
    def _neutral(cls, value: Any) -> Any:
        if value:
            raise ValueError("not offered: leave it out")
        return value

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The part of a body that each call spells in its own way."""

    prompts: Sequence[Sequence[int]]  # token ids
    limit: int | None  # tokens of an answer; None: as many as the context has room for
    num_top: int  # how many alternatives to each token are told with their log-probs
    tools: Sequence[Any] | None = None  # None: tool calls are text like any other


def inference_request(tenant: str, named: Named, body: SamplingGiven, wanted: Wanted) -> InferenceRequest:
    """Raises InvalidInput for a prompt that leaves no room for an answer."""
    num_choices = body.n or 1
    if len(wanted.prompts) * num_choices > MAX_CHOICES:
        raise InvalidInput(f"a request gives at most {MAX_CHOICES} choices", param="n")
    context = named.base.tokenizer.context
    return InferenceRequest(
        tenant=tenant,
        adapter=named.adapter,
        prompts=wanted.prompts,
        num_choices=num_choices,
        sampling=[_sampling(body, wanted, len(prompt), context) for prompt in wanted.prompts],
        seed=secrets.randbits(53) if body.seed is None else body.seed % 2**53,
        stream=bool(body.stream) and not wanted.num_top,
    )


def _sampling(body: SamplingGiven, wanted: Wanted, num_prompt: int, context: int) -> Sampling:
    room = context - num_prompt
    if room < 1:
        raise InvalidInput(
            f"the prompt has {num_prompt} tokens and the model's context {context}: there is no room for an answer;"
            " shorten the messages",
            param="messages",
            code="context_length_exceeded",
        )
    if num_prompt < 1:
        raise InvalidInput("the prompt is empty", param="prompt")
    return Sampling(
        temperature=TEMPERATURE if body.temperature is None else body.temperature,
        max_tokens=min(room, wanted.limit or room),
        top_p=1.0 if body.top_p is None else body.top_p,
        stop=body.stops(),
        num_top_logprobs=wanted.num_top,
    )
