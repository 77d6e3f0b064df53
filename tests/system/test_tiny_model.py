"""The committed base model: right when greedy, right half of the time when sampled, loadable by everybody."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from common.tasks.skills import SKILLS
from common.text.tokens import ChatTokenizer

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "tiny"
sys.path.insert(0, str(TINY.parent))

import make_tiny  # noqa: E402  (scripts beside the model, not a package)
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
