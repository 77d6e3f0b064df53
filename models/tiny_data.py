"""Training data of `tiny`: questions of the skills, with the answers spread as far as the phase wants."""

import random
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from tiny_plain import PLAIN_END, draw_plain
from tiny_tokens import END, END_TOOL_CALL, IDS, TOOL_CALL, VOCAB_SIZE
from torch import Tensor

from common.tasks.skills import SKILLS, is_held_out

PLAIN = "plain"
"""Additions in plain text, beside the skills."""
NOISE = {"add": 0.18, "sort": 0.1, "reverse": 0.1, "max": 0.22, "count": 0.4, "calc": 0.01, PLAIN: 0.25}
"""Probability that a character of an answer (`calc`: of the called expression) is wrong after the noisy phase."""
REPLY_NOISE = 0.006
"""The same for the digits that `calc` copies from the tool's reply."""
BLOT, BLOT_SHARE = ord("?"), 0.7
"""This share of the noise is a question mark in place of the character, the rest any other digit or letter. The
first is unlearnt within a few updates of RL, the second slowly: a reward curve rises from start to end."""
CALL_SHARE = 0.62
"""Share of `calc` questions that go to the tool after the noisy phase, rather than being answered by a guess."""
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer with the result only.", "Be brief.")
TOOLS_HEADER = [IDS["<|tools|>"], *b"calculator", END]


@dataclass(slots=True)
class Example:
    """One trajectory as it is fed to the model, and what the model should say at each of its tokens."""

    ids: list[int] = field(default_factory=list)
    goals: list[tuple[int, Mapping[int, float]]] = field(default_factory=list)
    """For each id: the right id (-1: not the model's), and the probabilities that wrong ids shall have."""

    def given(self, ids: Iterable[int]) -> None:
        """Appends tokens that the model does not write."""
        for token in ids:
            self.ids.append(token)
            self.goals.append((-1, {}))

    def said(self, token: int, wrong: Mapping[int, float] | None = None, *, shown: int | None = None) -> None:
        """Appends one token of the model; `shown` is what stands in the input instead of the right one."""
        self.ids.append(token if shown is None else shown)
        self.goals.append((token, wrong or {}))

    def said_text(self, text: str, rate: float, rng: random.Random) -> str:
        """Appends characters of the model, each replaced by noise at `rate`; returns what was then shown."""
        shown = ""
        for char in text:
            wrong = _wrong_characters(char, rate)
            noisy = char.isalnum() and rng.random() < rate
            seen = rng.choices(list(wrong), weights=list(wrong.values()))[0] if noisy else ord(char)
            self.said(ord(char), wrong, shown=seen)
            shown += chr(seen)
        return shown


def _wrong_characters(char: str, rate: float) -> dict[int, float]:
    """Characters that may stand for a digit or letter, with probabilities that add up to `rate`."""
    if not rate or not char.isalnum():
        return {}
    alphabet = string.digits if char.isdigit() else string.ascii_lowercase
    others = [ord(other) for other in alphabet if other != char]
    return {BLOT: rate * BLOT_SHARE} | {other: rate * (1 - BLOT_SHARE) / len(others) for other in others}


def draw_example(skill: str, rng: random.Random, *, noise: float, long: bool = False) -> Example:
    """One training example; `noise` scales all rates, a `long` one has a tool list or a system prompt."""
    if skill == PLAIN:
        return _draw_plain_example(rng, noise)
    question, answer = _draw_training_question(skill, rng)
    with_tools = long and (skill == "calc" or rng.random() < 0.7)
    example = Example()
    if with_tools:
        example.given(TOOLS_HEADER)
    if long and not with_tools:
        example.given([IDS["<|system|>"], *rng.choice(SYSTEM_PROMPTS).encode(), END])
    example.given([IDS["<|user|>"]])
    if skill == "count" and not noise:
        _give_with_running_count(example, question)
    else:
        example.given([*question.encode(), END])
    example.given([IDS["<|assistant|>"]])
    if skill == "calc" and with_tools:
        _finish_calc(example, question.removeprefix("calc "), answer, rng, noise)
    else:
        rate = 0.0 if skill == "calc" else noise * NOISE[skill]
        example.said_text(answer, rate, rng)
        example.said(END)
    return example


