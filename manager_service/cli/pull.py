"""`pull`: download an adapter."""

import io
import json
import re
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from common.errors import InvalidInput
from common.settings import parse_base_models
from manager_service.cli.client import JOBS, Client
from manager_service.cli.merge import base_of, merge
from manager_service.cli.options import CliSettings, Data, Json, Url, connect
from manager_service.cli.output import print_json, say

CONFIG = "adapter_config.json"


ADAPTERS = "/v1/adapters/content"


def pull(
    job: Annotated[str, typer.Argument(help="A job, ftjob-…; or a model: ft:…, tinker://RUN/weights/NAME.")],
    version: Annotated[int | None, typer.Option("--version", help="The newest if not given.")] = None,
    to: Annotated[Path | None, typer.Option("--to", help="Folder; <job>-<version> if not given.")] = None,
    merged: Annotated[
        Path | None,
        typer.Option("--merged", help="A new folder for the base model's weights with the adapter in them."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", help="Of --merged: the base model's folder, or its name on the hub, NAME[@REVISION]."),
    ] = None,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Download one version of an adapter, of a job or of a run, in the form that PEFT and vLLM load; or merged into its base model."""
    if base and not merged:
        raise InvalidInput("--base goes with --merged FOLDER")
    with connect(url, data) as client:
        chosen, content = (of_model if ":" in job else of_job)(client, job, version)
    if merged:
        files = merged_into(merged, content, base)
        if as_json:
            return print_json({"job": job, "version": chosen, "folder": str(merged), "files": files})
        return say(f"{job} version {chosen}, merged, is in {merged}: {', '.join(files)}")
    folder = to or Path(f"{folder_name(job)}-{chosen}")
    files = unpack(content, folder)
    name_base(folder / CONFIG, CliSettings().base_models)
    if as_json:
        return print_json({"job": job, "version": chosen, "folder": str(folder), "files": files})
    say(f"{job} version {chosen} is in {folder}: {', '.join(files)}")


def merged_into(folder: Path, content: bytes, base: str | None) -> list[str]:
    """The names of the files that were written. Raises InvalidInput if the adapter does not fit its base model."""
    with TemporaryDirectory() as adapter:
        unpack(content, Path(adapter))
        config: dict[str, Any] = json.loads(Path(adapter, CONFIG).read_text())
        return merge(Path(adapter), base_of(config, base, CliSettings().base_models), folder)


def of_job(client: Client, job: str, version: int | None) -> tuple[int, bytes]:
    """(version, zip)."""
    chosen = newest_version(client, job) if version is None else version
    return chosen, client.download(f"{JOBS}/{job}/checkpoints/{chosen}/content")


def of_model(client: Client, name: str, version: int | None) -> tuple[int, bytes]:
    """(version, zip) of what a model's name means. Raises InvalidInput if a version is given beside a name that says it."""
    plain, at, pinned = name.partition("@")
    says_it = bool(at) or name.startswith("tinker://")
    if version is not None and says_it:
        raise InvalidInput(f"{name} says the version: leave --version out")
    if version is None:
        known = client.get(f"/v1/models/{quote(name, safe='')}")
        version = int(pinned if pinned.isdecimal() else known["version"])
    model = name if says_it else f"{plain}@{version}"
    return version, client.download(f"{ADAPTERS}?{urlencode({'model': model})}")


def folder_name(name: str) -> str:
    """A model's name as a folder's."""
    return re.sub(r"[^\w.-]+", "_", name.partition("@")[0])


def name_base(config: Path, base_models: str) -> None:
    """Writes the folder of a base model that lies on this machine into an adapter's configuration, for `AutoPeftModel`."""
    if not config.is_file():
        return
    content: dict[str, Any] = json.loads(config.read_text())
    folder = Path(parse_base_models(base_models).get(content.get("base_model_name_or_path", ""), ""))
    if folder != Path() and folder.is_dir():
        config.write_text(json.dumps(content | {"base_model_name_or_path": str(folder.resolve())}, indent=2))


def newest_version(client: Client, job: str) -> int:
    """Raises InvalidInput if there is none yet."""
    for checkpoint in client.items(f"{JOBS}/{job}/checkpoints"):
        return int(checkpoint["step_number"])
    raise InvalidInput(f"{job} has no trained version yet")


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
