"""Compares training tokens/s with a plain PEFT loop: the same model, rows, loss, clipping and AdamW, one thread.

    python -m benchmarks.training [--repetitions 7] [--json FILE]

Contenders take turns, and every figure is the median over turns of the ratio within one turn, so that a noisy machine
harms all alike. Tokens are those of the rows (prompt and answer, once a row, no padding), the same count for all.
The PEFT loop is what one would write: sorted, right-padded micro-batches of the same token budget, the full logits,
`clip_grad_norm_`, `torch.optim.AdamW`.

Axes: B rows of a micro-batch, T positions.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from base_model.decoder import Decoder
from base_model.device import prepare_cpu
from benchmarks._report import Goal, Report, in_turns, make_table, ratio, run, timed
from common.settings import TINY
from common.wire.messages import AdapterRef, Init, LoraSpec, LossSpec, OptimSpec, Rows, TrainStep, f32, i32, u8
from common.wire.transcript import transcript
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.batch import SampledRows, parse_rows
from trainer_service.losses import row_terms
from trainer_service.packing import Budget
from trainer_service.training import Trainer, TrainState

BUDGET = 4096
LORA = LoraSpec()
ADAPTER = AdapterRef("t", "j", 0)


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    num_groups: int
    group_size: int
    num_prompt: tuple[int, int]  # from, to (exclusive)
    num_written: tuple[int, int]


WORKLOADS = (
    Workload("short answers", 16, 8, (30, 50), (4, 24)),
    Workload("long answers", 4, 8, (40, 80), (100, 300)),
    Workload("long prompts", 4, 8, (250, 350), (10, 40)),
)


def make_step(work: Workload, seed: int = 0, *, num_written: Callable[[int, int], int] | None = None) -> TrainStep:
    """One training batch; every group has a signal. `num_written` (group, sample): of each answer instead of the workload's."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    written: list[int] = []
    lengths: list[int] = []
    for group in range(work.num_groups):
        prompt = rng.integers(0, 250, rng.integers(*work.num_prompt)).tolist()
        for sample in range(work.group_size):
            num = num_written(group, sample) if num_written else rng.integers(*work.num_written)
            answer = rng.integers(0, 250, num).tolist()
            tokens += prompt + answer
            written += [0] * len(prompt) + [1] * len(answer)
            lengths.append(len(prompt) + len(answer))
    num_rows = work.num_groups * work.group_size
    rows = Rows(
        transcript=transcript(tokens, np.array(written) * -5.6, written),
        lengths=i32(lengths),
        groups=i32(np.arange(num_rows) // work.group_size),
        samples=i32(np.arange(num_rows) % work.group_size),
        rewards=f32(np.arange(num_rows) % 3),
        versions=i32([0] * num_rows),
        truncated=u8([0] * num_rows),
    )
    return step_of(rows)


def step_of(
    rows: Rows, adapter: AdapterRef = ADAPTER, lora: LoraSpec = LORA, loss: LossSpec | None = None
) -> TrainStep:
    """The training step of a batch. `loss`: GRPO if it is not given."""
    ids: dict[str, Any] = {"id": "s", "tenant": adapter.tenant, "job": adapter.job, "partition": 0, "adapter": adapter}
    return TrainStep(**ids, seed=0, lora=lora, loss=loss or LossSpec(), optim=OptimSpec(1e-4), rows=rows, next_group=0)


def initial_state(trainer: Trainer, seed: int, spec: LoraSpec) -> TrainState:
    """Version 0 of a job of this seed."""
    return trainer.init(Init(id="i", tenant="t", job="j", partition=0, adapter=ADAPTER, seed=seed, lora=spec))


class PeftLoop:
    """A plain PEFT training loop over a base model of transformers, which it changes."""

    def __init__(self, base: Any) -> None:
        from peft import LoraConfig, get_peft_model  # here: a lent GPU may lack it

        config = LoraConfig(r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules="all-linear", lora_dropout=0.0)
        self.model: Any = get_peft_model(base, config)
        self.model.train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.adamw = torch.optim.AdamW(self.parameters, 1e-4, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, batch: SampledRows) -> None:
        terms = row_terms(batch, LossSpec())
        for rows in padded_micro_batches(batch):
            device = self.model.device
            tokens_BT, mask_BT, written_BT, sampled_BT = (torch.from_numpy(x).to(device) for x in padded(batch, rows))
            logits = self.model(input_ids=tokens_BT, attention_mask=mask_BT).logits
            logprobs_BT = logits[:, :-1].float().log_softmax(-1).gather(2, tokens_BT[:, 1:, None]).squeeze(2)
            advantages_B = torch.from_numpy(terms.advantages_R[rows]).float()[:, None].to(device)
            weights_B = torch.from_numpy(terms.weights_R[rows]).float()[:, None].to(device)
            ratio_BT = (logprobs_BT - sampled_BT[:, 1:]).exp()
            gain_BT = torch.minimum(ratio_BT * advantages_B, ratio_BT.clamp(0.8, 1.2) * advantages_B)
            loss: Tensor = -(gain_BT * weights_B * written_BT[:, 1:]).sum()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.adamw.step()
        self.adamw.zero_grad()


def padded_micro_batches(batch: SampledRows) -> list[list[int]]:
    """Rows sorted by length, filled up to BUDGET tokens with padding."""
    parts: list[list[int]] = [[]]
    for row in np.argsort([len(tokens) for tokens in batch.tokens], kind="stable").tolist():
        if parts[-1] and (len(parts[-1]) + 1) * len(batch.tokens[row]) > BUDGET:
            parts.append([])
        parts[-1].append(row)
    return parts


def padded(batch: SampledRows, rows: list[int]) -> tuple[np.ndarray, ...]:
    """tokens, attention mask, written (float) and log-probs at sampling, each [B, T]."""
    shape = (len(rows), max(len(batch.tokens[row]) for row in rows))
    tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    written, sampled = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for i, row in enumerate(rows):
        n = len(batch.tokens[row])
        tokens[i, :n], mask[i, :n] = batch.tokens[row], 1
        written[i, :n], sampled[i, :n] = batch.written[row], batch.logprobs[row]
    return tokens, mask, written, sampled


def contenders(step: TrainStep) -> dict[str, Callable[[], object]]:
    decoder = Decoder.load(TINY)
    batch = parse_rows(step.rows, version=0, vocab=decoder.config.vocab, context=decoder.config.context)
    from transformers import AutoModelForCausalLM  # here: who needs the steps of this module alone may lack it

    peft = PeftLoop(AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32))
    shared, plain = (
        Trainer(DecoderBackbone(decoder), Budget(BUDGET)),
        Trainer(DecoderBackbone(decoder), Budget(BUDGET), share_prefixes=False),
    )
    exact = Trainer(DecoderBackbone(decoder), Budget(BUDGET), deterministic=True)
    state = initial_state(shared, 0, LORA)
    return {
        "peft": lambda: peft.step(batch),
        "trainer": lambda: shared.step(step, state, lambda: None),
        "trainer, prompts not shared": lambda: plain.step(step, state, lambda: None),
        "trainer, deterministic": lambda: exact.step(step, state, lambda: None),
    }


