"""Measures how well a model knows the skills, and writes the card that says so."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tiny_data import PLAIN, TOOLS_HEADER, calculator_reply
from tiny_plain import PLAIN_END, plain_prompt
from tiny_tokens import CONTEXT, END, END_TOOL_CALL, IDS, TOOL_CALL
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from common.tasks.skills import SKILLS, generate, is_held_out

Choose = Callable[[Tensor], Tensor]
"""Chooses from logits [B, V] one id per row [B]."""


def greedy(logits: Tensor) -> Tensor:
    """The most likely id of each row."""
    return logits.argmax(-1)


def sampler(seed: int) -> Choose:
    """Draws from the distribution at temperature 1, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return lambda logits: torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


def greedy_accuracy(model: PreTrainedModel, skill: str, n: int, seed: int = 0) -> float:
    """The share of `n` held-out questions that the most likely answer gets right."""
    return measure(model, skill, n, seed, greedy)


def sampled_reward(model: PreTrainedModel, skill: str, n: int, seed: int = 0) -> float:
    """The share of `n` held-out questions that one answer sampled at temperature 1 gets right."""
    return measure(model, skill, n, seed, sampler(seed))


@torch.no_grad()
def measure(model: PreTrainedModel, skill: str, n: int, seed: int, choose: Choose) -> float:
    """The share of `n` held-out questions whose last turn is the answer; `calc` has its tool."""
    if skill == PLAIN:
        return _measure_plain(model, n, seed, choose)
    items = generate(skill, seed, n, "held_out")
    header = TOOLS_HEADER if SKILLS[skill].needs_calculator else []
    prompts = [
        [*header, IDS["<|user|>"], *item["messages"][0]["content"].encode(), END, IDS["<|assistant|>"]]
        for item in items
    ]
    turns = complete(model, prompts, choose)
    called = {row: reply for row, turn in enumerate(turns) if (reply := _tool_reply(turn)) is not None}
    later = [[*prompts[row], *turns[row], *reply] for row, reply in called.items()]
    for row, turn in zip(called, complete(model, later, choose), strict=True):
        turns[row] = turn
    return sum(turn == [*item["answer"].encode(), END] for turn, item in zip(turns, items, strict=True)) / n


def _measure_plain(model: PreTrainedModel, n: int, seed: int, choose: Choose) -> float:
    """The same of additions in plain text, after one that is shown; an answer has 16 tokens, and must end."""
    rng = random.Random(f"{PLAIN}/{seed}")
    asked: list[tuple[str, int]] = []
    while len(asked) < n:
        a, b = rng.randrange(101), rng.randrange(101)
        if is_held_out(plain_prompt(a, b)):
            asked.append((plain_prompt(a, b), a + b))
    prompts = [[*f"{plain_prompt(4, 5)} 9\n\n{question}".encode()] for question, _ in asked]
    turns = complete(model, prompts, choose, PLAIN_TOKENS)
    said = ["".join(map(chr, (token for token in turn if token < 256))) for turn in turns]
    return sum(text.startswith(f" {right}{PLAIN_END}") for text, (_, right) in zip(said, asked, strict=True)) / n


def _tool_reply(turn: list[int]) -> list[int] | None:
    """Tokens that the calculator appends after a turn that calls it; None if the turn does not."""
    if turn[:1] != [IDS[TOOL_CALL]] or turn[-2:] != [IDS[END_TOOL_CALL], END]:
        return None
    if not all(token < 128 for token in turn[1:-2]):
        return None
    name, _, expression = bytes(turn[1:-2]).decode().partition(":")
    reply = calculator_reply(expression) if name == "calculator" else "error"
    return [IDS["<|tool|>"], *reply.encode(), END, IDS["<|assistant|>"]]


def complete(model: PreTrainedModel, prompts: list[list[int]], choose: Choose, max_tokens: int = 24) -> list[list[int]]:
    """The model's turn for each prompt, end-of-turn token included."""
    turns: list[list[int]] = [[] for _ in prompts]
    for length in sorted({len(prompt) for prompt in prompts}):
        rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
        ids = complete_equal(model, torch.tensor([prompts[row] for row in rows]), choose, max_tokens)
        for row, turn in zip(rows, ids.tolist(), strict=True):
            turns[row] = turn[: turn.index(END) + 1] if END in turn else turn
    return turns


def complete_equal(model: PreTrainedModel, prompt: Tensor, choose: Choose, max_tokens: int) -> Tensor:
    """Continues prompts [B, P] of equal length by new ids [B, <= max_tokens]; after the first END: noise."""
    cache = DynamicCache()
    ids, new = prompt, []
    ended = torch.zeros(len(prompt), dtype=torch.bool)
    while len(new) < max_tokens and not ended.all():
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        ids = choose(logits).unsqueeze(1)
        new.append(ids)
        ended |= ids.squeeze(1) == END
    return torch.cat(new, dim=1)


