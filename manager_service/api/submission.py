"""From the body of `POST /v1/fine_tuning/jobs` to a JobSpec, with everything checked before anything is queued."""

import re
import secrets
import time
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from common.environments import is_multi_turn, makes_items, wants_tools
from common.errors import InvalidInput, NotFound
from common.messages import EnvSpec
from common.spelling import did_you_mean, quoted
from manager_service.api.context import Api, Base
from manager_service.api.hyperparameters import PARAM, Hyperparameters, as_given, parse_hyperparameters, resolve
from manager_service.api.reading.items import LongPrompts
from manager_service.api.reading.tasks import CheckLengths, CheckMethod, CheckRows
from manager_service.api.starts import find_start
from manager_service.records import JSON, FileRecord, JobSpec, TenantRecord
from manager_service.scheduling.fairness import largest_group

MAX_METHOD_BYTES = 384 << 10
"""Of a job's grader, environment and hyperparameters: they travel in its messages, and stand in every list of jobs."""

_SUFFIX = re.compile(r"[A-Za-z0-9_.-]*")
_METHODS = ("supervised", "dpo")


class Given(BaseModel):
    model_config = ConfigDict(extra="forbid")


class EnvironmentGiven(Given):
    name: str
    args: dict[str, Any] = {}


class ReinforcementGiven(Given):
    grader: dict[str, Any] | None = None
    environment: EnvironmentGiven | None = None
    hyperparameters: dict[str, Any] | None = None


class MethodGiven(Given):
    type: str
    reinforcement: ReinforcementGiven | None = None
    supervised: Any = None
    dpo: Any = None


Label = Annotated[str, Field(max_length=512)]


class JobGiven(Given):
    """The body. `model` is a base model, or a tuned one, `ft:…`, to go on from; without a `seed` the service chooses one, and
    returns it.
    """

    model: str
    training_file: str | None = None
    validation_file: str | None = None
    method: MethodGiven | None = None
    suffix: str | None = Field(None, max_length=64)
    seed: int | None = Field(None, ge=0, lt=2**53)
    metadata: dict[str, Label] | None = Field(None, max_length=16)
    integrations: list[Any] | None = Field(None, max_length=0)
    hyperparameters: dict[str, Any] | None = Field(None, description="OpenAI's old place for them: not used here")


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A method after its checks."""

    env: EnvSpec
    fields: list[str]  # of an item that the grader needs
    given: Hyperparameters


async def build_spec(api: Api, tenant: TenantRecord, body: JobGiven) -> JobSpec:
    """Raises InvalidInput with the wrong name or value, and the nearest valid name."""
    start = await find_start(api, tenant, body.model)
    base = start.base
    _check_labels(body)
    method = _reinforcement(body)
    _check_size(method)
    env = _environment(method)
    task = CheckMethod(env.name, env.args, method.grader, "method.reinforcement")
    fields = await api.helpers.do(tenant, task, num_bytes=_num_bytes(method))
    plan = JobPlan(env, fields, start.shaped(parse_hyperparameters(method.hyperparameters or {})))
    _check_base(base, plan)
    training = await _file(api, tenant, body.training_file, "training_file")
    validation = await _file(api, tenant, body.validation_file, "validation_file")
    if training is None and not makes_items(plan.env):
        raise InvalidInput(f"the environment {plan.env.name!r} needs a training_file", param="training_file")
    num_items = training.num_items if training else 0
    rate, policy = base.tokenizer.learning_rate, api.settings.scheduling
    hyper = resolve(plan.given, num_items=num_items, base_learning_rate=rate, policy=policy)
    for record, param in ((training, "training_file"), (validation, "validation_file")):
        if record is not None:
            await _check_items(api, tenant, record, base, plan, param)
    _check_memory(base, plan.given, training, validation)
    reinforcement = method.model_dump(exclude_none=True) | {"hyperparameters": as_given(hyper, plan.given)}
    return JobSpec(
        id=f"ftjob-{secrets.token_hex(12)}",
        tenant=tenant.id,
        base_model=base.name,
        created_at=int(time.time()),
        seed=secrets.randbits(53) if body.seed is None else body.seed,
        suffix=body.suffix or "",
        metadata=body.metadata or {},
        training_file=body.training_file,
        validation_file=body.validation_file,
        method={"type": "reinforcement", "reinforcement": reinforcement},
        env=plan.env,
        hyper=hyper,
        num_items=num_items,
        num_eval_items=validation.num_items if validation else 0,
        weight=tenant.weight,
        model=start.name,
        source=start.source,
    )


def _check_size(method: ReinforcementGiven) -> None:
    check_num_bytes("method", _num_bytes(method), param="method.reinforcement")


def _num_bytes(method: ReinforcementGiven) -> int:
    env = method.environment
    return len(JSON.encode((method.grader, env and (env.name, env.args), method.hyperparameters)))


def check_num_bytes(name: str, num_bytes: int, *, param: str) -> None:
    """Raises InvalidInput for what is too large for a job's messages."""
    if num_bytes > MAX_METHOD_BYTES:
        raise InvalidInput(f"{name} has {num_bytes} bytes; at most {MAX_METHOD_BYTES}", param=param, code="too_large")


def _check_labels(body: JobGiven) -> None:
    if not _SUFFIX.fullmatch(body.suffix or ""):
        raise InvalidInput("suffix: use letters, digits, '.', '_' and '-'", param="suffix")
    if any(len(key) > 64 for key in body.metadata or {}):
        raise InvalidInput("metadata: a key has at most 64 characters", param="metadata")
    if body.hyperparameters:
        raise InvalidInput(f"hyperparameters belong into {PARAM}", param="hyperparameters")


def _reinforcement(body: JobGiven) -> ReinforcementGiven:
    method = body.method
    if method is None:
        raise InvalidInput(
            'method is missing: {"type": "reinforcement", "reinforcement": {"grader": …}}', param="method"
        )
    if method.type in _METHODS:
        raise InvalidInput(
            f"method {quoted(method.type)} is not offered: this service trains by reinforcement only",
            param="method.type",
        )
    if method.type != "reinforcement":
        hint = did_you_mean(method.type, ["reinforcement"])
        raise InvalidInput(f"unknown method {quoted(method.type)}{hint}; use 'reinforcement'", param="method.type")
    if method.supervised is not None or method.dpo is not None:
        raise InvalidInput("method: only `reinforcement` goes with type 'reinforcement'", param="method")
    if method.reinforcement is None:
        raise InvalidInput("method.reinforcement is missing", param="method.reinforcement")
    return method.reinforcement


def _environment(method: ReinforcementGiven) -> EnvSpec:
    where = "method.reinforcement"
    if (method.grader is None) == (method.environment is None):
        raise InvalidInput(f"give {where}.grader or {where}.environment, one of them", param=f"{where}.grader")
    if method.environment is None:
        return EnvSpec("single_turn", {"grader": method.grader})
    return EnvSpec(method.environment.name, method.environment.args)


def _check_base(base: Base, plan: JobPlan) -> None:
    """Checks the plan against the base model and the workers that serve it."""
    given, tokenizer = plan.given, base.tokenizer
    if is_multi_turn(plan.env) and not tokenizer.is_prefix_stable():
        raise InvalidInput(
            f"the chat template of {base.name!r} cannot do multi-turn environments such as {plan.env.name!r}",
            param="method.reinforcement.environment",
        )
    if wants_tools(plan.env) and not tokenizer.shows_tools():
        raise InvalidInput(
            f"the environment {plan.env.name!r} has tools, and the chat template of {base.name!r} does not tell the model of them",
            param="method.reinforcement.environment",
            code="no_tools",
        )
    limit = base.cluster.max_lora_rank()
    if limit is not None and given.lora_rank > limit:
        raise InvalidInput(
            f"lora_rank {given.lora_rank} is above {limit}, what the rollout workers take", param=f"{PARAM}.lora_rank"
        )
    _check_context(base, given)
    for name in given.lora_targets:
        if base.linear_layers and name not in base.linear_layers:
            hint = did_you_mean(name, base.linear_layers)
            raise InvalidInput(
                f"lora_targets: {base.name!r} has no linear layer {name!r}{hint}", param=f"{PARAM}.lora_targets"
            )


