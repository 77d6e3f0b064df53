"""Fetches a base model from object storage into the node folder, as a plain Hugging Face folder that any engine loads.

    <node folder>/bases/<digest>          whole, each byte checked; with the manifest
    <node folder>/bases/<digest>.texts    the same for those who need no weights
    <node folder>/bases/<either>.part     what a fetch that goes on, or was interrupted, has so far

reads: the store, holders of its large files   writes: the node folder
waits for: another loader of this machine, which has its `.lock`   unblocked by: that one, or its end
after a crash: the next fetch goes on behind the parts that are right
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BufferedRandom
from itertools import chain
from pathlib import Path

import msgspec
import structlog

from common.errors import CorruptObject, InvalidInput, NotFound
from common.models.base_digest import base_digest, differ, shown
from common.models.stages import divided
from common.models.weight_files import StoredTensor, parse_header
from common.peers.chain import FolderUnusable, Relay
from common.peers.convoys import Convoy
from common.peers.folder import WrongPart, keep_right_parts, make_own_folder, write_part
from common.settings import Settings, kept_base, resolve_config, resolve_model, stored_digest
from common.store.bases import MANIFEST, BaseManifest, base_path, decode_manifest, read_base
from common.store.objects import Objects
from common.store.parts import LEAST_PART, PARTED_BYTES, StoredFile, read_parts

LOOK_S = 0.1
MAX_WRONG = 3
"""Times that a file's bytes are wrong before its push is at fault."""
log = structlog.get_logger()


def folder_of(where: str, settings: Settings, *, with_weights: bool) -> Path:
    """The folder of a base model, wherever it is, for callers that may block. Raises InvalidInput, and StoreUnavailable."""
    if not stored_digest(where):
        return (resolve_model if with_weights else resolve_config)(where)
    fetch = BaseFetch(Objects.open(settings.store), settings.node_dir, where, with_weights=with_weights)
    with ThreadPoolExecutor(1) as thread:  # the caller's may have an event loop
        return thread.submit(asyncio.run, fetch.run()).result()


