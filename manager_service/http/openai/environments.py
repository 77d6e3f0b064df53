"""/v1/environments: those that jobs may name, built in and installed."""

import inspect
from importlib.metadata import EntryPoint
from typing import Any

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel

from common.tasks.environments import BUILT_IN, installed, is_live, load_installed, makes_items, outdated
from common.wire.messages import EnvSpec
from manager_service.http.context import Parts, Tenant
from manager_service.http.errors import COMMON
from manager_service.http.openai.paging import page
from manager_service.http.schemas import EnvironmentObject, Page
from manager_service.records.keys import JSON

router = APIRouter(prefix="/v1/environments", tags=["environments"], responses=COMMON)


@router.get("")
async def list_environments(api: Parts, tenant: Tenant) -> Page[EnvironmentObject]:
    """The environments that a job may name, with their arguments; those that were installed a moment ago too."""
    return page(await api.helpers.beside(tenant, _known), has_more=False)


def _known() -> list[EnvironmentObject]:
    built_in = [_shown(name, schema_of(args), None) for name, args in BUILT_IN.items()]
    return built_in + [
        _installed(entry) for entry in sorted(installed(again=True).values(), key=lambda entry: entry.name)
    ]


def _installed(entry: EntryPoint) -> EnvironmentObject:
    try:
        made = load_installed(entry.name)
        declared: Any = getattr(made, "Args", None)
        is_model = isinstance(declared, type) and issubclass(declared, BaseModel)
        shown = _shown(entry.name, schema_of(declared) if is_model else _schema_of_keywords(made), entry)
        return shown.model_copy(update={"error": outdated(entry)})
    except (Exception, SystemExit) as error:  # foreign code
        package = _package(entry)
        return EnvironmentObject(id=entry.name, package=package, entry_point=entry.value, args=None, error=str(error))


def _shown(name: str, args: dict[str, Any], entry: EntryPoint | None) -> EnvironmentObject:
    spec = EnvSpec(name)
    return EnvironmentObject(
        id=name,
        package=entry and _package(entry),
        entry_point=entry and entry.value,
        args=args,
        makes_items=makes_items(spec),
        live=is_live(spec),
    )


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown"


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Its JSON Schema, in which all is JSON."""
    return msgspec.json.decode(JSON.encode(model.model_json_schema()))


def _schema_of_keywords(made: Any) -> dict[str, Any]:
    """The schema of a class that declares no model of its arguments: what it can be called with."""
    properties, required, more = dict[str, Any](), list[str](), False
    for name, one in inspect.signature(made).parameters.items():
        if one.kind is inspect.Parameter.VAR_KEYWORD:
            more = True
        elif one.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            properties[name] = {} if one.default is inspect.Parameter.empty else {"default": _plain(one.default)}
            required += [name] if one.default is inspect.Parameter.empty else []
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}


def _plain(value: Any) -> Any:
    """A default as JSON, or as Python writes it."""
    try:
        return msgspec.json.decode(JSON.encode(value))
    except TypeError:
        return repr(value)
