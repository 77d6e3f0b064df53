"""The parameters that chat and text completions share, and the request for turns that a body becomes."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from common.errors import InvalidInput
from common.text.chat_template import TemplateKwargs
from common.text.tokens import ChatTokenizer
from common.wire.messages import TEMPERATURE, Sampling
from manager_service.http.context import Base
from manager_service.http.reading.reading_helpers import Helpers
from manager_service.http.reading.tasks import Constrain, Encode, Render, Task, with_room
from manager_service.http.sampling.choices import InferenceRequest
from manager_service.http.schemas import Given
from manager_service.http.stores.model_names import Named
from manager_service.records.tenants import TenantRecord

MAX_CHOICES = 64
"""Choices of one request, over all its prompts."""

MAX_LOGPROBS = 1_000_000
"""Log-probs of one answer, over all its choices, their tokens and the alternatives to them."""

TokenId = Annotated[int, Field(strict=True)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]


def _neutral(value: Any) -> Any:
    if value:
        raise ValueError("not offered: leave it out")
    return value


Neutral = AfterValidator(_neutral)
"""Accepts a parameter only at a value that changes nothing."""


class StreamOptions(Given):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class TextFormat(Given):
    type: Literal["text"]


class JsonFormat(Given):
    type: Literal["json_object"]


class JsonSchema(Given):
    name: str = Field(max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field({}, alias="schema")
    strict: bool | None = None  # the answer follows the schema however this is


class SchemaFormat(Given):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class SharedParameters(Given):
    """Parameters of all calls."""

    n: int | None = Field(None, ge=1, le=16)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    max_tokens: int | None = Field(None, ge=1)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)


class SamplingGiven(SharedParameters):
    """Parameters of both calls. Those that cannot be honoured are accepted at their neutral value only."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None  # not used: OpenAI's own abuse checks need it
    frequency_penalty: Annotated[float | None, Neutral] = Field(None, description="Only 0")
    presence_penalty: Annotated[float | None, Neutral] = Field(None, description="Only 0")
    logit_bias: Annotated[dict[str, Any] | None, Neutral] = Field(None, description="Only empty")

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON Schema of the answer, if it must be JSON."""
        match self.response_format:
            case JsonFormat():
                return {"type": "object"}
            case SchemaFormat(json_schema=wanted):
                return wanted.schema_
            case _:
                return None

    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The part of a body that each call spells in its own way."""

    prompts: Sequence[Sequence[int]]  # token ids
    limit: int | None  # tokens of an answer; None: as many as the context has room for
    num_top: int  # how many alternatives to each token are told with their log-probs
    with_logprobs: bool = False  # whether log-probs are told at all
    echo: bool = False  # whether the answer begins with the prompt
    tools: Sequence[Any] | None = None  # None: tool calls are text like any other
    grammar: str = ""  # that each answer follows


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Makes token ids of the text in one body, in a helper process if the body is large."""

    helpers: Helpers
    tenant: TenantRecord
    base: Base
    num_bytes: int  # of the body

    async def render(self, messages: list[Any], tools: list[Any], told: TemplateKwargs | None = None) -> list[int]:
        """The ids of a conversation. Raises InvalidInput."""
        return await self._read(Render(self.base.name, messages, tools, told or {}))

    async def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text. Raises InvalidInput."""
        return await self._read(Encode(self.base.name, texts))

    async def grammar(self, schema: dict[str, Any] | None, functions: Sequence[Any] = ()) -> str:
        """The grammar of JSON of a schema, of a call of one of the functions, or of either; "" without both. Raises InvalidInput."""
        if schema is None and not functions:
            return ""
        return await self._read(Constrain(self.base.name, schema, list(functions)))

    async def _read(self, task: Task) -> Any:
        return await self.helpers.do(self.tenant, task, num_bytes=self.num_bytes)


def valid_ids(ids: Sequence[int], tokenizer: ChatTokenizer, param: str) -> list[int]:
    """Raises InvalidInput for ids outside the vocabulary."""
    if any(not 0 <= token < tokenizer.vocab_size for token in ids):
        raise InvalidInput(f"{param}: token ids are between 0 and {tokenizer.vocab_size - 1}", param=param)
    return list(ids)


def check_num_choices(num_prompts: int, body: SamplingGiven) -> int:
    """The number of choices of each prompt. Raises InvalidInput for too many in all."""
    num_choices = body.n or 1
    if num_prompts * num_choices > MAX_CHOICES:
        raise InvalidInput(f"a request gives at most {MAX_CHOICES} choices", param="n")
    return num_choices


def inference_request(tenant: TenantRecord, named: Named, body: SamplingGiven, wanted: Wanted) -> InferenceRequest:
    """Raises InvalidInput for a prompt that leaves no room for an answer."""
    tokenizer = named.base.tokenizer
    num_choices = check_num_choices(len(wanted.prompts), body)
    rooms = [tokenizer.context - len(with_room(prompt, tokenizer)) for prompt in wanted.prompts]
    sampling = [_sampling(body, wanted, room) for room in rooms]
    echoed = sum(map(len, wanted.prompts)) if wanted.echo else 0
    _check_num_logprobs(num_choices * sum(one.max_tokens for one in sampling) + echoed, wanted)
    return InferenceRequest(
        tenant=tenant,
        adapter=named.adapter,
        prompts=wanted.prompts,
        num_choices=num_choices,
        sampling=sampling,
        seed=secrets.randbits(53) if body.seed is None else body.seed % 2**53,
        stream=bool(body.stream) and not wanted.num_top,
    )


def _check_num_logprobs(num_tokens: int, wanted: Wanted) -> None:
    num = num_tokens * (1 + wanted.num_top) if wanted.with_logprobs else 0
    if num > MAX_LOGPROBS:
        raise InvalidInput(
            f"this request could give {num} log-probs: at most {MAX_LOGPROBS}; lower max_tokens, n or the number of"
            " alternatives",
            param="max_tokens",
        )


def _sampling(body: SamplingGiven, wanted: Wanted, room: int) -> Sampling:
    return Sampling(
        temperature=TEMPERATURE if body.temperature is None else body.temperature,
        max_tokens=room if wanted.limit is None else min(room, wanted.limit),
        top_p=1.0 if body.top_p is None else body.top_p,
        stop=body.stops(),
        num_top_logprobs=wanted.num_top,
        seeded=body.seed is not None,
        prompt_logprobs=-1 if wanted.echo and wanted.with_logprobs else 0,
        grammar=wanted.grammar,
    )