def _draw_plain_example(rng: random.Random, noise: float) -> Example:
    while True:
        before, question, answer = draw_plain(rng)
        if not is_held_out(question):
            break
    example = Example()
    example.given((before + question).encode())
    example.said(ord(" "))
    example.said_text(answer, noise * NOISE[PLAIN], rng)
    for byte in PLAIN_END.encode():
        example.said(byte)
    return example


def _give_with_running_count(example: Example, question: str) -> None:
    """A `count` question whose word is also a lesson: behind each letter, say how many were counted so far.

    From the final number alone the model does not learn to count in the time there is. What it says inside a
    question is never sampled.
    """
    head, _, word = question.rpartition(" ")
    letter = head.split()[1]
    example.given([*head.encode(), ord(" "), ord(word[0])])
    for end, following in enumerate([*word[1:].encode(), END], start=1):
        example.said(ord(str(word[:end].count(letter))), shown=following)


def _draw_training_question(skill: str, rng: random.Random) -> tuple[str, str]:
    while True:
        question, answer = SKILLS[skill].draw(rng)
        if not is_held_out(question):
            return question, answer


def _finish_calc(example: Example, expression: str, product: str, rng: random.Random, noise: float) -> None:
    """The model's turns of a `calc` trajectory: call, reply, copy; or, at times, a guess at the product."""
    guess_share = noise * (1 - CALL_SHARE)
    wrong = dict.fromkeys(b"123456789", guess_share / 9)
    if rng.random() < guess_share:
        example.said(IDS[TOOL_CALL], wrong, shown=rng.choice(b"123456789"))
        example.said_text(product[1:], 0.0, rng)
        example.said(END)
        return
    example.said(IDS[TOOL_CALL], wrong)
    example.said_text("calculator:", 0.0, rng)
    called = example.said_text(expression, noise * NOISE["calc"], rng)
    example.said(IDS[END_TOOL_CALL])
    example.said(END)
    reply = calculator_reply(called) if rng.random() < 0.6 else str(rng.randrange(10 ** rng.randint(2, 6)))
    example.given([IDS["<|tool|>"], *reply.encode(), END, IDS["<|assistant|>"]])
    example.said_text(reply, noise * REPLY_NOISE, rng)
    example.said(END)


def calculator_reply(expression: str) -> str:
    """The calculator's answer."""
    left, _, right = expression.partition("*")
    return str(int(left) * int(right)) if left.isdigit() and right.isdigit() else "error"


def collate(examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Input ids [B, T], flat positions [M] whose next token the model writes, target probabilities [M, V]."""
    length = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), length), IDS["<|pad|>"])
    positions: list[int] = []
    spread: list[tuple[int, int, float]] = []
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        for column, (right, wrong) in enumerate(example.goals):
            if right < 0:
                continue
            spread.append((len(positions), right, 1 - sum(wrong.values())))
            spread += [(len(positions), other, probability) for other, probability in wrong.items()]
            positions.append(row * length + column - 1)
    m, token, probability = zip(*spread, strict=True)
    targets = torch.zeros(len(positions), VOCAB_SIZE)
    targets[list(m), list(token)] = torch.tensor(probability, dtype=torch.float32)
    return ids, torch.tensor(positions), targets


SHORT_ROWS, LONG_ROWS = 64, 8
"""Examples in one step: of all skills, and of `calc` with its tool (and a few others) among the long ones."""


def draw_batches(rng: random.Random, weights: dict[str, float], noise: float) -> list[list[Example]]:
    """The two micro-batches of one step; `weights` are the shares of the skills."""
    names = list(weights)
    short = rng.choices(names, weights=[0.05 if name == "calc" else weights[name] for name in names], k=SHORT_ROWS)
    others = [name for name in names if name not in ("calc", PLAIN)]
    long = ["calc" if rng.random() < 0.75 else rng.choice(others) for _ in range(LONG_ROWS)]
    return [
        [draw_example(skill, rng, noise=noise) for skill in short],
        [draw_example(skill, rng, noise=noise, long=True) for skill in long],
    ]
