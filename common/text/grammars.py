"""Grammars that an answer must follow, in llguidance's Lark: JSON of a schema, exactly one tool call, or either. Engines mask tokens by
them."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from common.text.tool_calls import CLOSE, OPEN

MAX_BYTES = 64 << 10
"""The longest grammar."""
LIMITS = LLParserLimits(max_grammar_size=50_000, max_lexer_states=20_000, verbose_errors=False)
"""The cost of one grammar at most: states of some 40 MiB, and 20 ms for the mask of a token."""
MAX_S = 0.5
"""Processor seconds to make a matcher of one grammar: the library bounds neither these nor their memory (`multipleOf`)."""
MAX_ITEMS = 10_000
"""Each that `minItems` or `maxItems` counts costs a kilobyte before the library looks at its limits."""
ITEM_COUNTS = ("minItems", "maxItems")
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose members have names of the user's, and are schemas."""
AS_THEY_ARE = ("const", "enum", "default", "examples")
"""Keywords of values."""
COMPACT = {"whitespace_flexible": False}
"""JSON without white space: a model that could write it without end does."""
AS_TRAINED = COMPACT | {"item_separator": ", ", "key_separator": ": "}
"""The same, as models write calls: Python's form."""


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of the JSON texts that a JSON Schema allows. Raises ValueError for what cannot be followed, by its name."""
    grammar = f"start: answer\nanswer: {_json(schema, COMPACT)}"
    _check(grammar)
    return grammar


def call_grammar(functions: Sequence[Mapping[str, Any]], *, tags_are_tokens: bool, instead: str = "") -> str:
    """The grammar of exactly one call, in the format `hermes`, of one of the functions: those that tools have in OpenAI's form.
    `tags_are_tokens`: whether the call's tags were added to the vocabulary. `instead`: a grammar of JSON, which an answer may follow
    instead. Raises ValueError, naming the function."""
    first, last = (OPEN, CLOSE) if tags_are_tokens else (json.dumps(OPEN), json.dumps(CLOSE))
    spent_s = 0.0
    rules = [f'call: {first} "\\n" ({" | ".join(f"call_{i}" for i in range(len(functions)))}) "\\n" {last}']
    rules += ["start: call | answer", *instead.split("\n")[1:]] if instead else ["start: call"]
    for i, function in enumerate(functions):
        parameters = function.get("parameters") or {"additionalProperties": False}
        try:
            arguments = _json({**parameters, "type": "object"}, AS_TRAINED)
            spent_s = _check(f"start: answer\nanswer: {arguments}", spent_s)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the parameters of {function['name']}: {error}") from error
        before = f'{{"name": {_text(function["name"])}, "arguments": '
        rules += [f'call_{i}: {_text(before)} arguments_{i} "}}"', f"arguments_{i}: {arguments}"]
    grammar = "\n".join(rules)
    _check_size(grammar)
    return grammar


def _json(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    if (num := sum(_counted_items(schema))) > MAX_ITEMS:
        raise ValueError(f"minItems and maxItems come to {num:g}: at most {MAX_ITEMS}")
    closed = schema if _is_joined(schema) else _closed(schema)
    return f"%json {_text({**closed, 'x-guidance': options})}"


def _closed(schema: Any) -> Any:
    """The schema, by which objects whose properties are named have no others unless it says so: small models would write some
    without end. Not for a joined one."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    members: Mapping[str, Any] = schema
    closed = {name: _closed_member(name, value) for name, value in members.items()}
    return {"additionalProperties": False, **closed} if "properties" in members else closed


def _closed_member(name: str, value: Any) -> Any:
    if name in OF_NAMES and isinstance(value, Mapping):
        schemas: Mapping[str, Any] = value
        return {key: _closed(each) for key, each in schemas.items()}
    return value if name in AS_THEY_ARE else _closed(value)


def _is_joined(value: Any) -> bool:
    """Do several schemas name the properties of one object? Each, closed, would forbid what the others name."""
    return _num_naming(value) > 1 or any(map(_is_joined, _members(value)))


def _num_naming(schema: Any) -> int:
    if not isinstance(schema, Mapping):
        return 0
    of: Mapping[str, Any] = schema
    either = sum(max(map(_num_naming, _members(of.get(name))), default=0) for name in ("anyOf", "oneOf"))
    return ("properties" in of) + ("$ref" in of) + either + sum(map(_num_naming, _members(of.get("allOf"))))


def _members(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()


def _counted_items(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        of: Mapping[str, Any] = value
        yield from (abs(num) for name, num in of.items() if name in ITEM_COUNTS and isinstance(num, int | float))
    for member in _members(value):
        yield from _counted_items(member)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _check(grammar: str, spent_s: float = 0.0) -> float:
    """Processor seconds that it costs with those before it. Raises ValueError."""
    _check_size(grammar)
    spent_s -= time.thread_time()
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=LIMITS)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(fault_of(matcher))
    spent_s += time.thread_time()
    if spent_s > MAX_S:
        raise ValueError("following it costs too much: simplify it, first where it says multipleOf or pattern")
    return spent_s


def _check_size(grammar: str) -> None:
    if (size := len(grammar.encode())) > MAX_BYTES:
        raise ValueError(f"{size} bytes are too many: at most {MAX_BYTES}")


def fault_of(matcher: LLMatcher) -> str:
    """The reason why a matcher goes no further, on one line, without the grammar and the options of llguidance's own."""
    text = matcher.get_error().rpartition("compile JSON schema: ")[2].partition(" Enable '")[0]
    return " ".join(text.partition("<backtrace")[0].partition("\n   1 | ")[0].split())
