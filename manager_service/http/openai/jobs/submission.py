"""Makes a JobSpec from the body of `POST /v1/fine_tuning/jobs`, with everything checked before anything is queued."""

import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from common.errors import InvalidInput, NotFound
from common.models.weight_files import LINEAR_LAYERS
from common.suggestions import did_you_mean, quoted
from common.tasks.environments import SUPERVISED, is_live, makes_items, reply_fault, reply_roles, wants_tools
from common.wire.messages import EnvSpec
from manager_service.http.context import Api, Base
from manager_service.http.openai.grader_models import pin_environment
from manager_service.http.openai.jobs.hyperparameters import (
    PARAM,
    SUPERVISED_PARAM,
    Hyperparameters,
    as_given,
    as_given_supervised,
    parse_hyperparameters,
    resolve,
    resolve_supervised,
)
from manager_service.http.openai.jobs.integrations import IntegrationGiven, checked_integrations
from manager_service.http.openai.jobs.starts import JobStart, find_start
from manager_service.http.openai.reachable_hosts import check_outside
from manager_service.http.reading.item_lines import LongPrompts
from manager_service.http.reading.tasks import CheckKind, CheckLengths, CheckMethod, CheckRows, Task
from manager_service.records.file_records import FileRecord
from manager_service.records.job_records import Hyper, JobSpec
from manager_service.records.keys import JSON
from manager_service.records.receivers import Integration, Receivers
from manager_service.records.tenants import TenantRecord
from manager_service.scheduling.fairness import largest_group
from manager_service.scheduling.policies import Policy

MAX_METHOD_BYTES = 384 << 10
"""Bytes of a job's grader, environment and hyperparameters: they travel in its messages, and stand in every list of jobs."""

_SUFFIX = re.compile(r"[A-Za-z0-9_.-]*")
_METHODS = ("reinforcement", "supervised")


class Given(BaseModel):
    model_config = ConfigDict(extra="forbid")


class EnvironmentGiven(Given):
    name: str
    args: dict[str, Any] = {}


class ReinforcementGiven(Given):
    grader: dict[str, Any] | None = None
    environment: EnvironmentGiven | None = None
    hyperparameters: dict[str, Any] | None = None


class SupervisedGiven(Given):
    hyperparameters: dict[str, Any] | None = None


class MethodGiven(Given):
    type: str
    reinforcement: ReinforcementGiven | None = None
    supervised: SupervisedGiven | None = None
    dpo: Any = None


Label = Annotated[str, Field(max_length=512)]


class JobGiven(Given):
    """The body. `model` is a base model, or a tuned one, `ft:…`, to go on from; without a `seed` the service chooses one, and
    returns it.
    """

    model: str
    adapter_file: str | None = Field(
        None, description="A file of purpose `adapter`, of the base `model`, to go on from"
    )
    training_file: str | None = None
    validation_file: str | None = None
    method: MethodGiven | None = None
    suffix: str | None = Field(None, max_length=64)
    seed: int | None = Field(None, ge=0, lt=2**53)
    metadata: dict[str, Label] | None = Field(None, max_length=16)
    integrations: list[IntegrationGiven] | None = Field(None, max_length=4)
    webhooks: bool = Field(True, description="Do your webhooks hear of its end?")
    hyperparameters: dict[str, Any] | None = Field(None, description="OpenAI's old place for them: not used here")


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A method after its checks."""

    env: EnvSpec
    fields: list[str]  # of an item that the grader needs
    given: Hyperparameters
    method: dict[str, Any]  # as the user gave it, but for the hyperparameters

    @property
    def supervised(self) -> bool:
        return self.env.name == SUPERVISED

    @property
    def param(self) -> str:
        """The place of the hyperparameters in the request."""
        return SUPERVISED_PARAM if self.supervised else PARAM

    def most_tokens(self, base: Base) -> int:
        """Most tokens of a prompt, or of a supervised job's example."""
        served = base.tokenizer.context
        return served - 1 if self.supervised else (self.given.max_context or served) - self.given.max_tokens

    def hyper(self, base: Base, num_items: int, policy: Policy) -> Hyper:
        """Raises InvalidInput."""
        rate = base.tokenizer.learning_rate
        if self.supervised:
            return resolve_supervised(self.given, num_items=num_items, base_learning_rate=rate)
        return resolve(self.given, num_items=num_items, base_learning_rate=rate, policy=policy)

    def shown(self, hyper: Hyper) -> dict[str, Any]:
        """The method for the API's answers."""
        kind = "supervised" if self.supervised else "reinforcement"
        resolved = as_given_supervised(hyper, self.given) if self.supervised else as_given(hyper, self.given)
        return {"type": kind, kind: self.method | {"hyperparameters": resolved}}


