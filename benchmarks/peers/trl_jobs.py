"""Runs one job on TRL's GRPOTrainer, with TRL's Python: `python -m benchmarks.peers.trl_jobs FOLDER NAME`.

As TRL's documentation has it for a small model on a CPU: float32 (`bf16=False`), no gradient checkpointing, no vLLM,
generation by transformers, no dataloader workers, one micro-batch a step, no checkpoints, no reports.
"""

# pyright: reportMissingImports=false
# (`datasets` and `trl` are installed beside TRL alone)

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.settings import Job, Settings, read_job, read_rows, read_settings, reward, write_ends


class Clock(TrainerCallback):
    """Notes when steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.time())


def trainer(folder: Path, job: Job, settings: Settings, clock: Clock) -> Any:
    rows = read_rows(folder / job.name / "drawn.jsonl")
    return GRPOTrainer(
        model=settings.model,
        callbacks=[clock],
        reward_funcs=rewards(settings),
        args=config(folder / job.name / "trl", job, settings),
        train_dataset=Dataset.from_list([{"prompt": row["messages"], "answer": row["answer"]} for row in rows]),
        peft_config=LoraConfig(
            r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules=list(settings.lora_targets)
        ),
    )


def rewards(settings: Settings) -> Callable[..., list[float]]:
    def of(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
        return [
            reward(turns[0]["content"], expected, settings) for turns, expected in zip(completions, answer, strict=True)
        ]

    return of


def config(out: Path, job: Job, settings: Settings) -> Any:
    fields: dict[str, Any] = {
        "output_dir": str(out),
        "seed": job.seed,
        "per_device_train_batch_size": settings.rows,
        "num_generations": settings.group_size,
        "max_steps": settings.num_steps,
        "max_completion_length": settings.max_tokens,
        "temperature": settings.temperature,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": settings.adam_betas[0],
        "adam_beta2": settings.adam_betas[1],
        "adam_epsilon": settings.adam_eps,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,  # none
        "loss_type": "grpo",
        "scale_rewards": "group",
        "epsilon": settings.clip,
        "beta": 0.0,
        "num_iterations": 1,
        "shuffle_dataset": False,
        "model_init_kwargs": {"dtype": "float32"},
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "logging_steps": settings.num_steps,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return GRPOConfig(**fields)


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    settings, job = read_settings(folder), read_job(folder, name)
    torch.set_num_threads(settings.threads)
    run = trainer(folder, job, settings, clock := Clock())
    run.train()
    write_ends(folder, job, clock.ends)
    run.save_model(str(folder / name / "trl"))


if __name__ == "__main__":
    main()
