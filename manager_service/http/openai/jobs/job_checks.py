"""Checks a job's body against what there is: models, files, the workers and what they may call; and makes its JobSpec."""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from common.errors import InvalidInput, NotFound
from common.models.weight_files import LINEAR_LAYERS
from common.settings import TINY
from common.suggestions import quoted
from common.tasks.environments import (
    imported,
    installed,
    is_live,
    makes_items,
    outdated,
    reply_fault,
    reply_roles,
    wants_tools,
)
from common.text.chat_template import KWARGS
from common.wire.messages import AdapterRef, LoraSpec
from manager_service.http.context import Api, Base
from manager_service.http.openai.grader_models import pin_environment
from manager_service.http.openai.jobs.hyperparameters import PARAM, Hyperparameters
from manager_service.http.openai.jobs.integrations import checked_integrations
from manager_service.http.openai.jobs.submission import METHOD, JobGiven, Submission, parse
from manager_service.http.openai.reachable_hosts import check_outside
from manager_service.http.reading.item_lines import LongPrompts
from manager_service.http.reading.tasks import CheckItems, CheckMethod
from manager_service.http.stores.model_names import find_model
from manager_service.http.stores.tinker_names import find_base
from manager_service.records.file_records import FileRecord, UploadedAdapter
from manager_service.records.job_records import JobSpec
from manager_service.records.receivers import Receivers
from manager_service.records.tenants import TenantRecord
from manager_service.scheduling.fairness import largest_group


async def build_spec(api: Api, tenant: TenantRecord, body: JobGiven) -> JobSpec:
    """Raises InvalidInput with the wrong name or value, and the nearest valid name."""
    job = parse(body)
    start = await find_start(api, tenant, body)
    base, given, job = start.base, body.integrations, replace(job, given=start.shaped(job.given, job.param))
    await imported(job.env, lambda: None)  # a request is no work that others take over
    fields = await _grader_fields(api, tenant, job)
    _check_environment(api, base, job)
    _check_hyperparameters(base, job)
    training, validation = await _files(api, tenant, job)
    num_items = training.num_items if training else 0
    hyper = job.hyper(num_items, base.tokenizer, api.settings.scheduling)
    await _check_items(api, tenant, training, base, job, fields, "training_file")
    await _check_items(api, tenant, validation, base, job, fields, "validation_file")
    _check_memory(base, job, training, validation)
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
        method=job.shown(hyper),
        env=await pin_environment(api, tenant, base, job.env, param=job.grader_param),
        hyper=hyper,
        num_items=num_items,
        num_eval_items=validation.num_items if validation else 0,
        weight=tenant.weight,
        **start.of_spec(),
        adapter_file=body.adapter_file,
        integrations=checked_integrations(given, await Receivers(api.redis).installed()) if given else (),
        webhooks=body.webhooks,
        notes=tuple(_notes(job, training)),
    )


def _notes(job: Submission, training: FileRecord | None) -> Iterator[str]:
    """The lines of its first events."""
    if job.is_supervised and training and training.num_texts:
        yield _OF_TEXTS
    if (entry := installed().get(job.env.name)) and (why := outdated(entry)):
        yield f"The environment {entry.name}: {why}"


_OF_TEXTS = (
    "Examples whose prompt and completion are texts are learned as they stand, without the chat template by which chat and other jobs ask: "
    "write lists of messages for that, as `marlaas submit --prompt COLUMN --completion COLUMN` does"
)


async def _grader_fields(api: Api, tenant: TenantRecord, job: Submission) -> list[str]:
    """Fields of an item that the grader needs, after a check of both grader and environment."""
    if job.is_supervised:
        return []
    task = CheckMethod(job.env.name, job.env.args, job.method.get("grader"), METHOD)
    return await api.helpers.do(tenant, task, num_bytes=job.num_bytes)


# ---- what it starts from --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobStart:
    base: Base
    name: str  # as its user named it, and a source's version
    source: AdapterRef | None = None  # whose weights version 0 is a copy of; None: it is drawn, or in a file
    lora: LoraSpec | None = None  # of the source, or of the file
    digest: str = ""  # of the base model that the file says it was trained on

    def of_spec(self) -> dict[str, Any]:
        """Fields of the job's record."""
        return {"model": self.name, "source": self.source, "adapter_base": self.digest}

    def shaped(self, given: Hyperparameters, param: str) -> Hyperparameters:
        """The hyperparameters, at `param`, with the source's adapter shape. Raises InvalidInput for another one."""
        if self.lora is None:
            return given
        shape = {
            "lora_rank": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "lora_targets": list(self.lora.targets),
        }
        for name, value in shape.items():
            if name in given.model_fields_set and getattr(given, name) != value:
                raise InvalidInput(
                    f"{name}: the model that the job starts from has {value!r}; leave it out", param=f"{param}.{name}"
                )
        return given.model_copy(update=shape)


