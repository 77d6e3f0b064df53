"""URLs that users give, checked by the client that will call them."""

import ipaddress
import string

import httpx

from common.suggestions import quoted

MAX_CHARACTERS = 2048
_NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-._")


def check_url(text: str) -> None:
    """Raises ValueError, with the reason, unless it is an http:// or https:// URL of a host that can be called."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"has {len(text)} characters; a URL has at most {MAX_CHARACTERS}")
    try:
        url = httpx.URL(text)
        host = url.host.encode("idna").decode()
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"is not a URL: {error}") from error
    if url.scheme not in ("http", "https") or not host:
        raise ValueError("must be an http:// or https:// URL")
    if url.userinfo:
        raise ValueError("must not carry a user name or password")
    if url.port is not None and not 0 < url.port < 2**16:
        raise ValueError(f"the port {url.port} is not between 1 and 65535")
    if not _is_name(host) and not _is_address(host):
        raise ValueError(f"the host {quoted(host)} is neither a name nor an address")


def check_base(text: str) -> None:
    """Raises ValueError for a URL after which no path can be written."""
    if set("?#") & set(text):
        raise ValueError("must have neither a query nor a fragment: paths are added to it")


def _is_name(host: str) -> bool:
    return len(host) <= 253 and _NAME_CHARACTERS.issuperset(host)


def _is_address(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return "%" not in host
