"""Finds the API and the key that opens it: as the caller says, else by the environment, else a cluster on this machine."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import httpx
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from marlaas_client.cluster_file import read_cluster_file
from marlaas_client.errors import InvalidInput

DEFAULT_URL = "http://127.0.0.1:8000"
HERE = ("127.0.0.1", "localhost", "::1")


class ClientSettings(BaseSettings):
    """Variables that a client reads once. What its caller says overrides them."""

    model_config = SettingsConfigDict(env_prefix="MARLAAS_", frozen=True, extra="ignore")

    url: str = ""
    api_key: str = Field(default="", repr=False)
    data_dir: Path = Path(".marlaas")
    """The folder in which `marlaas up` keeps Redis' files, the store, keys and logs."""


class Address(NamedTuple):
    url: str
    key: str
    bases: Mapping[str, str]
    """Base model -> its folder, of those that lie on this machine."""


def find(url: str | None = None, key: str | None = None, data: Path | None = None, *, admin: bool = False) -> Address:
    """The key is MARLAAS_API_KEY, or the file `api_key` (`admin_key`) in the data folder, if it is not given; that file is never
    sent to a cluster elsewhere.

    Raises InvalidInput without a key, and for what is no URL.
    """
    settings = ClientSettings()
    data_dir = data or settings.data_dir
    running = read_cluster_file(data_dir)
    local_url = running.url if running else DEFAULT_URL
    chosen = (url or settings.url or local_url).rstrip("/").removesuffix("/v1")
    host = _host(chosen)
    key = key or settings.api_key or _read_key(data_dir / ("admin_key" if admin else "api_key"), chosen, host)
    return Address(chosen, key, running.bases if running and chosen == running.url else {})


def _host(text: str) -> str:
    """The host of an API's URL. Raises InvalidInput unless it can be called; a password in it is not shown."""
    if "@" in text:
        raise InvalidInput(
            f"the API's URL …@{text.rpartition('@')[2]} holds a name or a password, which this API does not take: "
            "leave it out, and set MARLAAS_API_KEY"
        )
    try:
        url = httpx.URL(text)
        url.host.encode("idna")
    except (httpx.InvalidURL, UnicodeError) as error:
        raise InvalidInput(f"the API's URL {text!r} is not a URL: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidInput(f"the API's URL {text!r} must be an http:// or https:// URL")
    if url.port is not None and not 0 < url.port < 2**16:
        raise InvalidInput(f"the API's URL {text!r}: the port {url.port} is not between 1 and 65535")
    return url.host


def _read_key(file: Path, url: str, host: str) -> str:
    if host not in HERE:
        raise InvalidInput(
            f"no API key: set MARLAAS_API_KEY to one of {url}; that in {file} is for this machine's cluster"
        )
    try:
        return file.read_text().strip()
    except OSError as error:
        raise InvalidInput(
            f"no API key: set MARLAAS_API_KEY, or name the folder of a cluster with --data ({file}: {error.strerror})"
        ) from None
