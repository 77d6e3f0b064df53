"""Rewrites what people and models write into one plain form, which the rest of the package reads.

    digits of any script, full-width signs   0-9 and ASCII
    $...$, $$...$$, \\(...\\), \\[...\\], align  ⟦...⟧, without line breaks
    **bold**                                 ⟪bold⟫
    a dollar sign that delimits nothing      ＄
    1.234,56 in a text that counts so        1234.56
    forty-two, two thirds                    42, 2/3; the words up to twelve stay, as they often count nothing

All patterns take time in proportion to the text.
"""

import re
import unicodedata

from env_service.graders.answers.values.foreign_numbers import foreign_spelled
from env_service.graders.answers.values.numbers import spelled
from env_service.graders.answers.vocabulary import COMMA_LANGUAGES, ENGLISH

MAX_CHARACTERS = 10_000
"""Characters that are read: the end of a longer text."""

_SIGNS = str.maketrans(
    dict.fromkeys("⟦⟧⟪⟫", " ")
    | dict.fromkeys("\r\u200b\ufeff\u200e\u200f", "")
    | {"＄": "$"}
    | dict.fromkeys("\u00a0\u2007\u2009\u200a\u202f\u3000\t", " ")
    | dict.fromkeys("−﹣－‐‑", "-")
    | dict.fromkeys("⟹⟶", "→")
    | dict.fromkeys("٫．", ".")
    | dict.fromkeys("٬", ",")
    | {"∞": "\\infty", "≥": "\\geq ", "≤": "\\leq ", "≡": "\\equiv "}
    | dict(zip("％：（）＝＋，［］｛｝＃＊／", "%:()=+,[]{}#*/", strict=True))
    | {sign: " " + unicodedata.normalize("NFKC", sign).replace("⁄", "/") for sign in "½¼¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
    | {"⁄": "/"}
    | {"’": "'", "‘": "'", "“": '"', "”": '"', "„": '"', "«": '"', "»": '"', "⋅": "·", "∗": "*", "٪": "%"}
)
_BLANKS = re.compile(r"\s{50,}")
"""They say no more than one, or a blank line; patterns would take seconds for thousands."""
_CALCULATOR = re.compile(
    r"<tool_call>[^<]*</tool_call>|~~[^~\n]{1,200}~~|\\(?:begin|end)\{(?:sol\w*|ans\w*|proof|document|center|quote)\}"
    r"|```[ \t]*(?:py\w*|js|javascript|c|cpp|java|r|matlab)\n[^`]*```|\\(?:blacksquare|square|qed|hfill)(?![A-Za-z])"
    r"|\\(?:label|tag)\{[^{}]*\}"
    r"|\b(?:QED|Q\.E\.D\.?)(?!\w)|<<[^<>=\n]{0,100}=[^<>\n]{0,100}>>|(?<=\d)(?:/|[.,](?=[-–—](?!\w)))[-–—]|(?<=[a-z] )(?:\.{3}|…)(?=\d)"
)
_ENUMERATOR = re.compile(r"(?<=[\s,:])\([1-9]\)\s(?=[a-z])")
_BOLD_TAGS = re.compile(r"</?(?:b|strong)>", re.IGNORECASE)
_TAGS = re.compile(r"</?(?:p|div|span|i|em|u|code|br|h\d|ul|ol|li|center|mark|font)(?: [^<>]{0,80})?/?>", re.IGNORECASE)
_OPENING = re.compile(r"\\[(\[]|\\begin\{(?:align|aligned|equation|gather|gathered|eqnarray|multline)\*?\}")
_CLOSING = re.compile(r"\\[)\]]|\\end\{(?:align|aligned|equation|gather|gathered|eqnarray|multline)\*?\}")
_DISPLAY = re.compile(r"\$\$([^$]*+)\$\$")
_INLINE = re.compile(r"\$(?=\S)([^$\n]*+)(?<=\S)\$(?!\d)")
_MATH = re.compile(r"⟦([^⟦⟧]*+)⟧")
_BOLD = re.compile(r"\*\*(?=\S)([^*\n]++)(?<=\S)\*\*")
_ITALIC = re.compile(
    r"(?<![\w*)⟧])(?:\*(?=[^\s*])([^*\n⟦⟧]{1,80}+)(?<=\S)\*|_(?=[^\s_])([^_\n⟦⟧]{1,80}+)(?<=\S)_)(?![\w*(]|\s*\d)"
)
_GROUPED = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!:; ]|~|')(?=\d{3}(?!\d))")
_PI = re.compile(r"(?<![α-ωά-ώ])π(?![α-ωά-ώ])(?P<apart>(?=[A-Za-z]))?")
_POWERS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_DECIMAL_BRACES = re.compile(r"(?<=\d)\{,\}(?=\d)")
_ROOT = re.compile(r"√\s*(?:\(([^()\n]*+)\)|\{([^{}\n]*+)\}|(\d++|[a-z]))")
_SUPERSCRIPTS = re.compile(r"[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_SUBSCRIPTS = re.compile(r"(?<=\w)[₀₁₂₃₄₅₆₇₈₉ₙ]+")
_NEGATIVE = re.compile(
    r"(?<![\w-])(?:negative|(?<=is )minus|(?<=be )minus|(?<=: )minus|(?<='s )minus"
    r"|(?<=of )minus|(?<=to )minus|(?<=at )minus|(?<=equals )minus|(?<=gives )minus|^minus) (?=[$€£]?\d)",
    re.IGNORECASE,
)
_LENGTH = r"\d+(?:\.\d+)?(?: ?(?:[cmk]?m|feet|ft|inches|in|yards|met(?:er|re)s|centimet(?:er|re)s|units))?"
_MEASURES = [
    (re.compile(r"(?<![\d:.,$])(1[0-2]|[1-9])\s?([ap])\.?\s?m\b", re.IGNORECASE), r"\1:00 \2m"),
    (re.compile(r"(?<![\d:.,$])(1[0-2]|[1-9]) o'clock"), r"\1:00"),
    (re.compile(r"(?<![\d:.,$])(1[0-2]|0?[1-9])\.([0-5]\d)(?= ?[ap]\.?\s?m\b)", re.IGNORECASE), r"\1:\2"),
    (
        re.compile(r"(?<=\d)\s?(?:ft|feet|foot|')\.?,?\s?(?:and )?(\d+(?:\.\d+)?)\s?(?:in(?![\w ])\.?|\"|'')"),
        r" feet \1 inches",
    ),
    (
        re.compile(
            rf"(^|\b(?:is|are|measures?|be|dimensions|size)|:)( ?)({_LENGTH}) by ({_LENGTH})(?=[^\w/]|$)", re.IGNORECASE
        ),
        r"\1\2(\3, \4)",
    ),
    (
        re.compile(r"\b([a-z]) lies (?:strictly )?between (-?\d[\d./]*) and (-?\d[\d./]*)"),
        r"\2 < \1 < \3",
    ),
    (re.compile(r"\ban? (hour|day|week|year|minute|mile) and a half\b", re.IGNORECASE), r"1.5 \1s"),
    (re.compile(r"\b(?:one|1)[ -]in[ -](?:a )?(?=\d)", re.IGNORECASE), "1 in "),
    (re.compile(r"\bhalf an hour\b", re.IGNORECASE), "0.5 hours"),
    (re.compile(r"(?<=[$€£])(\d+) and (\d\d) (?:cents|pence)\b"), r"\1.\2"),
    (re.compile(r"(?<=\d) in(?=\.?$)", re.MULTILINE), " inches"),
    (re.compile(r"(?<=\d) ?h ?(?=[0-5]\d\b(?! ?m))"), ":"),
    (re.compile(r"\ban (hour and \d)", re.IGNORECASE), r"1 \1"),
]
"""Measures in words and signs, and how the rest of the package reads them."""
_HOURS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_CLOCK = re.compile(rf"\b(half past|(?:a )?quarter (?:past|to)) ({'|'.join(_HOURS)}|1[0-2]|[1-9])\b", re.IGNORECASE)
_ONE_IN = re.compile(rf"\bone[ -]in[ -](?:an? )?({'|'.join(_HOURS[1:])})\b", re.IGNORECASE)
_POUND = re.compile(r"\\(?:pounds|textsterling)(?![A-Za-z])|\\text\{£\}")
_EURO = re.compile(r"\\(?:euro|texteuro|EUR)(?![A-Za-z])(?:\{\})?|\\text\{€\}")


def plain(text: str) -> str:
    """The plain form of a text's last `MAX_CHARACTERS` characters."""
    text = _BLANKS.sub(lambda blanks: "\n\n"[: blanks[0].count("\n")] or " ", text[-MAX_CHARACTERS:].translate(_SIGNS))
    if not text.isascii():
        text = _PI.sub(lambda pi: "\\pi" + " " * (pi["apart"] is not None), text)
        text = "".join(_digit(c) if c > "\x7f" else c for c in text)
        text = re.sub(r"(?<![\w.)])[–—](?=[\d$€£¥])", "-", text)
    for pattern, written in _MEASURES:
        text = pattern.sub(written, text)
    text = _CLOCK.sub(_clock, text)
    text = _ONE_IN.sub(lambda said: f"1 in {_HOURS.index(said[1].casefold()) + 1}", text)
    if "(1)" in text and "(2)" in text:
        text = _ENUMERATOR.sub("", text)
    text = _TAGS.sub("", _BOLD_TAGS.sub("**", _CALCULATOR.sub("", text)))
    text = _DECIMAL_BRACES.sub(
        ".", _GROUPED.sub(lambda sign: "," * ("," in sign[0]), _POUND.sub("£", _EURO.sub("€", text)))
    )
    text = _NEGATIVE.sub("-", _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2] or root[3]}}}", text))
    text = _SUPERSCRIPTS.sub(lambda power: "^{" + power[0].translate(_POWERS) + "}", text)
    text = _SUBSCRIPTS.sub(lambda base: "_{" + unicodedata.normalize("NFKC", base[0]) + "}", text)
    text = _with_math_marked(text)
    if comma_is_decimal(text):
        text = foreign_spelled(_NUMBER.sub(_with_point, text))
    elif _CHINESE.search(text):
        text = foreign_spelled(text)
    text = _ITALIC.sub(lambda m: f"⟪{m[1] or m[2]}⟫", _BOLD.sub(r"⟪\1⟫", text))
    return spelled(text)


