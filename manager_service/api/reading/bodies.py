"""The JSON bodies of requests: each is parsed once, strictly, and a large one in a helper process."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from common.errors import InvalidInput
from manager_service.api.context import Api, tenant_of
from manager_service.api.errors import translated
from manager_service.api.reading.helpers import SMALL_BYTES
from manager_service.api.reading.tasks import ParseBody, do


class JsonRoute(APIRoute):
    """A route whose JSON body is refused if messages could not carry it (NaN, bad Unicode, numbers beyond 64 bits, duplicate
    keys), or if it has very many values. Every route with a JSON body is one.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_strictly


class JsonRequest(Request):
    """Raises ApiError 400 for a body that is no JSON for us."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            try:
                self._json: Any = await self._parsed(await self.body())
            except InvalidInput as error:
                raise translated(error) from error
        return self._json

    async def _parsed(self, body: bytes) -> Any:
        if len(body) <= SMALL_BYTES:
            return do(ParseBody(body), {})
        api: Api = self.app.state.api
        return await api.helpers.do(await tenant_of(api, self.scope), ParseBody(body), num_bytes=len(body))
