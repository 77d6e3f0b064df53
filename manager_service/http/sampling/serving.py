"""The path of every completion: body ─► prompts ─► InferenceRequest ─► tokens ─► one object, or a stream of chunks.

Chat and text completions differ only in their `Dialect`.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response

from common.wire.messages import Usage
from manager_service.http.connections import unless_gone
from manager_service.http.context import Api
from manager_service.http.errors import declared
from manager_service.http.event_stream import DONE, data, event_stream
from manager_service.http.quota import check_quota, check_room, count_inference
from manager_service.http.reading.reading_helpers import Helpers
from manager_service.http.sampling.choices import Fresh, InferenceRequest
from manager_service.http.sampling.completion_requests import PromptReader, SamplingGiven, Wanted, inference_request
from manager_service.http.sampling.replies import AnswerText
from manager_service.http.stores.model_names import Named, find_model
from manager_service.records.tenants import TenantRecord

VERSION_HEADER = "x-marlaas-version"
ANSWERS: dict[int | str, dict[str, Any]] = {
    **declared(404, 429),
    200: {
        "description": "The completion, or with `stream` its chunks as server-sent events",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    },
}

T = TypeVar("T")
Body = TypeVar("Body", bound=SamplingGiven)
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Completion(Generic[Body]):
    """One request under way."""

    tenant: TenantRecord
    named: Named
    body: Body
    ask: InferenceRequest
    answers: list[AnswerText]  # one a choice
    id: str
    created: int  # seconds since 1970

    def shown(self, kind: str, choices: list[Json], **more: Any) -> Json:
        """An answer, or a chunk of one, as OpenAI's object of this kind."""
        fingerprint = str(self.named.adapter)
        first = {"id": self.id, "object": kind, "created": self.created, "model": self.body.model}
        return {**first, "system_fingerprint": fingerprint, "choices": choices, **more}

    def usage(self) -> Json:
        prompt = sum(len(tokens) for tokens in self.ask.prompts)
        completion = sum(len(answer.tokens) for answer in self.answers)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def cost(self) -> Usage:
        """Counts an unfinished choice with its prompt and the tokens that were seen."""
        total = Usage()
        for index, answer in enumerate(self.answers):
            num_prompt = len(self.ask.prompts[index // self.ask.num_choices])
            seen = Usage(prompt_tokens=num_prompt, sampled_tokens=len(answer.tokens))
            total += answer.result.usage if answer.result else seen
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect(Generic[Body]):
    """The ways in which one of the two calls reads its body and shows its answers."""

    id_prefix: str
    kind: str  # `object` of a whole answer
    chunk_kind: str  # `object` of a chunk
    read: Callable[[Body, PromptReader], Awaitable[Wanted]]  # raises InvalidInput
    choice: Callable[[Completion[Body], int], Json]  # a finished choice, by its index
    chunks: Callable[[Completion[Body], Fresh, str], Iterable[Json]]  # new tokens and text -> a choice for each chunk
    opening: Callable[[int], Json] | None = None  # index -> the choice of a first chunk without tokens


async def serve(request: Request, api: Api, tenant: TenantRecord, body: Body, dialect: Dialect[Body]) -> Response:
    """Answers a request; its header and `system_fingerprint` say which version of the adapter did."""
    named = await find_model(api, tenant, body.model)
    await check_quota(named.base.redis, named.base.cell, tenant)
    await check_room(named.base.gauge)
    reader = PromptReader(api.helpers, tenant, named.base, num_bytes=len(await request.body()))
    completion = _begun(reader, named, body, await dialect.read(body, reader), dialect)
    headers = {VERSION_HEADER: str(named.adapter)}
    if body.stream:
        return event_stream(_streamed(api.helpers, completion, dialect), headers)
    answer = await unless_gone(request, _whole(api.helpers, completion, dialect))
    return Response(answer, media_type="application/json", headers=headers)


def _begun(reader: PromptReader, named: Named, body: Body, wanted: Wanted, dialect: Dialect[Body]) -> Completion[Body]:
    ask = inference_request(reader.tenant, named, body, wanted)
    num_choices = len(ask.prompts) * ask.num_choices
    answers = [AnswerText(named.base.tokenizer, body.stops(), wanted.tools) for _ in range(num_choices)]
    name = f"{dialect.id_prefix}-{secrets.token_hex(12)}"
    return Completion(reader.tenant, named, body, ask, answers, name, int(time.time()))


async def _whole(helpers: Helpers, completion: Completion[Body], dialect: Dialect[Body]) -> bytes:
    async with aclosing(_texts(completion)) as texts:
        async for _ in texts:
            pass
    return await helpers.beside(completion.tenant, partial(_shown, completion, dialect))


def _shown(completion: Completion[Body], dialect: Dialect[Body]) -> bytes:
    """Encodes the answer, in a thread: it may have a million log-probs."""
    choices = [dialect.choice(completion, index) for index in range(len(completion.answers))]
    return msgspec.json.encode(completion.shown(dialect.kind, choices, usage=completion.usage()))


async def _streamed(helpers: Helpers, completion: Completion[Body], dialect: Dialect[Body]) -> AsyncIterator[str]:
    with_usage = completion.body.include_usage()
    no_usage = {"usage": None} if with_usage else {}

    def chunk(choice: Json) -> str:
        return data(completion.shown(dialect.chunk_kind, [choice], **no_usage))

    def chunks(fresh: Fresh, text: str) -> list[str]:
        return [chunk(choice) for choice in dialect.chunks(completion, fresh, text)]

    if dialect.opening is not None:
        for index in range(len(completion.answers)):
            yield chunk(dialect.opening(index))
    async with aclosing(_texts(completion)) as texts:
        async for fresh, text in texts:
            call = partial(chunks, fresh, text)
            for made in await helpers.beside(completion.tenant, call) if fresh.result else call():
                yield made
    if with_usage:
        yield data(completion.shown(dialect.chunk_kind, [], usage=completion.usage()))
    yield DONE


async def _texts(completion: Completion[Any]) -> AsyncGenerator[tuple[Fresh, str]]:
    """New tokens with the text that they complete.

    The tenant is charged for them however this ends, also when the client leaves.
    """
    base = completion.named.base
    try:
        async with aclosing(base.inference.answer(completion.ask)) as progress:
            async for fresh in progress:
                answer = completion.answers[fresh.choice]
                text = answer.feed(fresh.tokens, fresh.logprobs)
                answer.result = fresh.result
                yield fresh, text + (answer.finish() if fresh.result else "")
    finally:
        await asyncio.shield(count_inference(base.redis, base.cell, completion.tenant.id, completion.cost()))
