"""Names that users have misspelt: shows them, and suggests others."""

import difflib
from collections.abc import Iterable
from itertools import islice

MAX_CHARACTERS = 64
"""Longer words are neither compared nor suggested: users choose both, and the time grows with the product."""
MAX_NAMES = 100
"""Most names with which a word is compared."""

MAX_SHOWN = 80
"""Characters of what a user has sent that an error shows."""


def cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def quoted(value: object) -> str:
    """A user's text, as an error shows it."""
    return repr(cut(value)) if isinstance(value, str) else cut(repr(value))


def nearest(word: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The known name most like the word; None if none has this likeness, from 0 (none) to 1 (the same)."""
    if len(word) > MAX_CHARACTERS:
        return None
    short = list(islice((name for name in known if len(name) <= MAX_CHARACTERS), MAX_NAMES))
    return next(iter(difflib.get_close_matches(word, short, n=1, cutoff=likeness)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing if nothing is near."""
    near = nearest(word, known)
    return f"; did you mean {near!r}?" if near else ""
