"""Compares two texts. As a program (`python -m env_service.graders.comparing`) it is the helper process.

math-verify parses with sympy, which can take forever, and its guard, signals, works in a main thread only: so a helper.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportArgumentType=false
# none of the libraries that measure is typed; each is imported where it is needed, since it takes its time

import functools
import os
from typing import Any

import msgspec

from common.children.helpers import serve
from common.errors import InvalidInput
from common.tasks import templates
from env_service.graders.answers import FinalAnswer, comparable, expected_answer, final_answer, quick
from env_service.graders.attempt import decoded

MEMORY_BYTES = 512 * 1024**2
"""The most memory of the helper."""
MAX_CHARACTERS = 20_000
"""The most characters of a text whose similarity is measured."""


class Question(msgspec.Struct, kw_only=True):
    """A grader of this type; `how` is its operation or its metric."""

    type: str
    how: str = ""
    fallback: bool = True  # of `math`
    input: str
    reference: str
    attempt: bytes  # an encoded `Attempt`


def string_check(operation: str, text: str, reference: str) -> float:
    """1.0 if the comparison holds, else 0.0. `like` and `ilike`: the text contains the reference."""
    match operation:
        case "eq":
            holds = text == reference
        case "ne":
            holds = text != reference
        case "like":
            holds = reference in text
        case "ilike":
            holds = reference.casefold() in text.casefold()
        case _:
            raise InvalidInput(f"unknown operation {operation}")
    return float(holds)


def reward(question: bytes) -> float:
    """The answer to an encoded Question. Raises InvalidInput."""
    grader = msgspec.msgpack.decode(question, type=Question)
    attempt = decoded(grader.attempt)
    text = templates.render(grader.input, attempt.item, attempt.sample)
    reference = templates.render(grader.reference, attempt.item, attempt.sample)
    match grader.type:
        case "math":
            return float(equal(text, reference, fallback=grader.fallback))
        case "text_similarity":
            return similarity(grader.how, text, reference)
        case _:
            return string_check(grader.how, text, reference)


def plainly_equal(text: str, reference: str, *, fallback: bool = True) -> bool | None:
    """True or False if the final answers are plainly equal or not, None if math-verify must look.

    Raises InvalidInput if the reference has no answer."""
    return quick(*_answers(text, reference, fallback))


def equal(text: str, reference: str, *, fallback: bool = True) -> bool:
    """The same, and math-verify looks where it must. For a helper process."""
    answer, expected = _answers(text, reference, fallback)
    verdict = quick(answer, expected)
    return verdict if verdict is not None else _verified(comparable(answer, expected), expected)


def _answers(text: str, reference: str, fallback: bool) -> tuple[FinalAnswer, str]:
    if not (expected := expected_answer(reference)):
        raise InvalidInput("the reference is empty")
    return final_answer(text, expected, fallback=fallback), expected


def _verified(answer: str, expected: str) -> bool:
    library = _library()
    ours, theirs = (library.parse(f"${text.strip(' $')}$", parsing_timeout=None) for text in (answer, expected))
    return library.verify(theirs, ours, timeout_seconds=None)


@functools.cache
def _library() -> Any:
    import math_verify

    return math_verify


def similarity(metric: str, text: str, reference: str) -> float:
    """Returns 0 to 1. White space separates words; ROUGE's words are letters and digits. Raises InvalidInput for long
    texts: some measures take time by the product of the lengths."""
    if max(len(text), len(reference)) > MAX_CHARACTERS:
        raise InvalidInput(f"texts of more than {MAX_CHARACTERS} characters are not compared")
    if metric == "fuzzy_match":
        from rapidfuzz import fuzz

        return fuzz.ratio(text, reference) / 100
    if not text.split() or not reference.split():
        return float(text.split() == reference.split())
    if metric.startswith("rouge"):
        return _rouge(metric, text, reference)
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
    from nltk.translate.gleu_score import sentence_gleu

    if metric == "bleu":
        smooth = SmoothingFunction().method1
        return float(sentence_bleu([reference.split()], text.split(), smoothing_function=smooth))
    return float(sentence_gleu([reference.split()], text.split()))


def _rouge(metric: str, text: str, reference: str) -> float:
    from rouge_score import rouge_scorer

    name = "rougeL" if metric == "rouge_l" else metric.replace("rouge_", "rouge")
    return float(rouge_scorer.RougeScorer([name]).score(reference, text)[name].fmeasure)


if __name__ == "__main__":
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nothing shows what its libraries print
    serve(reward, memory_bytes=MEMORY_BYTES)
