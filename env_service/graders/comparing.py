"""Compares two texts in a helper process: what takes long, or may take forever.

As a program (`python -m env_service.graders.comparing`) this file is the helper.
"""

import os

import msgspec

from common.children.helpers import serve
from common.errors import InvalidInput
from common.tasks import templates
from env_service.graders import math
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
    asked = msgspec.msgpack.decode(question, type=Question)
    attempt = decoded(asked.attempt)
    text = templates.render(asked.input, attempt.item, attempt.sample)
    reference = templates.render(asked.reference, attempt.item, attempt.sample)
    match asked.type:
        case "math":
            return float(math.equal(text, reference, fallback=asked.fallback))
        case "text_similarity":
            return _similarity(asked.how, text, reference)
        case _:
            return string_check(asked.how, text, reference)


def _similarity(metric: str, text: str, reference: str) -> float:
    if max(len(text), len(reference)) > MAX_CHARACTERS:
        raise InvalidInput(f"texts of more than {MAX_CHARACTERS} characters are not compared")
    # imported here: only the helpers that measure similarity need its libraries
    from env_service.graders.similarity import similarity

    return similarity(metric, text, reference)


if __name__ == "__main__":
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nothing shows what its libraries print
    serve(reward, memory_bytes=MEMORY_BYTES)