def _check_context(base: Base, given: Hyperparameters) -> None:
    served = base.tokenizer.context
    if given.max_context is not None and given.max_context > served:
        raise InvalidInput(
            f"max_context {given.max_context} is above {served}, the context of {base.name!r}",
            param=f"{PARAM}.max_context",
        )
    if given.max_tokens >= (given.max_context or served):
        raise InvalidInput(
            f"max_tokens {given.max_tokens} leaves no room for a prompt: {_context_named(base, given)}",
            param=f"{PARAM}.max_tokens",
        )


def _context_named(base: Base, given: Hyperparameters) -> str:
    """The bound of the job's trajectories, in words."""
    if given.max_context:
        return f"the job's max_context is {given.max_context} tokens"
    return f"the context of {base.name!r} is {base.tokenizer.context} tokens"


def _check_memory(
    base: Base, given: Hyperparameters, training: FileRecord | None, validation: FileRecord | None
) -> None:
    """Raises InvalidInput if the answers to one prompt never fit beside each other into a rollout worker's memory."""
    most = largest_group(base.cluster.least_kv_tokens())
    asked = [("group_size", given.group_size, training)]
    asked += [("eval_samples", given.eval_samples, validation)] if validation else []
    for name, num, record in asked:
        prompt = record.longest.get(base.name, 0) if record else 0
        if num * (prompt + given.max_tokens) > most:
            raise InvalidInput(
                f"{name} {num} x (max_tokens {given.max_tokens} + a prompt of {prompt}) needs keys and values for"
                f" {num * (prompt + given.max_tokens)} tokens at once; the rollout workers take at most {most:.0f}",
                param=f"{PARAM}.{name}",
                code="group_too_large",
            )


async def _file(api: Api, tenant: TenantRecord, file: str | None, param: str) -> FileRecord | None:
    if file is None:
        return None
    try:
        return await api.files.get(tenant.id, file)
    except NotFound as error:
        raise InvalidInput(f"{param}: there is no file {quoted(file)}", param=param, code="file_not_found") from error


# ---- items ----------------------------------------------------------------------------------------------------------


async def _check_items(
    api: Api, tenant: TenantRecord, record: FileRecord, base: Base, plan: JobPlan, param: str
) -> None:
    """Raises InvalidInput if the grader names a field that a row lacks, or if prompts are too long."""
    most = (plan.given.max_context or base.tokenizer.context) - plan.given.max_tokens
    fits = base.name in record.longest and record.longest[base.name] <= most
    if plan.fields:
        await _check_rows(api, tenant, record, plan.fields, param)
    if not fits:
        await _check_lengths(api, tenant, record, plan.given, base, param)


async def _check_rows(api: Api, tenant: TenantRecord, record: FileRecord, fields: list[str], param: str) -> None:
    before = 0
    async for part in api.files.slices(record):
        before += await api.helpers.do(tenant, CheckRows(part, before, fields, param), num_bytes=len(part))


async def _check_lengths(
    api: Api, tenant: TenantRecord, record: FileRecord, given: Hyperparameters, base: Base, param: str
) -> None:
    found, most = LongPrompts(), (given.max_context or base.tokenizer.context) - given.max_tokens
    async for part in api.files.slices(record):
        task = CheckLengths(part, found.num_lines, base.name, most, param)
        found += msgspec.convert(await api.helpers.do(tenant, task, num_bytes=len(part)), LongPrompts)
    if found.num_long:
        raise InvalidInput(_too_long(found, most, given, base), param=param, code="too_long")


def _too_long(found: LongPrompts, most: int, given: Hyperparameters, base: Base) -> str:
    bound = "max_context" if given.max_context else "the context"
    named = ", ".join(map(str, found.first_long)) + (", …" if found.num_long > len(found.first_long) else "")
    return (
        f"{found.num_long} of the prompts are longer than {most} tokens, which is {bound} of"
        f" {most + given.max_tokens} less max_tokens {given.max_tokens} (lines {named}; the longest has {found.longest} tokens):"
        " shorten them or lower max_tokens"
    )
