"""The graders that compare two texts: short ones at once, long ones and what may take forever in helper processes.

TextComparer.reward(grader, attempt) ─┬─ short and plain ─► here
                                      └─ else ─► a place, fair between tenants ─► a helper process, with a time limit
"""

import msgspec

from common.tasks import templates
from common.tasks.graders import MathGrader, StringCheck, TextSimilarity
from env_service.graders.attempt import Attempt
from env_service.graders.comparing import Question, string_check
from env_service.graders.helper import GraderHelpers
from env_service.graders.math import plainly_equal
from env_service.work import Allowance

HELPER = "env_service.graders.comparing"
"""The program of the helpers."""
SHORT_CHARACTERS = 2048
"""Characters of a text that is compared here by `string_check`: microseconds."""
SHORT_MATH_CHARACTERS = 512
"""Characters of a text in which a final answer is looked for here: usually 1 ms, at worst 15."""

TextGrader = StringCheck | TextSimilarity | MathGrader

_FIRST = {
    "string_check": Question(type="string_check", how="eq", input="", reference="", attempt=Attempt({}, "").encoded),
    "text_similarity": Question(
        type="text_similarity", how="rouge_l", input="a", reference="a", attempt=Attempt({}, "").encoded
    ),
    "math": Question(type="math", input="$\\sqrt{4}$", reference="$\\sqrt{3}$", attempt=Attempt({}, "").encoded),
}
"""Asked first of each new helper: it loads its libraries."""


class TextComparer:
    """Compares texts. Safe to use from many tasks; `close` ends the helpers."""

    def __init__(self) -> None:
        self._helpers = {
            kind: GraderHelpers(kind, HELPER, first=msgspec.msgpack.encode(first)) for kind, first in _FIRST.items()
        }

    async def close(self) -> None:
        for helpers in self._helpers.values():
            await helpers.close()

    async def reward(self, grader: TextGrader, attempt: Attempt, allowance: Allowance) -> float:
        """Raises InvalidInput if the texts cannot be compared, GraderFailed if that takes too long."""
        found = _at_once(grader, attempt)
        if found is not None:
            return found
        question = msgspec.msgpack.encode(_question(grader, attempt))
        return await self._helpers[grader.type].ask(question, allowance)


def _question(grader: TextGrader, attempt: Attempt) -> Question:
    how = ""
    if isinstance(grader, StringCheck):
        how = grader.operation
    elif isinstance(grader, TextSimilarity):
        how = grader.evaluation_metric
    fallback = not isinstance(grader, MathGrader) or grader.fallback
    return Question(
        type=grader.type,
        how=how,
        fallback=fallback,
        input=grader.input,
        reference=grader.reference,
        attempt=attempt.encoded,
    )


def _at_once(grader: TextGrader, attempt: Attempt) -> float | None:
    """The reward where it takes no time; else None."""
    match grader:
        case TextSimilarity():
            return None
        case StringCheck():
            texts = _short(grader, attempt, SHORT_CHARACTERS)
            return None if texts is None else string_check(grader.operation, *texts)
        case MathGrader():
            texts = _short(grader, attempt, SHORT_MATH_CHARACTERS)
            found = None if texts is None else plainly_equal(*texts, fallback=grader.fallback)
            return None if found is None else float(found)


def _short(grader: StringCheck | MathGrader, attempt: Attempt, most: int) -> tuple[str, str] | None:
    """The texts to compare; None if one is long, or takes long to make."""
    if len(attempt.output_text) > SHORT_CHARACTERS:
        return None
    sample = attempt.sample if "output_json" in grader.input + grader.reference else attempt.unparsed
    text = templates.render_short(grader.input, attempt.item, sample, most=most)
    reference = templates.render_short(grader.reference, attempt.item, sample, most=most)
    return None if text is None or reference is None else (text, reference)
