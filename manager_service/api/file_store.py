"""Files of items: JSONL, one item a line. The upload checks each line, so that nothing malformed is ever queued.

marlaas:{@}:file:<file>       string   FileRecord
marlaas:{@}:files:<tenant>    zset     file id by creation time
files/{tenant}/{file}         object   the content
"""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from common.errors import InvalidInput, NotFound
from common.objects import Objects
from common.text.tokens import ChatTokenizer, check_messages
from manager_service.records import GLOBAL, JSON, FileRecord

ENDING_ROLES = ("user", "system", "developer", "tool")
MAX_DEPTH = 32
_BOM = b"\xef\xbb\xbf"


class Files:
    """Uploaded files of all tenants."""

    def __init__(
        self, redis: Any, objects: Objects, tokenizers: Mapping[str, ChatTokenizer], *, max_line_bytes: int
    ) -> None:
        """`tokenizers`: of the base models."""
        self._redis = redis
        self._objects = objects
        self._tokenizers = tokenizers
        self._max_line_bytes = max_line_bytes

    async def create(self, tenant: str, filename: str, content: bytes) -> FileRecord:
        """Check and keep a file, and measure its prompts once for all jobs. Raises InvalidInput with the line's number."""
        content = content.removeprefix(_BOM)
        num_items, longest = await asyncio.to_thread(check_content, content, self._max_line_bytes, self._tokenizers)
        now = time.time()
        record = FileRecord(
            id=f"file-{secrets.token_hex(12)}",
            tenant=tenant,
            filename=filename,
            purpose="fine-tune",
            created_at=int(now),
            num_bytes=len(content),
            num_items=num_items,
            longest=longest,
        )
        await self._objects.write(_path(record), content)
        pipe = self._redis.pipeline(transaction=False)
        pipe.set(_key(record.id), JSON.encode(record))
        pipe.zadd(_index(tenant), {record.id: now})
        await pipe.execute()
        return record

    async def get(self, tenant: str, file: str) -> FileRecord:
        """Raises NotFound, also for another tenant's file."""
        found = await self._redis.get(_key(file))
        record = None if found is None else msgspec.json.decode(found, type=FileRecord)
        if record is None or record.tenant != tenant:
            raise NotFound(f"there is no file {file!r}")
        return record

    async def content(self, record: FileRecord) -> bytes:
        return await self._objects.get(_path(record))

    async def delete(self, tenant: str, file: str) -> None:
        """Raises NotFound. Running jobs keep the items that they have read."""
        record = await self.get(tenant, file)
        pipe = self._redis.pipeline(transaction=False)
        pipe.zrem(_index(tenant), file)
        pipe.delete(_key(file))
        await pipe.execute()
        await self._objects.delete(_path(record))

    async def ids(self, tenant: str, *, newest_first: bool = True) -> list[str]:
        found = await self._redis.zrange(_index(tenant), 0, -1, desc=newest_first)
        return [file.decode() for file in found]

    async def several(self, ids: list[str]) -> list[FileRecord]:
        """Existing records, in the order of the ids."""
        found = await self._redis.mget([_key(file) for file in ids]) if ids else []
        return [msgspec.json.decode(record, type=FileRecord) for record in found if record is not None]


def _key(file: str) -> str:
    return f"{GLOBAL}file:{file}"


def _index(tenant: str) -> str:
    return f"{GLOBAL}files:{tenant}"


def _path(record: FileRecord) -> str:
    return f"files/{record.tenant}/{record.id}"


# ---- content --------------------------------------------------------------------------------------------------------


def numbered_lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1."""
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield number, line


def check_content(
    content: bytes, max_line_bytes: int, tokenizers: Mapping[str, ChatTokenizer]
) -> tuple[int, dict[str, int]]:
    """The number of items, and the longest prompt for each base model. Raises InvalidInput about the first bad line."""
    num_items, longest = 0, dict.fromkeys(tokenizers, 0)
    for number, line in numbered_lines(content):
        try:
            if len(line) > max_line_bytes:
                raise ValueError(f"{len(line)} bytes; a line has at most {max_line_bytes}")
            item = parse_json(line)
            check_item(item)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"line {number}: {error}", param="file", code="invalid_file") from error
        num_items += 1
        longest = _with_prompt(longest, item["messages"], tokenizers)
    if not num_items:
        raise InvalidInput("the file is empty: it needs one JSON object a line", param="file", code="invalid_file")
    return num_items, longest


def _with_prompt(longest: Mapping[str, int], messages: Any, tokenizers: Mapping[str, ChatTokenizer]) -> dict[str, int]:
    """Leaves out bases whose template refuses the item: the error comes when a job wants to train such a base on the file."""
    found: dict[str, int] = {}
    for base, tokens in longest.items():
        with contextlib.suppress(ValueError):
            found[base] = max(tokens, len(tokenizers[base].render(messages)))
    return found


def check_item(item: Any) -> None:
    """Raises ValueError unless it is an object with a conversation that a model can answer."""
    if not isinstance(item, dict):
        raise ValueError(f"must be a JSON object, not {_kind(item)}")
    messages: Any = item.get("messages")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if "messages" not in item:
        raise ValueError('the field "messages" is missing: a list of chat messages')
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one chat message")
    check_messages(messages)  # pyright: ignore[reportUnknownArgumentType]
    last: Any = messages[-1]  # pyright: ignore[reportUnknownVariableType]
    if last["role"] not in ENDING_ROLES:
        raise ValueError(f"the last message must be one that the model answers, not one of role {last['role']!r}")


def parse_json(text: bytes) -> Any:
    """A JSON value that every part of the system can carry. Raises ValueError: duplicate keys, NaN, bad Unicode,
    numbers beyond 64 bits, deep nesting."""
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1})") from error
    try:
        value = json.loads(decoded, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    check_value(value)
    return value


def check_value(value: Any, depth: int = 0) -> None:
    """Raises ValueError for strings and numbers that messages cannot carry, and for deep nesting."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a number does not fit into 64 bits")
    elif isinstance(value, list):
        for part in value:  # pyright: ignore[reportUnknownVariableType]
            check_value(part, depth + 1)
    elif isinstance(value, dict):
        for key, part in value.items():  # pyright: ignore[reportUnknownVariableType]
            _check_text(str(key))  # pyright: ignore[reportUnknownArgumentType]
            check_value(part, depth + 1)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a string is not valid Unicode: {error.reason}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} stands twice in one object")
        result[key] = value
    return result


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _kind(value: Any) -> str:
    names: dict[type, str] = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
