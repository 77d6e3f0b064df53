"""`string_check` and `text_similarity`: rewards from comparing two texts."""

from common.errors import InvalidInput
from env_service.graders.helper import HelperPool

MAX_CHARACTERS = 20_000
"""The most characters of a text whose similarity is measured."""


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


class TextComparer:
    """Measures how alike two texts are, in a helper process. `close` when done."""

    def __init__(self) -> None:
        self._helpers = HelperPool("text_similarity", "env_service.graders.similarity", first=("rouge_l", "a", "a"))
        self.close = self._helpers.close

    async def similarity(self, metric: str, text: str, reference: str, *, timeout_s: float) -> float:
        """Returns 0 to 1. Raises InvalidInput, GraderFailed."""
        if max(len(text), len(reference)) > MAX_CHARACTERS:
            raise InvalidInput(f"texts of more than {MAX_CHARACTERS} characters are not compared")
        return await self._helpers.ask(metric, text, reference, timeout_s=timeout_s)
