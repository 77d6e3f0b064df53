"""Keeps where a tenant's jobs report to: keys of loggers, and webhooks.

marlaas:{@}:logger-keys:<tenant>   hash     logger -> LoggerKey
marlaas:{@}:webhooks:<tenant>      hash     webhook -> Webhook
marlaas:{@}:loggers                string   names of the loggers that are installed where the exporter runs

Keys and secrets are kept as they are, since loggers and signatures need them. Only the manager and the exporter may read
these keys of Redis (deploy/acl.py), and no route answers with one.
"""

import base64
import secrets
import time
from collections.abc import Collection
from typing import Any, Literal

import msgspec

from common.errors import InvalidInput, NotFound
from manager_service.records.keys import GLOBAL, JSON

LoggerName = Literal["wandb", "trackio"]


class Integration(msgspec.Struct, frozen=True, kw_only=True):
    """A logger that a job's figures go to."""

    type: LoggerName
    project: str
    name: str = ""  # of the run; empty: the job's id
    entity: str = ""  # whose project it is; empty: the key's own
    tags: tuple[str, ...] = ()


class LoggerKey(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's key of a logger's server. No route shows the key again."""

    logger: LoggerName
    key: str
    base_url: str  # of the server
    created_at: int


WebhookEvent = Literal["fine_tuning.job.succeeded", "fine_tuning.job.failed", "fine_tuning.job.cancelled"]


class Webhook(msgspec.Struct, frozen=True, kw_only=True):
    """A URL that hears of the end of a tenant's jobs. The secret is shown once."""

    id: str  # `webhook-…`
    url: str
    secret: str  # `whsec_…`, of Standard Webhooks
    events: tuple[WebhookEvent, ...]
    created_at: int


LOGGERS = GLOBAL + "loggers"
MAX_WEBHOOKS = 8
"""Webhooks of one tenant."""

# KEYS: the tenant's webhooks. ARGV: id, record, most.
ADD = """
if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then return 0 end
return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
"""


class Receivers:
    """Records of loggers' keys and of webhooks, which the API writes and the exporter reads."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._add = redis.register_script(ADD)

    # ---- loggers ----------------------------------------------------------------------------------------------------

    async def installed(self) -> list[LoggerName] | None:
        """The loggers that the exporter can write to; None if there has never been an exporter."""
        names = await self._redis.get(LOGGERS)
        return None if names is None else msgspec.json.decode(names, type=list[LoggerName])

    async def tell_installed(self, loggers: Collection[LoggerName]) -> None:
        await self._redis.set(LOGGERS, JSON.encode(sorted(loggers)))

    async def set_key(self, tenant: str, logger: LoggerName, key: str, base_url: str) -> LoggerKey:
        record = LoggerKey(logger=logger, key=key, base_url=base_url, created_at=int(time.time()))
        await self._redis.hset(_keys(tenant), logger, JSON.encode(record))
        return record

    async def keys(self, tenant: str) -> dict[LoggerName, LoggerKey]:
        found = await self._redis.hgetall(_keys(tenant))
        records = [msgspec.json.decode(record, type=LoggerKey) for record in found.values()]
        return {record.logger: record for record in records}

    async def delete_key(self, tenant: str, logger: LoggerName) -> None:
        """Raises NotFound."""
        if not await self._redis.hdel(_keys(tenant), logger):
            raise NotFound(f"there is no key for {logger}")

    # ---- webhooks ---------------------------------------------------------------------------------------------------

    async def add_webhook(self, tenant: str, url: str, events: tuple[WebhookEvent, ...]) -> Webhook:
        """Raises InvalidInput if the tenant has too many."""
        secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
        name = f"webhook-{secrets.token_hex(12)}"
        record = Webhook(id=name, url=url, secret=secret, events=events, created_at=int(time.time()))
        if not await self._add(keys=[_webhooks(tenant)], args=[name, JSON.encode(record), MAX_WEBHOOKS]):
            raise InvalidInput(
                f"you have {MAX_WEBHOOKS} webhooks, which is the most: delete one", code="too_many_webhooks"
            )
        return record

    async def webhooks(self, tenant: str) -> list[Webhook]:
        """Newest first."""
        found = await self._redis.hvals(_webhooks(tenant))
        records = [msgspec.json.decode(record, type=Webhook) for record in found]
        return sorted(records, key=lambda record: (record.created_at, record.id), reverse=True)

    async def delete_webhook(self, tenant: str, webhook: str) -> None:
        """Raises NotFound."""
        if not await self._redis.hdel(_webhooks(tenant), webhook):
            raise NotFound(f"there is no webhook {webhook[:64]!r}")


def _keys(tenant: str) -> str:
    return f"{GLOBAL}logger-keys:{tenant}"


def _webhooks(tenant: str) -> str:
    return f"{GLOBAL}webhooks:{tenant}"
