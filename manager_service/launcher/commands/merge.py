"""`pull`: download an adapter, or its base model with the adapter merged into the weights.

W + scale * B A, in float32, a few rows in memory at once. The new weights have the files, names and dtypes of the base's, so whatever
loads the one loads the other.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, BinaryIO, NamedTuple

import numpy as np
import typer

from common.errors import InvalidInput
from common.models.weight_files import StoredTensor, stored_tensors
from common.settings import TEXT_FILES, Settings, parse_base_models, resolve_model
from common.store.adapters import PEFT_FILES
from marlaas_client.cli import pull as adapters
from marlaas_client.cli.options import Data, Json, Url, connect
from marlaas_client.cli.output import print_json, say

WEIGHTS, CONFIG = PEFT_FILES
INDEX = "model.safetensors.index.json"
COPIED = (*TEXT_FILES, "*.model")
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
DTYPES = ("F32", "BF16", "F16")
ROWS = 1024
"""Rows of a matrix that are merged at once."""
CHUNK = 16 << 20


def pull(
    job: adapters.Name,
    version: adapters.Version = None,
    to: adapters.To = None,
    merged: Annotated[
        Path | None,
        typer.Option("--merged", help="A new folder for the base model's weights with the adapter in them."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", help="Of --merged: the base model's folder, or its name on the hub, NAME or NAME@REVISION."
        ),
    ] = None,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Download one version of an adapter, of a job or of a run, in the form that PEFT and vLLM load; or merged into its base model."""
    if not merged:
        if base:
            raise InvalidInput("--base goes with --merged FOLDER")
        return adapters.pull(job, version, to, url, data, as_json)
    with TemporaryDirectory() as folder, connect(url, data) as client:
        pulled = client.pull(job, version=version, to=Path(folder))
        config: dict[str, Any] = json.loads(Path(folder, CONFIG).read_text())
        files = merge(Path(folder), base_of(config, base, Settings().base_models), merged)
    if as_json:
        return print_json({"job": job, "version": pulled.version, "folder": str(merged), "files": files})
    say(f"{job} version {pulled.version}, merged, is in {merged}: {', '.join(files)}")


class Factors(NamedTuple):
    """The factors of one layer; R rank."""

    a: np.ndarray  # [R, in]
    b: np.ndarray  # [out, R]
    scale: float


def base_of(config: Mapping[str, Any], given: str | None, base_models: str) -> Path:
    """The folder of an adapter's base model: as given (a folder or a name of the hub), in MARLAAS_BASE_MODELS, or the hub's model
    that the adapter names. Raises InvalidInput."""
    name = str(config.get("base_model_name_or_path") or "")
    known = parse_base_models(base_models).get(name)
    if given or known or Path(name).is_dir():
        return resolve_model(given or known or name)
    if name.count("/") != 1:
        raise InvalidInput(f"where is the base model {name!r}? Name its folder, or its name on the hub: --base FOLDER")
    return resolve_model(f"{name}@{config['revision']}" if config.get("revision") else name)


def merge(adapter: Path, base: Path, to: Path) -> list[str]:
    """Writes the merged model into a new folder; returns the names of its files. Raises InvalidInput, before it writes anything if
    the adapter does not fit the base."""
    config, factors = read_adapter(adapter)
    shards = {file: _tensors(file) for file in _weight_files(base)}
    places = check_fit(factors, config["target_modules"], [t for tensors in shards.values() for t in tensors], base)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InvalidInput(f"--merged {to}: there is something already; name a new folder")
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, to, ignore_errors=True)
        try:
            written = _write(base, shards, {name: factors[layer] for name, layer in places.items()}, to)
        except OSError as error:
            raise InvalidInput(f"--merged {to}: {error}") from error
        undo.pop_all()
    return written


def _write(
    base: Path, shards: Mapping[Path, Sequence[StoredTensor]], changed: Mapping[str, Factors], to: Path
) -> list[str]:
    """Writes all files; returns their names."""
    to.mkdir(parents=True, exist_ok=True)
    texts = [file for pattern in COPIED for file in sorted(base.glob(pattern)) if file.is_file()]
    for file in texts:
        shutil.copyfile(file, to / file.name)
    for file, tensors in shards.items():
        _write_shard(file, tensors, changed, to / file.name)
    return sorted(file.name for file in [*texts, *shards])


