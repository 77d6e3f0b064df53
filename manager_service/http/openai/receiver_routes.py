"""/v1/loggers, /v1/webhooks: where a tenant's jobs report to. Keys and secrets come in, and never out again."""

import re
from typing import Annotated, Literal, get_args

from fastapi import APIRouter, Depends
from pydantic import Field, StringConstraints

from common.errors import InvalidInput, NotFound
from common.outgoing import check_url
from common.suggestions import quoted
from manager_service.http.context import Parts, Tenant
from manager_service.http.errors import COMMON, declared
from manager_service.http.openai.paging import page
from manager_service.http.openai.reachable_hosts import check_host
from manager_service.http.reading.bodies import JsonRoute
from manager_service.http.schemas import Deleted, Given, LoggerObject, NewWebhookObject, Page, WebhookObject
from manager_service.records.receivers import LoggerKey, Receivers, Webhook, WebhookEvent

router = APIRouter(prefix="/v1", tags=["receivers"], responses=COMMON, route_class=JsonRoute)

WANDB_URL = "https://api.wandb.ai"
Secret = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[!-~]+$")]

TOKEN, SECRET = re.compile(r"[\w-]+\.[\w-]+\.[\w-]+"), re.compile(r"[\w-]{40,}")
"""W&B's keys: a JSON web token, or what stands in a key after its first dash."""


class LoggerKeyGiven(Given):
    """`base_url`: of a W&B server of your own."""

    api_key: Secret
    base_url: str = Field(WANDB_URL, max_length=2048)


class WebhookGiven(Given):
    """Without `events`: all of them."""

    url: str = Field(max_length=2048)
    events: list[WebhookEvent] | None = Field(None, min_length=1, max_length=3)


@router.get("/loggers")
async def list_loggers(api: Parts, tenant: Tenant) -> Page[LoggerObject]:
    """The loggers that have a key of yours; the keys are not shown."""
    found = await Receivers(api.redis).keys(tenant.id)
    return page([shown_logger(record) for record in found.values()], has_more=False)


def _with_key(logger: str) -> Literal["wandb"]:
    """The logger, if it takes a key. Raises NotFound."""
    if logger != "wandb":
        raise NotFound(f"there is no logger {quoted(logger)} that takes a key; wandb does")
    return logger


WithKey = Annotated[Literal["wandb"], Depends(_with_key)]


@router.post("/loggers/{logger}", responses=declared(404))
async def set_logger(api: Parts, tenant: Tenant, logger: WithKey, body: LoggerKeyGiven) -> LoggerObject:
    """Set or replace the key with which your jobs' figures are sent to a logger's server. It is never shown again."""
    _check_key(body.api_key)
    _check_host(body.base_url, api.settings.logger_hosts, "base_url", "MARLAAS_LOGGER_HOSTS")
    return shown_logger(await Receivers(api.redis).set_key(tenant.id, logger, body.api_key, body.base_url.rstrip("/")))


@router.delete("/loggers/{logger}", responses=declared(404))
async def delete_logger(api: Parts, tenant: Tenant, logger: WithKey) -> Deleted:
    """Forget the key."""
    await Receivers(api.redis).delete_key(tenant.id, logger)
    return Deleted(id=logger, object="logger")


@router.post("/webhooks")
async def create_webhook(api: Parts, tenant: Tenant, body: WebhookGiven) -> NewWebhookObject:
    """Have a URL told when a job of yours ends, signed as OpenAI signs. Only this answer shows the secret."""
    _check_host(body.url, api.settings.webhook_hosts, "url", "MARLAAS_WEBHOOK_HOSTS")
    events: tuple[WebhookEvent, ...] = tuple(dict.fromkeys(body.events or get_args(WebhookEvent)))
    record = await Receivers(api.redis).add_webhook(tenant.id, body.url, events)
    return NewWebhookObject(**shown_webhook(record).model_dump(), secret=record.secret)


@router.get("/webhooks")
async def list_webhooks(api: Parts, tenant: Tenant) -> Page[WebhookObject]:
    found = await Receivers(api.redis).webhooks(tenant.id)
    return page([shown_webhook(record) for record in found], has_more=False)


@router.delete("/webhooks/{webhook_id}", responses=declared(404))
async def delete_webhook(api: Parts, tenant: Tenant, webhook_id: str) -> Deleted:
    """Tell the URL nothing more."""
    await Receivers(api.redis).delete_webhook(tenant.id, webhook_id)
    return Deleted(id=webhook_id, object="webhook")


def _check_key(key: str) -> None:
    """Raises InvalidInput for what W&B's library refuses before it calls a server."""
    secret = key.split("-", 1)[-1]  # what stands before the dash names a server of one's own
    if not (TOKEN.fullmatch(key) or SECRET.fullmatch(secret)):
        raise InvalidInput(
            f"api_key: W&B's keys have at least 40 letters, digits and underscores, after a dash if there is one; yours has {len(secret)} "
            "characters there: copy it whole, from the page /authorize of the server",
            param="api_key",
        )


def _check_host(url: str, hosts: str, param: str, setting: str) -> None:
    """Raises InvalidInput unless it is a URL of a host that the operator allows."""
    try:
        check_url(url)
    except ValueError as error:
        raise InvalidInput(f"{param}: {error}", param=param) from error
    check_host(url, hosts, param, setting)


def shown_logger(record: LoggerKey) -> LoggerObject:
    return LoggerObject(id=record.logger, base_url=record.base_url, created_at=record.created_at)


def shown_webhook(record: Webhook) -> WebhookObject:
    return WebhookObject(id=record.id, url=record.url, events=list(record.events), created_at=record.created_at)
