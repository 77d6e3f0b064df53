"""The bytes that neighbouring payloads have in common."""

from hypothesis import given
from hypothesis import strategies as st

from common.repeats import num_same, num_same_at_end

ENDS = st.binary(max_size=600)
BETWEEN = st.binary(max_size=3)


@given(ENDS, BETWEEN, BETWEEN, ENDS)
def test_common_ends_of_any_length_are_found(head: bytes, one: bytes, other: bytes, tail: bytes) -> None:
    first, second = head + one + tail, head + other + tail
    assert num_same(first, second) == common(first, second)
    assert num_same_at_end(first, second) == common(first[::-1], second[::-1])


def common(one: bytes, other: bytes) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
