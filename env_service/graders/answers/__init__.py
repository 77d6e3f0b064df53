"""The final answer of a text, and whether two are equal. Pure functions, in time proportional to the text.

    text ─► plain ─► final ─► answer ─┐
                                      ├─► equality ─► equal, different, or a question for math-verify
    reference ──────────────► answer ─┘

Its files:

    plain.py              rewrites a text in one plain form: digits, signs, math delimiters, decimal commas
    numbers.py            numbers with their signs, currencies, percent, and in English words
    foreign_numbers.py    numbers in words of other languages
    expressions.py        the value at the beginning of a text, and inside of math
    sentences.py          the result that the last sentence states
    final.py              finds the final answer
    sizes.py              tells what would take long to compute
    vocabulary.py         the words of several languages that name, doubt and take back an answer
    equality.py           compares two answers, exactly where they are plain
"""
