"""`pull`: download an adapter."""

from pathlib import Path
from typing import Annotated

import typer

from marlaas_client.cli.options import Data, Json, Url, connect
from marlaas_client.cli.output import print_json, say
from marlaas_client.errors import InvalidInput

ELSEWHERE = "comes with the package of the service: pip install marlaas"

Name = Annotated[str, typer.Argument(help="A job, ftjob-…; or a model: ft:…, tinker://RUN/weights/NAME.")]
Version = Annotated[int | None, typer.Option("--version", help="The newest if not given.")]
To = Annotated[Path | None, typer.Option("--to", help="Folder; <job>-<version> if not given.")]


def pull(
    job: Name,
    version: Version = None,
    to: To = None,
    url: Url = None,
    data: Data = None,
    as_json: Json = False,
    merged: Annotated[Path | None, typer.Option("--merged", hidden=True)] = None,
) -> None:
    """Download one version of an adapter, of a job or of a run, in the form that PEFT and vLLM load."""
    if merged:
        raise InvalidInput(f"`marlaas pull --merged` {ELSEWHERE}")
    with connect(url, data) as client:
        pulled = client.pull(job, version=version, to=to)
    if as_json:
        shown = pulled._asdict() | {"folder": str(pulled.folder)}
        return print_json({"job": job, **shown})
    say(f"{job} version {pulled.version} is in {pulled.folder}: {', '.join(pulled.files)}")
