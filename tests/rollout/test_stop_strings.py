"""Stop strings: found by the token that completes them, and long ones compared only where their ends come."""

import random
from collections.abc import Sequence

from rollout_service.turns import END_CHARACTERS, STOP_MARGIN, first_stop


def decode(tokens: Sequence[int]) -> str:
    """A token is a byte."""
    return bytes(tokens).decode(errors="replace")


def test_a_stop_string_is_found_by_the_token_that_completes_it() -> None:
    rng = random.Random(7)
    for _ in range(300):
        tokens = "".join(rng.choices("abé😀", k=40)).encode()
        stops = ["".join(rng.choices("abé😀", k=rng.choice((1, 2, 4, 7)))) for _ in range(2)]
        ends = [end for end in range(1, len(tokens) + 1) if first_stop(stops, tokens[:end], decode)]
        first = min(
            (tokens.find(stop.encode()) + len(stop.encode()) for stop in stops if stop.encode() in tokens), default=0
        )
        assert ends[:1] == [first][: bool(first)]
        assert not ends or first_stop(stops, tokens[:first], decode) in stops


def test_long_stop_strings_cost_a_look_at_the_newest_tokens_until_their_end_comes() -> None:
    longest, stops = 0, [f"{n:04}" + "x" * 1020 for n in range(64)]

    def looked(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode(tokens)

    assert first_stop(stops, b"y" * 5000, looked) == ""
    assert longest <= 4 * END_CHARACTERS + STOP_MARGIN
    assert first_stop(stops, b"y" * 5000 + stops[9].encode(), looked) == stops[9]
