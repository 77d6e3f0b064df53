"""Writes adapters as folders in PEFT layout for an engine's process; each stays while a request names it.

A number names one content: a version that is loaded again gets another number, so that the process cannot take anything
remembered of the first for the second.
"""

import contextlib
import shutil
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from base_model.adapter import CONFIG_FILE, WEIGHTS_FILE, Adapter, check_fits, init_adapter, load_adapter, save_adapter
from common.children.own_folder import OwnFolder
from common.errors import InvalidInput
from common.models.weight_files import LINEAR_MODULES, read_weights
from common.wire.messages import BASE, AdapterRef, LoraSpec
from rollout_service.process.core import AdapterFolder

MAX_NORM = 1e6
"""The largest change of one module's weights, as a bound on its Frobenius norm: scale x |A| x |B|.

Trained adapters stay below 1e3. Up to this bound no product of a layer leaves the range of float32 and bfloat16 (3e38): inputs
of at most 1e4 after a norm give at most 1e10, their product in the MLP 1e20, and its last product 1e26.
"""
PREFIX = "marlaas-adapters-"
CANARY_B = 1.0


@dataclass(slots=True, eq=False)
class Stored:
    """An adapter that the engine was given."""

    ref: AdapterRef
    adapter: AdapterFolder
    num_bytes: int
    broken: str = ""  # why no turn can be sampled with it
    users: int = 0
    dropped: bool = False


@dataclass(slots=True)
class AdapterFiles:
    """The folders of one engine."""

    shapes: Mapping[str, tuple[int, int]]  # of the base's linear layers: (out, in)
    max_rank: int
    max_norm: float = MAX_NORM
    parent: Path | None = None  # the folder around them
    _root: "OwnFolder | None" = None  # made with the first adapter
    _stored: dict[AdapterRef, Stored] = field(default_factory=dict[AdapterRef, Stored])
    _last_number: int = 0

    def refs(self) -> list[AdapterRef]:
        return [ref for ref in self._stored if not ref.is_base]

    def get(self, ref: AdapterRef) -> Stored | None:
        return self._stored.get(ref)

    def put(self, ref: AdapterRef, files: Mapping[str, bytes]) -> Stored:
        """Writes an adapter's files. One whose products would not be finite is kept as broken.

        Raises CorruptObject (no adapter of this base) or InvalidInput (its rank is above the limit).
        """
        if (known := self._stored.get(ref)) is not None:
            return known
        weights = load_adapter(files)
        self._check(weights)
        stored = self._write(ref, {name: files[name] for name in (CONFIG_FILE, WEIGHTS_FILE)})
        stored.broken = self._too_large(weights)
        return stored

    def put_base(self) -> Stored:
        """Writes the adapter that changes nothing, for turns of the bare base model."""
        if (known := self._stored.get(BASE)) is not None:
            return known
        return self._write(BASE, zero_adapter(self.shapes))

    def canary(self) -> AdapterFolder:
        """Writes an adapter that changes all scores. It goes with the engine."""
        first = init_adapter(LoraSpec(1, 1.0, ()), self.shapes, seed=0)
        changed = replace(first, b={name: weights + CANARY_B for name, weights in first.b.items()})
        return self._folder("canary", save_adapter(changed, "base"))

    @contextlib.contextmanager
    def hold(self, stored: Stored) -> Generator[None]:
        """Keeps the folder inside, also if the adapter is dropped meanwhile."""
        stored.users += 1
        try:
            yield
        finally:
            stored.users -= 1
            self._clean(stored)

    def drop(self, ref: AdapterRef) -> Stored | None:
        """Forgets the adapter; its folder goes when nobody holds it any more."""
        stored = self._stored.pop(ref, None)
        if stored is not None:
            stored.dropped = True
            self._clean(stored)
        return stored

    def close(self) -> None:
        if self._root is not None:
            self._root.remove()

    def _write(self, ref: AdapterRef, files: Mapping[str, bytes]) -> Stored:
        adapter = self._folder(f"{ref.tenant}/{ref}", files)
        stored = self._stored[ref] = Stored(ref, adapter, sum(map(len, files.values())))
        return stored

    def _folder(self, name: str, files: Mapping[str, bytes]) -> AdapterFolder:
        self._last_number += 1
        self._root = self._root or OwnFolder(PREFIX, self.parent)
        folder = self._root.path / str(self._last_number)
        folder.mkdir(parents=True)
        for file, data in files.items():
            (folder / file).write_bytes(data)
        return AdapterFolder(self._last_number, f"{name}#{self._last_number}", folder)

    def _clean(self, stored: Stored) -> None:
        if stored.dropped and not stored.users:
            shutil.rmtree(stored.adapter.folder, ignore_errors=True)

    def _check(self, weights: Adapter) -> None:
        if weights.spec.rank > self.max_rank:
            raise InvalidInput(
                f"the adapter has rank {weights.spec.rank}, and this worker takes at most {self.max_rank}"
                " (MARLAAS_VLLM_MAX_LORA_RANK)"
            )
        check_fits(weights, self.shapes)

    def _too_large(self, weights: Adapter) -> str:
        for name in weights.names():
            norm = abs(weights.scale) * float(weights.a[name].double().norm()) * float(weights.b[name].double().norm())
            if not norm <= self.max_norm:
                return f"its change of {name} is too large to compute with: {norm:.1e}, at most {self.max_norm:.0e}"
        return ""


def zero_adapter(shapes: Mapping[str, tuple[int, int]]) -> dict[str, bytes]:
    """The files of an adapter that changes nothing: its B is zero."""
    target = next(iter(shapes)).rpartition(".")[2]
    return save_adapter(init_adapter(LoraSpec(1, 1.0, (target,)), shapes, seed=0), "base")


def linear_shapes(folder: Path) -> Mapping[str, tuple[int, int]]:
    """(out, in) of each linear layer that an adapter may target, as in `layers.3.mlp.up_proj`, from the headers of a base model's
    files. Raises InvalidInput if there is none."""
    try:
        shapes = read_weights(folder).shapes
    except ValueError as error:
        raise InvalidInput(str(error)) from error
    if not shapes:
        raise InvalidInput(f"{folder}: no safetensors file with linear layers such as {LINEAR_MODULES[0]}")
    return shapes
