"""Parses JSON strictly: what passes can be sent in every message, and costs no more than its size."""

import json
from collections.abc import Collection
from typing import Any

from common.spelling import quoted

MAX_DEPTH = 32
MAX_VALUES = 100_000
"""Of one text. What is done with a text later takes time for each of them."""


def parse_json(text: bytes) -> Any:
    """A JSON value that every part of the system can carry. Raises ValueError: duplicate keys, NaN, bad Unicode,
    numbers beyond 64 bits, deep nesting, very many values."""
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
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {quoted(key)} stands twice in one object")
        result[key] = value
    return result


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:20]} is too large")
    return value
