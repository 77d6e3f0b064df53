"""Keeps tenants and their API keys; refuses a Redis that another version wrote.

marlaas:{@}:tenants     hash   tenant -> TenantRecord
marlaas:{@}:keys        hash   sha256 of the key -> KeyRecord
"""

import contextlib
import hashlib
import os
import re
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec

from common.errors import AlreadyExists, InvalidInput, NotFound
from manager_service.records.keys import GLOBAL, JSON


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str = ""
    created_at: int
    weight: float = 1.0
    max_jobs: int = 16  # running at once in a cell; more are queued
    max_tokens_per_day: int | None = None  # prompt, sampled and trained; beyond it nothing is issued or accepted
    max_stored_bytes: int | None = (
        None  # in object storage; beyond it nothing is trained or accepted; None: the service's
    )

    def may_store(self, default: int) -> int:
        """Bytes. `default`: the service's."""
        return default if self.max_stored_bytes is None else self.max_stored_bytes


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Stored under the sha256 of the key; the key itself is shown once."""

    id: str  # `key-…`
    tenant: str
    created_at: int
    admin: bool = False
    hint: str = ""  # the last four characters


TENANTS, KEYS = GLOBAL + "tenants", GLOBAL + "keys"
DEFAULT_TENANT = "default"
ADMIN = "admin"
"""The owner of admin keys. It is no tenant: it has no files and no jobs."""
FORMAT = "5"
"""Raised when a message or record of before cannot be read any more. 2: `Step` became `TrainStep`. 3: what a run's
samplers sample with left its state, and the bytes of files are counted. 4: tokens travel as transcripts that refer to histories.
5: samples are objects in the storage, and records of runs moved."""
FORMAT_KEY = GLOBAL + "format"

_TENANT_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_RESERVED = (ADMIN, "other", "-", "day")


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def make_key() -> str:
    return "sk-" + secrets.token_urlsafe(32)


def check_tenant_id(tenant: str) -> None:
    """Checks an id, which becomes part of model names and object paths. Raises InvalidInput."""
    if not _TENANT_ID.fullmatch(tenant) or tenant in _RESERVED:
        raise InvalidInput(
            f"{tenant!r} cannot be a tenant's id: use 1 to 63 of a-z, 0-9, '_' and '-', beginning with a letter or"
            f" digit; {', '.join(_RESERVED[:2])} are taken",
            param="id",
        )


class Tenants:
    """Records of tenants and keys, which all API replicas share."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis

    # ---- tenants ----------------------------------------------------------------------------------------------------

    async def create(self, tenant: TenantRecord) -> None:
        """Raises InvalidInput or AlreadyExists."""
        check_tenant_id(tenant.id)
        if not await self._redis.hsetnx(TENANTS, tenant.id, JSON.encode(tenant)):
            raise AlreadyExists(f"there is already a tenant {tenant.id!r}")

    async def get(self, tenant: str) -> TenantRecord:
        """Raises NotFound."""
        record = await self._redis.hget(TENANTS, tenant)
        if record is None:
            raise NotFound(f"there is no tenant {tenant!r}")
        return msgspec.json.decode(record, type=TenantRecord)

    async def update(self, tenant: TenantRecord) -> None:
        await self._redis.hset(TENANTS, tenant.id, JSON.encode(tenant))

    async def all(self) -> list[TenantRecord]:
        """Newest first."""
        records = await self._redis.hvals(TENANTS)
        tenants = [msgspec.json.decode(record, type=TenantRecord) for record in records]
        return sorted(tenants, key=lambda tenant: (tenant.created_at, tenant.id), reverse=True)

    # ---- keys -------------------------------------------------------------------------------------------------------

    async def authenticate(self, key: str) -> KeyRecord | None:
        """The record of a key; None: the key is unknown."""
        record = await self._redis.hget(KEYS, hashed(key))
        return None if record is None else msgspec.json.decode(record, type=KeyRecord)

    async def add_key(self, tenant: str, *, key: str | None = None, admin: bool = False) -> tuple[str, KeyRecord]:
        """A new key (or `key`, if it is not known yet) and its record."""
        key = key or make_key()
        record = KeyRecord(
            id=f"key-{hashed(key)[:16]}", tenant=tenant, created_at=int(time.time()), admin=admin, hint=key[-4:]
        )
        await self._redis.hsetnx(KEYS, hashed(key), JSON.encode(record))
        return key, record

    async def keys(self, tenant: str) -> list[KeyRecord]:
        """Newest first."""
        return [record for _, record in await self._keys(tenant)]

    async def delete_key(self, tenant: str, key_id: str) -> None:
        """Takes effect at once. Raises NotFound."""
        for digest, record in await self._keys(tenant):
            if record.id == key_id:
                await self._redis.hdel(KEYS, digest)
                return
        raise NotFound(f"tenant {tenant!r} has no key {key_id!r}")

    async def _keys(self, tenant: str) -> list[tuple[bytes, KeyRecord]]:
        found = await self._redis.hgetall(KEYS)
        records = [(digest, msgspec.json.decode(value, type=KeyRecord)) for digest, value in found.items()]
        mine = [(digest, record) for digest, record in records if record.tenant == tenant]
        return sorted(mine, key=lambda row: (row[1].created_at, row[1].id), reverse=True)


async def bootstrap(tenants: Tenants, data_dir: Path) -> None:
    """Makes the tenant `default`, its first key and an admin key, unless they exist. Safe to repeat and to race.

    The keys lie in `{data_dir}/api_key` and `admin_key`, readable by their owner; if Redis lost them, they are registered again.
    """
    with contextlib.suppress(AlreadyExists):
        await tenants.create(TenantRecord(id=DEFAULT_TENANT, name="Default", created_at=int(time.time())))
    await tenants.add_key(DEFAULT_TENANT, key=read_or_make_key(data_dir / "api_key"))
    await tenants.add_key(ADMIN, key=read_or_make_key(data_dir / "admin_key"), admin=True)


def read_or_make_key(file: Path) -> str:
    """The key in a file with mode 0600, which appears whole or not at all. Raises InvalidInput if it has no key."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not file.exists():
        draft = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as handle:
            handle.write(make_key() + "\n")
        try:
            os.link(draft, file)
        except FileExistsError:  # another manager was first
            pass
        finally:
            draft.unlink()
    key = file.read_text().strip()
    if not key.startswith("sk-"):
        raise InvalidInput(f"{file} does not hold an API key; remove it to have a new one made")
    return key


async def check_format(redis: Any) -> None:
    """Marks an empty Redis. Raises InvalidInput for one of another format."""
    mark = await redis.get(FORMAT_KEY)
    if mark is None and await redis.exists(TENANTS):
        mark = b"1"
    elif mark is None:
        await redis.set(FORMAT_KEY, FORMAT, nx=True)
        mark = FORMAT.encode()
    if mark != FORMAT.encode():
        raise InvalidInput(
            f"this Redis holds data of another version of MARLaaS (format {mark.decode()}, this one reads {FORMAT}): run it "
            "with that version, or start with an empty one (marlaas up --data ANOTHER_FOLDER)"
        )
