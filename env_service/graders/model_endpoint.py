"""Asks graders' models outside of this service, through APIs like OpenAI's, with the operator's keys.

The hosts are those that the operator allows for it, checked as those of `endpoint` graders. A key goes to the address alone for
which the operator gave it, and a tenant neither gives nor sees one.
"""

import json
from collections.abc import Mapping
from typing import Any, cast
from weakref import WeakValueDictionary

import httpx

from common.errors import InvalidInput
from common.places import Places
from env_service import work
from env_service.failures import GraderFailed
from env_service.graders.endpoint import Endpoints
from env_service.graders.model import ModelQuestion


class ModelEndpoints:
    """Asks models. `close` when done."""

    def __init__(self, endpoints: Endpoints, keys: str = "", *, timeout_s: float = 60.0, most: int = 8) -> None:
        """`keys`: see `read_keys`. `timeout_s`: of one question. `most`: questions of one tenant at once, in this worker."""
        self._endpoints = endpoints
        self._keys = read_keys(keys)
        self._timeout_s = timeout_s
        self._most = most
        self._places: WeakValueDictionary[str, Places] = WeakValueDictionary()
        self.close = endpoints.close

    async def ask(self, url: str, question: ModelQuestion, *, key: str) -> str:
        """The answer's text. `key` lets the endpoint recognise a repeat. Raises GraderFailed."""
        places = self._places.setdefault(work.tenant(), Places(lambda: self._most))
        target = f"{url.rstrip('/')}/chat/completions"
        secret = self._keys.get(_origin(target))
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        async with work.place(places):
            body = await self._endpoints.post(target, headers, _body(question), key=key, timeout_s=self._timeout_s)
        return _answer(body)


def read_keys(text: str) -> dict[str, str]:
    """`https://api.example.org=sk-…,https://…` -> a key by the address that may have it. Raises InvalidInput."""
    keys: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        address, equals, key = part.partition("=")
        try:
            origin = _origin(address)
        except httpx.InvalidURL:
            origin = ""
        if (
            not equals
            or not key
            or not origin.startswith(("https://", "http://"))
            or not (key.isascii() and key.isprintable())
        ):
            raise InvalidInput("MARLAAS_GRADER_KEYS: write https://host=key, comma-separated")
        keys[origin] = key
    return keys


def _origin(url: str) -> str:
    """Scheme, host and port."""
    parsed = httpx.URL(url)
    port = parsed.port or {"https": 443, "http": 80}.get(parsed.scheme)
    return f"{parsed.scheme}://{parsed.host.lower().rstrip('.')}:{port}"


def _body(question: ModelQuestion) -> bytes:
    body: dict[str, Any] = {
        "model": question.model,
        "messages": question.messages,
        "max_completion_tokens": question.max_tokens,
        "temperature": question.temperature,
        "top_p": question.top_p,
    }
    return json.dumps(body if question.seed is None else body | {"seed": question.seed}).encode()


def _answer(body: bytes) -> str:
    try:
        answer: Any = json.loads(body)
        content = answer["choices"][0]["message"]["content"]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise GraderFailed("the model's endpoint: the answer is no chat completion") from error
    if not isinstance(content, str):
        raise GraderFailed("the model's endpoint: the model answered no text")
    usage: Any = cast(Mapping[str, Any], answer).get("usage")
    total: Any = cast(Mapping[str, Any], usage).get("total_tokens") if isinstance(usage, Mapping) else None
    if isinstance(total, int) and 0 < total < 1 << 31:
        work.count_grader_tokens(total)
    return content
