"""Base models in object storage.

    bases/<digest>/<file>      the files of a base model's folder
    bases/<digest>/manifest    their sha256 and those of their parts, written last: without it the base model is not there

The digest is the base model's identity (`common.models.base_digest`).
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from fnmatch import fnmatch
from pathlib import Path

import msgspec

from common.errors import AlreadyExists, CorruptObject, InvalidInput, NotFound
from common.models.base_digest import base_digest
from common.models.base_shape import BaseShape
from common.models.families import check_weights, unsupported
from common.settings import MODEL_FILES, TEXT_FILES, stored_digest
from common.store.objects import PART_BYTES, Objects
from common.store.parts import StoredFile, part_bytes, read_parts
from common.text.model_folder import OwnSettings, read_config, read_template

MANIFEST = "manifest"
ROOT = "bases"
TOKENIZER = "tokenizer.json"


class BaseManifest(msgspec.Struct, frozen=True):
    name: str  # for people; the first that it was pushed under
    files: dict[str, StoredFile]

    def wanted(self, *, with_weights: bool) -> dict[str, StoredFile]:
        """The files, or the texts of them alone, the smallest first."""
        patterns = MODEL_FILES if with_weights else TEXT_FILES
        found = {name: file for name, file in self.files.items() if any(fnmatch(name, each) for each in patterns)}
        return dict(sorted(found.items(), key=lambda item: item[1].size))


def base_path(digest: str, name: str) -> str:
    return f"{ROOT}/{digest}/{name}"


async def read_base(objects: Objects, where: str) -> BaseManifest:
    """Raises InvalidInput, with what there is, for a base model that is not there, and CorruptObject."""
    path = base_path(stored_digest(where), MANIFEST)
    try:
        content = await objects.get(path)
    except NotFound:
        there = ", ".join(await stored_bases(objects)) or "none"
        raise InvalidInput(
            f"base model: {where} is not in the store; there are: {there}. `marlaas base push NAME FOLDER` brings one there"
        ) from None
    return decode_manifest(content, path)


async def stored_bases(objects: Objects) -> list[str]:
    """All that are there, as `store:NAME@DIGEST`."""
    found: list[str] = []
    for digest in await objects.folders(ROOT):
        path = base_path(digest, MANIFEST)
        try:
            found.append(f"store:{decode_manifest(await objects.get(path), path).name}@{digest}")
        except (NotFound, CorruptObject):  # its push has not ended
            continue
    return sorted(found)


async def push_base(objects: Objects, name: str, folder: Path, tell: Callable[[str], None]) -> str:
    """Brings a folder's base model into the store; returns its `store:NAME@DIGEST`. What a push before has left there is checked, and
    not sent again. `tell` hears of each file.

    Raises InvalidInput for a folder that is no base model, and where the store has other files under its digest.
    """
    since_s, files = time.time(), await asyncio.to_thread(_hashed_folder, folder)
    digest = await asyncio.to_thread(base_digest, folder)
    await _check_same(objects, digest, files, folder)
    sizes = await objects.sizes(f"{ROOT}/{digest}")
    for file_name, file in files.items():
        path = base_path(digest, file_name)
        if sizes.get(path) == file.size and await _is_right(objects, path, file):
            tell(f"{file_name} is there")
        else:
            tell(f"{file_name}, {file.size:,} bytes, goes up")
            await objects.write_parts(path, _pieces(folder / file_name))
    with contextlib.suppress(AlreadyExists):
        await objects.create(base_path(digest, MANIFEST), msgspec.json.encode(BaseManifest(name, files)))
    objects.drop_drafts(f"{ROOT}/{digest}", since_s)
    return f"store:{name}@{digest}"


def _hashed_folder(folder: Path) -> dict[str, StoredFile]:
    """Raises InvalidInput unless it is a base model with all of its files."""
    OwnSettings.load(folder)
    if not any(unsupported(read_config(folder))):  # vLLM or transformers may know it
        check_weights(folder, BaseShape.load(folder))
    if not ((folder / TOKENIZER).is_file() and any(folder.glob("*.safetensors"))):
        raise InvalidInput(f"{folder} is no base model's folder: it needs {TOKENIZER} and weights as .safetensors")
    try:
        read_template(folder)
        found = {file for pattern in MODEL_FILES for file in folder.glob(pattern) if file.is_file()}
        return {file.name: _hashed(file) for file in sorted(found)}
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{folder}: {error}") from error


def _hashed(path: Path) -> StoredFile:
    """Hashes a file of any size, all of it in parts."""
    whole, parts, size = hashlib.sha256(), list[str](), path.stat().st_size
    with path.open("rb") as file:
        while part := file.read(part_bytes(size)):
            whole.update(part)
            parts.append(hashlib.sha256(part).hexdigest())
    return StoredFile(whole.hexdigest(), size, tuple(parts))


async def _check_same(objects: Objects, digest: str, files: dict[str, StoredFile], folder: Path) -> None:
    """Raises InvalidInput if the store has a base model of this digest with other files."""
    path = base_path(digest, MANIFEST)
    try:
        there = decode_manifest(await objects.get(path), path).files
    except NotFound:
        return
    if odd := sorted(name for name in files.keys() | there.keys() if files.get(name) != there.get(name)):
        raise InvalidInput(
            f"the store has this base model with another {odd[0]} than {folder}: push that one's folder, or delete "
            f"{ROOT}/{digest} in the store first, once no worker loads it"
        )


async def _is_right(objects: Objects, path: str, file: StoredFile) -> bool:
    whole = hashlib.sha256()
    async for part in read_parts(objects, path, file, 0):
        await asyncio.to_thread(whole.update, part)
    return whole.hexdigest() == file.sha256


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, PART_BYTES):
            yield piece


def decode_manifest(content: bytes, path: str) -> BaseManifest:
    """Raises CorruptObject, also for names of files that are none of a base model's folder."""
    try:
        found = msgspec.json.decode(content, type=BaseManifest)
    except msgspec.DecodeError as error:
        raise CorruptObject(f"{path}: {error}") from error
    for name in found.files:
        if "/" in name or not any(fnmatch(name, pattern) for pattern in MODEL_FILES):
            raise CorruptObject(f"{path}: {name!r} is no file of a base model")
    return found
