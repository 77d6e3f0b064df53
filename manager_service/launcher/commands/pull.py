"""`pull`: download an adapter, or the base model with the adapter in its weights."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from common.errors import InvalidInput
from common.settings import Settings
from manager_service.launcher.commands.merge import CONFIG, base_of, merge
from marlaas_client.cli import pull as adapters
from marlaas_client.cli.options import Data, Json, Url, connect
from marlaas_client.cli.output import print_json, say


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
