"""The special tokens of a tokenizer: marks strings so that they contain none, and finds them in a text."""

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

_MARKS = range(0x100000, 0x10FFFD)
"""Private-use characters: no writing system has them, so one always occurs in no string."""


class Specials:
    """The added tokens of a tokenizer: finds them, and marks strings so that they contain none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = list(tokenizer.get_added_tokens_decoder().items())
        self._tokens = {token.content: (i, token.lstrip, token.rstrip) for i, token in added}
        self._pattern = _one_of(set(self._tokens))
        self._firsts = _one_of({token.content[0] for _, token in added})
        self._lasts = _one_of({token.content[-1] for _, token in added})
        self._ends = _one_of({end for _, token in added for end in (token.content[0], token.content[-1])})
        self._removed = _one_of({token.content for _, token in added if token.special})

    def mark(self, value: Any, mark: str) -> Any:
        """`value` with the mark behind what can begin a special token and before what can end one.

        So it neither has a special token nor becomes one next to what the template or another value adds.
        """
        if isinstance(value, str):
            if not self._ends.search(value):
                return value
            return self._lasts.sub(lambda m: mark + m[0], self._firsts.sub(lambda m: m[0] + mark, value))
        if isinstance(value, dict):
            members: dict[Any, Any] = value
            return {key: self.mark(item, mark) for key, item in members.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, mark) for item in value]
        return value

    def split(self, text: str) -> Iterator[tuple[int | None, str]]:
        """(id, token) for each special token without marks, (None, text) for what is between them.

        A token takes the white space next to it that it swallows.
        """
        end = 0
        while match := self._pattern.search(text, end):
            i, takes_left, takes_right = self._tokens[match[0]]
            before = text[end : match.start()]
            before = before.rstrip() if takes_left else before
            if before:
                yield None, before
            yield i, match[0]
            end = _end_of_spaces(text, match.end()) if takes_right else match.end()
        if end < len(text):
            yield None, text[end:]

    def remove(self, text: str) -> str:
        """The text without the tokens that `decode` skips."""
        return self._removed.sub("", text)


_ENCODER = json.JSONEncoder(ensure_ascii=False)
_NOTHING = r"(?!)"
"""A pattern that matches nowhere."""
_SPACES = re.compile(r"\s*")


def _one_of(texts: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or _NOTHING)


def _end_of_spaces(text: str, start: int) -> int:
    found = _SPACES.match(text, start)
    assert found is not None
    return found.end()


def parse_tokenizer(tokenizer_json: str) -> Tokenizer:
    """Reads what `tokenizer.json` holds. Raises ValueError."""
    try:
        return Tokenizer.from_str(tokenizer_json)
    except Exception as error:
        raise ValueError(f"tokenizer.json holds no tokenizer: {error}") from error


def without_added_tokens(tokenizer_json: str) -> Tokenizer:
    """The same tokenizer, to which special tokens are ordinary text.

    Raises ValueError if their text still becomes the token, or if one is a single character, which has no inside for a
    mark.
    """
    content = json.loads(tokenizer_json)
    added = content.get("added_tokens") or []
    plain = Tokenizer.from_str(json.dumps(content | {"added_tokens": [], "post_processor": None}))
    for token in added:
        if len(token["content"]) < 2 or token["id"] in plain.encode(token["content"], add_special_tokens=False).ids:
            raise ValueError(f"this tokenizer makes a special token of the plain text {token['content']!r}")
    return plain


def unused_mark(value: Any) -> str:
    text = _ENCODER.encode(value)
    if (first := chr(_MARKS[0])) not in text:
        return first
    used = set(text)
    return next(chr(code) for code in _MARKS if chr(code) not in used)
