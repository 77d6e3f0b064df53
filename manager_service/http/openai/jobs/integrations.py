"""Checks a job's `integrations`: the loggers that its figures go to, in OpenAI's form."""

import re
from collections.abc import Container, Iterator
from typing import Annotated, Any, get_args

from pydantic import Field

from common.errors import InvalidInput
from common.suggestions import did_you_mean, quoted
from manager_service.http.schemas import Given
from manager_service.records.job_records import JobSpec
from manager_service.records.receivers import Integration, LoggerName

LOGGERS: tuple[LoggerName, ...] = get_args(LoggerName)
Word = Annotated[str, Field(min_length=1, max_length=64)]

_PROJECT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_TAKEN = re.compile(r"registry-.*|.*_(system|configs|traces|artifact\w*)", re.IGNORECASE)
"""Names that trackio's own files have."""


class LoggerGiven(Given):
    """`name` of the run: the job's id unless given."""

    project: str
    name: str | None = Field(None, min_length=1, max_length=128)


class WandbGiven(LoggerGiven):
    entity: str | None = None
    tags: list[Word] | None = Field(None, max_length=16)


class IntegrationGiven(Given):
    type: str
    wandb: WandbGiven | None = None
    trackio: LoggerGiven | None = None


def checked_integrations(given: list[IntegrationGiven], installed: list[LoggerName] | None) -> tuple[Integration, ...]:
    """`installed`: loggers of the exporter; None: there is none. Raises InvalidInput."""
    if installed is None:
        raise InvalidInput("integrations: this service has no exporter: ask its operator", param="integrations")
    checked = tuple(_checked(one, f"integrations[{at}]", installed) for at, one in enumerate(given))
    if len({one.type for one in checked}) < len(checked):
        raise InvalidInput("integrations: one of each type at most", param="integrations")
    return checked


def _checked(given: IntegrationGiven, param: str, installed: list[LoggerName]) -> Integration:
    logger = next((name for name in LOGGERS if name == given.type), None)
    if logger is None:
        hint = did_you_mean(given.type, LOGGERS)
        raise InvalidInput(f"{param}: unknown type {quoted(given.type)}{hint}; use {' or '.join(LOGGERS)}", param=param)
    if logger not in installed:
        raise InvalidInput(
            f"{param}: {logger} is not installed where the exporter runs; its operator can: pip install 'marlaas[{logger}]'",
            param=param,
            code="logger_not_installed",
        )
    settings = {"wandb": given.wandb, "trackio": given.trackio}
    own = settings.pop(logger)
    if own is None or any(settings.values()):
        raise InvalidInput(f'{param}: give {{"type": "{logger}", "{logger}": {{"project": …}}}}', param=param)
    _check_names(logger, own, f"{param}.{logger}")
    entity, tags = (own.entity or "", tuple(own.tags or ())) if isinstance(own, WandbGiven) else ("", ())
    return Integration(type=logger, project=own.project, name=own.name or "", entity=entity, tags=tags)


def _check_names(logger: LoggerName, given: LoggerGiven, param: str) -> None:
    for field, name in given.model_dump(include={"project", "entity"}).items():
        if name is not None and not _PROJECT.fullmatch(name):
            raise InvalidInput(
                f"{param}.{field} {quoted(name)}: use 1 to 128 letters, digits, '_', '-' and '.'",
                param=f"{param}.{field}",
            )
    if logger == "trackio" and _TAKEN.fullmatch(given.project):
        raise InvalidInput(
            f"{param}.project {quoted(given.project)}: trackio keeps this name", param=f"{param}.project"
        )


def kept_here(spec: JobSpec, keys: Container[LoggerName]) -> Iterator[str]:
    """Says where a job's figures lie that are sent to no server. `keys`: loggers with a key of its tenant's."""
    for one in spec.integrations:
        folder = f"loggers/{spec.tenant}/{one.type}"
        if one.type == "trackio":
            yield f"trackio: {_WRITTEN} {folder} {_WHOSE}: TRACKIO_DIR=FOLDER trackio show --project {one.project}"
        elif one.type not in keys:
            sync = f"wandb beta sync --id {spec.id} FOLDER"
            yield f"wandb: no key is set (marlaas loggers wandb), so {_WRITTEN} {folder}/{spec.id} {_WHOSE}: {sync}"


_WRITTEN = "this job's figures are written into the folder"
_WHOSE = "in the data folder of the service (of `marlaas up`: .marlaas, or its --data). There"


def shown(integration: Integration) -> dict[str, Any]:
    """The integration in OpenAI's form."""
    own: dict[str, Any] = {"project": integration.project, "name": integration.name or None}
    if integration.type == "wandb":
        own |= {"entity": integration.entity or None, "tags": list(integration.tags)}
    return {"type": integration.type, integration.type: own}
