"""The measures of `text_similarity`. Some take time in proportion to the product of the texts' lengths."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportArgumentType=false
# none of these libraries is typed

from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
from nltk.translate.gleu_score import sentence_gleu
from rapidfuzz import fuzz
from rouge_score import rouge_scorer


def similarity(metric: str, text: str, reference: str) -> float:
    """Returns 0 to 1. White space separates words; for ROUGE a word is a run of letters and digits."""
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
