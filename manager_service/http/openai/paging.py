"""Cursor paging as OpenAI does it: `after` is the id of the last object seen, `limit` how many come next."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Query
from pydantic import BaseModel
from starlette.responses import Response

from common.errors import InvalidInput
from common.suggestions import quoted
from manager_service.http.schemas import Identified, Page

After = Annotated[str | None, Query(max_length=256, description="The id of the last object of the page before")]
Limit = Annotated[int, Query(ge=1, le=100)]
FileLimit = Annotated[int, Query(ge=1, le=10_000)]


T = TypeVar("T")
Object = TypeVar("Object", bound=Identified)


def rest_after(ids: Sequence[T], after: str | None, key: Any = str) -> Sequence[T]:
    """The ids after the cursor. Raises InvalidInput if the cursor is none of them."""
    if after is None:
        return ids
    for i, one in enumerate(ids):
        if key(one) == after:
            return ids[i + 1 :]
    raise wrong_cursor(after)


def wrong_cursor(after: str, reason: str = "is not in this list") -> InvalidInput:
    return InvalidInput(f"after: {quoted(after)} {reason}", param="after", code="invalid_cursor")


async def take(items: AsyncIterator[T], count: int) -> list[T]:
    """The next items, `count` at most."""
    found: list[T] = []
    while len(found) < count and (item := await anext(items, None)) is not None:
        found.append(item)
    return found


def page(objects: list[Object], *, has_more: bool) -> Page[Object]:
    first, last = (objects[0].id, objects[-1].id) if objects else (None, None)
    return Page(data=objects, first_id=first, last_id=last, has_more=has_more)


def as_json(shown: BaseModel) -> bytes:
    return shown.model_dump_json().encode()


def written(rows: Mapping[str, bytes], *, has_more: bool) -> Response:
    """The answer that FastAPI would write of a `Page`, of its objects' ids and JSON. Long pages are written object by object: the event
    loop has others to serve between."""
    first, last = next(iter(rows), None), next(reversed([*rows]), None)
    empty = Page[Identified](data=[], first_id=first, last_id=last, has_more=has_more)
    before, _, behind = as_json(empty).partition(b"[]")
    return Response(b"".join((before, b"[", b",".join(rows.values()), b"]", behind)), media_type="application/json")
