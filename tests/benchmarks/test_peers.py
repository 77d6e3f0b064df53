"""The comparison with peers, as far as it needs none of them: what is the same on all sides, and the judge."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from benchmarks.peers.__main__ import items, make_jobs, step_seconds, write_data
from benchmarks.peers.judge import with_adapter
from benchmarks.peers.marlaas_jobs import hyperparameters
from benchmarks.peers.settings import (
    MODEL,
    SUM,
    Settings,
    advantages,
    batches,
    of_base,
    read_rows,
    read_settings,
    write_ends,
)
from common.rng import permutation
from manager_service.http.openai.jobs.hyperparameters import parse_hyperparameters, resolve
from trainer_service import losses


def test_marlaas_takes_the_settings_as_they_are() -> None:
    settings = Settings()
    hyper = resolve(parse_hyperparameters(hyperparameters(settings)), num_items=512, base_learning_rate=1e-3)
    optim, lora = hyper.optim, hyper.lora
    assert (hyper.batch_size, hyper.group_size, hyper.num_steps) == (16, 8, settings.num_steps)
    assert (optim.learning_rate, optim.weight_decay) == (settings.learning_rate, 0.0)
    assert ((optim.beta1, optim.beta2), optim.eps) == (settings.adam_betas, settings.adam_eps)
    assert (lora.rank, lora.alpha, set(lora.targets)) == (8, 32, set(settings.lora_targets))


def test_peers_get_the_items_in_the_order_in_which_marlaas_draws_them(tmp_path: Path) -> None:
    settings, (_, job) = Settings(num_steps=3, batch_size=4, num_items=8), make_jobs(2)
    write_data(tmp_path, [job], settings)
    rows = read_rows(tmp_path / job.name / "items.jsonl")
    given = list(batches(tmp_path, job, read_settings(tmp_path)))
    assert [len(batch) for batch in given] == [4, 4, 4]
    drawn = [rows[int(permutation(job.seed, g // 8, 8)[g % 8])] for g in range(12)]
    assert [row for batch in given for row in batch] == drawn


def test_a_step_takes_the_time_in_which_any_job_was_at_work_without_the_first_two(tmp_path: Path) -> None:
    jobs = make_jobs(3, [SUM])
    assert step_seconds(tmp_path, jobs) is None
    for job, ends in zip(jobs, ([1, 10, 14, 16], [2, 11, 13, 20], [50, 60, 63, 66]), strict=True):
        (tmp_path / job.name).mkdir()
        write_ends(tmp_path, job, [float(end) for end in ends])
    assert step_seconds(tmp_path, jobs) == pytest.approx((10 + 6) / 6), "two at once from 10 to 20, one from 60 to 66"


def test_a_pretrained_base_is_asked_for_sums_of_which_some_are_held_out(tmp_path: Path) -> None:
    settings, (job,) = of_base("base"), make_jobs(1, [SUM])
    write_data(tmp_path, [job], settings)
    asked, held_out = (
        {row["messages"][0]["content"]: int(row["answer"]) for row in items(job, 300, split)}
        for split in ("train", "held_out")
    )
    assert not asked.keys() & held_out.keys() and all(answer % 5 == 0 for answer in held_out.values())
    assert read_settings(tmp_path) == settings and (settings.rows, settings.num_steps) == (48, 10)


def test_advantages_are_those_of_the_trainer() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    ours = losses.advantages(np.array(rewards), np.zeros(8, int), "standardised")
    assert advantages(rewards) == pytest.approx(ours.tolist())
    assert advantages([1.0, 1.0]) == [0.0, 0.0]


def write_adapter(folder: Path, layers: range) -> dict[str, torch.Tensor]:
    """Rank 2, alpha 4, on `up_proj`, with a configuration that names no modules, as SkyRL writes it."""
    torch.manual_seed(1)
    names = [f"base_model.model.model.layers.{layer}.mlp.up_proj" for layer in layers]
    tensors = {f"{name}.lora_A.weight": torch.randn(2, 128) for name in names}
    tensors |= {f"{name}.lora_B.weight": torch.randn(384, 2) for name in names}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": None}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return tensors


def test_an_adapter_is_judged_with_all_its_tensors(tmp_path: Path) -> None:
    tensors = write_adapter(tmp_path, range(4))
    base, tuned = (AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32) for _ in range(2))
    weights = with_adapter(tuned, tmp_path).state_dict()
    for layer in range(4):
        name = f"model.layers.{layer}.mlp.up_proj"
        product = tensors[f"base_model.model.{name}.lora_B.weight"] @ tensors[f"base_model.model.{name}.lora_A.weight"]
        torch.testing.assert_close(weights[f"{name}.weight"], base.state_dict()[f"{name}.weight"] + 2 * product)
    write_adapter(tmp_path, range(3))
    with pytest.warns(UserWarning, match="missing adapter keys"), pytest.raises(ValueError, match="without a place"):
        with_adapter(AutoModelForCausalLM.from_pretrained(MODEL), tmp_path)
