"""`string_check` and `text_similarity`: rewards from comparing two texts. Pure functions."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportArgumentType=false
# none of these libraries is typed

from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
from nltk.translate.gleu_score import sentence_gleu
from rapidfuzz import fuzz
from rouge_score import rouge_scorer

from common.errors import InvalidInput

MAX_CHARACTERS = 20_000
"""The most characters of a text: some metrics take time in proportion to the product of the lengths."""


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


def similarity(metric: str, text: str, reference: str) -> float:
    """Returns 0 to 1. White space separates words; for ROUGE a word is a run of letters and digits. Raises InvalidInput."""
    if max(len(text), len(reference)) > MAX_CHARACTERS:
        raise InvalidInput(f"texts of more than {MAX_CHARACTERS} characters are not compared")
    if metric == "fuzzy_match":
        return fuzz.ratio(text, reference) / 100
    if not text.split() or not reference.split():
        return float(text.split() == reference.split())
    if metric == "bleu":
        smooth = SmoothingFunction().method1
        return float(sentence_bleu([reference.split()], text.split(), smoothing_function=smooth))
    if metric == "gleu":
        return float(sentence_gleu([reference.split()], text.split()))
    return _rouge(metric, text, reference)


def _rouge(metric: str, text: str, reference: str) -> float:
    name = "rougeL" if metric == "rouge_l" else metric.replace("rouge_", "rouge")
    return float(rouge_scorer.RougeScorer([name]).score(reference, text)[name].fmeasure)
