"""Parses JSON strictly: what passes can be sent in every message, and costs no more than its size."""

import json
import re
from collections import Counter
from collections.abc import Collection
from typing import Any, TypeVar

import msgspec

from common.errors import InvalidInput
from common.suggestions import quoted

MAX_DEPTH = 32
MAX_VALUES = 100_000
"""Values of one text. What is done with a text later takes time for each of them."""

T = TypeVar("T")


def decode_body(body: bytes, kind: type[T]) -> T:
    """The value of a body of the Tinker protocol. Raises InvalidInput."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the body: {error}", code="invalid_json") from error


def parse_json(text: bytes) -> Any:
    """A JSON value that messages can carry. Raises ValueError: duplicate keys, NaN, bad Unicode, numbers beyond 64 bits,
    deep nesting, very many values."""
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1})") from error
    is_plain = _is_plain(decoded)
    try:
        value = (_DECODER if is_plain else _STRICT_DECODER).decode(decoded)
    except json.JSONDecodeError as error:
        found = quoted(decoded[error.pos :]) if decoded[error.pos :] else "the end"
        raise ValueError(f"not JSON: {error.msg} (column {error.colno}), where {found} is") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not is_plain:
        check_value(value)
    return value


def _is_plain(text: str) -> bool:
    """True if `check_value` finds nothing in this text's value: none is nested deeply, has bad Unicode or many digits."""
    few = len(text) <= MAX_VALUES and text.count("[") + text.count("{") <= MAX_DEPTH
    return few and "\\u" not in text and not _LONG_NUMBER.search(text)


def check_value(value: Any) -> None:
    """Raises ValueError for strings and numbers that messages cannot carry, for deep nesting and for very many values."""
    num, rest = 1, [(value, 0)]
    while rest:
        part, depth = rest.pop()
        children = _check_one(part)
        num += len(children)
        if num > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values (numbers, strings, lists, objects)")
        if children and depth == MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
        rest += [(child, depth + 1) for child in children]


def _check_one(value: Any) -> Collection[Any]:
    """The values directly in a value, after a check of itself."""
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a number does not fit into 64 bits")
    elif isinstance(value, dict):
        members: dict[Any, Any] = value
        for key in members:
            _check_text(str(key))
        return members.values()
    return value if isinstance(value, list) else ()  # pyright: ignore[reportUnknownVariableType]


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a string is not valid Unicode: {error.reason}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen = Counter(key for key, _ in pairs)
        raise ValueError(f"the key {quoted(next(key for key in seen if seen[key] > 1))} stands twice in one object")
    return result


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


_LONG_NUMBER = re.compile(r"[0-9]{19}")
"""Whatever is shorter fits into 64 bits."""
MAX_DIGITS = 20
"""Python's own parser refuses thousands, in words of its own."""


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits does not fit into 64 bits")
    return int(text)


_STRICT_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_int
)
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
