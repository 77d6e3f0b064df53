"""The final answer of a text, and whether two are equal. Pure functions, in time proportional to the text.

    text ─► plain ─► final ─► answer ─┐
                                      ├─► equality ─► equal, different, or a question for math-verify
    reference ──────────────► answer ─┘

Its files:

    plain.py              rewrites a text in one plain form: digits, signs, math delimiters, decimal commas
    values/               numbers, units and ranges
    expressions.py        the value at the beginning of a text, and inside of math
    candidates.py         numbers in a sentence, and which of them is its result
    results.py            the result that a sentence states
    remarks.py            remarks after a result, explanations of one
    sentences.py          the result that a text ends with
    wording.py            answers in words: names, dates, yes or no, letters of choice
    ending.py             cuts off what follows the answer: questions, checks, remarks
    final.py              finds the final answer
    vocabulary.py         the words of several languages that name, doubt and take back an answer
    equality.py           compares two answers, exactly where they are plain
"""
