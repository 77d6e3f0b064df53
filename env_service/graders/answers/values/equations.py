r"""Equations that are answers as a whole: `(x-3)^2 + (y+2)^2 = 16`, `x + 2y = 6`. One of their sides answers nothing."""

import re

_NAME = r"(?:[A-Za-z]+|\\[A-Za-z]+)(?:_\{?\w+\}?)?(?:\^\{?-1\}?)?(?:\([a-z]\))?"
_NAMED = re.compile(rf"\s*{_NAME}\s*=.*|.*=\s*{_NAME}\s*", re.DOTALL)
"""`y = 2x + 3`, whose other side is an answer too."""
_VALUE = re.compile(rf"\s*{_NAME}\s*=[^A-Za-z]*")
_SIDE = (
    r"(?:[\d\s+\-*/^().{}_|!·÷×√±]|\\(?:frac|sqrt|cdot|times|pi|left|right|pm|sin|cos|tan|ln|log)(?![a-z])"
    r"|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))++"
)
_EQUATION = re.compile(rf"{_SIDE}=(?=\s*[^\s=]){_SIDE}")
_LETTER = re.compile(r"(?<![A-Za-z\\])[a-zA-Z](?![A-Za-z])")


def is_equation(reference: str) -> bool:
    """True if a plain reference is one equation with an unknown, and neither of its sides a name."""
    whole = _EQUATION.fullmatch(reference.strip("⟦⟧ ."))
    return bool(whole and _LETTER.search(whole[0]) and not _NAMED.fullmatch(whole[0]))


def last_equation(text: str) -> str:
    """The last equation of a plain text that has an unknown and is no value of it; "" if it has none."""
    found = (equation[0] for equation in _EQUATION.finditer(re.sub("[⟦⟧⟪⟫]", " ", text)))
    kept = [one for one in found if _LETTER.search(one) and not _VALUE.fullmatch(one)]
    return kept[-1].strip(" .") if kept else ""
