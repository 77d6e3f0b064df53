"""The adapter store: versioned LoRA weights in object storage.

    adapters/{tenant}/{job}/{version:08d}/manifest.json            create-only: the commit of version and batch
    adapters/{tenant}/{job}/{version:08d}/{attempt}/<file>         written before the manifest, under an attempt of its own

A version exists if and only if its manifest does. Of two trainers of one version the first to write the manifest wins; the
other deletes its own folder. Only the trainer service writes here.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec

from common.errors import AlreadyExists, CorruptObject, NotFound, Unavailable
from common.models.base_digest import NO_BASE, BaseIdentity
from common.peers.chain import Relay
from common.store.objects import InThread, Objects
from common.store.parts import StoredFile, stored_file
from common.wire.messages import AdapterRef, AdapterUpdate, Usage

OPTIMIZER_FILE = "optimizer.safetensors"
PEFT_FILES = ("adapter_model.safetensors", "adapter_config.json")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The commit record of one version."""

    adapter: AdapterRef
    base_model: str = ""
    base_digest: str = ""  # of the base model; empty: written before there was one, or by a trainer that knows none
    attempt: str = ""  # folder of the winning attempt
    files: dict[str, StoredFile] = {}
    parent: int | None  # version that this one was trained from
    batch: str  # id of the Init or TrainStep that made it
    seed: int  # all random numbers are functions of it: with `next_group` this is the RNG's whole state
    next_group: int  # data cursor
    trajectories: tuple[str, ...] = ()
    metrics: dict[str, float | None] = {}
    usage: Usage = Usage()
    fingerprints: dict[str, str] = {}  # service -> of the bits that it computed, in deterministic mode
    created_at: float = 0.0  # seconds since 1970, the trainer's clock

    @property
    def size(self) -> tuple[int, int]:
        """Bytes of the files as they were written: of the adapter, and of the optimiser's state."""
        sizes = {name: file.size for name, file in self.files.items()}
        optimizer = sizes.pop(OPTIMIZER_FILE, 0)
        return sum(sizes.values()), optimizer


def update_of(manifest: Manifest, about: Mapping[str, Any]) -> AdapterUpdate:
    """Makes the message that tells the owner of a version, the same each time. `about`: fields of `Message.about`."""
    return AdapterUpdate(
        id=f"{manifest.batch}/done",
        **about,
        adapter=manifest.adapter,
        batch=manifest.batch,
        next_group=manifest.next_group,
        metrics=manifest.metrics,
        usage=manifest.usage,
        size=manifest.size,
    )


class AdapterStore:
    """Reads and commits versions."""

    def __init__(self, objects: Objects, base: BaseIdentity = NO_BASE, relay: Relay | None = None) -> None:
        """`base`: the reader's; versions of another are refused. `relay`: through it come files that have parts."""
        self._objects = objects
        self.base = base
        self.relay = relay

    async def manifest(self, adapter: AdapterRef) -> Manifest | None:
        """The commit record, or None if the version does not exist. Raises CorruptObject."""
        try:
            data = await self._objects.get(f"{adapter.path()}/manifest.json")
        except NotFound:
            return None
        try:
            return msgspec.json.decode(data, type=Manifest)
        except msgspec.DecodeError as error:
            raise CorruptObject(f"{adapter}: manifest: {error}") from error

    async def read(
        self, adapter: AdapterRef, names: Iterable[str] = PEFT_FILES, beside: InThread = asyncio.to_thread
    ) -> dict[str, bytes]:
        """File contents, read and checked against the manifest's sha256 in a thread of `beside`. Raises NotFound, CorruptObject, or
        InvalidInput if the version is of another base model."""
        manifest = await self.manifest(adapter)
        if manifest is None:
            raise NotFound(f"adapter {adapter} does not exist")
        self.base.check(f"adapter {adapter}", BaseIdentity(manifest.base_model, manifest.base_digest))
        return {name: await self._read_file(manifest, name, beside) for name in names}

    async def read_uploaded(self, path: str) -> bytes:
        """The factors that a user has uploaded. Raises NotFound."""
        return await self._objects.get(path)

    async def _read_file(self, manifest: Manifest, name: str, beside: InThread) -> bytes:
        if name not in manifest.files:
            raise NotFound(f"adapter {manifest.adapter} has no file {name}")
        file, path = manifest.files[name], f"{manifest.adapter.path()}/{manifest.attempt}/{name}"
        try:
            if self.relay and file.parts and (relayed := await self.relay.read(file, path)) is not None:
                return relayed
            data = await self._objects.get(path, beside)
        except NotFound as error:
            raise CorruptObject(f"adapter {manifest.adapter}: {name} is gone") from error
        if (await beside(partial(stored_file, data, in_parts=False))).sha256 != file.sha256:
            raise CorruptObject(f"adapter {manifest.adapter}: {name} does not match its sha256")
        return data

    async def commit(self, manifest: Manifest, files: Mapping[str, bytes]) -> Manifest:
        """Writes the files, then the manifest, with `attempt`, `files` and `created_at`.

        Raises AlreadyExists if another attempt was first, and deletes its own files then.
        """
        folder, attempt = manifest.adapter.path(), uuid4().hex
        await self._write(f"{folder}/{attempt}", files)
        record = msgspec.structs.replace(
            manifest,
            attempt=attempt,
            files={
                name: await asyncio.to_thread(stored_file, data, in_parts=name in PEFT_FILES)
                for name, data in files.items()
            },
            created_at=time.time(),
        )
        # The commit. Files come first, under a name of this attempt, so a manifest never names files that are not there. The
        # manifest is created only if there is none: of two trainers of one version, as after a take-over, one wins, and no
        # reader sees a version change. A trainer that dies before this line leaves files that nobody names.
        try:
            await self._objects.create(f"{folder}/manifest.json", msgspec.json.encode(record))
        except AlreadyExists:
            existing = await self.manifest(manifest.adapter)
            # It may be our own: a request that was retried after its reply was lost.
            if existing is None or existing.attempt != attempt:
                await self._objects.delete_folder(f"{folder}/{attempt}")
                raise
        return record

    async def _write(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Writes all files of an attempt; deletes those that it wrote, if it can, when one fails."""
        try:
            for name, data in files.items():
                await self._objects.write(f"{folder}/{name}", data)
        except Unavailable:
            with contextlib.suppress(Unavailable):
                await self._objects.delete_folder(folder)
            raise

    async def drop_optimizer(self, adapter: AdapterRef) -> None:
        """Deletes a version's optimiser state; the adapter stays."""
        manifest = await self.manifest(adapter)
        if manifest is not None and OPTIMIZER_FILE in manifest.files:
            await self._objects.delete(f"{adapter.path()}/{manifest.attempt}/{OPTIMIZER_FILE}")

    async def drop_files(self, adapter: AdapterRef) -> None:
        """Deletes a version's files. Its manifest stays, so that nobody makes the version again."""
        manifest = await self.manifest(adapter)
        if manifest is not None:
            await self._objects.delete_folder(f"{adapter.path()}/{manifest.attempt}")

    async def delete_job(self, tenant: str, job: str) -> None:
        await self._objects.delete_folder(f"adapters/{tenant}/{job}")
