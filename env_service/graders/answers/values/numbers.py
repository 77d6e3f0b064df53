r"""Numbers in plain texts: `1,234.50`, `-3/4`, `4 2/5`, `＄18`, `48 €`, `75%`, `3 million`, `50 cents`, `1.2e5`, `forty-two`."""

import re
from dataclasses import dataclass
from fractions import Fraction

_CURRENCY = (
    r"(?:(?:US|CA|AU|NZ|HK|C|A|R|S)?＄|[€£¥₹₽₩₺₫₱₦฿₴₪元円원]|(?<![A-Za-z\d])R(?=\d)"
    r"|(?:(?<![A-Za-z])(?:USD|EUR|GBP|JPY|CHF|CNY|RMB|INR|RUB|BRL|CAD|AUD|SEK|NOK|DKK|PLN|Rs\.?))(?![A-Za-z]))"
)
_DIGITS = r"(?:\d{1,2}(?:,\d\d(?!\d))++,\d{3}(?!\d)|\d{1,3}(?:[, ]\d{3}(?!\d))++(?:\.\d++)?|\d++(?:\.\d++)?|\.\d++)"
_SCALES = {
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "lakh": 10**5, "crore": 10**7,
    "mio": 10**6, "mrd": 10**9, "万": 10**4, "萬": 10**4, "億": 10**8, "亿": 10**8, "千": 1000, "百": 100, "만": 10**4, "억": 10**8,
    "тысяч": 1000, "миллион": 10**6, "tausend": 1000, "mille": 1000, "mil": 1000, "millones": 10**6, "millón": 10**6,
    "milliarde": 10**9, "k": 1000, "m": 10**6, "b": 10**9,
}  # fmt: skip
_SCALE = (
    r"(?:\s?(?:[万萬億亿百만억]|千(?![米克瓦]))|\s?(?:thousand|million(?:en|s)?|billion|trillion|lakhs?|crores?|mio\.?|mrd\.?|hundred|тысяч[аи]?"
    r"|миллион(?:ов|а)?|tausend|mille|mil|millones|millón|milliarden?)(?![A-Za-zà-ÿ])|k(?![\w/])"
    r"|(?(before)\s?(?:m|mn|b|bn)(?![\w/])|(?!)))"
)
_PERCENT = (
    r"\s?(?:\\?%|(?:per\s?cent|pct|prozent|pour\s?cent|por\s?cient?o|por\s?cento|procent|процент\w{0,3})(?![A-Za-z]))"
)

