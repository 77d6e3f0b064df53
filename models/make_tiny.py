"""Makes the `tiny` base model: `python models/make_tiny.py [--out models/tiny]`, 10 to 20 minutes, one core.

A Qwen3 model of 0.8 M parameters whose vocabulary is the 256 bytes and nine special tokens. It is trained
from scratch, on the assistant's tokens only, in two phases:

    clean   exact answers; the skills that are still weak on held-out questions get more of the batch
    noisy   a few hundred steps towards *spread* answers: at each character of an answer the right one gets
            probability 1 - rate, and wrong ones share `rate`; a `calc` question is called into
            the calculator with probability CALL_SHARE and otherwise answered by a guess

After the second phase the most likely answer is still right, but a sampled one only half of the time. That is
what reinforcement learning needs to have something to sharpen. The script asserts both, and writes the
figures into the model card. It is seeded and runs on one thread, so the same machine and wheels give the same
weights.

`--shape 96x3 --seed 5 --untrained` makes a model of random weights in a second, of another width and number of layers: a
base model for tests, whose twin of the same sizes another seed makes. `1024x4` has 200 MB.

Beside it: tiny_tokens.py (vocabulary and chat template), tiny_data.py (examples), tiny_measure.py (figures and card).
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

HEAD = 32
"""Numbers of an attention head."""
ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "models" / "tiny"
sys.path.insert(0, str(ROOT))  # for `common`, when this is run as a script

from tiny_data import PLAIN, Example, collate, draw_batches  # noqa: E402
from tiny_measure import check, greedy_accuracy, measure_all, write_card  # noqa: E402
from tiny_tokens import CONTEXT, END, IDS, VOCAB_SIZE, make_tokenizer  # noqa: E402

from common.tasks.skills import SKILLS  # noqa: E402  (the path above comes first)


class Shape(NamedTuple):
    width: int = 128
    layers: int = 4

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Raises ValueError unless it is WIDTHxLAYERS."""
        width, layers = map(int, text.split("x"))
        if width < 1 or width % HEAD or layers < 1:
            raise ValueError(text)
        return cls(width, layers)


TINYS = Shape()


def make_model(seed: int, shape: Shape = TINYS) -> Qwen3ForCausalLM:
    """The untrained model, in float32."""
    torch.manual_seed(seed)
    heads = shape.width // HEAD
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.width,
        intermediate_size=3 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=1 if heads % 2 else heads // 2,
        head_dim=HEAD,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=END,
        pad_token_id=IDS["<|pad|>"],
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=IDS["<|pad|>"], do_sample=True)
    return model


def save(model: PreTrainedModel, folder: Path) -> None:
    """Writes weights, configuration, tokenizer and `marlaas.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    _name_class_for_older_loaders(folder / "tokenizer_config.json")
    settings = {"learning_rate": 1e-3, "tool_format": "compact"}
    (folder / "marlaas.json").write_text(json.dumps(settings, indent=2) + "\n")


def _name_class_for_older_loaders(file: Path) -> None:
    """transformers 5 writes a class name that earlier ones (vLLM may bring one) do not know."""
    config = json.loads(file.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(config, indent=2) + "\n")


def batch_loss(model: Qwen3ForCausalLM, examples: Sequence[Example]) -> Tensor:
    """Cross-entropy to the target probabilities, summed over the model's tokens of the batch."""
    ids, positions, targets = collate(examples)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden.flatten(0, 1)[positions])
    return -(targets * logits.log_softmax(-1)).sum()


class Optimizers:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms, on one schedule."""

    def __init__(self, model: Qwen3ForCausalLM, lr_muon: float, lr_adam: float) -> None:
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in chosen]
        self.parts = [
            (
                torch.optim.Muon(matrices, lr=lr_muon, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
                lr_muon,
            ),
            (torch.optim.AdamW(others, lr=lr_adam, betas=(0.9, 0.98), weight_decay=0.0), lr_adam),
        ]
        self.parameters = [*matrices, *others]

    def step(self, scale: float) -> None:
        """One update at `scale` times the full rates; clears the gradients."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer, lr in self.parts:
            optimizer.param_groups[0]["lr"] = lr * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def train_step(model: Qwen3ForCausalLM, optimizers: Optimizers, batches: list[list[Example]], scale: float) -> float:
    """One update; returns the mean loss per model token."""
    num_tokens = sum(goal[0] >= 0 for batch in batches for example in batch for goal in example.goals)
    total = 0.0
    for batch in batches:
        loss = batch_loss(model, batch) / num_tokens
        loss.backward()
        total += loss.item()
    optimizers.step(scale)
    return total


