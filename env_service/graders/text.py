"""The graders that compare two texts: short ones at once, long ones and what may take forever in helper processes.

TextComparer.reward(grader, attempt) ─┬─ short and plain ─► here
                                      └─ else ─► a place, fair between tenants ─► a helper process, with a time limit
"""

from typing import Any

import msgspec

from common.children.helpers import Helper, HelperKilled, HelperPool
from common.sharing.places import Places
from common.tasks import templates
from common.tasks.graders import MathGrader, StringCheck, TextSimilarity
from env_service import work
from env_service.failures import GraderFailed
from env_service.graders.attempt import Attempt
from env_service.graders.comparing import Question, plainly_equal, string_check

HELPER = "env_service.graders.comparing"
"""The program of the helpers."""
START_S = 30.0
"""Time to import the libraries of a helper on a busy machine."""
MAX_HELPERS = 5
"""Helpers that may be killed over one question, idle ones among them."""
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
            kind: GraderHelpers(kind, first=msgspec.msgpack.encode(first)) for kind, first in _FIRST.items()
        }

    async def close(self) -> None:
        for helpers in self._helpers.values():
            await helpers.close()

    async def reward(self, grader: TextGrader, attempt: Attempt, allowance: work.Allowance) -> float:
        """Raises InvalidInput if the texts cannot be compared, GraderFailed if that takes too long."""
        reward = _at_once(grader, attempt)
        if reward is not None:
            return reward
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
            equal = None if texts is None else plainly_equal(*texts, fallback=grader.fallback)
            return None if equal is None else float(equal)


def _short(grader: StringCheck | MathGrader, attempt: Attempt, most: int) -> tuple[str, str] | None:
    """The texts to compare; None if one is long, or takes long to make."""
    if len(attempt.output_text) > SHORT_CHARACTERS:
        return None
    sample = attempt.sample if "output_json" in grader.input + grader.reference else attempt.unparsed
    text = templates.render_short(grader.input, attempt.item, sample, most=most)
    reference = templates.render_short(grader.reference, attempt.item, sample, most=most)
    return None if text is None or reference is None else (text, reference)


class GraderHelpers:
    """Asks one helper at a time, or two for two tenants: see `Places`. For many tasks; `close` when done."""

    def __init__(self, name: str, *, first: bytes) -> None:
        """`name`: of the grader, for errors. `first`: a question that a new process must answer first."""
        self._name = name
        self._first = first
        self._places = Places(lambda: 1)
        self._pool = HelperPool(HELPER, variables={"OPENBLAS_NUM_THREADS": "1"})
        self.close = self._pool.close

    async def ask(self, question: bytes, allowance: work.Allowance) -> Any:
        """Its time begins with its turn. A helper that others kill, as the kernel does when memory runs out, is replaced.
        Raises InvalidInput if it is refused, GraderFailed if it takes too long or too much memory."""
        async with work.place(self._places):
            for _ in range(MAX_HELPERS):
                try:
                    async with self._pool.helper() as helper:
                        return await self._ask(helper, question, allowance)
                except HelperKilled:
                    continue
                except (TimeoutError, ConnectionError) as error:
                    timed_out = isinstance(error, TimeoutError)
                    reason = f"longer than {allowance.seconds:g} seconds" if timed_out else "too much memory"
                    raise GraderFailed(f"{self._name}: comparing the texts took {reason}") from error
        raise GraderFailed(f"{self._name}: the process that compares the texts was killed {MAX_HELPERS} times")

    async def _ask(self, helper: Helper, question: bytes, allowance: work.Allowance) -> Any:
        if helper.is_new:
            async with work.time_limit(START_S):
                await helper.ask(self._first)
        with work.charged(), allowance.spending():
            async with work.time_limit(allowance.left_s):
                return await helper.ask(question)
