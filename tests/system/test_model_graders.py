"""Graders that are models, of the service and elsewhere, through all services, on a cluster of real processes."""

import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from common.skills import generate
from harness.live import Api, is_balanced, jsonl
from tests.support.forked import running
from tests.support.verifiers_python import model_by_script

pytestmark = pytest.mark.slow

LETTER_E: dict[str, Any] = {
    "type": "score_model",
    "name": "letters",
    "model": "tiny",
    "input": [{"role": "user", "content": "count e in {{sample.output_text}}"}],
    "range": [0, 9],
}


JUDGED: dict[str, Any] = {
    "type": "score_model",
    "name": "judge",
    "model": "judge",
    "input": [{"role": "user", "content": "{{item.question}} -> {{sample.output_text}}"}],
}


def judge(messages: list[dict[str, Any]]) -> str:
    """Alone knows what is right."""
    question, _, answer = messages[-1]["content"].partition(" -> ")
    return str(int(answer == str(sum(map(int, re.findall(r"\d+", question))))))


@pytest.mark.timeout(1200)
async def test_a_judge_elsewhere_a_base_model_and_a_tuned_one_grade_the_answers_of_jobs(tmp_path: Path) -> None:
    allowed = {"MARLAAS_GRADER_HOSTS": "127.0.0.1"}
    with model_by_script(judge) as url:
        async with running(tmp_path, rollout=2, env=2, environment=allowed) as (_, api):
            await learns_from_a_judge_alone(api, JUDGED | {"url": url})
            await models_of_the_service_grade(api)


async def learns_from_a_judge_alone(api: Api, grader: dict[str, Any]) -> None:
    asked = [row["messages"] for row in generate("add", 1, 256)]
    items = jsonl([{"messages": messages, "question": messages[0]["content"]} for messages in asked])
    hyper: dict[str, Any] = {"batch_size": 8, "group_size": 8, "max_tokens": 8, "learning_rate_multiplier": 2}
    hyper |= {"max_steps": 60, "target_reward": 0.75}
    method = {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": hyper}}
    body = {"model": "tiny", "training_file": await api.upload("sums.jsonl", items), "method": method, "seed": 7}
    (job,) = await api.until_done((await api.post("/fine_tuning/jobs", body))["id"], seconds=600)
    curve = (await api.get(f"/fine_tuning/jobs/{job['id']}/events", limit=100))["data"]
    rewards = [event["data"]["reward_mean"] for event in reversed(curve) if "reward_mean" in event["data"]]
    assert rewards[0] < 0.7 and job["stopped_early"] == "target_reward", (rewards, job["error"])
    used = await api.get(f"/fine_tuning/jobs/{job['id']}/usage")
    assert used["grader_tokens"] >= 64 * len(rewards)


async def models_of_the_service_grade(api: Api) -> None:
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

    job, samples = await train(LETTER_E, batch_size=8, group_size=8, max_steps=2, max_tokens=16)
    assert fmean(sample["reward"] == sample["text"].count("e") for sample in samples) > 0.8, samples
    assert max(sample["reward"] for sample in samples) >= 1
    used = await api.get(f"/fine_tuning/jobs/{job['id']}/usage")
    tried = {"grader": LETTER_E, "model_sample": "eee", "item": {}}
    assert (await api.post("/fine_tuning/alpha/graders/run", tried))["reward"] == 3.0
    both = {"tuned": LETTER_E | {"model": job["fine_tuned_model"]}, "plain": LETTER_E}
    multi = {"type": "multi", "name": "both", "graders": both, "calculate_output": "plain + 0 * tuned"}
    _, again = await train(multi, batch_size=4, group_size=4, max_steps=2, max_tokens=16)
    # a prompt of the job has at most 17 tokens, and a question to the grader's model as many at least
    assert used["prompt_tokens"] > 2 * 64 * 28, used
    assert again and all(set(sample["reward_parts"]) == {"plain", "tuned"} for sample in again), again
