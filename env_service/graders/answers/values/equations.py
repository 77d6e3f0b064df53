r"""Equations that are answers as a whole: `(x-3)^2 + (y+2)^2 = 16`, `x + 2y = 6`. One of their sides answers nothing."""

import re

_NAME = r"(?:[A-Za-z]+|\\[A-Za-z]+)(?:_\{?\w+\}?)?(?:\^\{?-1\}?)?(?:\([a-z]\))?"
_NAMED = re.compile(rf"\s*{_NAME}\s*=.*|.*=\s*{_NAME}\s*", re.DOTALL)
"""An equation such as `y = 2x + 3`, whose other side is an answer too."""
_VALUE = re.compile(rf"\s*{_NAME}\s*=[^A-Za-z]*")
_EXPRESSIONS = re.compile(
    r"(?:[\d\s+\-*/^().{}_|!·÷×√±=]|\\(?:frac|sqrt|cdot|times|pi|left|right|pm|sin|cos|tan|ln|log)(?![a-z])"
    r"|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))++"
)
_LETTER = re.compile(r"(?<![A-Za-z\\])[a-zA-Z](?![A-Za-z])")


def is_equation(reference: str) -> bool:
    """True if a plain reference is one equation with an unknown, and neither of its sides a name."""
    bare = reference.strip("⟦⟧ .")
    whole = _EXPRESSIONS.fullmatch(bare) and bare.count("=") == 1 and all(map(str.strip, bare.split("=")))
    return bool(whole and _LETTER.search(bare) and not _NAMED.fullmatch(bare))


def last_equation(text: str) -> str:
    """The last equation of a plain text that has an unknown and is no value of it; "" if it has none. Of a chain, its ends."""
    runs = (run[0].strip(" \n.").split("=") for run in _EXPRESSIONS.finditer(re.sub("[⟦⟧⟪⟫]", " ", text)))
    found = (f"{sides[0]}={sides[-1]}" for sides in runs if len(sides) > 1 and sides[0].strip() and sides[-1].strip())
    kept = [one for one in found if _LETTER.search(one) and not _VALUE.fullmatch(one)]
    return kept[-1] if kept else ""
