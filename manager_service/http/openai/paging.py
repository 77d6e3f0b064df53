"""Cursor paging as OpenAI does it: `after` is the id of the last object seen, `limit` how many come next."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Query
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


@dataclass(frozen=True, slots=True)
class Row:
    """An object of a page as JSON. Long pages are written row by row: the event loop has others to serve between."""

    id: str
    json: bytes

    @classmethod
    def of(cls, shown: Identified) -> "Row":
        return cls(shown.id, shown.model_dump_json().encode())


def written(rows: Sequence[Row], *, has_more: bool) -> Response:
    """The answer that FastAPI would write of a `Page` of these objects."""
    first, last = (rows[0].id, rows[-1].id) if rows else (None, None)
    empty = Page[Identified](data=[], first_id=first, last_id=last, has_more=has_more).model_dump_json().encode()
    before, _, behind = empty.partition(b"[]")
    body = b"".join((before, b"[", b",".join([row.json for row in rows]), b"]", behind))
    return Response(body, media_type="application/json")