async def find_start(api: Api, tenant: TenantRecord, body: JobGiven) -> JobStart:
    """A base model, a version of a tuned one, or an uploaded adapter. Raises InvalidInput, also if the adapter does not fit."""
    default = [TINY.name] if TINY.name in api.bases else [*api.bases]
    model = body.model or (default[0] if len(default) == 1 else "")
    if body.adapter_file is not None:
        return await _uploaded(api, tenant, model, body.adapter_file)
    if not model.startswith(("ft:", "tinker://")):
        return JobStart(find_base(api, model, param="model"), model)
    try:
        named = await find_model(api, tenant, model)
    except NotFound as error:
        raise InvalidInput(str(error), param="model", code="model_not_found") from error
    pinned = f"{model.partition('@')[0]}@{named.adapter.version}" if model.startswith("ft:") else model
    return JobStart(named.base, pinned, named.adapter, named.lora)


async def _uploaded(api: Api, tenant: TenantRecord, model: str, file: str) -> JobStart:
    if model.startswith(("ft:", "tinker://")):
        raise InvalidInput(
            f"model {quoted(model)} is a start already: name a base model next to adapter_file", param="model"
        )
    base = find_base(api, model, param="model")
    try:
        adapter = (await api.files.get(tenant.id, file)).adapter
    except NotFound as error:
        raise InvalidInput(f"adapter_file: {error}", param="adapter_file", code="file_not_found") from error
    if adapter is None:
        raise InvalidInput(
            f"adapter_file: {quoted(file)} holds items; upload an adapter with the purpose 'adapter'",
            param="adapter_file",
        )
    _check_fits(adapter, base)
    return JobStart(base, model, lora=adapter.lora, digest=adapter.base_digest)


def _check_fits(adapter: UploadedAdapter, base: Base) -> None:
    """Raises InvalidInput if the base has other layers. Without its weights here, the trainer checks that."""
    there = base.weights.shapes
    if not there:
        return
    num_layers = len({name.split(".")[1] for name in there})
    if adapter.num_layers != num_layers:
        raise _misfit(base, f"it is for {adapter.num_layers} layers, and the base has {num_layers}")
    for module, shape in adapter.shapes.items():
        for layer in range(num_layers):
            of = there.get(f"layers.{layer}.{module}")
            if of != shape:
                known = f"{of[0]} x {of[1]}" if of else "not there"
                raise _misfit(base, f"its {module} is {shape[0]} x {shape[1]}, the base's {known}")


def _misfit(base: Base, reason: str) -> InvalidInput:
    return InvalidInput(f"the adapter does not fit {base.name!r}: {reason}", param="adapter_file", code="wrong_adapter")


# ---- base model and workers -----------------------------------------------------------------------------------------


def _check_environment(api: Api, base: Base, job: Submission) -> None:
    """Checks what the environment needs of the chat template, the workers and the service's mode."""
    env, tokenizer, code = job.env, base.tokenizer.told(job.given.chat_template_kwargs), None
    if fault := reply_fault(tokenizer, reply_roles(env)):
        reason = f"cannot answer {base.name!r}: {fault}"
    elif wants_tools(env) and not tokenizer.shows_tools():
        reason = f"has tools, and the chat template of {base.name!r} does not tell the model of them"
        code = "no_tools"
    elif api.settings.deterministic and is_live(env):
        reason = "holds its state in a session, and may answer otherwise another time: it cannot be used in deterministic mode"
    else:
        check_outside(env, base.cluster.outside(), param=job.grader_param)
        return
    raise InvalidInput(f"the environment {env.name!r} {reason}", param=f"{METHOD}.environment", code=code)


def _check_hyperparameters(base: Base, job: Submission) -> None:
    given = job.given
    limit = base.cluster.max_lora_rank()
    if limit is not None and given.lora_rank > limit:
        raise InvalidInput(
            f"lora_rank {given.lora_rank} is above {limit}, what the rollout workers take",
            param=f"{job.param}.lora_rank",
        )
    for name in given.lora_targets:
        if base.linear_layers and name not in base.linear_layers:
            has = ", ".join(each for each in LINEAR_LAYERS if each in base.linear_layers)
            raise InvalidInput(
                f"lora_targets: {base.name!r} has no linear layer {quoted(name)}; it has {has}",
                param=f"{job.param}.lora_targets",
            )
    if not job.is_supervised:
        _check_context(base, given)


