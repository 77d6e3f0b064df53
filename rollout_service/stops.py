"""Finds stop strings in token ids. The tokens that complete one are kept; the reader cuts the text."""

from collections.abc import Callable, Sequence

STOP_MARGIN = 4
"""Tokens decoded beyond a stop string's bytes in the search for it: one character may need so many."""


def first_stop(stops: Sequence[str], tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    """The stop string that the last token completes, the first of several; "" for none.

    `decode` gives the text of some ids, special tokens included.
    """
    if not stops:
        return ""
    reach = max(len(stop.encode()) for stop in stops) + STOP_MARGIN
    text = decode(tokens[-reach:])
    return next((stop for stop in stops if stop and stop in text), "")
