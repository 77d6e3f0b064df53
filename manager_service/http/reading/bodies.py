"""The JSON bodies of requests: each is parsed once, strictly, and a large one in a helper process."""

import itertools
from collections.abc import Callable, Coroutine
from typing import Any, cast

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.formparsers import MultiPartParser
from starlette.responses import Response

from manager_service.http.body_limit import FORM_BYTES
from manager_service.http.connections import unless_gone
from manager_service.http.context import Api, tenant_of
from manager_service.http.errors import body_model, model_of_field
from manager_service.http.reading.reading_helpers import SMALL_BYTES
from manager_service.http.reading.tasks import ParseBody, do

MAX_FIELDS = 8
"""Fields of a form besides its file. Starlette would hold a thousand of a megabyte each in memory, and as many files."""
MultiPartParser.spool_max_size = 64 << 10
"""Bytes of a file under way that are held in memory. Starlette has no other way to say it."""
UNKNOWN_SHOWN = 5
"""Unknown fields of an object that are checked: an error names the first."""


class JsonRequest(Request):
    """Raises InvalidInput for a body that is no JSON for us, and Unavailable if the helper that reads it dies."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json: Any = few_unknown(await self._parsed(await self.body()), body_model(self))
        return self._json

    async def _parsed(self, body: bytes) -> Any:
        if len(body) <= SMALL_BYTES:
            return do(ParseBody(body), {})
        api: Api = self.app.state.api
        tenant = await tenant_of(api, self.scope)
        return await unless_gone(self, api.helpers.do(tenant, ParseBody(body), num_bytes=len(body)))


class FormRequest(Request):
    def form(self, **_: Any) -> Any:
        return super().form(max_files=1, max_fields=MAX_FIELDS, max_part_size=FORM_BYTES)


class StrictRoute(APIRoute):
    """A route whose body is read as its kind of request reads it."""

    request: type[Request]

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(self.request(request.scope, request.receive))

        return handle_strictly


class JsonRoute(StrictRoute):
    """A route with a JSON body, which is refused if `parse_json` refuses it. Every route with a JSON body is one."""

    request = JsonRequest


class FormRoute(StrictRoute):
    """A route with a form: one file, and a few fields that come to little."""

    request = FormRequest


def few_unknown(value: Any, model: type[BaseModel] | None) -> Any:
    """A body's value without all but a few of the fields that its model lacks: each costs time."""
    if not isinstance(value, dict) or model is None:
        return value
    members = cast(dict[str, Any], value)
    known = {
        name: few_unknown(members[name], model_of_field(model, name)) for name in model.model_fields & members.keys()
    }
    unknown = itertools.islice((name for name in members if name not in known), UNKNOWN_SHOWN)
    return known | {name: members[name] for name in unknown}
