"""Lines of items: what a file must hold, and what a job needs of it. Pure functions, which raise InvalidInput with the line."""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, cast

import msgspec

from common.errors import InvalidInput
from common.tasks.graders import check_fields
from common.text.chat_template import KWARGS
from common.text.examples import check_example, is_example, is_text, read_example, with_messages
from common.text.tokens import ChatTokenizer, check_messages
from manager_service.http.reading.json_values import parse_json

ENDING_ROLES = ("user", "system", "developer", "tool")
NAMED_LINES = 5
"""Line numbers that an error lists at most."""
MAX_FIELDS = 64
"""Names of fields that a file's record keeps, and characters of one."""


class FoundItems(msgspec.Struct, frozen=True):
    """The contents of some lines of a file."""

    num_lines: int  # blank ones included
    num_items: int
    longest: dict[str, int]  # base model -> tokens of the longest prompt or example; not for bases that refuse one
    num_examples: int = 0  # of the items: those with an answer to learn
    tokens: dict[str, int] = {}  # as `longest`, of all together
    num_texts: int = 0  # of the examples: those of plain text, which no chat template shows
    fields: frozenset[str] | None = None  # that all items have, the first by name; None: there is no item

    def __add__(self, more: "FoundItems") -> "FoundItems":
        bases = [base for base in self.longest if base in more.longest]
        return FoundItems(
            self.num_lines + more.num_lines,
            self.num_items + more.num_items,
            {base: max(self.longest[base], more.longest[base]) for base in bases},
            self.num_examples + more.num_examples,
            {base: self.tokens[base] + more.tokens[base] for base in bases},
            self.num_texts + more.num_texts,
            more.fields if self.fields is None else self.fields if more.fields is None else self.fields & more.fields,
        )

    @classmethod
    def none(cls, bases: Iterable[str]) -> "FoundItems":
        return cls(0, 0, dict.fromkeys(bases, 0), 0, dict.fromkeys(bases, 0))


class LongPrompts(msgspec.Struct, frozen=True):
    """Items that are too long in some lines of a file."""

    num_lines: int = 0  # blank ones included
    num_long: int = 0
    first_long: list[int] = []  # numbers of the first lines whose prompts are too long
    longest: int = 0  # tokens

    def __add__(self, more: "LongPrompts") -> "LongPrompts":
        return LongPrompts(
            self.num_lines + more.num_lines,
            self.num_long + more.num_long,
            [*self.first_long, *more.first_long][:NAMED_LINES],
            max(self.longest, more.longest),
        )


def check_lines(
    lines: bytes, *, before: int, max_line_bytes: int, tokenizers: Mapping[str, ChatTokenizer]
) -> FoundItems:
    """`before`: the number of lines above these."""
    found, number = FoundItems.none(tokenizers), before
    for number, line in _numbered(lines, before):
        if not line.strip():
            continue
        try:
            if len(line) > max_line_bytes:
                raise ValueError(f"{len(line)} bytes; a line has at most {max_line_bytes}")
            item = parse_json(line)
            check_item(item)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"line {number}: {error}", param="file", code="invalid_file") from error
        lengths = _lengths(item, {base: tokenizers[base] for base in found.longest})
        found += FoundItems(0, 1, lengths, int(is_example(item)), lengths, int(is_text(item)), frozenset(item))
    fields = found.fields and frozenset(sorted(name for name in found.fields if len(name) <= MAX_FIELDS)[:MAX_FIELDS])
    return msgspec.structs.replace(found, num_lines=number - before, fields=fields)


def check_items(
    lines: bytes,
    *,
    before: int,
    tokenizer: ChatTokenizer,
    examples: bool,
    fields: Collection[str],
    most: int | None,
    param: str,
) -> LongPrompts:
    """Finds prompts, and examples, of more than `most` tokens. Raises InvalidInput unless all are `examples`, or none, and have these
    fields, as `common.tasks.graders.item_fields` finds them."""
    found, longest, number = list[int](), 0, before
    for number, line in _numbered(lines, before):
        if not line.strip():
            continue
        item = msgspec.json.decode(line)
        if is_example(item) != examples:
            why = _NO_EXAMPLE if examples else _EXAMPLE
            raise InvalidInput(f"{param}, line {number}: {why}", param=param, code="wrong_kind_of_file")
        try:
            check_fields(fields, with_messages(item))
            length = 0 if most is None else _num_tokens(item, tokenizer)
        except InvalidInput as error:
            raise InvalidInput(
                f"{param}, line {number}: the grader needs what is not there: {error}", param=param
            ) from error
        except ValueError as error:
            raise InvalidInput(f"{param}, line {number}: {error}", param=param) from error
        longest = max(longest, length)
        found += [number] if most is not None and length > most else []
    return LongPrompts(number - before, len(found), found[:NAMED_LINES], longest)


_NO_EXAMPLE = (
    "a supervised job learns answers: the last message must be the assistant's, or there must be a completion"
    " (of a table, `marlaas submit` takes its column as --completion)"
)
_EXAMPLE = "the last message is the assistant's, or there is a completion: that is for a supervised job"


def _numbered(lines: bytes, before: int) -> Iterator[tuple[int, bytes]]:
    return enumerate(lines.splitlines(), before + 1)


def _lengths(item: dict[str, Any], tokenizers: Mapping[str, ChatTokenizer]) -> dict[str, int]:
    """Leaves out bases whose template refuses the item: a job that would train one on the file gets the error."""
    found: dict[str, int] = {}
    for base, tokenizer in tokenizers.items():
        with contextlib.suppress(ValueError):
            found[base] = _num_tokens(item, tokenizer)
    return found


def _num_tokens(item: dict[str, Any], tokenizer: ChatTokenizer) -> int:
    """Tokens of an item's prompt, or of the whole example. Raises ValueError."""
    if is_example(item):
        return len(read_example(item, tokenizer).tokens)
    return len(tokenizer.render(with_messages(item)["messages"]))


def check_item(item: Any) -> None:
    """Raises ValueError unless it is an object with a conversation to answer, or with one and its answer."""
    if not isinstance(item, dict):
        raise ValueError(f"must be a JSON object, not {_kind(item)}")
    row = cast(dict[str, Any], item)
    if KWARGS in row:
        raise ValueError(f"{KWARGS} belongs into a job's hyperparameters, for all of its rows")
    if is_example(row):
        return check_example(row)
    name = "messages" if "messages" in row else "prompt"
    if name == "prompt" and row.get(name) is None:
        raise ValueError('the field "messages" is missing: a list of chat messages; or "prompt", the question as text')
    messages: Any = with_messages(row)["messages"]
    if not isinstance(messages, list) or not messages or row[name] == "":
        raise ValueError(f"{name} must be a list of at least one chat message{', or a text' * (name == 'prompt')}")
    check_messages(cast(list[Any], messages), name)
    last = cast(list[Any], messages)[-1]
    if last["role"] not in ENDING_ROLES:
        raise ValueError(f"the last message must be one that the model answers, not one of role {last['role']!r}")


def _kind(value: Any) -> str:
    names: dict[type, str] = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