def _digit(character: str) -> str:
    value = unicodedata.decimal(character, None)
    return character if value is None else str(value)


def _clock(said: re.Match[str]) -> str:
    """`half past six` as 6:30."""
    words, name = said[1].casefold(), said[2].casefold()
    hour = int(name) if name.isdigit() else _HOURS.index(name) + 1
    if words.endswith("to"):
        return f"{(hour - 2) % 12 + 1}:45"
    return f"{hour}:{30 if words == 'half past' else 15}"


def _with_math_marked(text: str) -> str:
    if "matrix" not in text:
        text = text.replace("\\\\", " \n ")
    text = text.replace("\\$", "＄").replace("\\%", "%")
    text = _CLOSING.sub("⟧", _OPENING.sub("⟦", text))
    text = _INLINE.sub(r"⟦\1⟧", _DISPLAY.sub(r"⟦\1⟧", text)).replace("$", "＄")
    return _MATH.sub(
        lambda match: match[0].replace("\n", " ").replace("&", "" if "matrix" not in match[0] else "&"), text
    )


# ---- decimal commas -------------------------------------------------------------------------------------------------

_CYRILLIC = re.compile(r"[а-яА-Я]{2}")
_CHINESE = re.compile(r"[二三四五六七八九十百千][一二三四五六七八九十百千]")
_PRICE = re.compile(
    r"(?<![\d,.])\d{1,3}(?:\.\d{3})+(?:,\d\d)?(?:\s?€|\s(?:Euro|EUR)\b)"
    r"|(?<![\d,.])\d+,\d\d\s?(?:€|EUR\b|zł|kr\b)|(?:€|R＄)\s?\d[\d.]*,\d\d(?!\d)"
)
_DECIMAL_COMMA = re.compile(r"(?<![\d,.(\[])\d+,\d{1,2}(?![\d,])")
_WORD = re.compile(r"[^\W\d_]{2,}")
_NUMBER = re.compile(r"(?<![\d,.(\[^_])\d++(?:[.,]\d++)*+(?![,.]?\d)")


def comma_is_decimal(text: str) -> bool:
    """True for a text in a language that writes `1.234,56`."""
    if _CYRILLIC.search(text) or _PRICE.search(text):
        return True
    foreign = len({word.casefold() for word in COMMA_LANGUAGES.findall(text)})
    if not ENGLISH.search(text) and _DECIMAL_COMMA.search(text) and len(_WORD.findall(text)) > 2:
        return True
    return foreign > 0 and foreign >= len({word.casefold() for word in ENGLISH.findall(text)})


def _with_point(match: re.Match[str]) -> str:
    """`1.234,56` and `12,5` with a point; what is written in the English way (`1,234.56`, `12.5`, `1,234`) as it is."""
    number = match[0]
    if re.fullmatch(r"\d{1,3}(?:\.\d{3})+(?:,\d+)?", number) and not re.fullmatch(r"0\.\d{3}", number):
        return number.replace(".", "").replace(",", ".")
    if re.fullmatch(r"\d+,(?:\d{1,2}|\d{4,})|0,\d+", number):
        return number.replace(",", ".")
    return number
