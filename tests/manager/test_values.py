"""JSON that tenants send is parsed strictly."""

import json
from typing import Any

import pytest

from manager_service.http.reading.json_values import MAX_DEPTH, MAX_VALUES, parse_json

GOOD: list[Any] = [
    2**63 - 1,
    -(2**63),
    "\u00fc\U0001f600 \\u",
    [0.5, True, None],
    {"a": {"b": [1]}},
    [0] * (MAX_VALUES // 2),
    [["x"]],
]
BAD = {
    "9" * 19: "does not fit into 64 bits",
    f"[{'1' * 10_000}]": "a number of 10000 digits does not fit into 64 bits",
    "-9223372036854775809": "does not fit into 64 bits",
    '{"a": 1, "a": 1, "b": 2}': "the key 'a' stands twice",
    '["\\ud800"]': "not valid Unicode",
    "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2): "nested more than 32 levels",
    f"[{'0,' * MAX_VALUES}0]": "more than 100000 values",
    "1e999": "too large",
    "NaN": "not a JSON number",
}


@pytest.mark.parametrize("value", GOOD, ids=range(len(GOOD)))
def test_what_messages_can_carry_is_parsed(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert parse_json(text.encode()) == value


@pytest.mark.parametrize(("text", "reason"), BAD.items(), ids=range(len(BAD)))
def test_what_they_cannot_carry_is_refused_in_our_words(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_json(text.encode())