class BaseFetch:
    """One base model's way to this machine."""

    def __init__(
        self, objects: Objects, node_dir: Path, where: str, *, with_weights: bool, relay: Relay | None = None
    ) -> None:
        """`where`: `store:NAME@DIGEST`. `relay`: through it come large files, of a convoy its stage's share first."""
        self._objects, self._relay, self._convoy = objects, relay, relay.convoy if relay else None
        self._where, self._digest, self._with_weights = where, stored_digest(where), with_weights
        self._whole = Path(kept_base(where, node_dir))
        self._target = self._whole if with_weights else Path(f"{self._whole}.texts")
        self._part = Path(f"{self._target}.part")
        self._total = 0
        self._shares = list[tuple[str, StoredFile]]()

    def progress(self) -> str:
        """`fetching q@0a1b…: 43% of 1.2 GB, 516 MB are here`."""
        name, _, digest = self._where.partition("@")
        told, total = f"fetching {name}@{shown(digest)}", self._total
        try:
            done = _num_held(self._part)
        except FileNotFoundError:  # it has just become the whole one, or was not begun
            return told
        return (
            f"{told}: {f'{done / total:.0%} of {total / 1e9:.1f} GB, ' if total else ''}{done / 1e6:,.0f} MB are here"
        )

    async def run(self) -> Path:
        """The folder, complete; a later call goes on where one was that failed.

        Raises StoreUnavailable; InvalidInput if it is not in the store, is damaged there, or finds no room here.
        """
        try:
            found = await asyncio.to_thread(self._kept)
            found = found or await self._fetched(await read_base(self._objects, self._where))
            files = _manifest(found).files if self._relay else {}
        except (OSError, FolderUnusable) as error:
            what = f"{self._part.parent} cannot hold it: {error}; see MARLAAS_CACHE_DIR"
            raise InvalidInput(f"base model {self._where}: {what}") from error
        except CorruptObject as error:
            raise InvalidInput(f"base model {self._where} is damaged in the store: {error}; push it again") from error
        for name, file in [*files.items(), *self._shares]:
            if self._relay and file.size > PARTED_BYTES:
                self._relay.offer(file, found / name).has(len(file.parts))
        return found

    def _kept(self) -> Path | None:
        """A folder that is here already."""
        return next((each for each in (self._whole, self._target) if self._is_right(each)), None)

    def _is_right(self, folder: Path) -> bool:
        """Has it all files, and this digest? Samples of the weights are read."""
        with_weights = self._with_weights or folder == self._whole
        try:
            files, sizes = _manifest(folder).wanted(with_weights=with_weights), _sizes(folder)
        except (OSError, CorruptObject):
            return False
        is_whole = all(sizes.get(name) == file.size for name, file in files.items())
        return is_whole and not differ(base_digest(folder, with_weights=with_weights), self._digest)

    async def _fetched(self, manifest: BaseManifest) -> Path:
        """Raises OSError, FolderUnusable, CorruptObject, StoreUnavailable."""
        files = manifest.wanted(with_weights=self._with_weights)
        self._total = sum(file.size for file in files.values())
        make_own_folder(self._target.parent)
        async with self._locked():
            if (found := await asyncio.to_thread(self._kept)) is not None:  # another loader was first
                return found
            if self._target.is_dir():
                log.warning("base_folder_wrong", folder=str(self._target), does="fetches what is not right of it")
                shutil.rmtree(self._part, ignore_errors=True)
                self._target.rename(self._part)
            self._part.mkdir(exist_ok=True)
            missing, free = self._total - _num_held(self._part), shutil.disk_usage(self._part).free
            if free < missing:
                raise OSError(f"{missing / 1e9:.2f} GB are missing, and {free / 1e9:.2f} GB are free")
            if self._convoy:
                await self._fetch_shares(self._convoy, files)
            for name, file in files.items():
                await self._complete(self._part / name, file)
            for name in files:  # only now: who follows would wait for the disk between two files
                await asyncio.to_thread(_sync, self._part / name)
            (self._part / MANIFEST).write_bytes(msgspec.json.encode(manifest))
            if not await asyncio.to_thread(self._is_right, self._part):
                raise CorruptObject("its files have another digest")
            async with self._convoy.reading if self._convoy else contextlib.nullcontext():
                self._part.rename(self._target)
                if self._convoy:
                    self._convoy.folder = self._target
        return self._target

    @contextlib.asynccontextmanager
    async def _locked(self) -> AsyncGenerator[None]:
        """The kernel ends a lock with its process."""
        with os.fdopen(os.open(f"{self._target}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as handle:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                await asyncio.sleep(LOOK_S)
            yield

    async def _fetch_shares(self, convoy: Convoy, files: Mapping[str, StoredFile]) -> None:
        """Fetches other files, then the weights of a convoy's stage, of the one behind it, and so on. So those who load together read the
        store once. Whoever did gives later ones the stage that was its own, as each of them begins with another."""
        small, tensors = list[StoredTensor](), dict[str, list[StoredTensor]]()
        for name, file in files.items():
            found = await self._tensors(name, file) if name.endswith(".safetensors") else []
            if found and file.size > PARTED_BYTES:
                tensors[name] = found
            else:
                await self._complete(self._part / name, file)
                small += found
        stages = divided(chain(small, *tensors.values()), convoy.num_stages)
        own = await convoy.enter()
        for stage in [*stages[own:], *stages[:own]]:
            for name, found in tensors.items():
                share = files[name].section(f"{stage.number}of{len(stages)}", stage.parts_of(files[name], found))
                await self._complete(self._part / name, share)
                self._shares += [(name, share)] if stage.number == own else []
            if stage.number == own:
                convoy.folder, convoy.stages = self._part, stages
                convoy.began.set()

    async def _tensors(self, name: str, file: StoredFile) -> list[StoredTensor]:
        """The tensors of a file in the store, by its header. Raises CorruptObject too."""
        read, end = bytearray(), 8
        async for piece in self._objects.stream(base_path(self._digest, name), 0, LEAST_PART):
            read += piece
            end = 8 + int.from_bytes(read[:8], "little")
            if len(read) >= end:
                break
        try:
            return parse_header(bytes(read[8:end]), file.size)
        except ValueError as error:
            raise CorruptObject(f"{name}: {error}") from error

    async def _complete(self, path: Path, file: StoredFile) -> None:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as handle:
            for times in range(1, MAX_WRONG + 1):
                try:
                    await self._fill(handle, path, file)
                    break
                except (CorruptObject, NotFound) as error:
                    log.warning("base_file_wrong", file=path.name, reason=str(error))
                    if times == MAX_WRONG:
                        raise CorruptObject(str(error)) from error
            handle.truncate(file.size)

    async def _fill(self, handle: BufferedRandom, path: Path, file: StoredFile) -> None:
        stored = base_path(self._digest, path.name)
        if self._relay and file.size > PARTED_BYTES:
            return await self._relay.complete(handle, file, stored, path)
        part = await asyncio.to_thread(keep_right_parts, handle, file)
        async for content in read_parts(self._objects, stored, file, part):
            try:
                await asyncio.to_thread(write_part, handle, file, part, content)
            except WrongPart as error:
                raise CorruptObject(f"{stored}: {error}") from error
            part += 1


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file)


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir()}


def _num_held(folder: Path) -> int:
    """Bytes on the disk: sections leave holes between them."""
    return sum(min(found.st_size, 512 * found.st_blocks) for found in (file.stat() for file in folder.iterdir()))


def _manifest(folder: Path) -> BaseManifest:
    """Raises OSError and CorruptObject."""
    return decode_manifest((folder / MANIFEST).read_bytes(), str(folder / MANIFEST))
