"""A base model whose own context is longer than the memory holds, served with no context set, and trained by transformers."""

from pathlib import Path
from typing import Any

import pytest

from harness.bases import FIRST_WORD, make_random_base
from harness.live import Api
from tests.support.forked import running
from tests.system.test_other_families import job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 1024,
    "vocab_size": 1024,
    "max_position_embeddings": 40_960,
}
"""Few weights, and 64 KiB of keys and values a token: 1 GiB holds fewer tokens than the model's context has."""
SERVED = 6144


async def test_what_fits_is_served_and_said_and_longer_prompts_are_refused_with_it(tmp_path: Path) -> None:
    base = make_random_base(tmp_path / "base", last_word=FIRST_WORD, **SIZES)
    lines: list[str] = []
    environment = {
        "MARLAAS_BASE_MODELS": f"base={base}",
        "MARLAAS_TRAINER_BACKBONE": "transformers",
        "MARLAAS_ROLLOUT_KV_BYTES": str(1 << 30),
    }
    async with running(tmp_path / "data", environment=environment, notify=lines.append) as (_, api):
        # Given a cluster that has said what it serves, in one line, and why
        (line,) = [each for each in lines if "keys and values" in each]
        assert f"context {SERVED:,} of the model's 40,960; of the" in line

        # Then it refuses a longer prompt with that number, of a completion and of a job
        told = await refusal(api, "/completions", {"model": "base", "prompt": [300] * SERVED})
        assert told.startswith(f"This model's maximum context length is {SERVED} tokens, and the prompt has {SERVED}")
        told = await refusal(api, "/fine_tuning/jobs", await job(api, "base", "word " * SERVED))
        assert f"longer than {SERVED - 16} tokens, which is the context of {SERVED} less max_tokens 16" in told

        # And a job on short ones trains, on transformers' modules, whose log-probs are those of our engine; three of four ids are
        # not in the tokenizer: they are no text, and are trained
        made = await api.post("/fine_tuning/jobs", await job(api, "base", "a word", max_steps=1))
        (ended,) = await api.until_done(made["id"])
        assert ended["status"] == "succeeded", ended["error"]
        (step,) = [e["data"] for e in await api.events(made["id"]) if "grad_norm" in e["data"]]
        assert step["reward_std"] > 0 and step["grad_norm"] > 0 and step["sampling_gap"] < 1e-3
        log = (tmp_path / "data" / "logs" / "trainer-0.log").read_text()
        (chosen,) = [line for line in log.splitlines() if "backbone_chosen" in line]
        assert "transformers" in chosen
        samples = (await api.get(f"/fine_tuning/jobs/{made['id']}/samples"))["data"]
        assert len(samples) == 8
        assert 0 < 2 * sum(len(row["text"]) for row in samples) < step["written_tokens"]


async def refusal(api: Api, path: str, body: Any) -> str:
    answer = await api.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]
