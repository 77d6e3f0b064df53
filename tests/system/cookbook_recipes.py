"""Recipes of tinker-cookbook and its own tests, their bytes unmodified, against a whole cluster of real processes:
`make tinker-cookbook`."""

import asyncio
import json
import os
import shutil
import sys
import tarfile
from collections.abc import AsyncGenerator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from examples.tinker_demo import MODEL, OPTIONS, PYTHON, RECIPE, RISES_BY
from harness.live import running
from manager_service.launcher.supervisor import LocalCluster

pytestmark = [pytest.mark.timeout(2400), pytest.mark.asyncio(loop_scope="module")]
PUBLIC = "Qwen/Qwen3-8B-Base"
"""A name whose renderer and sizes the cookbook knows. Here it is a link to `tiny`."""
CONVERSATIONS = "tinker_cookbook/example_data/conversations.jsonl"
STEPS = 20
TESTED, ANSWERER = "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B"
"""The models of the cookbook's own tests. Here they are `tiny`, two of whose tokens have names of Qwen's, for which the renderer looks,
with twice its context: in bytes a game of `guess_number` has up to 3,700 tokens."""
SOURCES = PYTHON.absolute().parents[1] / "tinker_cookbook-0.6.1.tar.gz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which recipes run: they find a tokenizer by the model's public name."""
    made = tmp_path_factory.mktemp("recipes")
    (made / PUBLIC).parent.mkdir()
    (made / PUBLIC).symlink_to(MODEL)
    shutil.copytree(MODEL, made / TESTED)
    changed = {"<|end|>": "<|im_end|>", "<|tools|>": "</think>", "2048": "4096"}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        file = made / TESTED / name
        file.write_text(reduce(lambda text, pair: text.replace(*pair), changed.items(), file.read_text()))
    (made / ANSWERER).symlink_to(made / TESTED)
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(folder: Path) -> AsyncGenerator[LocalCluster]:
    served = [f"{Path(name).name}={folder / name}" for name in (PUBLIC, TESTED, ANSWERER)]
    bases = {"MARLAAS_BASE_MODELS": ",".join([f"tiny={MODEL}", *served])}
    async with running(folder / "data", environment=bases) as (started, _):
        yield started


async def run(cluster: LocalCluster, folder: Path, recipe: str, options: dict[str, str]) -> list[dict[str, Any]]:
    """The metrics of each step that it wrote. `log_path` is a folder in `folder`."""
    words = ["-m", recipe, *(f"{name}={value}" for name, value in options.items())]
    await ended(cluster, folder, str(PYTHON.absolute()), *words)
    return [json.loads(line) for line in (folder / options["log_path"] / "metrics.jsonl").read_text().splitlines()]


async def ended(cluster: LocalCluster, folder: Path, *words: str, **variables: str) -> None:
    """Runs a program that succeeds."""
    own = {"TINKER_BASE_URL": cluster.base_url, "TINKER_API_KEY": f"tml-{cluster.api_key}", "TINKER_TELEMETRY": "0"}
    process = await asyncio.create_subprocess_exec(
        *words,
        env={**os.environ, **own, **variables},
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()[-4000:]


def shares(rows: list[dict[str, Any]]) -> list[float]:
    return [row["env/all/correct"] for row in rows if "env/all/correct" in row]


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"max_steps_off_policy": "2"},
        {"stream_minibatch_config.groups_per_batch": "16", "stream_minibatch_config.num_minibatches": "4"},
    ],
    ids=["sync", "off-policy", "stream"],
)
async def test_arithmetic_is_learned(cluster: LocalCluster, folder: Path, mode: dict[str, str]) -> None:
    options = {**OPTIONS, "max_steps": str(STEPS), "log_path": "math_rl", **mode}
    rows = await run(cluster, folder, RECIPE, options)
    right = shares(rows)
    assert len(right) == STEPS and sum(right[-2:]) / 2 >= sum(right[:2]) / 2 + RISES_BY, right
    if not mode:
        gaps = [row["optim/kl_sample_train_v1"] for row in rows if "optim/kl_sample_train_v1" in row]
        assert gaps and max(map(abs, gaps)) < 1e-3


async def test_a_recipe_goes_on_from_a_checkpoint(cluster: LocalCluster, folder: Path) -> None:
    options = {**OPTIONS, "compute_post_kl": "True", "save_every": "2", "log_path": "resumed"}
    rows = await run(cluster, folder, RECIPE, {**options, "max_steps": "6"})
    assert all("kl_pre_post_v1" in row for row in rows if "env/all/correct" in row)
    saved = folder / "resumed" / "checkpoints.jsonl"
    saved.write_text("\n".join(saved.read_text().splitlines()[:2]) + "\n")  # as if it had ended after the fourth step
    rows = await run(cluster, folder, RECIPE, {**options, "max_steps": "8", "behavior_if_log_dir_exists": "resume"})
    assert [row["progress/batch"] for row in rows if "env/all/correct" in row][-4:] == [4, 5, 6, 7]


async def test_conversations_are_learned(cluster: LocalCluster, folder: Path) -> None:
    found = next(PYTHON.absolute().parents[1].glob(f"lib/python*/site-packages/{CONVERSATIONS}"))
    data = "dataset_builder"
    options = {
        "model_name": PUBLIC,
        data: "FromConversationFileBuilder",
        f"{data}.file_path": str(found),
        f"{data}.common_config.max_length": "1024",
        f"{data}.common_config.batch_size": "8",
        f"{data}.common_config.model_name_for_tokenizer": PUBLIC,
        f"{data}.common_config.renderer_name": "role_colon",
        "log_path": "sl_basic",
        "learning_rate": "1e-3",
    }
    rows = await run(cluster, folder, "tinker_cookbook.recipes.sl_basic", options)
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    assert len(losses) == 16 and sum(losses[-4:]) < sum(losses[:4])


@pytest.mark.parametrize("game", ["guess_number", "twenty_questions"])
async def test_players_of_a_game_of_several_turns_are_trained(cluster: LocalCluster, folder: Path, game: str) -> None:
    options = {
        "model_name": PUBLIC,
        "renderer_name": "role_colon",
        "max_tokens": "16",
        "batch_size": "4",
        "group_size": "2",
        "max_steps": "2",
        "eval_every": "0",  # each would be 412 games of ten turns, or 3,200 of twenty with two samples a turn
        "log_path": game,
    }
    rows = await run(cluster, folder, f"tinker_cookbook.recipes.multiplayer_rl.{game}.train", options)
    assert sum("env/all/turns_per_episode" in row for row in rows) == 2


@pytest.mark.parametrize("name", ["math_rl", "shorter", "guess_number"])
async def test_the_cookbooks_own_tests_pass_with_its_default_loss(
    cluster: LocalCluster, folder: Path, tmp_path: Path, name: str
) -> None:
    with tarfile.open(SOURCES) as sources:
        sources.extractall(tmp_path, filter="data")
    (tmp_path / "uv").write_text(f'#!/bin/sh\nshift 2\nexec {PYTHON.absolute()} "$@"\n')  # they say `uv run python`
    (tmp_path / "uv").chmod(0o755)
    (test,) = tmp_path.glob(f"*/tests/recipes/test_recipe_{name}.py")
    found_first = f"{tmp_path}:{os.environ['PATH']}"
    await ended(
        cluster, folder, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test), PATH=found_first
    )
