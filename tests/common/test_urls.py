"""URLs that users give: what can be called passes, and all else is refused with a reason instead of an error later."""

import asyncio
import ipaddress
import socket
from typing import Any

import httpx
import pytest

from common.errors import InvalidInput
from common.outgoing import AllowedHosts, NotAllowed, check_base
from common.private_networks import PRIVATE
from common.tasks.graders import validate_grader

GOOD = [
    "http://grader.example/score?x=1",
    "https://a_b.example:8443/",
    "http://127.0.0.1:9/",
    "http://[::1]:9/",
    "http://bücher.example/",
    "HTTP://a/",
]
BAD = [
    ("http://[::1", "Invalid port"),
    ("http://a:b/", "Invalid port"),
    ("http://a:99999/", "the port 99999 is not between"),
    ("http://a:0/", "the port 0 is not between"),
    ("http://user:secret@a/", "must not carry a user name or password"),
    ("http://a..b/", "is not a URL"),
    (f"http://{'a' * 70}.example/", "is not a URL"),
    (f"http://{'a.' * 200}example/", "neither a name nor an address"),
    ("http://xn--/", "is not a URL"),
    ("http://xn--a/", "is not a URL"),
    ("http://a\tb/", "is not a URL"),
    ("http://a/\x7f", "is not a URL"),
    ("http://a b/", "neither a name nor an address"),
    ("http://[v1.x]/", "is not a URL"),
    ("http://[fe80::1%eth0]/", "neither a name nor an address"),
    ("http://[::1]x/", "is not a URL"),
    ("http://999.1.1.1/", "is not a URL"),
    ("http://\u2488com/", "is not a URL"),
    ("http://a\u200bb/", "is not a URL"),
    ("http://\ud800/", "is not a URL"),
    ("http:///path", "must be an http"),
    ("ftp://a/", "must be an http"),
    ("a", "must be an http"),
    ("", "must be an http"),
    ("http://a/" + "x" * 3000, "has 3009 characters"),
]


@pytest.mark.parametrize("url", GOOD)
def test_a_url_that_can_be_called_passes(url: str) -> None:
    validate_grader({"type": "endpoint", "url": url})


@pytest.mark.parametrize(("url", "reason"), BAD)
def test_a_url_that_cannot_be_called_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason) as refused:
        validate_grader({"type": "endpoint", "url": url})
    assert refused.value.param == "grader.url"


@pytest.mark.parametrize(
    "headers", [{"x": "\xe9"}, {"x": "a\r\nb: c"}, {"a b": "c"}, {"": "c"}, {"Host": "c"}, {"x": "\0"}]
)
def test_a_header_that_cannot_be_sent_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match=r"grader\.headers: header"):
        validate_grader({"type": "endpoint", "url": "http://a/", "headers": headers})


@pytest.mark.parametrize("url", ["http://a/?x=1", "http://a/#f", "http://a?"])
def test_what_paths_are_added_to_has_neither_a_query_nor_a_fragment(url: str) -> None:
    with pytest.raises(ValueError, match="neither a query nor a fragment"):
        check_base(url)
    check_base("http://a/b")


@pytest.mark.parametrize(
    "address",
    ["64:ff9b::a00:1", "64:ff9b:1::1", "2002:a00:1::1", "::a00:1", "fec0::1", "192.0.0.9", "ff02::1", "240.0.0.1"],
)
def test_a_name_that_leads_into_a_refused_network_is_not_called_unless_that_is_listed(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    def found(*_: object, **__: object) -> list[Any]:
        return [(0, 0, 0, "", (address, 80))]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    with pytest.raises(NotAllowed, match=r"address of example\.org"):
        asyncio.run(AllowedHosts("example.org").resolve(httpx.URL("http://example.org/")))
    network = next(one for one in PRIVATE if ipaddress.ip_address(address) in ipaddress.ip_network(one))
    listed = AllowedHosts(f"example.org,{network}")
    assert asyncio.run(listed.resolve(httpx.URL("http://example.org/"))) == address
