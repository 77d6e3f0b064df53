"""One and the same judge for every system: loads a saved adapter into PEFT and answers the held-out items."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks.peers.settings import ADAPTER, ADAPTER_CONFIG, Row, Settings, reward

Score = tuple[float, float]
"""Mean rewards on held-out items: greedy, and at the training temperature."""


def score(settings: Settings, rows: list[Row], adapter: Path | None = None) -> Score:
    """Score of the adapter, or of the base model if there is none. Raises ValueError if a tensor of the adapter has no place."""
    disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    model = model.eval() if adapter is None else with_adapter(model, adapter)
    torch.manual_seed(0)
    return _mean(settings, model, rows, samples=0), _mean(settings, model, rows, samples=settings.eval_samples)


@torch.no_grad()
def _mean(settings: Settings, model: Any, rows: list[Row], samples: int) -> float:
    """Greedy if `samples` is 0."""
    tokenizer: Any = AutoTokenizer.from_pretrained(settings.model, padding_side="left")
    texts = [tokenizer.apply_chat_template(r["messages"], add_generation_prompt=True, tokenize=False) for r in rows]
    prompts = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    sampling = {"do_sample": True, "temperature": settings.temperature, "top_k": 0, "top_p": 1.0}
    how = {**sampling, "num_return_sequences": samples} if samples else {"do_sample": False}
    ids = model.generate(**prompts, max_new_tokens=settings.max_tokens, **how)
    answers = tokenizer.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = [reward(answer, rows[i // max(1, samples)]["answer"], settings) for i, answer in enumerate(answers)]
    return sum(rewards) / len(rewards)


def with_adapter(model: Any, adapter: Path) -> Any:
    """Through a copy whose `target_modules` are those of its tensors: SkyRL writes none."""
    from peft import PeftModel  # here: it takes a second

    with safe_open(adapter / ADAPTER, framework="pt") as file:
        names = list(file.keys())
    config = json.loads((adapter / ADAPTER_CONFIG).read_text())
    targets = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in names})
    with tempfile.TemporaryDirectory() as copy:
        shutil.copy(adapter / ADAPTER, copy)
        named = {**config, "target_modules": targets, "task_type": "CAUSAL_LM"}
        (Path(copy) / ADAPTER_CONFIG).write_text(json.dumps(named))
        tuned = PeftModel.from_pretrained(model, copy)
    placed = {name.replace(".default.", ".") for name, _ in tuned.named_parameters() if "lora_" in name}
    if placed != set(names):
        raise ValueError(f"{adapter}: tensors without a place: {sorted(placed ^ set(names))[:3]}")
    return tuned.merge_and_unload().eval()  # the same function, fewer products
