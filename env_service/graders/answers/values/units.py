"""Units that change what a number means: 12 km is 12,000 m, and not 12 cm. Others, such as `apples`, count alike."""

import re
from fractions import Fraction

_SIZES = r"""
length    1/1000 mm|millimet(?:er|re)s?  1/100 cm|centimet(?:er|re)s?  1 m|met(?:er|re)s?  1000 km|kilomet(?:er|re)s?
imperial  1 inch|inches  12 feet|foot|ft  36 yards?|yd  63360 miles?
mass      1/1000 mg|milligrams?  1 g|grams?  1000 kg|kilograms?|kilos?  1000000 tonnes?
volume    1/1000 ml|millilit(?:er|re)s?  1/100 cl  1/10 dl  1 l|lit(?:er|re)s?
time      1 s|secs?|seconds?  60 mins?|minutes?  3600 h|hrs?|hours?  86400 days?  604800 weeks?
calendar  1 months?  12 years?
speed     1 m/s|met(?:er|re)s?\sper\ssecond  5/18 km/h|kph|kilomet(?:er|re)s?\sper\shour  1397/3125 mph|miles?\sper\shour
area      1/10000 cm\}?\^\{?2\}?|(?:square|sq)\s(?:cm|centimet(?:er|re)s?)  1 m\}?\^\{?2\}?|(?:square|sq)\s(?:m|met(?:er|re)s?)
area      1000000 km\}?\^\{?2\}?|(?:square|sq)\s(?:km|kilomet(?:er|re)s?)
volume    1/1000 cm\}?\^\{?3\}?|cubic\s(?:cm|centimet(?:er|re)s?)  1000 m\}?\^\{?3\}?|cubic\s(?:m|met(?:er|re)s?)
area      10000 hectares?|ha
imperial-mass 1 ounces?|oz  16 pounds?|lbs?
imperial-volume 1 fl\s?oz|fluid\sounces?  8 cups?  16 pints?  32 quarts?  128 gallons?
imperial-area 1 (?:square|sq)\s(?:inch|inches|in)  144 (?:ft|feet)\}?\^\{?2\}?|(?:square|sq)\s(?:feet|foot|ft)
"""
_UNITS = [
    (line.split()[0], Fraction(size), re.compile(rf"(?:{names})", re.IGNORECASE))
    for line in _SIZES.strip().splitlines()
    for size, names in zip(line.split()[1::2], line.split()[2::2], strict=True)
]
UNIT = "(?:" + "|".join(sorted((pattern.pattern for _, _, pattern in _UNITS), key=len, reverse=True)) + ")"
_KINDS = [
    [names.pattern for kind, _, names in _UNITS if kind == wanted] for wanted in dict.fromkeys(u[0] for u in _UNITS)
]
_OF_KINDS = ["(?:" + "|".join(sorted(names, key=len, reverse=True)) + ")" for names in _KINDS]
MIXED = "(?:" + "|".join(rf"\d+(?:\.\d+)?\s?{u},?\s(?:and\s)?\d+(?:\.\d+)?\s?{u}" for u in _OF_KINDS) + ")(?![A-Za-z])"
"""Two numbers with units of one kind: `1 hour 20 minutes`."""
_AFTER = re.compile(
    rf"(?:\s|\\[,;:! ]|~|\\(?:text|textrm|mathrm|mbox)\s*\{{)*({UNIT})(?![A-Za-z\d])(?!\s*[/^²³'-]|\s+(?:per|squared|cubed)\b"
    rf"|\s*\\cdot|\}}\s*[/^])",
    re.IGNORECASE,
)


def unit_after(text: str, at: int = 0) -> str:
    """The unit that begins at a place, " km"; "" if none does."""
    found = _AFTER.match(text, at)
    return " " + re.sub("[{}]", "", found[1]) if found else ""


def measure(unit: str) -> tuple[str, Fraction]:
    """The quantity that a unit measures, and how much of it."""
    return next((kind, size) for kind, size, names in _UNITS if names.fullmatch(unit))
