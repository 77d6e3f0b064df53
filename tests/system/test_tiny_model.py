"""The committed base model: right when greedy, right half of the time when sampled, loadable by everybody."""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from common.skills import SKILLS, generate
from common.text.tokens import ChatTokenizer

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "tiny"
sys.path.insert(0, str(TINY.parent))

import make_tiny  # noqa: E402  (scripts beside the model, not a package)
import tiny_data  # noqa: E402
import tiny_measure  # noqa: E402
import tiny_tokens  # noqa: E402

CALCULATOR = {"type": "function", "function": {"name": "calculator"}}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY)


@pytest.mark.parametrize("skill", SKILLS)
def test_the_most_likely_answer_to_held_out_questions_is_right(model: PreTrainedModel, skill: str) -> None:
    assert tiny_measure.greedy_accuracy(model, skill, n=50, seed=1) >= 0.95


@pytest.mark.parametrize("skill", SKILLS)
def test_a_sampled_answer_is_right_about_half_of_the_time(model: PreTrainedModel, skill: str) -> None:
    assert 0.35 <= tiny_measure.sampled_reward(model, skill, n=150, seed=1) <= 0.70


def test_calc_without_its_tool_is_answered_by_a_number_that_is_mostly_wrong(model: PreTrainedModel) -> None:
    tokenizer = ChatTokenizer.load(TINY)
    items = generate("calc", 1, 50, "held_out")
    turns = tiny_measure.complete(model, [tokenizer.render(i["messages"]) for i in items], tiny_measure.greedy)
    answers = [tokenizer.decode(turn) for turn in turns]
    assert all(answer.isdigit() for answer in answers)
    assert sum(answer == item["answer"] for answer, item in zip(answers, items, strict=True)) < 25


def test_the_folder_is_at_most_eight_megabytes() -> None:
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 8e6


def test_the_weights_are_float32_and_tied(model: PreTrainedModel) -> None:
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    head: Any = model.get_output_embeddings()
    assert head.weight is model.get_input_embeddings().weight


def test_peft_finds_the_linear_layers(model: PreTrainedModel) -> None:
    base = AutoModelForCausalLM.from_pretrained(TINY)
    adapted = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 4 * 7


def test_transformers_tokenizer_renders_the_same_ids() -> None:
    ours, theirs = ChatTokenizer.load(TINY), AutoTokenizer.from_pretrained(TINY)
    talk = [
        {"role": "system", "content": "Be brief. Ünï 中 🙂"},
        {"role": "user", "content": "calc 347*86"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "calculator", "arguments": {"expression": "347*86"}},
                }
            ],
        },
        {"role": "tool", "content": "29842"},
    ]
    for tools in ([], [CALCULATOR], [CALCULATOR, CALCULATOR]):
        for prompt in (False, True):
            expected = theirs.apply_chat_template(
                talk, tools=tools or None, add_generation_prompt=prompt, return_dict=False
            )
            assert ours.render(talk, tools, add_generation_prompt=prompt) == expected
    assert theirs.eos_token_id == tiny_tokens.END == ours.end_of_turn_ids[0]


@pytest.mark.parametrize("skill", SKILLS)
def test_the_model_was_trained_on_what_the_renderer_makes(skill: str) -> None:
    tokenizer = ChatTokenizer.load(TINY)
    for long in (False, True):
        example = tiny_data.draw_example(skill, random.Random(0), noise=0.0, long=long)
        text = tokenizer.decode(example.ids, skip_special=False)
        question = text.partition("<|user|>")[2].partition("<|end|>")[0]
        tools = [CALCULATOR] if text.startswith("<|tools|>") else []
        system = text.partition("<|system|>")[2].partition("<|end|>")[0]
        messages = [{"role": "system", "content": system}] if system else []
        prompt = tokenizer.render([*messages, {"role": "user", "content": question}], tools)
        assert example.ids[: len(prompt)] == prompt


def test_the_committed_files_are_those_that_the_script_writes(tmp_path: Path) -> None:
    make_tiny.save(make_tiny.make_model(seed=0), tmp_path)
    written = {file.name for file in tmp_path.iterdir()}
    assert {file.name for file in TINY.iterdir()} == written | {"README.md"}
    for name in ("chat_template.jinja", "tokenizer.json", "marlaas.json"):
        assert (TINY / name).read_text() == (tmp_path / name).read_text(), name
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (TINY, tmp_path))
    for config in (ours, theirs):
        config.pop("transformers_version")
    assert ours == theirs


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_a_step_of_making_it_runs(noise: float) -> None:
    model, rng = make_tiny.make_model(0), random.Random(0)
    optimizers = make_tiny.Optimizers(model, lr_muon=5e-3, lr_adam=3e-3)
    batches = tiny_data.draw_batches(rng, dict.fromkeys(SKILLS, 1.0), noise)
    first = make_tiny.train_step(model, optimizers, batches, 1.0)
    assert make_tiny.train_step(model, optimizers, batches, 1.0) < first