# ---- what is there --------------------------------------------------------------------------------------------------


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Factors]]:
    """The configuration, and the factors of each layer by the base's name for it: `model.layers.0.mlp.up_proj`."""
    import safetensors.numpy

    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
        tensors = safetensors.numpy.load_file(folder / WEIGHTS)
        scale = float(config["lora_alpha"]) / int(config["r"])
        layers = [name.removesuffix(A) for name in tensors if name.endswith(A)]
        return config, {
            layer.removeprefix(PREFIX): Factors(tensors[layer + A], tensors[layer + B], scale) for layer in layers
        }
    except (OSError, KeyError, ValueError, TypeError, safetensors.SafetensorError) as error:
        raise InvalidInput(f"this is no adapter in PEFT's form: {type(error).__name__} {error}") from error


def _weight_files(base: Path) -> list[Path]:
    index = base / INDEX
    if index.is_file():
        return [base / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if found := sorted(base.glob("model*.safetensors")):
        return found
    raise InvalidInput(f"{base} has no model.safetensors: a base model's weights are needed as safetensors")


def _tensors(file: Path) -> list[StoredTensor]:
    try:
        with file.open("rb") as handle:
            return stored_tensors(handle)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{file}: {error}") from error


def check_fit(
    factors: Mapping[str, Factors], targets: Sequence[str], tensors: Sequence[StoredTensor], base: Path
) -> dict[str, str]:
    """The base's tensors that change -> the layer whose factors change them. Raises InvalidInput, naming the layer."""
    there, places = {tensor.name: tensor for tensor in tensors}, dict[str, str]()
    for layer, (a, b, _) in factors.items():
        tensor = there.get(f"{layer}.weight")
        if tensor is None:
            raise _misfit(base, f"there is no {layer}")
        if tensor.shape != [b.shape[0], a.shape[1]] or a.shape[0] != b.shape[1]:
            raise _misfit(
                base, f"{layer} has the shape {tensor.shape}, and the factors make {[b.shape[0], a.shape[1]]}"
            )
        if tensor.dtype not in DTYPES:
            raise InvalidInput(
                f"{base}: {layer} has the dtype {tensor.dtype}; one of {', '.join(DTYPES)} can be merged"
            )
        places[tensor.name] = layer
    for name in there:
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if name.startswith("model.layers.") and leaf in targets and name.endswith(".weight") and name not in places:
            raise _misfit(base, f"the adapter has no factors for {name.removesuffix('.weight')}")
    return places


def _misfit(base: Path, reason: str) -> InvalidInput:
    return InvalidInput(
        f"the adapter does not fit the base model in {base}: {reason}; is it of another base? Say --base"
    )


# ---- weights --------------------------------------------------------------------------------------------------------


def floats(raw: bytes, dtype: str) -> np.ndarray:
    """float32 of stored numbers."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, "<f4" if dtype == "F32" else "<f2").astype(np.float32)


def stored(values: np.ndarray, dtype: str) -> bytes:
    """float32 as it is stored, rounded to the nearest, to the even one of two."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return values.astype("<f4" if dtype == "F32" else "<f2").tobytes()


def _write_shard(file: Path, tensors: Sequence[StoredTensor], changed: Mapping[str, Factors], to: Path) -> None:
    """Copies a file of weights, and changes some on the way."""
    with file.open("rb") as old, to.open("wb") as new:
        _copy(old, new, tensors[0].start if tensors else file.stat().st_size)
        for tensor in tensors:
            if tensor.name in changed:
                _merge(old, new, tensor, changed[tensor.name])
            else:
                _copy(old, new, tensor.num_bytes)


def _copy(old: BinaryIO, new: BinaryIO, num_bytes: int) -> None:
    for at in range(0, num_bytes, CHUNK):
        new.write(old.read(min(CHUNK, num_bytes - at)))


def _merge(old: BinaryIO, new: BinaryIO, tensor: StoredTensor, factors: Factors) -> None:
    """W + scale * B A. Raises InvalidInput if that is more than the dtype holds."""
    num_rows, width = tensor.shape
    row_bytes = tensor.num_bytes // num_rows
    for first in range(0, num_rows, ROWS):
        b = factors.b[first : first + ROWS].astype(np.float32)
        weights = floats(old.read(len(b) * row_bytes), tensor.dtype).reshape(len(b), width)
        with np.errstate(over="ignore"):
            raw = stored(weights + np.float32(factors.scale) * (b @ factors.a.astype(np.float32)), tensor.dtype)
        if not np.isfinite(floats(raw, tensor.dtype)).all():
            raise InvalidInput(f"{tensor.name}: the merged weights are no finite numbers of dtype {tensor.dtype}")
        new.write(raw)