NUMBER = re.compile(
    rf"(?P<sign>(?<![\w.)\]}}⟧%])[-+])?(?P<before>{_CURRENCY}\s?(?P<inner>[-+])?)?"
    rf"(?:(?<![\d.,^])(?P<whole>\d++)(?:\s|\sand\s)(?=\d++/\d))?"
    rf"(?P<digits>(?<![\d^])(?<!\d\.)(?<!\^\{{){_DIGITS})(?P<exponent>[eE][-+]?\d{{1,3}}(?!\w))?(?P<over>\s?/\s?\d++(?!/|\.\d))?"
    rf"(?P<scale>{_SCALE})?(?P<percent>{_PERCENT})?(?P<minor>\s?(?:¢|(?:cents?|pence|paise|centimes?)(?![A-Za-z]))|p(?![\w/^*'=)]|\s?[-+=*/]))?"
    rf"(?P<after>\s?{_CURRENCY})?(?P<dozen>\sdozen(?![A-Za-z]))?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Quantity:
    """A number and what it counts, as far as that changes its meaning."""

    value: Fraction
    percent: bool = False
    minor: bool = False
    """It counts hundredths of a currency's unit."""
    currency: str = ""
    """Its sign, "" if it has none."""
    dozen: bool = False
    unit: str = ""
    """One of those that `units` knows, "" if it has none."""


def quantity(match: re.Match[str]) -> Quantity | None:
    """The value of a match of NUMBER; None if it has none, as `1/0`."""
    value = Fraction(re.sub(r"[, ]", "", match["digits"]))
    if match["exponent"]:
        value *= Fraction(10) ** int(match["exponent"][1:])
    if match["over"]:
        bottom = int(match["over"].strip(" /"))
        if not bottom:
            return None
        value /= bottom
    value += int(match["whole"] or 0)
    if "-" in (match["sign"], match["inner"]):
        value = -value
    if match["scale"]:
        value *= _scale(match["scale"].strip().casefold())
    currency = (match["before"] or match["after"] or "").strip(" -+").upper()
    return Quantity(value, bool(match["percent"]), bool(match["minor"]), currency, bool(match["dozen"]))


def _scale(word: str) -> int:
    return next(size for name, size in sorted(_SCALES.items(), key=lambda item: -len(item[0])) if word.startswith(name))


# ---- numbers in words -----------------------------------------------------------------------------------------------

_SMALL = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_UNITS = [*_SMALL, "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_VALUES = {
    **{word: value for value, word in enumerate(_UNITS)},
    **{word: 10 * value for value, word in enumerate(_TENS, 2)},
    "fourty": 40,
}
_POWERS = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_PARTS = {
    "half": 2, "halves": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10, "twelfth": 12,
}  # fmt: skip
_WORD = "|".join(sorted([*_VALUES, *_POWERS, *_PARTS], key=len, reverse=True))
_WORDS = re.compile(
    rf"(?<![\w.-])(?:(?:minus|negative) )?(?:a (?=hundred|thousand|million|dozen|half))?(?:{_WORD}|dozen)s?"
    rf"(?:[ -](?:and (?:a )?)?(?:{_WORD}|dozen)s?)*+(?![\w-])",
    re.IGNORECASE,
)
_FIRST = re.compile(rf"(?<![A-Za-z])(?:{_WORD}|dozen)", re.IGNORECASE)
_ALONE = re.compile(
    rf"(?<![\w-])(?!one (?:would|can|could|might|may)\b)(?<!this )(?<!another )(?<!each )(?<!every )(?<!other )(?<!which )"
    rf"(?:(?:minus|negative) )?"
    rf"(?:(?:{'|'.join(reversed(_SMALL))})(?![\w-])|(?:an? )?(?:half|quarter|third)(?![\w-])|(?:an?|one) (?:fifth|sixth|eighth"
    rf"|tenth|twelfth)(?![\w-]))",
    re.IGNORECASE,
)
_NONE = re.compile(r"\bnone\b(?! of (?:the above|these|those))", re.IGNORECASE)
_MONEY = re.compile(
    rf"(?<![\w-])(?:{'|'.join(reversed(_SMALL))})(?= (?:dollars?|euros?|cents|pounds? and)\b)", re.IGNORECASE
)
_POINT = re.compile(
    rf"(?<![\w-])({'|'.join(reversed(_UNITS))}) point ((?:(?:{'|'.join(_SMALL[:10])})(?![\w-]) ?)+)(?<! )",
    re.IGNORECASE,
)


def spelled(text: str) -> str:
    """The text with digits for its numbers in words, where they are surely meant to count."""
    if not _FIRST.search(text):
        return text
    text = _POINT.sub(lambda match: f"{_digits(match[1])}.{''.join(_digits(d) or '' for d in match[2].split())}", text)
    return _MONEY.sub(lambda match: _digits(match[0]) or match[0], _WORDS.sub(_as_digits, text))


def spelled_small(text: str) -> str:
    """The text with digits for `none`, `one` to `twelve` and `half` too."""
    return _ALONE.sub(lambda match: _digits(match[0]) or match[0], _NONE.sub("0", text))


def _as_digits(match: re.Match[str]) -> str:
    words = match[0].casefold()
    numerals = {*_VALUES, "a"} & set(re.split(r"[ -]", words))  # none in `hundreds` or `tenths` of something
    if not numerals or words.removeprefix("minus ").removeprefix("negative ") in {*_SMALL, *_PARTS, *_POWERS}:
        return match[0]
    return _digits(words) or match[0]


def _digits(words: str) -> str | None:
    """The number that words say: `two thousand and five` is 2005, `two thirds` 2/3, `two and a half` 5/2."""
    total, current = Fraction(0), Fraction(0)
    tokens = re.split(r"[ -]+", words.casefold())
    for i, token in enumerate(tokens):
        single = token.removesuffix("s") if token.removesuffix("s") in {*_POWERS, *_PARTS, "dozen"} else token
        if single in _VALUES:
            current += _VALUES[single]
        elif single == "hundred":
            current = (current or Fraction(1)) * 100
        elif single in _POWERS:
            total, current = total + (current or Fraction(1)) * _POWERS[single], Fraction(0)
        elif single == "dozen":
            current = (current or Fraction(1)) * 12
        elif single in _PARTS and not i:
            return f"1/{_PARTS[single]}"
        elif single in _PARTS and i and tokens[i - 1] in ("a", "and"):
            current += Fraction(1, _PARTS[single])
        elif single in _PARTS:
            if single == token and tokens[i - 1] != "one":
                return None  # twenty-fifth
            current = (current or Fraction(1)) / _PARTS[single]
    return ("-" if tokens[0] in ("minus", "negative") else "") + str(total + current)
