"""RL by one's own loop through the `tinker` SDK, unmodified: `make tinker` runs it in an environment that has the SDK alone.

    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-$MARLAAS_API_KEY .tinker/bin/python examples/tinker_loop.py

Each step samples answers to additions, compares each one's reward with its group's mean, and takes one optimiser step. Exit status: 0;
1 if the share of right answers did not rise.
"""

# pyright: reportMissingImports=false, reportUnknownParameterType=false

import argparse
import random
import re
import sys
from typing import Any

try:
    import tinker
    from tinker import types
except ImportError:
    sys.exit(f"error: run {__file__} by a Python with `pip install tinker`, or `marlaas example tinker_demo --loop`")

QUESTIONS, SAMPLES = 16, 8
USER, END, ASSISTANT = 259, 256, 260
"""Special tokens of `tiny`; all others are bytes."""
TINY = "add {a}+{b}", 100, 1e-3
PRETRAINED = "What is {a} + {b}? Answer with the number only.", 41, 3e-4
"""The question, an end of its numbers, and the learning rate."""
RISES_BY = 0.1
"""The least gain of the share of right answers from the first three steps to the last three."""


class OfTiny:
    """A tokenizer with the methods of transformers' that are used here."""

    def apply_chat_template(self, talk: list[dict[str, str]], **_: bool) -> list[int]:
        return [USER, *talk[0]["content"].encode(), END, ASSISTANT]

    def decode(self, tokens: list[int], **_: bool) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


def tokenizer_of(model: str) -> Any:
    if model == "tiny":
        return OfTiny()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def prompt_of(question: str, tokenizer: Any) -> list[int]:
    talk = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=True, return_dict=False)


def is_right(text: str, answer: str) -> bool:
    """Is it the last number?"""
    return re.findall(r"\d+", text)[-1:] == [answer]


def learnt_from(prompt: list[int], samples: list[types.SampledSequence], rewards: list[float]) -> list[types.Datum]:
    """One datum a sample whose reward differs from its group's mean. At each position stands what follows it."""
    mean, before = sum(rewards) / len(rewards), [0.0] * (len(prompt) - 1)
    data: list[types.Datum] = []
    for sample, reward in zip(samples, rewards, strict=True):
        tokens, advantage = [*prompt, *sample.tokens], reward - mean
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": [*before, *(sample.logprobs or [])],
            "advantages": [*before, *[advantage] * len(sample.tokens)],
        }
        if advantage:
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data


def train_step(client: tinker.TrainingClient, questions: list[tuple[str, str]], tokenizer: Any, rate: float) -> float:
    """Returns the share of right answers before the step."""
    sampler = client.save_weights_and_get_sampling_client().result()
    how = types.SamplingParams(max_tokens=16, temperature=1.0)
    asked = [(prompt_of(question, tokenizer), answer) for question, answer in questions]
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, how) for prompt, _ in asked]
    data: list[types.Datum] = []
    num_right = 0.0
    for (prompt, answer), future in zip(asked, futures, strict=True):
        samples = future.result().sequences
        texts = [tokenizer.decode(sample.tokens, skip_special_tokens=True) for sample in samples]
        rewards = [float(is_right(text, answer)) for text in texts]
        num_right += sum(rewards)
        data += learnt_from(prompt, samples, rewards)
    if data:
        gradient = client.forward_backward(data, "importance_sampling")
        step = client.optim_step(types.AdamParams(learning_rate=rate))
        gradient.result()
        step.result()
    return num_right / (QUESTIONS * SAMPLES)


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--steps", type=int, default=20)
    given.add_argument(
        "--model", default="tiny", help="a base's name; of others than `tiny` the folder with its tokenizer"
    )
    options, rng = given.parse_args(), random.Random(0)
    tokenizer, (ask, end, rate) = tokenizer_of(options.model), TINY if options.model == "tiny" else PRETRAINED
    client = tinker.ServiceClient().create_lora_training_client(options.model, rank=8).result()
    shares: list[float] = []
    for step in range(options.steps):
        pairs = [(rng.randrange(end), rng.randrange(end)) for _ in range(QUESTIONS)]
        questions = [(ask.format(a=a, b=b), str(a + b)) for a, b in pairs]
        shares.append(train_step(client, questions, tokenizer, rate))
        print(f"step {step:>3}   right {shares[-1]:.2f}   {'█' * round(40 * shares[-1])}", flush=True)
    kept = client.save_state("last").result()
    first, last = sum(shares[:3]) / 3, sum(shares[-3:]) / 3
    print(f"\nright answers: {first:.2f} at first, {last:.2f} at the end; the last version is {kept.path}")
    sys.exit(0 if last >= first + RISES_BY else 1)


if __name__ == "__main__":
    main()