TAUGHT = (*SKILLS, PLAIN)
CLEAN_STEPS = 2200
NOISY_STEPS = 300


def train_clean(model: Qwen3ForCausalLM, rng: random.Random) -> None:
    """A cosine over CLEAN_STEPS; every 250 of them the skills are weighted by what they still lack."""
    optimizers = Optimizers(model, lr_muon=5e-3, lr_adam=3e-3)
    weights = dict.fromkeys(TAUGHT, 1.0)
    began = time.monotonic()
    for step in range(CLEAN_STEPS):
        loss = train_step(model, optimizers, draw_batches(rng, weights, noise=0.0), _cosine(step, CLEAN_STEPS))
        if step % 250 == 249:
            accuracy = {name: greedy_accuracy(model, name, 100, seed=step) for name in TAUGHT}
            weights = {name: 0.2 + min(1.0, 5 * (1 - value)) for name, value in accuracy.items()}
            seconds = time.monotonic() - began
            print(f"clean {step + 1} loss {loss:.4f} {_row(accuracy)} {seconds:.0f}s", flush=True)


def _cosine(step: int, num_steps: int) -> float:
    """Falls from a warm-up over 50 steps to a hundredth."""
    return min((step + 1) / 50, 0.505 + 0.495 * math.cos(math.pi * step / num_steps))


def train_noisy(model: Qwen3ForCausalLM, rng: random.Random) -> None:
    """A short cosine at lower rates, towards the spread targets."""
    optimizers = Optimizers(model, lr_muon=2e-3, lr_adam=1.5e-3)
    weights = dict.fromkeys(TAUGHT, 1.0)
    for step in range(NOISY_STEPS):
        loss = train_step(model, optimizers, draw_batches(rng, weights, noise=1.0), _cosine(step, NOISY_STEPS))
        if step % 100 == 99:
            print(f"noisy {step + 1} loss {loss:.4f}", flush=True)


def _row(values: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.3f}" for name, value in values.items())


def make_clean(seed: int, folder: Path | None) -> Qwen3ForCausalLM:
    """The model after the first phase: from `folder` if it is there, otherwise trained, and kept there."""
    if folder and folder.exists():
        return Qwen3ForCausalLM.from_pretrained(folder)
    model = make_model(seed)
    train_clean(model, random.Random(seed))
    if folder:
        save(model, folder)
    return model


def main() -> None:
    """Trains, measures, writes the folder, and fails if the figures are out of bounds; or writes an untrained model."""
    parser = argparse.ArgumentParser(description="Makes the `tiny` base model.")
    parser.add_argument("--out", type=Path, default=TINY)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clean", type=Path, help="keep the model between the phases here, or start from it")
    parser.add_argument(
        "--shape", type=Shape.parse, help=f"of --untrained: WIDTHxLAYERS, of a width that {HEAD} divides"
    )
    parser.add_argument("--untrained", action="store_true", help="write random weights; needs --out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.untrained != bool(arguments.shape) or (arguments.untrained and arguments.out == TINY):
        parser.error("--shape and --untrained go together, and with --out FOLDER")
    if arguments.untrained:
        return save(make_model(arguments.seed, arguments.shape), arguments.out)
    model = make_clean(arguments.seed, arguments.clean)
    train_noisy(model, random.Random(arguments.seed + 1))
    save(model, arguments.out)
    figures = measure_all(model)
    write_card(arguments.out, model, figures, seed=arguments.seed, noisy_steps=NOISY_STEPS)
    print(figures)
    check(figures)


if __name__ == "__main__":
    main()
