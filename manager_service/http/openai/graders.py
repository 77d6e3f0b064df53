"""/v1/fine_tuning/alpha/graders: try a grader before a job depends on it."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from common.bus.streams import partition_of
from common.errors import InvalidInput
from common.wire.messages import EnvSpec, GradeRequest, GradeResult
from manager_service.http.connections import unless_gone
from manager_service.http.context import Api, Parts, Tenant
from manager_service.http.errors import COMMON, declared
from manager_service.http.openai.grader_models import base_asked, pin_models
from manager_service.http.openai.jobs.submission import check_num_bytes
from manager_service.http.openai.reachable_hosts import check_grader_hosts
from manager_service.http.quota import check_quota, check_room, count_inference
from manager_service.http.reading.bodies import JsonRoute
from manager_service.http.reading.tasks import CheckGrader
from manager_service.http.schemas import Given
from manager_service.http.stores.tinker_names import find_base
from manager_service.records.keys import JSON
from manager_service.records.tenants import TenantRecord

router = APIRouter(prefix="/v1/fine_tuning/alpha/graders", tags=["graders"], responses=COMMON, route_class=JsonRoute)

PARAM = "grader"
MAX_RUN_BYTES = 512 << 10
"""Bytes of an item and an answer together: with a grader they travel in one message, which stays below a claim check."""
NEVER = (
    *("formula_parse_error", "invalid_variable_error", "sample_parse_error", "truncated_observation_error"),
    *("model_grader_parse_error", "model_grader_refusal_error", "model_grader_server_error"),
    *("python_grader_server_error", "unresponsive_reward_error"),
)
"""OpenAI's flags for errors that are told as another here."""


class GraderGiven(Given):
    grader: dict[str, Any]


class RunGiven(GraderGiven):
    """A grader, the model's answer, and the item that it answers."""

    model_sample: str = Field(max_length=1 << 20)
    item: dict[str, Any] | None = None
    model: str | None = Field(
        None, description="The base model whose environment workers run it; that of the grader's models if absent"
    )


class Validated(BaseModel):
    grader: dict[str, Any]


class RunMetadata(BaseModel):
    name: str
    type: str
    errors: dict[str, bool | str | None]
    execution_time: float  # seconds
    scores: dict[str, float]
    token_usage: int | None = None
    sampled_model_name: str | None = None


class RunResult(BaseModel):
    """The reward, or 0 with `metadata.errors` and `failure` if the grader failed. Training masks such a trajectory."""

    reward: float
    sub_rewards: dict[str, float]
    metadata: RunMetadata
    model_grader_token_usage_per_model: dict[str, Any] = {}
    failure: dict[str, str] | None = None


@router.post("/validate")
async def validate(api: Parts, tenant: Tenant, body: GraderGiven) -> Validated:
    """Check a grader. The answer is the grader as it was given."""
    await _check(api, tenant, body.grader, None)
    base = await base_asked(api, tenant, body.grader)
    check_grader_hosts(body.grader, base.cluster.outside(), param=PARAM)
    await pin_models(api, tenant, None, body.grader, param=PARAM)
    return Validated(grader=body.grader)


@router.post("/run", responses=declared(429))
async def run(api: Parts, tenant: Tenant, body: RunGiven, request: Request) -> RunResult:
    """Run a grader once on an environment worker. Its seconds and its models' tokens count as the tenant's use of `inference`;
    without a result, the seconds for which it ran.
    """
    item = body.item or {}
    if (num_bytes := len(JSON.encode(item)) + len(body.model_sample.encode())) > MAX_RUN_BYTES:
        told = f"item and model_sample have {num_bytes} bytes together; at most {MAX_RUN_BYTES}"
        raise InvalidInput(told, param="item", code="too_large")
    await _check(api, tenant, body.grader, item)
    base = find_base(api, body.model, param="model") if body.model else await base_asked(api, tenant, body.grader)
    check_grader_hosts(body.grader, base.cluster.outside(), param=PARAM)
    grader = await pin_models(api, tenant, base, body.grader, param=PARAM)

    def make(job: str, reply_to: str) -> GradeRequest:
        return GradeRequest(
            id=job,
            tenant=tenant.id,
            job=job,
            partition=partition_of(tenant.id),
            env=EnvSpec("single_turn", {"grader": grader}),
            item=item,
            output_text=body.model_sample,
            reply_to=reply_to,
            weight=tenant.weight,
        )

    await check_quota(base.redis, base.cell, tenant)
    await check_room(base.gauge)
    charge = partial(count_inference, base.redis, base.cell, tenant.id)
    running = base.inference.grade(tenant, make, timeout_s=api.limits.grader_run_timeout_s, charge=charge)
    return _shown(grader, await unless_gone(request, running))


async def _check(api: Api, tenant: TenantRecord, grader: dict[str, Any], item: dict[str, Any] | None) -> None:
    num_bytes = len(JSON.encode(grader))
    check_num_bytes(PARAM, num_bytes, param=PARAM)
    await api.helpers.do(tenant, CheckGrader(grader, item, PARAM), num_bytes=num_bytes + len(JSON.encode(item)))


def _shown(grader: Mapping[str, Any], result: GradeResult) -> RunResult:
    failure, usage, kind = result.failure, result.usage, str(grader["type"])
    return RunResult(
        reward=result.reward or 0.0,
        sub_rewards=result.reward_parts,
        failure=failure and {"kind": failure.kind, "reason": failure.reason},
        metadata=RunMetadata(
            name=str(grader.get("name") or kind),
            type=kind,
            errors=_errors(kind, result),
            execution_time=result.seconds,
            scores=result.reward_parts,
            token_usage=usage.prompt_tokens + usage.sampled_tokens + usage.grader_tokens or None,
            sampled_model_name=grader.get("model"),
        ),
    )


def _errors(kind: str, result: GradeResult) -> dict[str, bool | str | None]:
    """OpenAI's flags for errors. Ours are of two kinds: the user's code, and anything else."""
    reason = None if result.failure is None else result.failure.reason
    in_python = reason is not None and kind == "python"
    return dict.fromkeys(NEVER, False) | {
        "other_error": reason is not None and not in_python,
        "python_grader_runtime_error": in_python,
        "python_grader_runtime_error_details": reason if in_python else None,
        "model_grader_server_error_details": None,
        "python_grader_server_error_type": None,
    }
