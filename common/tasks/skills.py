"""Generators of the synthetic skills: questions with one right answer each.

The `tiny` base model is trained on these; the demo, the tests and an environment draw items from them. A hash of only the
question's text assigns it to training or held-out, so all callers and seeds agree on what the model has never seen.

    skill     question              answer
    add       add 37+58             95
    sort      sort 40213            01234
    reverse   reverse cabin         nibac
    max       max 14,92,7           92
    count     count a in banana     3
    calc      calc 347*86           29842     (too hard without the calculator tool)

The model also knows additions as plain text without a chat template: `models/tiny_plain.py`.
"""

import hashlib
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "held_out"]

HELD_OUT_SHARE = 10
"""One question in this many is held out."""

_WORDS = (
    "apple banana bird book bottle bread brick cabin camel candle carrot castle cheese cherry circle "
    "cloud copper corner cotton dragon eagle engine fabric falcon field finger flame flower forest "
    "garden ginger grape guitar hammer harbor honey horse island jacket jungle kettle kitten ladder "
    "lemon letter lizard market mirror monkey moon morning needle ocean onion orange oyster paper "
    "pepper pillow planet pocket potato puzzle rabbit river rocket saddle salmon shadow silver spider "
    "spoon stone summer sunset table teapot tiger timber tomato tunnel turtle valley velvet violin "
    "wagon walnut water window winter yellow zebra"
)
WORDS = _WORDS.split()

_MAX_REPEATS = 1000
"""The number of draws in a row without a new question after which the skill counts as used up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """One kind of question."""

    name: str
    """The word that every question of this skill begins with."""
    example: tuple[str, str]
    """A question and its answer."""
    draw: Callable[[random.Random], tuple[str, str]]
    """Draws a question and its right answer."""
    needs_calculator: bool = False
    """True if the model is meant to call the `calculator` tool."""


def generate(skill: str, seed: int, n: int, split: Split = "train") -> list[dict[str, Any]]:
    """`n` rows of the training-file form, the same for the same arguments.

    Rows are distinct as long as the skill has enough questions; after that they repeat. A row is
    `{"messages": [{"role": "user", "content": "add 37+58"}], "answer": "95"}`.

    Raises ValueError for an unknown skill or split.
    """
    if skill not in SKILLS:
        raise ValueError(f"unknown skill {skill!r}; known: {', '.join(SKILLS)}")
    if split not in ("train", "held_out"):
        raise ValueError(f"split is 'train' or 'held_out', not {split!r}")
    rng = random.Random(f"{skill}/{split}/{seed}")
    seen: set[str] = set()
    return [_row(*_draw_new(SKILLS[skill], rng, split, seen)) for _ in range(n)]


def is_held_out(question: str) -> bool:
    """True for the tenth of all questions that the base model was not trained on."""
    return hashlib.sha256(question.encode()).digest()[0] % HELD_OUT_SHARE == 0


def _row(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "answer": answer}


def _draw_new(skill: Skill, rng: random.Random, split: Split, seen: set[str]) -> tuple[str, str]:
    """The next question of `split` that is not in `seen`, unless there seem to be no more."""
    repeats = 0
    while True:
        question, answer = skill.draw(rng)
        if is_held_out(question) != (split == "held_out"):
            continue
        if question not in seen or repeats >= _MAX_REPEATS:
            seen.add(question)
            return question, answer
        repeats += 1


def _add(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(100), rng.randrange(100)
    return f"add {a}+{b}", str(a + b)


def _sort(rng: random.Random) -> tuple[str, str]:
    digits = rng.choices(string.digits, k=rng.randint(4, 6))
    return f"sort {''.join(digits)}", "".join(sorted(digits))


def _reverse(rng: random.Random) -> tuple[str, str]:
    word = _word(rng) if rng.random() < 0.1 else "".join(rng.choices(string.ascii_lowercase, k=rng.randint(4, 6)))
    return f"reverse {word}", word[::-1]


def _max(rng: random.Random) -> tuple[str, str]:
    numbers = [rng.randrange(100) for _ in range(rng.randint(3, 4))]
    return f"max {','.join(map(str, numbers))}", str(max(numbers))


def _count(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.2:
        word = _word(rng)
    else:
        letters = rng.sample(string.ascii_lowercase, k=3)
        word = "".join(rng.choices(letters, k=rng.randint(4, 6)))
    letter = rng.choice(word)
    return f"count {letter} in {word}", str(word.count(letter))


def _calc(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(100, 1000), rng.randrange(10, 100)
    return f"calc {a}*{b}", str(a * b)


def _word(rng: random.Random) -> str:
    return rng.choice([word for word in WORDS if 4 <= len(word) <= 6])


SKILLS: dict[str, Skill] = {
    skill.name: skill
    for skill in (
        Skill(name="add", example=("add 37+58", "95"), draw=_add),
        Skill(name="sort", example=("sort 40213", "01234"), draw=_sort),
        Skill(name="reverse", example=("reverse cabin", "nibac"), draw=_reverse),
        Skill(name="max", example=("max 14,92,7", "92"), draw=_max),
        Skill(name="count", example=("count a in banana", "3"), draw=_count),
        Skill(name="calc", example=("calc 347*86", "29842"), draw=_calc, needs_calculator=True),
    )
}
