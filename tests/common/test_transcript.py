"""Transcripts against plain arrays."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.wire.transcript import EMPTY, Transcript, joined, shown, transcript, wrote

Part = tuple[list[int], list[float], list[bool]]


@st.composite
def parts(draw: st.DrawFn) -> Part:
    """Tokens, with their log-probs and who wrote them."""
    rows = draw(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-9, 0, width=32), st.booleans()), max_size=12))
    return [row[0] for row in rows], [row[1] if row[2] else 0.0 for row in rows], [row[2] for row in rows]


def arrays(found: Transcript) -> Part:
    tokens, logprobs, written = found.tokens.numpy(), found.logprobs.numpy(), found.written.numpy()
    return tokens.tolist(), logprobs.tolist(), [bool(one) for one in written]


@given(st.lists(parts(), max_size=4), st.integers(0, 50))
def test_it_says_what_arrays_say_joined_and_cut(given: list[Part], num: int) -> None:
    tokens, logprobs, written = ([value for part in given for value in part[i]] for i in range(3))
    whole = joined(transcript(*part) for part in given)
    assert whole == transcript(tokens, logprobs, written) == sum((transcript(*part) for part in given), EMPTY)
    assert arrays(whole) == (tokens, logprobs, written)
    assert (len(whole), whole.num_written) == (len(tokens), sum(written))
    assert arrays(whole.first(num)) == (tokens[:num], logprobs[:num], written[:num])
    sent = msgspec.msgpack.encode(whole)
    assert msgspec.msgpack.decode(sent, type=Transcript) == whole
    assert len(sent) <= 4 * len(tokens) + 4 * sum(written) + 3 * len(whole.edges) + 16


def test_a_prompt_and_an_answer_cost_what_they_say() -> None:
    whole = shown(range(100)) + wrote(range(10), [-0.5] * 10)
    assert whole == transcript([*range(100), *range(10)], [0.0] * 100 + [-0.5] * 10, [0] * 100 + [1] * 10)
    assert whole.segments == [(100, 110)] and len(msgspec.msgpack.encode(whole)) < 4 * 120 + 16
    assert wrote([], []) == EMPTY


@pytest.mark.parametrize(
    "broken",
    [
        (b"12345", (), b""),
        (b"1234", (0, 2), b""),
        (b"1234", (0,), b""),
        (b"1234", (1, 0), b""),
        (b"1234", (0, 1), b"12345678"),
        (b"1234", (), b"1234"),
        (b"1234", (0, 0), b""),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(broken: tuple[bytes, tuple[int, ...], bytes]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Transcript(*broken)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(broken), type=Transcript)
