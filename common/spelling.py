"""Suggestions for names that users have misspelt."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The known name most like the word; None if none has this likeness, from 0 (nothing in common) to 1 (the same)."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing if nothing is near."""
    near = nearest(word, known)
    return f"; did you mean {near!r}?" if near else ""