async def build_spec(api: Api, tenant: TenantRecord, body: JobGiven) -> JobSpec:
    """Raises InvalidInput with the wrong name or value, and the nearest valid name."""
    start = await find_start(api, tenant, body.model, body.adapter_file)
    base = start.base
    _check_labels(body)
    integrations = await _integrations(api, body)
    plan = await _plan(api, tenant, body, start)
    _check_base(base, plan)
    _check_repeats(api, plan.env)
    check_outside(plan.env, base.cluster.outside(), param=_grader_param(body))
    env = await pin_environment(api, tenant, base, plan.env, param=_grader_param(body))
    training, validation = await _files(api, tenant, body, plan)
    num_items = training.num_items if training else 0
    hyper = plan.hyper(base, num_items, api.settings.scheduling)
    await _check_files(api, tenant, base, plan, training, validation)
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
        method=plan.shown(hyper),
        env=env,
        hyper=hyper,
        num_items=num_items,
        num_eval_items=validation.num_items if validation else 0,
        weight=tenant.weight,
        model=start.name,
        source=start.source,
        adapter_file=start.adapter_file,
        integrations=integrations,
        webhooks=body.webhooks,
        notes=(_OF_TEXTS,) if plan.supervised and training and training.num_texts else (),
    )


_OF_TEXTS = (
    "Examples whose prompt and completion are texts are learned as they stand, without the chat template by which chat and other jobs ask: "
    "write lists of messages for that, as `marlaas submit --prompt COLUMN --completion COLUMN` does"
)


async def _integrations(api: Api, body: JobGiven) -> tuple[Integration, ...]:
    return checked_integrations(body.integrations, await Receivers(api.redis).installed()) if body.integrations else ()


async def _files(
    api: Api, tenant: TenantRecord, body: JobGiven, plan: JobPlan
) -> tuple[FileRecord | None, FileRecord | None]:
    """The items, and the held-out ones."""
    training = await _file(api, tenant, body.training_file, "training_file")
    validation = await _file(api, tenant, body.validation_file, "validation_file")
    if training is None and not makes_items(plan.env):
        what = "a supervised job" if plan.supervised else f"the environment {plan.env.name!r}"
        raise InvalidInput(f"{what} needs a training_file", param="training_file")
    return training, validation


async def _check_files(
    api: Api,
    tenant: TenantRecord,
    base: Base,
    plan: JobPlan,
    training: FileRecord | None,
    validation: FileRecord | None,
) -> None:
    for record, param in ((training, "training_file"), (validation, "validation_file")):
        if record is not None:
            await _check_items(api, tenant, record, base, plan, param)
    if not plan.supervised:
        _check_memory(base, plan.given, training, validation)


def _check_repeats(api: Api, env: EnvSpec) -> None:
    if api.settings.deterministic and is_live(env):
        raise InvalidInput(
            f"the environment {env.name!r} holds its state in a session, so that its answers are not known to be the same again: "
            "it cannot be used in deterministic mode",
            param="method.reinforcement.environment",
        )


async def _plan(api: Api, tenant: TenantRecord, body: JobGiven, start: JobStart) -> JobPlan:
    method = _method(body)
    if isinstance(method, SupervisedGiven):
        given = parse_hyperparameters(method.hyperparameters or {}, supervised=True)
        return JobPlan(EnvSpec(SUPERVISED), [], start.shaped(given, SUPERVISED_PARAM), {})
    _check_size(method)
    env = _environment(method)
    task = CheckMethod(env.name, env.args, method.grader, "method.reinforcement")
    fields = await api.helpers.do(tenant, task, num_bytes=_num_bytes(method))
    given = start.shaped(parse_hyperparameters(method.hyperparameters or {}), PARAM)
    return JobPlan(env, fields, given, method.model_dump(exclude_none=True))


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


