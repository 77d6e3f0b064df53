"""Files of versions by urls that need no key: who has one may read that one file for a while."""

import base64
import functools
import hashlib
import hmac
import io
import secrets
import tarfile
from collections.abc import Mapping
from typing import IO, Any

import msgspec
from starlette.responses import Response

from common.errors import NotFound
from common.store.adapters import PEFT_FILES
from common.wire.messages import AdapterRef
from manager_service.http.context import Api
from manager_service.http.openai.adapter_content import files_of
from manager_service.http.stores.run_store import Source
from manager_service.records.keys import GLOBAL

VALID_S = 900
"""Seconds that a url is valid."""
ARCHIVE = "archive.tar"
"""Stands for all files in one."""
COMPLETE = "checkpoint_complete"
"""An empty file that clients look for in an archive."""
MAX_TOKEN = 2048


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """A leave to download one file, as its url carries it."""

    tenant: str
    path: str  # of the checkpoint
    version: int  # that the path named when this was signed
    file: str
    expires_at: int  # seconds since 1970


class SigningKey:
    """The key that all replicas sign with. A Redis that lost it ends the urls that were signed before."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis

    async def get(self) -> bytes:
        name = f"{GLOBAL}signing-key"
        while (found := await self._redis.get(name)) is None:
            await self._redis.set(name, secrets.token_bytes(32), nx=True)
        return found


def sign(key: bytes, grant: Grant) -> str:
    """The part of a url that says what it permits, and proves it."""
    said = msgspec.msgpack.encode(grant)
    return base64.urlsafe_b64encode(_proof(key, said) + said).decode().rstrip("=")


def verified(key: bytes, token: str) -> Grant | None:
    """The grant in a token; None if anything is not as it was signed."""
    if len(token) > MAX_TOKEN:
        return None
    try:
        both = base64.b64decode(f"{token}{'=' * (-len(token) % 4)}", altchars=b"-_", validate=True)
    except ValueError:
        return None
    proof, said = both[:32], both[32:]
    return msgspec.msgpack.decode(said, type=Grant) if hmac.compare_digest(proof, _proof(key, said)) else None


def _proof(key: bytes, said: bytes) -> bytes:
    return hmac.digest(key, said, hashlib.sha256)


async def file_names(api: Api, adapter: AdapterRef) -> list[str]:
    """The files of a version that PEFT loads. Raises NotFound if it has none."""
    manifest = await api.adapters.manifest(adapter)
    names = [name for name in PEFT_FILES if manifest is not None and name in manifest.files]
    if not names:
        raise NotFound(f"the version {adapter.version} has no files any more")
    return names


async def download(api: Api, source: Source, name: str) -> Response:
    """The answer with a file. Raises NotFound, ApiError."""
    names = await file_names(api, source.adapter) if name == ARCHIVE else [name]
    pack = _tar if name == ARCHIVE else _alone
    asker = await api.tenants.get(source.adapter.tenant)
    read = functools.partial(files_of, api, source.base, asker, source.adapter, names)
    return await api.downloads.answer(asker, read, pack, "application/octet-stream", {})


def _alone(files: Mapping[str, bytes], file: IO[bytes]) -> None:
    (content,) = files.values()
    file.write(content)


def _tar(files: Mapping[str, bytes], file: IO[bytes]) -> None:
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in {**files, COMPLETE: b""}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
