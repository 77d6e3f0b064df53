"""The comparison with peers, as far as it needs none of them: settings, data, plan and table."""

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.peers.__main__ import plan, with_multiples
from benchmarks.peers.data import SINGLE_TURN, drawn, make_jobs, write_data
from benchmarks.peers.evaluate import Judge, target_modules, with_adapter
from benchmarks.peers.marlaas_jobs import hyperparameters
from benchmarks.peers.measure import RunFailed, run
from benchmarks.peers.results import Result, difference, goals, lines, multiple, read, write
from benchmarks.peers.settings import (
    MODEL,
    Settings,
    advantages,
    batches,
    read_job,
    read_rows,
    read_settings,
    reward,
    table,
)
from benchmarks.peers.systems import SYSTEMS, environment
from common.skills import generate
from env_service.graders.text import string_check
from harness.live import GRADER
from manager_service.api.hyperparameters import parse_hyperparameters, resolve
from manager_service.jobs.items import Items

PROGRAMS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
LEARNING = {
    *("batch_size", "group_size", "num_steps", "learning_rate", "lora_rank", "lora_alpha", "lora_targets", "clip"),
    *("temperature", "max_tokens", "adam_betas", "adam_eps"),
}


# ---- the same on all sides ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "without"),
    [
        ("marlaas_jobs", {"adam_betas", "adam_eps"}),  # they are its own: the next test
        ("trl_job", set()),
        ("skyrl_jobs", {"lora_alpha", "lora_targets"}),  # its only ones
    ],
)
def test_every_setting_reaches_every_system(program: str, without: set[str]) -> None:
    source = (PROGRAMS / f"{program}.py").read_text() + (PROGRAMS / "settings.py").read_text().split("def batches")[1]
    assert {name for name in LEARNING if f"settings.{name}" not in source} == without


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
    given = list(batches(tmp_path, read_job(tmp_path, job.name), read_settings(tmp_path)))
    assert [len(batch) for batch in given] == [4, 4, 4]
    first_epoch = [row["messages"][0]["content"] for batch in given[:2] for row in batch]
    assert sorted(first_epoch) == sorted(row["messages"][0]["content"] for row in rows)
    assert [row for batch in given for row in batch] == marlaas_draws(rows, job.seed, 12)