def _method(body: JobGiven) -> ReinforcementGiven | SupervisedGiven:
    method = body.method
    if method is None:
        raise InvalidInput(
            'method is missing: {"type": "reinforcement", "reinforcement": {"grader": …}}, or {"type": "supervised"}',
            param="method",
        )
    if method.type == "dpo":
        raise InvalidInput("method 'dpo' is not offered: use 'reinforcement' or 'supervised'", param="method.type")
    if method.type not in _METHODS:
        hint = did_you_mean(method.type, _METHODS)
        raise InvalidInput(
            f"unknown method {quoted(method.type)}{hint}; use 'reinforcement' or 'supervised'", param="method.type"
        )
    given = {"reinforcement": method.reinforcement, "supervised": method.supervised, "dpo": method.dpo}
    if any(value is not None for kind, value in given.items() if kind != method.type):
        raise InvalidInput(f"method: only `{method.type}` goes with type '{method.type}'", param="method")
    if method.type == "supervised":
        return method.supervised or SupervisedGiven()
    if method.reinforcement is None:
        raise InvalidInput("method.reinforcement is missing", param="method.reinforcement")
    return method.reinforcement


def _grader_param(body: JobGiven) -> str:
    where, given = "method.reinforcement", body.method and body.method.reinforcement
    return f"{where}.environment.args.grader" if given and given.environment else f"{where}.grader"


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
    if fault := reply_fault(tokenizer, reply_roles(plan.env)):
        raise InvalidInput(
            f"the environment {plan.env.name!r} cannot answer {base.name!r}: {fault}",
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
            f"lora_rank {given.lora_rank} is above {limit}, what the rollout workers take",
            param=f"{plan.param}.lora_rank",
        )
    if not plan.supervised:
        _check_context(base, given)
    for name in given.lora_targets:
        if base.linear_layers and name not in base.linear_layers:
            has = ", ".join(each for each in LINEAR_LAYERS if each in base.linear_layers)
            raise InvalidInput(
                f"lora_targets: {base.name!r} has no linear layer {quoted(name)}; it has {has}",
                param=f"{plan.param}.lora_targets",
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
        record = await api.files.get(tenant.id, file)
    except NotFound as error:
        raise InvalidInput(f"{param}: there is no file {quoted(file)}", param=param, code="file_not_found") from error
    if record.adapter is not None:
        raise InvalidInput(f"{param}: {quoted(file)} is an adapter: name it as adapter_file", param=param)
    return record


# ---- items ----------------------------------------------------------------------------------------------------------


async def _check_items(
    api: Api, tenant: TenantRecord, record: FileRecord, base: Base, plan: JobPlan, param: str
) -> None:
    """Raises InvalidInput if rows are of the wrong kind, lack a field that the grader names, or are too long."""
    if record.num_examples != (record.num_items if plan.supervised else 0):
        await _each(api, tenant, record, lambda part, before: CheckKind(part, before, plan.supervised, param))
    most = plan.most_tokens(base)
    fits = base.name in record.longest and record.longest[base.name] <= most
    if not record.fields.issuperset(plan.fields):
        await _each(api, tenant, record, lambda part, before: CheckRows(part, before, plan.fields, param))
    if not fits:
        await _check_lengths(api, tenant, record, plan, base, param)


async def _each(api: Api, tenant: TenantRecord, record: FileRecord, task: Callable[[bytes, int], Task]) -> None:
    """Checks all lines of a file, a slice at a time. `task`: of a slice with so many lines above it; it gives its lines' number."""
    before = 0
    async for part in api.files.slices(record):
        before += await api.helpers.do(tenant, task(part, before), num_bytes=len(part))


async def _check_lengths(
    api: Api, tenant: TenantRecord, record: FileRecord, plan: JobPlan, base: Base, param: str
) -> None:
    found, most = LongPrompts(), plan.most_tokens(base)
    async for part in api.files.slices(record):
        task = CheckLengths(part, found.num_lines, base.name, most, param)
        found += msgspec.convert(await api.helpers.do(tenant, task, num_bytes=len(part)), LongPrompts)
    if found.num_long:
        raise InvalidInput(_too_long(found, most, plan, base), param=param, code="too_long")


def _too_long(found: LongPrompts, most: int, plan: JobPlan, base: Base) -> str:
    named = ", ".join(map(str, found.first_long)) + (", …" if found.num_long > len(found.first_long) else "")
    where = f"(lines {named}; the longest has {found.longest} tokens)"
    if plan.supervised:
        context = base.tokenizer.context
        return f"{found.num_long} of the examples do not fit into the context of {context} tokens {where}: shorten them"
    given = plan.given
    bound = "max_context" if given.max_context else "the context"
    return (
        f"{found.num_long} of the prompts are longer than {most} tokens, which is {bound} of"
        f" {most + given.max_tokens} less max_tokens {given.max_tokens} {where}:"
        " shorten them or lower max_tokens"
    )