def measure(work: Workload, repetitions: int) -> dict[str, Any]:
    """Median tokens/s of each contender, and the median of its ratio to PEFT within a turn."""
    step = make_step(work)
    seconds = in_turns({name: timed(train) for name, train in contenders(step).items()}, repetitions)
    num_tokens = len(step.rows.tokens)
    return {
        "workload": work.name,
        "tokens": num_tokens,
        "tokens_per_s": {name: num_tokens / statistics.median(times) for name, times in seconds.items()},
        "ratio_to_peft": {name: ratio(seconds["peft"], times) for name, times in seconds.items()},
    }


def report(given: Any) -> Report:
    prepare_cpu(1)
    results = [measure(work, given.repetitions) for work in WORKLOADS]
    tables = [
        make_table(
            f"Training, {result['workload']} ({result['tokens']:,} tokens a step)",
            ("", "tokens/s", "x PEFT"),
            [(name, speed, result["ratio_to_peft"][name]) for name, speed in result["tokens_per_s"].items()],
        )
        for result in results
    ]
    goals = [
        Goal(f"trainer against plain PEFT, {result['workload']}", result["ratio_to_peft"]["trainer"], 0.9, " x")
        for result in results
    ]
    return Report(tables, results, goals)


if __name__ == "__main__":
    run(__doc__, report, {"repetitions": 1}, repetitions=7)
