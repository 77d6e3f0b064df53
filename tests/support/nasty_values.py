"""Values that programs stumble over, and bodies one value of which is replaced by them."""

from typing import Any

from hypothesis import strategies as st

NASTY: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    2**64,
    10**400,
    1e308,
    -0.5,
    float("nan"),
    float("inf"),
    "",
    "a",
    "\0",
    "\ud800",
    "x" * 3000,
    "{{",
    "{{item}}",
    "{{item.x}}",
    "auto",
    "../..",
    "\u202e",
    [],
    [None],
    {},
    {"a": {}},
    {"\ud800": 1},
]
nasty = st.sampled_from(NASTY) | st.recursive(
    st.sampled_from(NASTY), lambda inner: st.lists(inner, max_size=3), max_leaves=4
)


def paths(value: Any) -> list[tuple[Any, ...]]:
    """The places of a body's values."""
    pairs: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(), *((key, *path) for key, inner in pairs for path in paths(inner))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy
