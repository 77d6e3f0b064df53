"""An adapter as the API sends it, a zip, and as it lies in a folder, where PEFT and vLLM load it."""

import io
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from marlaas_client.errors import InvalidInput

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


class Pulled(NamedTuple):
    """An adapter that lies in a folder."""

    version: int
    folder: Path
    files: list[str]


def says_version(name: str) -> bool:
    """Says whether a model's name means one version."""
    return "@" in name or name.startswith("tinker://")


def content_path(name: str, version: int) -> str:
    """The API's path to a version of a model."""
    model = name if says_version(name) else f"{name}@{version}"
    return f"/v1/adapters/content?{urlencode({'model': model})}"


def folder_name(name: str) -> str:
    """A model's name as a folder's."""
    return re.sub(r"[^\w.-]+", "_", name.partition("@")[0])


def check_folder(folder: Path) -> None:
    """Raises InvalidInput if a folder lacks a file of an adapter."""
    if absent := [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]:
        raise InvalidInput(f"{folder}: there is no {absent[0]}: a folder as PEFT's save_pretrained writes it is needed")


def unpack(content: bytes, folder: Path) -> list[str]:
    """Returns the names of the files. Raises InvalidInput if it is no zip, or has a name that leaves the folder."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = archive.namelist()
            if any(not (folder / name).resolve().is_relative_to(folder.resolve()) for name in names):
                raise InvalidInput("the archive has files outside of its folder; nothing was unpacked")
            folder.mkdir(parents=True, exist_ok=True)
            archive.extractall(folder)
    except (zipfile.BadZipFile, OSError) as error:
        raise InvalidInput(f"{folder}: {error}") from error
    return names


def name_base(config: Path, bases: Mapping[str, str]) -> None:
    """Writes the folder of a base model into an adapter's configuration, for `AutoPeftModel`, if it lies on this machine."""
    if not config.is_file():
        return
    content: dict[str, Any] = json.loads(config.read_text())
    if folder := bases.get(content.get("base_model_name_or_path", "")):
        config.write_text(json.dumps(content | {"base_model_name_or_path": folder}, indent=2))