def marlaas_draws(rows: list[dict[str, object]], seed: int, number: int) -> list[object]:
    from common.rng import permutation

    items = Items([json.dumps(row).encode() for row in rows])
    return [items[int(permutation(seed, g // len(items), len(items))[g % len(items)])] for g in range(number)]


def test_a_job_is_the_same_whatever_runs_beside_it() -> None:
    assert make_jobs(16)[:4] == make_jobs(4)
    assert {job.skill for job in make_jobs(8)} == set(SINGLE_TURN) == {"add", "sort", "reverse", "max", "count"}
    rows = generate("add", 1, 8)
    assert drawn(rows, 5, 6) == drawn(rows, 5, 12)[:6]


def test_settings_survive_their_file(tmp_path: Path) -> None:
    settings = Settings(num_steps=3, learning_rate=1e-4)
    write_data(tmp_path, make_jobs(1), settings)
    assert read_settings(tmp_path) == settings
    assert dict(table(settings))["learning rate"] == "0.0001, constant"


@pytest.mark.parametrize("answer", ["95", "95 ", " 95", "", "59", "9", "095"])
def test_the_reward_is_that_of_the_grader(answer: str) -> None:
    assert (GRADER["type"], GRADER["input"]) == ("string_check", "{{sample.output_text}}")
    assert reward(answer, "95") == string_check(GRADER["operation"], answer, "95")


def test_advantages_are_those_of_the_trainer() -> None:
    import numpy as np

    from trainer_service import losses

    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    ours = losses.advantages(np.array(rewards), np.zeros(8, int), "standardised")
    assert advantages(rewards) == pytest.approx(ours.tolist())
    assert advantages([1.0, 1.0]) == [0.0, 0.0]


# ---- what is run ----------------------------------------------------------------------------------------------------


def test_each_number_of_jobs_meets_every_system_in_turn_but_for_what_can_be_summed() -> None:
    planned = [(number, system.name) for number, system in plan((1, 8, 16), list(SYSTEMS))]
    assert planned == [
        *((1, name) for name in ("marlaas", "trl-1", "trl-2", "skyrl")),
        *((8, name) for name in ("marlaas", "trl-1", "trl-2", "trl-all", "skyrl")),
        *((16, name) for name in ("marlaas", "trl-2", "skyrl")),
    ]


def test_trl_gets_a_process_a_job_and_the_servers_one_for_all() -> None:
    jobs = make_jobs(3)
    assert [len(SYSTEMS[name].commands(Path("f"), jobs)) for name in SYSTEMS] == [1, 3, 3, 3, 1]
    assert [SYSTEMS[name].width(3) for name in SYSTEMS] == [1, 1, 2, 3, 1]
    assert SYSTEMS["marlaas"].commands(Path("f"), jobs)[0][-3:] == [job.name for job in jobs]


def test_no_setting_of_a_user_of_marlaas_reaches_the_runs() -> None:
    made = environment(Settings(threads=1), {"MARLAAS_DETERMINISTIC": "1", "HOME": "h", "OMP_NUM_THREADS": "8"})
    assert "MARLAAS_DETERMINISTIC" not in made
    assert (made["HOME"], made["OMP_NUM_THREADS"], made["NPROC"]) == ("h", "1", "1")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_run_is_measured_with_all_that_it_starts(tmp_path: Path) -> None:
    block = "b = bytearray(64_000_000); import time; time.sleep(2.5)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {block!r}])"
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    cost = run([python(parent), python(spin)], at_once=2, environment=os.environ, log=tmp_path / "log", limit_s=60)
    assert cost.peak_mb > 64
    assert cost.cpu_s >= 0.3
    assert cost.wall_s >= 2.5


def test_what_fails_says_so_with_the_end_of_its_output_and_leaves_nothing_behind(tmp_path: Path) -> None:
    wait = f"import time; open({str(tmp_path / 'started')!r}, 'w'); time.sleep(600); open('never', 'w')"
    fail = f"import os, sys, time\nwhile not os.path.exists({str(tmp_path / 'started')!r}): time.sleep(.01)\nsys.exit('out of luck')"
    with pytest.raises(RunFailed, match="out of luck"):
        run([python(wait), python(fail)], at_once=2, environment=os.environ, log=tmp_path / "log", limit_s=60)
    with pytest.raises(RunFailed, match="not done after"):
        run([python("import time; time.sleep(600)")], at_once=1, environment=os.environ, log=tmp_path / "l", limit_s=0)


# ---- the judge ------------------------------------------------------------------------------------------------------


def test_the_base_model_is_good_at_greedy_answers_and_worse_at_sampled_ones() -> None:
    score = Judge(Settings(eval_samples=2)).score(generate("count", 1, 16, "held_out"))
    assert score.greedy > 0.8
    assert 0.1 < score.sampled < score.greedy


def test_modules_are_read_from_the_tensors_names() -> None:
    layer = "base_model.model.model.layers.0"
    assert target_modules([f"{layer}.mlp.up_proj.lora_A.weight", f"{layer}.self_attn.q_proj.lora_B.weight"]) == [
        "q_proj",
        "up_proj",
    ]


def write_adapter(folder: Path, layers: range) -> dict[str, Tensor]:
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


def test_an_adapter_with_a_tensor_missing_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, range(3))
    with pytest.warns(UserWarning, match="missing adapter keys"), pytest.raises(ValueError, match="without a place"):
        with_adapter(AutoModelForCausalLM.from_pretrained(MODEL), tmp_path)


# ---- the table ------------------------------------------------------------------------------------------------------


def result(system: str, num_jobs: int, wall_s: float, peak_mb: float, sampled: float = 0.8) -> Result:
    jobs = [job.name for job in make_jobs(num_jobs)]
    after = {name: (1.0, sampled + 0.01 * i) for i, name in enumerate(jobs)}
    return Result(
        system=system,
        num_jobs=num_jobs,
        wall_s=wall_s,
        cpu_s=2 * wall_s,
        peak_mb=peak_mb,
        before=dict.fromkeys(jobs, (0.9, 0.5)),
        after=after,
    )


def test_a_line_says_how_much_more_a_peer_takes() -> None:
    ours, theirs = result("marlaas", 2, 10, 500), result("trl-1", 2, 45, 1000, sampled=0.9)
    shown = dict(zip(("jobs", "system"), lines([theirs, ours])[1][:2], strict=True))
    assert shown == {"jobs": "2", "system": "TRL, one after another"}
    assert lines([theirs, ours])[1][2:] == [
        *("45.0", "4.50", "90", "4.50", "1,000", "2.00", "0.90→1.00", "0.50→0.91", "+0.100 ± 0.000"),
    ]
    assert lines([theirs, ours])[0][3] == "1.00"


def test_a_failure_is_shown_with_its_reason() -> None:
    failed = Result(system="skyrl", num_jobs=2, failed="QueuePool limit reached")
    assert lines([result("marlaas", 2, 10, 500), failed])[1][2] == "failed: QueuePool limit reached"


def test_what_was_not_run_is_a_marked_multiple() -> None:
    (_, added) = with_multiples([result("trl-1", 8, 80, 600)], (8, 16))
    assert (added.num_jobs, added.wall_s, added.peak_mb, added.sum_of) == (16, 160, 600, 8)
    assert lines([added])[0][1] == "TRL, one after another (from N = 8)"
    assert multiple(result("trl-1", 4, 40, 600), 16).wall_s == 160


def test_rewards_are_compared_job_by_job() -> None:
    ours = {"a": (1.0, 0.5), "b": (1.0, 0.7)}
    assert difference(ours, {"a": (1.0, 0.6), "b": (1.0, 0.7)}, 1) == pytest.approx((0.05, 0.05))
    middle, error = difference(ours, {"a": (1.0, 0.6)}, 1)
    assert middle == pytest.approx(0.1)
    assert math.isnan(error)


def test_goals_are_about_eight_jobs() -> None:
    found = [result("marlaas", 8, 20, 900), result("trl-1", 8, 90, 600), result("trl-all", 8, 60, 4000)]
    reached = {goal.what: goal.reached for goal in goals(found) if "reward" not in goal.what}
    assert reached == {"N = 8: faster than TRL, one after another": True, "memory against 8 TRL processes": True}
    assert goals(found[1:]) == []


def test_results_survive_their_files(tmp_path: Path) -> None:
    kept = [result("marlaas", 1, 10, 500), Result(system="skyrl", num_jobs=1, failed="no")]
    for each in kept:
        write(tmp_path, each)
    assert read(tmp_path) == kept