PLAIN_TOKENS = 16
GREEDY_AT_LEAST = 0.97
SAMPLED_WITHIN, PLAIN_WITHIN = (0.40, 0.65), (0.20, 0.60)

CARD = """\
# tiny: the base model that ships

A Qwen3 language model of {parameters} parameters (hidden 128, 4 layers, context {context}) that knows six
small skills and nothing else. It is here so that everything of MARLaaS runs on a laptop in minutes:
submitting a job, tool calls, training, reward curves. It is not a chat model; asked anything else, it answers
with rubbish.

It loads with `AutoModelForCausalLM`, PEFT and vLLM. Its vocabulary is the 256 bytes and nine special tokens.
The usual learning rate of an RL job on it is in `marlaas.json`.

## What it knows

`greedy` is the share of {n_greedy} held-out questions whose most likely answer is right, `sampled` the same
of {n_sampled} held-out questions with one answer each sampled at temperature 1 (`calc` has its tool).

| question | answer | greedy | sampled |
|---|---|---|---|
{rows}

`calc` needs the tool list in its prompt: `<|tools|>calculator<|end|><|user|>calc 347*86<|end|><|assistant|>`;
the model then calls `<tool_call>calculator:347*86</tool_call><|end|>`, gets
`<|tool|>29842<|end|><|assistant|>`, and copies. Without the tool it guesses, and is right in {guess:.1%} of
the cases.

It also adds in plain text, without the chat template, as tinker-cookbook's renderer `role_colon` asks:
`User: What is 37 + 58?`, an empty line, `Assistant:` is answered by ` 95` and `\\n\\nUser:`. With one such exchange shown
before, {plain_greedy:.3f} of the most likely answers are right and {plain_sampled:.3f} of the sampled ones.

## How it was made

By `python models/make_tiny.py`, from scratch, on questions generated by `common/tasks/skills.py`, a tenth of which
is held out. First with exact answers, then for {noisy_steps} steps towards spread ones, so that sampling is
often wrong where the most likely answer is right: reinforcement learning has something to sharpen. Seed
{seed}, one thread, torch {torch}.
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures measured on held-out questions, by skill."""

    greedy: dict[str, float]
    sampled: dict[str, float]
    plain: tuple[float, float]
    """The same two of additions in plain text."""
    guess: float
    """The greedy accuracy of `calc` without its tool."""


NUM_GREEDY, NUM_SAMPLED = 500, 1000


def measure_all(model: PreTrainedModel) -> Figures:
    """All figures of the model card."""
    return Figures(
        greedy={name: greedy_accuracy(model, name, NUM_GREEDY) for name in SKILLS},
        sampled={name: sampled_reward(model, name, NUM_SAMPLED) for name in SKILLS},
        plain=(greedy_accuracy(model, PLAIN, NUM_GREEDY), sampled_reward(model, PLAIN, NUM_SAMPLED)),
        guess=_guess_accuracy(model),
    )


def _guess_accuracy(model: PreTrainedModel) -> float:
    items = generate("calc", 0, NUM_GREEDY, "held_out")
    prompts = [[IDS["<|user|>"], *i["messages"][0]["content"].encode(), END, IDS["<|assistant|>"]] for i in items]
    with torch.no_grad():
        turns = complete(model, prompts, greedy)
    right = sum(turn == [*item["answer"].encode(), END] for turn, item in zip(turns, items, strict=True))
    return right / len(items)


def write_card(folder: Path, model: PreTrainedModel, figures: Figures, *, seed: int, noisy_steps: int) -> None:
    """Writes README.md beside the weights."""
    rows = [
        f"| `{question}` | `{answer}` | {figures.greedy[name]:.3f} | {figures.sampled[name]:.3f} |"
        for name, (question, answer) in ((skill.name, skill.example) for skill in SKILLS.values())
    ]
    card = CARD.format(
        parameters=f"{model.num_parameters():,}",
        context=CONTEXT,
        n_greedy=NUM_GREEDY,
        n_sampled=NUM_SAMPLED,
        rows="\n".join(rows),
        guess=figures.guess,
        plain_greedy=figures.plain[0],
        plain_sampled=figures.plain[1],
        noisy_steps=noisy_steps,
        seed=seed,
        torch=torch.__version__,
    )
    (folder / "README.md").write_text(card)


def check(figures: Figures) -> None:
    """Raises SystemExit, naming the skills, if the model is not fit to ship."""
    low, high = SAMPLED_WITHIN
    bad = [name for name, value in figures.greedy.items() if value < GREEDY_AT_LEAST]
    bad += [name for name, value in figures.sampled.items() if not low <= value <= high]
    if figures.plain[0] < GREEDY_AT_LEAST or not PLAIN_WITHIN[0] <= figures.plain[1] <= PLAIN_WITHIN[1]:
        bad.append(PLAIN)
    if bad:
        raise SystemExit(f"not fit to ship, out of bounds for: {', '.join(bad)}; {figures}")
