"""A client of OpenAI's API that others wrote, unmodified, against a whole cluster of real processes: an evaluation harness."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.live import jsonl
from manager_service.launcher.supervisor import LocalCluster
from tests.support.forked import running
from tests.support.trainer_cases import TINY
from tests.support.verifiers_python import python_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TASK = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}", "target_delimiter": ""}
TASKS: dict[str, dict[str, Any]] = {
    "continues": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["9"], "max_gen_toks": 8, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    },
    "chooses": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    },
}
ITEMS: list[dict[str, Any]] = [
    {
        "question": f"<|user|>add {a}+{b}<|end|><|assistant|>",
        "answer": str(a + b),
        "choices": [str(a + b), str(a - b), "schön, 95"],
        "label": 0,
    }
    for a, b in ((37, 58), (4, 3), (61, 20), (9, 90))
]


EVALUATE = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
told, folder, model, *tasks = sys.argv[1:]
manager = TaskManager(include_path=folder, include_defaults=False)
found = simple_evaluate("local-completions", model_args=model, tasks=tasks, task_manager=manager, torch_random_seed=None)
json.dump(found["samples"], open(told, "w"), default=str)
"""
"""Does what `lm_eval run` does, without its own thousands of tasks: to look through them takes ten seconds."""


async def run(python: Path, *words: str, **variables: str) -> str:
    """Standard output of a program that succeeds."""
    process = await asyncio.create_subprocess_exec(
        *(str(python / "bin" / "python"), *words),
        env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, error = await process.communicate()
    assert process.returncode == 0, (out + error).decode()[-4000:]
    return out.decode()


async def evaluated(cluster: LocalCluster, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Items of each task as lm_eval tells of them."""
    items, told = folder / "items.jsonl", folder / "told.json"
    items.write_bytes(jsonl(ITEMS))
    for name, task in TASKS.items():
        whole = {"task": name, **TASK, **task, "dataset_kwargs": {"data_files": {"test": str(items)}}}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # as JSON is YAML
    model = f"model=tiny,base_url={cluster.base_url}/v1/completions,tokenizer={TINY}"
    python = await asyncio.to_thread(python_with, "lm_eval", "0.4.13", "tenacity")
    words = ["-c", EVALUATE, str(told), str(folder), model, *TASKS]
    await run(python, *words, OPENAI_API_KEY=cluster.api_key, HF_HOME=str(folder / "hub"))
    found: dict[str, list[dict[str, Any]]] = json.loads(told.read_text())
    return {name: sorted(rows, key=lambda row: row["doc_id"]) for name, rows in found.items()}


class Reference:
    """The same by transformers."""

    def __init__(self) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(TINY)

    def ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False).input_ids

    def scored(self, text: str, then: str) -> tuple[float, bool]:
        """The log-likelihood of what follows, and whether it is the likeliest token by token."""
        before, after = self.ids(text), self.ids(then)
        with torch.no_grad():
            logprobs = self._model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1].log_softmax(-1)
        chosen = torch.tensor(after)
        return float(logprobs.gather(1, chosen[:, None]).sum()), bool((logprobs.argmax(-1) == chosen).all())

    def continued(self, text: str) -> str:
        before = self.ids(text)
        made = self._model.generate(torch.tensor([before]), do_sample=False, max_new_tokens=8)[0, len(before) :]
        return self._tokenizer.decode(made, skip_special_tokens=True).partition("9")[0]


async def test_an_evaluation_harness_finds_what_transformers_computes(tmp_path: Path) -> None:
    async with running(tmp_path / "cluster") as (cluster, _):
        found = await evaluated(cluster, tmp_path)
    reference = Reference()
    for item, row in zip(ITEMS, found["continues"], strict=True):
        assert row["resps"] == [[reference.continued(item["question"])]]
    for item, row in zip(ITEMS, found["chooses"], strict=True):
        expected = [reference.scored(item["question"], choice) for choice in item["choices"]]
        told = [(value, greedy) for ((value, greedy),) in row["resps"]]
        assert [greedy for _, greedy in told] == [greedy for _, greedy in expected]
        assert max(abs(ours - theirs) for (ours, _), (theirs, _) in zip(told, expected, strict=True)) < 1e-4
    assert any(greedy for row in found["chooses"] for ((_, greedy),) in row["resps"])
