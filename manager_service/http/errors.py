"""Errors as HTTP answers, in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

import errno
import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from redis import exceptions as redis_errors
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from common.bus.redis_connection import is_full, passes
from common.errors import AlreadyExists, InvalidInput, MarlaasError, NotFound
from common.suggestions import cut, did_you_mean, quoted

REQUEST_ID = "x-request-id"
RETRY_LATER = {"Retry-After": "2"}
MAX_MESSAGE = 1000
"""Characters. Names in a message are cut before; this is for what nobody thought of."""
BAD_FORM = (
    "the body is no form that can be read: send multipart/form-data; a file's name has at most a few hundred characters"
)
UNREAD = "There was an error parsing the body"
"""FastAPI says so with a 400, whatever went wrong while it read a body."""
log = structlog.get_logger()


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class ApiError(HTTPException):
    """A refusal with its status. `retry` False tells the `openai` client not to try again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry: bool = True,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers if retry else {"x-should-retry": "false"})
        self.code = code
        self.param = param


def conflict(message: str, *, code: str = "conflict") -> ApiError:
    return ApiError(409, message, code=code, retry=False)


def unavailable(message: str, *, code: str = "unavailable") -> ApiError:
    return ApiError(503, message, code=code, headers=RETRY_LATER)


def too_many(message: str, *, code: str = "too_many") -> ApiError:
    return ApiError(429, message, code=code, headers=RETRY_LATER)


class ErrorResponse(Response):
    """JSON for any message: escapes characters that are not Unicode."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def json_bytes(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode("utf-8", errors="backslashreplace")


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    shown, param = message[:MAX_MESSAGE], param and param[:MAX_MESSAGE]
    return {"error": {"message": shown, "type": _type(status), "param": param, "code": code}}


def _type(status: int) -> str:
    names = {401: "authentication_error", 403: "permission_error", 409: "conflict_error", 429: "insufficient_quota"}
    return names.get(status, "invalid_request_error" if status < 500 else "server_error")


def answer(error: ApiError) -> Response:
    body = error_body(error.status_code, error.detail, param=error.param, code=error.code)
    return ErrorResponse(body, error.status_code, error.headers)


# ---- handlers -------------------------------------------------------------------------------------------------------


def translated(error: Exception) -> ApiError:
    """Makes an answer of any error."""
    match error:
        case ApiError():
            return error
        case InvalidInput():
            return ApiError(400, str(error), code=error.code or "invalid_request", param=error.param)
        case NotFound():
            return ApiError(404, str(error), code=error.code)
        case AlreadyExists():
            return conflict(str(error), code="already_exists")
        case ClientDisconnect():
            return ApiError(400, "the connection ended before the body did")  # nobody is left to read it
        case MarlaasError():
            return unavailable(str(error))
        case redis_errors.RedisError() if passes(error):
            return redis_unavailable(error)
        case HTTPException():
            return _of_framework(error)
        case _:
            return ApiError(500, "internal error; the operators' log says more", code="internal_error")


def redis_unavailable(error: Exception | None) -> ApiError:
    """Says of a Redis that may answer later what is the matter with it, and what to do. None: it is silent."""
    if isinstance(error, redis_errors.RedisError) and is_full(error):
        return unavailable(
            "the service's Redis is full (its memory, or its disk): try again in a minute, when work under way has ended, or cancel what"
            " you do not need; if it lasts, ask the operator for more of it",
            code="memory_full",
        )
    return unavailable(
        "the service's Redis does not answer, or is still starting: try again in some seconds; if it lasts, ask the operator to see"
        " whether it runs",
        code="redis_away",
    )


def _of_framework(error: HTTPException) -> ApiError:
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return ApiError(507, "the disk for uploads is full; try again later, or tell the operator", code="disk_full")
    if error.detail == UNREAD and isinstance(cause, Exception) and not isinstance(cause, ValueError):
        return translated(cause)  # a ValueError is what parsers raise for a wrong body
    if error.detail == "Invalid multipart data.":
        return ApiError(400, BAD_FORM, code="invalid_request")
    codes = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}
    code = codes.get(error.status_code, "invalid_request")
    return ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)


async def _handle(request: Request, error: Exception) -> Response:
    ours, headers = translated(error), dict[str, str]()
    if ours.status_code == 500:  # whose answer goes past `Arrival`
        headers[REQUEST_ID] = request.scope[REQUEST_ID]
        log.error("internal_error", path=request.url.path, request_id=headers[REQUEST_ID], exc_info=error)
    elif type(error) is HTTPException and error.status_code in (404, 405):
        ours.detail = _no_route(request, ours)
    response = answer(ours)
    response.headers.update(headers)
    return response


def _no_route(request: Request, error: ApiError) -> str:
    method, path, routes = request.method, request.url.path, request.app.routes
    if error.status_code == 405:
        return f"{cut(path)} takes {(error.headers or {}).get('Allow', 'other methods')}, and not {method}"
    near = did_you_mean(path, [route.path for route in routes if method in (getattr(route, "methods", None) or ())])
    return f"there is no {method} {cut(path)}{near or ';'} GET /docs shows all that there is"


async def _handle_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()[0]
    message, param = sentence(found)
    if found["type"] == "extra_forbidden":
        message += did_you_mean(str(found["loc"][-1]), _fields(request, found["loc"][1:-1]))
    return answer(ApiError(400, message, param=param, code="invalid_request"))


def sentence(found: Mapping[str, Any]) -> tuple[str, str | None]:
    """One of pydantic's errors as (a readable sentence, the parameter's name)."""
    path = [cut(str(part)) for part in found["loc"] if part not in ("body", "query", "path", "header")]
    name = ".".join(path)
    reason = str(found["msg"]).removeprefix("Value error, ")
    if found["type"] == "missing":
        return f"{name or 'the body'} is missing", name or None
    if found["type"] == "extra_forbidden":
        return f"unknown parameter {quoted(name)}", name
    if "UploadFile" in reason:
        return f'{name} is a text, not a file: send it with a file name, as in `filename="items.jsonl"`', name
    if "exceeded maximum size" in reason:
        return f"{name} is a number that is too large", name
    if found["type"] == "json_invalid":
        return "the body is not valid JSON", None
    return (f"{name}: {reason[:1].lower()}{reason[1:]}" if name else reason), name or None


def _fields(request: Request, path: Sequence[str | int]) -> list[str]:
    """Names of the fields that the body may have at a path."""
    model = body_model(request)
    for part in path:
        model = model and model_of_field(model, part)
    return list(model.model_fields) if model else []


def body_model(request: Request) -> type[BaseModel] | None:
    """The model of the body that the request's route takes."""
    body: Any = getattr(request.scope.get("route"), "body_field", None)
    return body.field_info.annotation if body else None


def model_of_field(model: type[BaseModel], name: str | int) -> type[BaseModel] | None:
    """The model of the objects in a field of another, if it has one."""
    field = model.model_fields.get(str(name))
    kinds: tuple[Any, ...] = (get_args(field.annotation) or (field.annotation,)) if field else ()
    return next((kind for kind in kinds if hasattr(kind, "model_fields")), None)


def install(app: FastAPI) -> None:
    app.add_exception_handler(RequestValidationError, _handle_validation)
    for kind in (HTTPException, MarlaasError, redis_errors.RedisError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _handle)


def declared(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Declares in OpenAPI the error answers that a route may give."""
    texts = {
        400: "The request is wrong; the message says what to do",
        401: "No API key, or an unknown one",
        403: "The key may not do this",
        404: "No such object, or it belongs to somebody else",
        409: "The object's state does not allow it",
        408: "The body came too slowly",
        413: "The body is too large",
        429: "The tenant's quota is used up",
        503: "Redis, the store or a worker is away; try again",
        507: "Too much is uploaded at once, or the disk is full; try again later",
    }
    return {status: {"model": ErrorBody, "description": texts[status]} for status in statuses}


COMMON = declared(400, 401, 403, 408, 413, 503)
