"""Graders that are models of the service, through all services, on a cluster of real processes."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from common.skills import generate
from harness.live import is_balanced, jsonl, running

pytestmark = pytest.mark.slow

LETTER_E: dict[str, Any] = {
    "type": "score_model",
    "name": "letters",
    "model": "tiny",
    "input": [{"role": "user", "content": "count e in {{sample.output_text}}"}],
    "range": [0, 9],
}


@pytest.mark.timeout(1200)
async def test_a_base_model_and_a_tuned_one_grade_the_answers_of_a_job(tmp_path: Path) -> None:
    async with running(tmp_path, rollout=2, env=2) as (_, api):
        file = await api.upload("reverse.jsonl", jsonl(generate("reverse", 1, 64)))

        async def train(grader: dict[str, Any], **hyper: Any) -> tuple[Any, list[Any]]:
            """The job, and its samples that have a reward."""
            method = {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": hyper}}
            body = {"model": "tiny", "training_file": file, "method": method, "seed": 7}
            (job,) = await api.until_done((await api.post("/fine_tuning/jobs", body))["id"], seconds=600)
            assert job["status"] == "succeeded", job["error"]
            assert is_balanced(await api.ledger(job["id"]))
            samples = [(await api.get(f"/fine_tuning/jobs/{job['id']}/samples", version=v))["data"] for v in (0, 1)]
            return job, [sample for one in samples for sample in one if sample["reward"] is not None]

        job, samples = await train(LETTER_E, batch_size=8, group_size=8, max_steps=4, max_tokens=16)
        assert fmean(sample["reward"] == sample["text"].count("e") for sample in samples) > 0.8, samples
        assert max(sample["reward"] for sample in samples) >= 1
        used = await api.get(f"/fine_tuning/jobs/{job['id']}/usage")
        tried = {"grader": LETTER_E, "model_sample": "eee", "item": {}}
        assert (await api.post("/fine_tuning/alpha/graders/run", tried))["reward"] == 3.0
        both = {"tuned": LETTER_E | {"model": job["fine_tuned_model"]}, "plain": LETTER_E}
        multi = {"type": "multi", "name": "both", "graders": both, "calculate_output": "plain + 0 * tuned"}
        _, again = await train(multi, batch_size=4, group_size=8, max_steps=2, max_tokens=16)
    # a prompt of the job has at most 17 tokens, and a question to the grader's model as many at least
    assert used["prompt_tokens"] > 4 * 64 * 28, used
    assert again and all(set(sample["reward_parts"]) == {"plain", "tuned"} for sample in again), again
