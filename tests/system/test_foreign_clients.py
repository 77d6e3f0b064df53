"""Clients of OpenAI's API that others wrote, unmodified, against a whole cluster of real processes: an evaluation harness, a gateway."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.tasks.skills import generate
from harness.live import Api, jsonl
from manager_service.launcher.supervisor import LocalCluster
from tests.support.forked import running
from tests.support.trainer_cases import TINY
from tests.support.verifiers_python import python_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[tuple[LocalCluster, Api]]:
    async with running(tmp_path_factory.mktemp("cluster")) as started:
        yield started


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


async def test_an_evaluation_harness_finds_what_transformers_computes(
    service: tuple[LocalCluster, Api], tmp_path: Path
) -> None:
    found, reference = await evaluated(service[0], tmp_path), Reference()
    for item, row in zip(ITEMS, found["continues"], strict=True):
        assert row["resps"] == [[reference.continued(item["question"])]]
    for item, row in zip(ITEMS, found["chooses"], strict=True):
        expected = [reference.scored(item["question"], choice) for choice in item["choices"]]
        told = [(value, greedy) for ((value, greedy),) in row["resps"]]
        assert [greedy for _, greedy in told] == [greedy for _, greedy in expected]
        assert max(abs(ours - theirs) for (ours, _), (theirs, _) in zip(told, expected, strict=True)) < 1e-4
    assert any(greedy for row in found["chooses"] for ((_, greedy),) in row["resps"])


GATEWAY = """
import json, litellm, sys
url, key, file = sys.argv[1:]
to = {"api_base": url, "api_key": key}
said = litellm.completion(model="openai/tiny", messages=[{"role": "user", "content": "add 37+58"}], max_tokens=8, **to)
job = litellm.create_fine_tuning_job(
    model="tiny", training_file=file, hyperparameters={"n_epochs": 2}, custom_llm_provider="openai", **to
)
print(json.dumps([said.choices[0].message.content, said.usage.completion_tokens, job.id]))
"""


async def test_a_gateway_chats_and_fine_tunes(service: tuple[LocalCluster, Api]) -> None:
    cluster, api = service
    rows = [
        {"messages": [*item["messages"], {"role": "assistant", "content": item["answer"]}]}
        for item in generate("add", 1, 32, "train")
    ]
    file = await api.upload("examples.jsonl", jsonl(rows))
    python = await asyncio.to_thread(python_with, "litellm", "1.110.2")
    told = await run(python, "-c", GATEWAY, f"{cluster.base_url}/v1", cluster.api_key, file)
    (line,) = (line for line in told.splitlines() if line.startswith("["))  # it says more
    text, num_tokens, job = json.loads(line)
    assert isinstance(text, str) and num_tokens > 0
    (done,) = await api.until_done(job)
    assert (done["status"], done["method"]["type"], done["num_steps"]) == ("succeeded", "supervised", 4)
