"""Options that all commands share, and the client that they make: with the API's address and the caller's key."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from common.errors import InvalidInput
from common.urls import check_url
from manager_service.cli.client import Client
from manager_service.local.cluster_file import read_cluster_file

Url = Annotated[str | None, typer.Option("--url", help="The API. Default: MARLAAS_URL, or the running cluster's.")]
Data = Annotated[
    Path | None, typer.Option("--data", help="Folder of `marlaas up`. Default: MARLAAS_DATA_DIR, or .marlaas.")
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output, for scripts.")]
JobId = Annotated[str, typer.Argument(help="For example ftjob-…")]

DEFAULT_URL = "http://127.0.0.1:8000"
HERE = ("127.0.0.1", "localhost", "::1")


class CliSettings(BaseSettings):
    """Variables that a command reads once. Its options override them."""

    model_config = SettingsConfigDict(env_prefix="MARLAAS_", frozen=True, extra="ignore")

    url: str = ""
    api_key: str = Field(default="", repr=False)
    data_dir: Path = Path(".marlaas")
    base_models: str = "tiny"


@contextmanager
def connect(url: str | None, data: Path | None, *, admin: bool = False) -> Generator[Client]:
    """A client of the running cluster. The key is MARLAAS_API_KEY, or the file `api_key` (`admin_key`) in the data
    folder; that file is never sent to a cluster elsewhere.

    Raises InvalidInput without a key, and for what is no URL.
    """
    settings = CliSettings()
    data_dir = data or settings.data_dir
    running = read_cluster_file(data_dir)
    local_url = running.url if running else DEFAULT_URL
    chosen = _checked((url or settings.url or local_url).rstrip("/").removesuffix("/v1"))
    key = settings.api_key or _read_key(data_dir / ("admin_key" if admin else "api_key"), chosen)
    with Client(chosen, key) as client:
        yield client


@contextmanager
def connect_operator(url: str | None, data: Path | None) -> Generator[Client | None]:
    """A client with the admin key of the cluster on this machine; None for another cluster, and without that key."""
    settings = CliSettings()
    if url or settings.url or settings.api_key or not ((data or settings.data_dir) / "admin_key").is_file():
        yield None
        return
    with connect(url, data, admin=True) as client:
        yield client


def _checked(url: str) -> str:
    try:
        check_url(url)
    except ValueError as error:
        raise InvalidInput(f"the API's URL {url!r} {error}") from None
    return url


def _read_key(file: Path, url: str) -> str:
    if urlsplit(url).hostname not in HERE:
        raise InvalidInput(
            f"no API key: set MARLAAS_API_KEY to one of {url}; that in {file} is for this machine's cluster"
        )
    try:
        return file.read_text().strip()
    except OSError as error:
        raise InvalidInput(
            f"no API key: set MARLAAS_API_KEY, or name the folder of a cluster with --data ({file}: {error.strerror})"
        ) from None