def _check_context(base: Base, given: Hyperparameters) -> None:
    served, bound = base.tokenizer.context, given.max_context
    if bound is not None and bound > served:
        raise InvalidInput(
            f"max_context {bound} is above {served}, the context of {base.name!r}", param=f"{PARAM}.max_context"
        )
    if given.max_tokens >= (bound or served):
        named = f"the job's max_context is {bound}" if bound else f"the context of {base.name!r} is {served}"
        raise InvalidInput(
            f"max_tokens {given.max_tokens} leaves no room for a prompt: {named} tokens", param=f"{PARAM}.max_tokens"
        )


def _check_memory(base: Base, job: Submission, training: FileRecord | None, validation: FileRecord | None) -> None:
    """Raises InvalidInput if the answers to one prompt never fit together into a rollout worker's memory."""
    if job.is_supervised:
        return
    given, most = job.given, largest_group(base.cluster.least_kv_tokens())
    groups = [("group_size", given.group_size, training)]
    groups += [("eval_samples", given.eval_samples, validation)] if validation else []
    for name, num, record in groups:
        prompt = record.longest.get(base.name, 0) if record else 0
        if num * (prompt + given.max_tokens) > most:
            raise InvalidInput(
                f"{name} {num} x (max_tokens {given.max_tokens} + a prompt of {prompt}) needs keys and values for"
                f" {num * (prompt + given.max_tokens)} tokens at once; the rollout workers take at most {most:.0f}",
                param=f"{PARAM}.{name}",
                code="group_too_large",
            )


# ---- files ----------------------------------------------------------------------------------------------------------


async def _files(api: Api, tenant: TenantRecord, job: Submission) -> tuple[FileRecord | None, FileRecord | None]:
    """The items, and the held-out ones."""
    training = await _file(api, tenant, job.body.training_file, "training_file")
    validation = await _file(api, tenant, job.body.validation_file, "validation_file")
    if training is None and not makes_items(job.env):
        what = "a supervised job" if job.is_supervised else f"the environment {job.env.name!r}"
        raise InvalidInput(f"{what} needs a training_file", param="training_file")
    return training, validation


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


async def _check_items(
    api: Api,
    tenant: TenantRecord,
    record: FileRecord | None,
    base: Base,
    job: Submission,
    fields: Sequence[str],
    param: str,
) -> None:
    """Raises InvalidInput if rows are of the wrong kind, lack a field that the grader names, or are too long. Where what the upload
    noted does not say enough, they are read again, a slice at a time."""
    if record is None:
        return
    most = job.most_tokens(base.tokenizer.context)
    right_kind = record.num_examples == (record.num_items if job.is_supervised else 0)
    told = job.given.chat_template_kwargs  # of which uploads know nothing
    if told and record.num_texts:
        raise InvalidInput(f"{KWARGS}: {param} has texts, which are learned without a chat template", param=job.param)
    fits = not told and record.longest.get(base.name, most + 1) <= most
    if right_kind and fits and record.fields.issuperset(fields):
        return
    found = LongPrompts()
    async for part in api.files.slices(record):
        limit = None if fits else most
        task = CheckItems(part, found.num_lines, base.name, job.is_supervised, list(fields), limit, param, told)
        found += msgspec.convert(await api.helpers.do(tenant, task, num_bytes=len(part)), LongPrompts)
    if found.num_long:
        raise InvalidInput(_too_long(found, most, job, base), param=param, code="too_long")


def _too_long(found: LongPrompts, most: int, job: Submission, base: Base) -> str:
    named = ", ".join(map(str, found.first_long)) + (", …" if found.num_long > len(found.first_long) else "")
    where = f"(lines {named}; the longest has {found.longest} tokens)"
    if job.is_supervised:
        context = base.tokenizer.context
        return f"{found.num_long} of the examples do not fit into the context of {context} tokens {where}: shorten them"
    given = job.given
    bound = "max_context" if given.max_context else "the context"
    return (
        f"{found.num_long} of the prompts are longer than {most} tokens, which is {bound} of"
        f" {most + given.max_tokens} less max_tokens {given.max_tokens} {where}:"
        " shorten them or lower max_tokens"
    )
