"""The commands of docs/real-models.md, one after the other, on a base model of Qwen3's family with random weights."""

import asyncio
import importlib
import json
import os
import re
import shutil
import sys
from asyncio.subprocess import PIPE, STDOUT
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from common.settings import TINY
from common.text.tokens import ChatTokenizer
from examples import gsm8k
from manager_service.launcher.supervisor import LocalCluster
from marlaas_client.cli.output import typed
from tests.support import forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "real-models.md").read_text()
PROGRAMS = {"python": [sys.executable], "marlaas": [sys.executable, "-m", "manager_service.launcher.commands.main"]}


async def follow(line: str, folder: Path, **instead: str) -> str:
    """Does what a line of the guide says, in a folder, with other words `instead` of some of its own; what it prints."""
    assert f"    {line}\n" in GUIDE, "the guide says something else"
    return await printed_by([instead.get(word, word) for word in line.split()], folder)


def do_here(line: str, monkeypatch: pytest.MonkeyPatch, **instead: str) -> None:
    """Does what a line of the guide says in this process, which has imported what takes seconds."""
    assert f"    {line}\n" in GUIDE, "the guide says something else"
    words = [instead.get(word, word) for word in line.split()]
    program = PROGRAMS[Path(words[0]).name]
    module, *options = [*program[2:], *words[1 if program[1:] else 2 :]]
    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", [module, *options])
        try:
            importlib.import_module(module).main()
        except SystemExit as end:
            assert not end.code, end.code


async def printed_by(words: list[str], folder: Path) -> str:
    command = [*PROGRAMS[Path(words[0]).name], *words[1:]]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    run = await asyncio.create_subprocess_exec(*command, cwd=folder, env=environment, stdout=PIPE, stderr=STDOUT)
    printed, _ = await asyncio.wait_for(run.communicate(), 200)
    assert run.returncode == 0, printed.decode()
    return printed.decode()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    row = {"question": "Two and 3?", "answer": "2 + 3 = 5\n#### 5"}
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    return tmp_path / "q"


def test_from_a_folder_to_a_trained_model_in_two_commands_and_in_pieces_on_a_cluster_that_stays(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # In two commands
    here = {"/tmp/q": str(base)}
    monkeypatch.chdir(base.parent)
    monkeypatch.setattr(gsm8k, "LocalCluster", partial(LocalCluster, start=forked.start))  # which takes seconds less
    do_here(".venv/bin/python -m harness.bases /tmp/q --small", monkeypatch, **here)
    do_here(".venv/bin/marlaas plan /tmp/q", monkeypatch, **here)
    assert "marlaas up" in capsys.readouterr().out
    short = (
        ".venv/bin/python -m examples.gsm8k --base /tmp/q --file train.jsonl --steps 1 --batch 2 --group 4 --tokens 16"
    )
    do_here(short, monkeypatch, **here)
    up, chat = (line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  "))
    assert up == f"MARLAAS_BASE_MODELS=q={base} {typed()} up", "what it was started with"
    do_here(".venv/bin/python -m examples.gsm8k --file train.jsonl --prepare items.jsonl", monkeypatch)
    asyncio.run(in_pieces(base, chat))


async def in_pieces(base: Path, chat: str) -> None:
    """The commands of the guide that are for a cluster which stays, and those between."""
    async with forked.running(base.parent / ".marlaas", environment={"MARLAAS_BASE_MODELS": f"q={base}"}):
        await printed_by([*chat.split(), "hello", "--max-tokens", "2"], base.parent)
        assert "    MARLAAS_BASE_MODELS=q=Qwen/Qwen3-0.6B .venv/bin/marlaas up\n" in GUIDE
        models = await follow(".venv/bin/marlaas models", base.parent)
        assert "2,048" in models and "bfloat16" in models
        long = ".venv/bin/marlaas submit items.jsonl --grader math:answer --model q --hyper max_steps=100 --hyper max_tokens=512 --watch"
        short = {"max_steps=100": "max_steps=1", "max_tokens=512": "max_tokens=16"}
        assert "succeeded" in await follow(long, base.parent, **short)


def test_gemmas_language_model_is_taken_out_of_the_one_with_vision(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration  # here: it takes seconds

    from base_model.modules import load_model

    # Given a Gemma 3 with vision, small and random
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 272, "max_position_embeddings": 256}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14})
    whole: Any = Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path / "whole")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / file, tmp_path / "whole")

    # When one does what the guide says
    lines = re.findall(r"(?m)^    ((?:from transformers|whole = |text|AutoTokenizer).*)$", GUIDE)
    recipe = "\n".join(lines).replace("google/gemma-3-4b-it", str(tmp_path / "whole"))
    exec(recipe.replace("gemma-3-4b-text", str(tmp_path / "text")), {})

    # Then trainers and engines load what it leaves, and it has the same scores
    found = load_model(tmp_path / "text", device="cpu", dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(found(input_ids=ids).logits, whole(input_ids=ids).logits)
    assert ChatTokenizer.load(tmp_path / "text").context == 256
