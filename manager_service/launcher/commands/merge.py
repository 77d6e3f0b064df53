"""`pull`: download an adapter, or its base model with the adapter merged into the weights.

W + scale * B A, in float32, one file in memory at once. The new weights have the base's files, names and dtypes.
"""

import json
import shutil
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import typer
from safetensors import SafetensorError, safe_open

from common.errors import InvalidInput
from common.models.base_digest import DIGEST_FIELD, BaseIdentity, base_digest
from common.peers.base_fetch import folder_of
from common.settings import TEXT_FILES, Settings
from common.store.adapters import PEFT_FILES
from marlaas_client.cli import pull as adapters
from marlaas_client.cli.options import Data, Json, Url, connect
from marlaas_client.cli.output import print_json, say

WEIGHTS, CONFIG = PEFT_FILES
COPIED = (*TEXT_FILES, "*.model")
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


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
    """Download a version of a job's or run's adapter, as PEFT and vLLM load it; or merged into its base model."""
    if not merged:
        if base:
            raise InvalidInput("--base goes with --merged FOLDER")
        return adapters.pull(job, version, to, url, data, as_json)
    with TemporaryDirectory() as folder, connect(url, data) as client:
        pulled = client.pull(job, version=version, to=Path(folder))
        config: dict[str, Any] = json.loads(Path(folder, CONFIG).read_text())
        files = merge(Path(folder), base_of(config, base, Settings()), merged)
    if as_json:
        return print_json({"job": job, "version": pulled.version, "folder": str(merged), "files": files})
    say(f"{job} version {pulled.version}, merged, is in {merged}: {', '.join(files)}")


class Factors(NamedTuple):
    """The factors of one layer, PyTorch's tensors; R rank."""

    a: Any  # [R, in]
    b: Any  # [out, R]
    scale: float


def base_of(config: Mapping[str, Any], given: str | None, settings: Settings) -> Path:
    """The folder of an adapter's base model: as given (a folder, a hub's name or the store's), in MARLAAS_BASE_MODELS, or the hub's
    model that the adapter names. Raises InvalidInput, and StoreUnavailable."""
    name = str(config.get("base_model_name_or_path") or "")
    known = settings.models.get(name)
    if given or known or Path(name).is_dir():
        return folder_of(given or known or name, settings, with_weights=True)
    if name.count("/") != 1:
        raise InvalidInput(f"where is the base model {name!r}? Name its folder, or its name on the hub: --base FOLDER")
    hub = f"{name}@{config['revision']}" if config.get("revision") else name
    return folder_of(hub, settings, with_weights=True)


def merge(adapter: Path, base: Path, to: Path) -> list[str]:
    """Writes the merged model into a new folder; returns the names of its files. Raises InvalidInput, also if the adapter does not fit
    the base: then nothing is left of the folder."""
    config, factors = read_adapter(adapter)
    theirs = BaseIdentity(digest=str(config.get(DIGEST_FIELD) or ""))
    BaseIdentity(str(base), base_digest(base)).check("the adapter", theirs)
    shards = sorted(base.glob("*.safetensors"))
    if not shards:
        raise InvalidInput(f"{base} has no *.safetensors: a base model's weights are needed as safetensors")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InvalidInput(f"--merged {to}: there is something already; name a new folder")
    layers, texts = set[str](), [file for pattern in COPIED for file in base.glob(pattern) if file.is_file()]
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, to, ignore_errors=True)
        try:
            to.mkdir(parents=True, exist_ok=True)
            for file in texts:
                shutil.copyfile(file, to / file.name)
            for file in shards:
                layers |= _write_shard(file, factors, config["target_modules"], to / file.name)
        except (OSError, SafetensorError) as error:  # safetensors' own, where the disk is full
            raise InvalidInput(f"--merged {to}: {error}") from error
        if odd := sorted(layers ^ factors.keys()):
            raise _misfit(f"{odd[0]} is in only one of them")
        undo.pop_all()
    return sorted(file.name for file in [*texts, *shards])


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Factors]]:
    """The configuration, and the factors of each layer by the base's name for it: `model.layers.0.mlp.up_proj`."""
    from safetensors.torch import load_file  # here: it takes a second, and few commands need it

    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
        tensors = load_file(folder / WEIGHTS)
        scale = float(config["lora_alpha"]) / int(config["r"])
        layers = [name.removesuffix(A) for name in tensors if name.endswith(A)]
        return config, {
            layer.removeprefix(PREFIX): Factors(tensors[layer + A], tensors[layer + B], scale) for layer in layers
        }
    except (OSError, KeyError, ValueError, TypeError, SafetensorError) as error:
        raise InvalidInput(f"this is no adapter in PEFT's form: {type(error).__name__} {error}") from error


def _misfit(reason: str) -> InvalidInput:
    return InvalidInput(f"the adapter does not fit the base model: {reason}; is it of another base? Say --base")


def _write_shard(file: Path, factors: Mapping[str, Factors], targets: Collection[str], to: Path) -> set[str]:
    """Copies a file of weights, and changes some on the way. Returns its layers of the adapter's kinds."""
    from safetensors.torch import save_file

    with safe_open(file, "pt") as shard:
        metadata = shard.metadata()
        weights = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118  it is no mapping
    found = {name.removesuffix(".weight") for name in weights if name.startswith("model.layers.")}
    layers = {layer for layer in found if layer.rpartition(".")[2] in targets}
    for layer in layers & factors.keys():
        weights[f"{layer}.weight"] = _merge(layer, weights[f"{layer}.weight"], factors[layer])
    save_file(weights, to, metadata=metadata)
    return layers


def _merge(layer: str, weights: Any, factors: Factors) -> Any:
    """W + scale * B A. Raises InvalidInput for weights that these factors do not fit, and if that is more than the dtype holds."""
    if factors.a.shape[0] != factors.b.shape[1]:
        raise _misfit(f"{layer} has factors of two ranks, {factors.a.shape[0]} and {factors.b.shape[1]}")
    more = factors.scale * (factors.b.float() @ factors.a.float())
    if weights.shape != more.shape or weights.dtype.itemsize < 2:
        raise _misfit(
            f"{layer} is {list(weights.shape)} of {weights.dtype}, and the factors make {list(more.shape)} of floats"
        )
    merged = (weights.float() + more).to(weights.dtype)
    if not merged.isfinite().all():
        raise InvalidInput(f"{layer}: the merged weights are no finite numbers of dtype {weights.dtype}")
    return merged
