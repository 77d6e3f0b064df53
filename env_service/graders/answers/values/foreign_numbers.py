"""Numbers in words of German, Dutch, French, Spanish, Italian, Portuguese, Russian and Chinese: `fünfunddreißig`, `三十五`."""

import re

_NAMES = """
1 ein eins een un une uno una um uma один одна 一 | 2 zwei twee deux dos due dois duas два две 二 两 |
3 drei drie trois tres tre três три 三
4 vier quatre cuatro quattro quatro четыре 四 | 5 fünf vijf cinq cinco cinque пять 五 | 6 sechs zes six seis sei шесть 六
7 sieben zeven sept siete sette sete семь 七 | 8 acht huit ocho otto oito восемь 八 | 9 neun negen neuf nueve nove девять 九
10 zehn tien dix diez dieci dez dezesse dieci десять | 11 elf onze once undici одиннадцать
12 zwölf twaalf douze doce dodici doze двенадцать | 13 dreizehn dertien treize trece tredici treze тринадцать
14 vierzehn veertien quatorze catorce quattordici catorze четырнадцать | 15 fünfzehn vijftien quinze quince quindici пятнадцать
16 sechzehn zestien seize dieciséis sedici dezesseis шестнадцать | 17 siebzehn zeventien diecisiete diciassette dezessete семнадцать
18 achtzehn achttien dieciocho diciotto dezoito восемнадцать | 19 neunzehn negentien diecinueve diciannove dezenove девятнадцать
20 zwanzig twintig vingt veinte veinti venti vent vinte двадцать | 30 dreißig dreissig dertig trente treinta trenta trent trinta тридцать
40 vierzig veertig quarante cuarenta quaranta quarant quarenta сорок
50 fünfzig vijftig cinquante cincuenta cinquanta cinquant cinquenta пятьдесят
60 sechzig zestig soixante sesenta sessanta sessant sessenta шестьдесят | 70 siebzig zeventig septante setenta settanta settant семьдесят
80 achtzig tachtig quatrevingts quatrevingt quatre-vingts quatre-vingt ochenta ottanta ottant oitenta восемьдесят
90 neunzig negentig nonante noventa novanta novant девяносто | 100 ciento cento сто | 200 doscientos doscientas duzentos duzentas двести
300 trescientos trescientas trezentos trezentas триста | 400 cuatrocientos quatrocentos четыреста | 500 quinientos quinhentos пятьсот
600 seiscientos seiscentos шестьсот | 700 setecientos setecentos семьсот | 800 ochocientos oitocentos восемьсот
900 novecientos novecentos девятьсот
"""
_VALUES = {name: int(names.split()[0]) for names in re.split(r"[|\n]", _NAMES.strip()) for name in names.split()[1:]}
_FACTORS = {
    "十": 10, "hundert": 100, "honderd": 100, "cents": 100, "cent": 100, "cien": 100, "百": 100,
    "tausend": 1000, "duizend": 1000, "mille": 1000, "mila": 1000, "mil": 1000, "тысяча": 1000, "тысячи": 1000, "千": 1000,
}  # fmt: skip
_PART = "|".join(sorted({*_VALUES, *_FACTORS}, key=len, reverse=True))
_AND = "und|en|ën|et|y|e|и"
_RUN = re.compile(
    rf"(?<![^\W一-龥])(?:minus )?(?:{_PART})(?:(?:[ -](?:{_AND})[ -]|und|en|ën|[ -]?)(?:{_PART})){{0,12}}+(?![^\W一-龥])",
    re.IGNORECASE,
)
_EACH = re.compile(rf"und(?!e)|{_PART}", re.IGNORECASE)


def foreign_spelled(text: str) -> str:
    """The text with digits for its numbers in words above twelve; smaller ones often count nothing."""
    return _RUN.sub(_as_digits, text)


def foreign_number(text: str) -> int | None:
    """The number that the words of a whole text name."""
    return _value(text) if _RUN.fullmatch(text) else None


def _as_digits(run: re.Match[str]) -> str:
    few = run[0].casefold() in _FACTORS or abs(_value(run[0])) <= 12
    return run[0] if few else str(_value(run[0]))


def _value(words: str) -> int:
    total, section, pending = 0, 0, 0
    for part in _EACH.findall(words.casefold()):
        if part not in _FACTORS:
            pending += _VALUES.get(part, 0)
        elif _FACTORS[part] < 1000:
            section, pending = section + (pending or 1) * _FACTORS[part], 0
        else:
            total, section, pending = total + (section + pending or 1) * _FACTORS[part], 0, 0
    value = total + section + pending
    return -value if words.casefold().startswith("minus ") else value
