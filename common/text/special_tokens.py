"""The special tokens of a tokenizer: how strings are marked so that they contain none, and where they stand in a text."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

_MARKS = range(0x100000, 0x10FFFD)
"""Private-use characters: no writing system has them, so there is always one that occurs in no string."""


class Specials:
    """The added tokens of a tokenizer: finds them, and marks strings so that they contain none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = sorted(tokenizer.get_added_tokens_decoder().items(), key=lambda entry: -len(entry[1].content))
        self._ids = [i for i, _ in added]
        """In the order of the groups of `_pattern`: longest first."""
        self._pattern = re.compile("|".join(f"({_token_pattern(token)})" for _, token in added) or _NOTHING)
        self._firsts = _one_of({token.content[0] for _, token in added})
        self._lasts = _one_of({token.content[-1] for _, token in added})
        self._removed = _one_of({token.content for _, token in added if token.special})

    def mark(self, value: Any, mark: str) -> Any:
        """`value` with the mark behind what can begin a special token and before what can end one.

        So no part of it is a special token, nor becomes one beside what the template or another value adds.
        """
        if isinstance(value, str):
            return self._lasts.sub(lambda m: mark + m[0], self._firsts.sub(lambda m: m[0] + mark, value))
        if isinstance(value, Mapping):
            return {key: self.mark(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, mark) for item in value]
        return value

    def split(self, text: str) -> Iterator[tuple[int | None, str]]:
        """(id, token) for each special token without marks, (None, text) for what is between them."""
        end = 0
        for match in self._pattern.finditer(text):
            if match.start() > end:
                yield None, text[end : match.start()]
            assert match.lastindex is not None
            yield self._ids[match.lastindex - 1], match[0]
            end = match.end()
        if end < len(text):
            yield None, text[end:]

    def remove(self, text: str) -> str:
        """The text without the tokens that `decode` skips."""
        return self._removed.sub("", text)


_NOTHING = r"(?!)"
"""A pattern that matches nowhere."""


def _one_of(texts: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or _NOTHING)


def _token_pattern(token: Any) -> str:
    """Matches a token and the white space beside it that the token swallows."""
    return (r"\s*" if token.lstrip else "") + f"(?:{re.escape(token.content)})" + (r"\s*" if token.rstrip else "")


def without_added_tokens(tokenizer_json: str) -> Tokenizer:
    """The same tokenizer, to which special tokens are text like any other.

    Raises ValueError if even so the text of a special token becomes that token, or if a special token is a
    single character, which has no inside for a mark.
    """
    content = json.loads(tokenizer_json)
    added = content.get("added_tokens") or []
    plain = Tokenizer.from_str(json.dumps(content | {"added_tokens": [], "post_processor": None}))
    for token in added:
        if len(token["content"]) < 2 or token["id"] in plain.encode(token["content"], add_special_tokens=False).ids:
            raise ValueError(f"this tokenizer makes a special token of the plain text {token['content']!r}")
    return plain


def unused_mark(value: Any) -> str:
    used = set(json.dumps(value, ensure_ascii=False))
    return next(chr(code) for code in _MARKS if chr(code) not in used)
