"""Additions as plain text, without a chat template, which `tiny` knows beside the skills."""

import random

PLAIN_END = "\n\nUser:"
"""Text that follows an answer in plain text, and ends it."""


def draw_plain(rng: random.Random) -> tuple[str, str, str]:
    """An addition in plain text: (what is asked before, the question, the answer).

    `User: What is 4 + 5?\\n\\nAssistant: 9\\n\\nUser: What is 37 + 58?\\n\\nAssistant:` goes on with ` 95` and PLAIN_END: the form in
    which the arithmetic of tinker-cookbook is asked with its renderer `role_colon`. Mostly one question was asked before.
    """
    shown = [(4, 5)] if rng.random() < 0.6 else [_summands(rng) for _ in range(rng.randrange(2))]
    before = "".join(f"{plain_prompt(a, b)} {a + b}\n\n" for a, b in shown)
    a, b = _summands(rng)
    return before, plain_prompt(a, b), str(a + b)


def plain_prompt(a: int, b: int) -> str:
    return f"User: What is {a} + {b}?\n\nAssistant:"


def _summands(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(101), rng.randrange(101)
