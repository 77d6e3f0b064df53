"""Finds the models that answer for graders (`score_model`, `label_model`), and fixes their versions."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from common.errors import InvalidInput, NotFound
from common.tasks.environments import grader_in
from common.tasks.graders import model_graders
from common.text.chat_template import KWARGS
from common.wire.messages import EnvSpec
from manager_service.http.context import Api, Base
from manager_service.http.stores.model_names import find_model
from manager_service.records.tenants import TenantRecord


async def pin_environment(api: Api, tenant: TenantRecord, base: Base, env: EnvSpec, *, param: str) -> EnvSpec:
    """A valid job's environment, whose grader names a version of each tuned model. `param`: the grader's. Raises InvalidInput."""
    grader = grader_in(env)
    if grader is None:
        return env
    pinned = await pin_models(api, tenant, base, grader, param=param)
    return msgspec.structs.replace(env, args={**env.args, "grader": pinned})


async def pin_models(
    api: Api, tenant: TenantRecord, base: Base | None, grader: Mapping[str, Any], *, param: str
) -> dict[str, Any]:
    """The same of a valid grader. `base`: whose workers must have its models; None: any."""
    pinned = dict(grader)
    for place, part in model_graders(grader):
        where = ".".join(filter(None, [param, place, "model"]))
        named = {**part, "model": await _pinned(api, tenant, base, part, where)}
        if not place:
            return named
        pinned["graders"] = {**pinned["graders"], place.removeprefix("graders."): named}
    return pinned


async def base_asked(api: Api, tenant: TenantRecord, grader: Mapping[str, Any]) -> Base:
    """The base whose workers have the first model that a valid grader asks; the first of all if it asks none."""
    for _, part in model_graders(grader):
        with suppress(NotFound):
            return (await find_model(api, tenant, str(part["model"]))).base
    return next(iter(api.bases.values()))


def asked_models(env: EnvSpec) -> set[str]:
    """Models of this service that a valid environment's graders ask, without versions."""
    return {str(part["model"]).partition("@")[0] for _, part in model_graders(grader_in(env) or {})}


async def _pinned(api: Api, tenant: TenantRecord, base: Base | None, grader: Mapping[str, Any], param: str) -> str:
    model = str(grader["model"])
    if model.startswith("tinker://"):
        raise InvalidInput("a grader's model is a base model or ft:…", param=param, code="model_not_found")
    try:
        named = await find_model(api, tenant, model)
    except NotFound as error:
        hint = "; a model outside of this service needs a url" if ":" not in model else ""
        raise InvalidInput(f"{error}{hint}", param=param, code="model_not_found") from error
    named.base.tokenizer.told(grader.get(KWARGS) or {})
    if base is not None and named.base is not base:
        raise InvalidInput(
            f"{model} is served by the workers of {named.base.name!r}: graders ask models of the job's base, {base.name!r}",
            param=param,
        )
    return f"{model.partition('@')[0]}@{named.adapter.version}" if model.startswith("ft:") else model
