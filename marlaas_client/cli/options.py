"""Options that all commands share, and the client that they make."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from marlaas_client.client import Client
from marlaas_client.place import ClientSettings

Url = Annotated[str | None, typer.Option("--url", help="The API. Default: MARLAAS_URL, or the running cluster's.")]
Data = Annotated[
    Path | None, typer.Option("--data", help="Folder of `marlaas up`. Default: MARLAAS_DATA_DIR, or .marlaas.")
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output, for scripts.")]
JobId = Annotated[str, typer.Argument(help="For example ftjob-…")]


def connect(url: str | None, data: Path | None, *, admin: bool = False) -> Client:
    """Raises InvalidInput without a key, and for what is no URL."""
    return Client(url, data=data, admin=admin)


@contextmanager
def connect_operator(url: str | None, data: Path | None) -> Generator[Client | None]:
    """A client with the admin key of the cluster on this machine; None for another cluster, and without that key."""
    settings = ClientSettings()
    if url or settings.url or settings.api_key or not ((data or settings.data_dir) / "admin_key").is_file():
        yield None
        return
    with connect(url, data, admin=True) as client:
        yield client
