"""POST /inference/v1/generate: tokens in, tokens with their log-probs out, as vLLM has it and trainers' clients ask for it."""

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from common.errors import InvalidInput
from manager_service.http.context import Parts, Tenant
from manager_service.http.errors import COMMON
from manager_service.http.reading.bodies import JsonRoute
from manager_service.http.sampling.completion_requests import (
    Neutral,
    PromptReader,
    SamplingGiven,
    SharedParameters,
    TokenId,
    TokenIds,
    Wanted,
    valid_ids,
)
from manager_service.http.sampling.replies import finish_reason
from manager_service.http.sampling.serving import ANSWERS, Completion, Dialect, Json, serve
from manager_service.http.schemas import Given

router = APIRouter(prefix="/inference/v1", tags=["inference"], responses=COMMON, route_class=JsonRoute)


class VllmSamplingParams(SharedParameters):
    """vLLM's, as far as they can be honoured; unknown ones are refused by name."""

    stop_token_ids: list[TokenId] | None = Field(
        None, max_length=64, description="Only those that end the model's turns"
    )
    logprobs: int | None = Field(None, ge=0, le=1, description="They are always told")
    skip_special_tokens: bool | None = None  # of texts, of which there are none
    routed_experts_prompt_start: int | None = None  # the same of experts


class GenerateGiven(Given):
    model: str
    token_ids: TokenIds
    sampling_params: VllmSamplingParams | None = None
    cache_salt: str | None = None  # no prompt is cached across tenants
    priority: Annotated[int | None, Neutral] = Field(None, description="Only 0")


class _Generate(SamplingGiven):
    """The same as the other calls have it."""

    token_ids: TokenIds
    stop_token_ids: list[int] | None = None


@router.post("/generate", responses=ANSWERS, response_class=JSONResponse)
async def generate(request: Request, api: Parts, tenant: Tenant, body: GenerateGiven) -> Response:
    """Continue token ids; `logprobs.content` names each token `token_id:<id>`."""
    params = body.sampling_params.model_dump(include=set(_Generate.model_fields)) if body.sampling_params else {}
    given = _Generate.model_validate({"model": body.model, "token_ids": body.token_ids, **params})
    return await serve(request, api, tenant, given, DIALECT)


async def _read(body: _Generate, reader: PromptReader) -> Wanted:
    tokenizer = reader.base.tokenizer
    if not set(body.stop_token_ids or ()) <= set(tokenizer.end_of_turn_ids):
        ends = ", ".join(map(str, tokenizer.end_of_turn_ids))
        raise InvalidInput(f"stop_token_ids: this model stops at {ends}, and at no others", param="sampling_params")
    prompt = valid_ids(body.token_ids, tokenizer, "token_ids")
    return Wanted(prompts=[prompt], limit=body.max_tokens, num_top=0, with_logprobs=True)


def _choice(completion: Completion[_Generate], index: int) -> Json:
    answer = completion.answers[index]
    pairs = zip(answer.tokens, answer.logprobs, strict=True)
    content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
    return {
        "index": index,
        "token_ids": answer.tokens,
        "finish_reason": finish_reason(answer, []),
        "logprobs": {"content": content},
    }


DIALECT = Dialect(
    id_prefix="gen",
    kind="generation",
    chunk_kind="generation",
    read=_read,
    choice=_choice,
    chunks=lambda completion, fresh, text: (),  # never called: there is no `stream`
)
