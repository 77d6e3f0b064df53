"""`python -m examples.new_skill`: teaches `tiny` what it does not know, `min 14,92,7`, by examples first and by rewards then.

    base ─ supervised job on examples ─► an adapter that often knows ─ reinforcement job that starts from it ─► one that nearly always does

Both jobs and the questions in between go through the `openai` client, to a service that this starts and ends.
"""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from openai import AsyncOpenAI

from common.tasks.skills import is_held_out
from examples.demo import GRADER, upload
from examples.three_turns import JobFailed, client_of
from manager_service.launcher.supervisor import LocalCluster
from marlaas_client.cli.output import say

DATA_DIR = Path(".marlaas/new_skill")
NUM_EXAMPLES, NUM_ITEMS, NUM_HELD_OUT = 4096, 1024, 512
SUPERVISED: dict[str, Any] = {"batch_size": 32, "n_epochs": 2, "learning_rate_multiplier": 3}
REINFORCEMENT: dict[str, Any] = {"batch_size": 32, "group_size": 8, "max_steps": 80, "target_reward": 0.96}
AT_ONCE = 32
PERIOD_S = 0.5

Item = dict[str, Any]


class Shares(NamedTuple):
    """Right answers to held-out questions, each sampled once at temperature 1."""

    base: float
    supervised: float
    reinforced: float


def questions(seed: int, num: int, *, held_out: bool) -> list[Item]:
    """Different questions for the smallest of three or four numbers, of one split."""
    rng, found = random.Random(f"min/{held_out}/{seed}"), dict[str, str]()
    while len(found) < num:
        numbers = [rng.randrange(100) for _ in range(rng.randint(3, 4))]
        question = f"min {','.join(map(str, numbers))}"
        if is_held_out(question) == held_out:
            found[question] = str(min(numbers))
    return [{"messages": [{"role": "user", "content": question}], "answer": found[question]} for question in found]


def as_example(item: Item) -> Item:
    """The question with its answer, in OpenAI's form."""
    return {"messages": [*item["messages"], {"role": "assistant", "content": item["answer"]}]}


async def learn(client: AsyncOpenAI, *, seed: int = 0) -> Shares:
    """Trains both jobs, and measures before, between and after. Raises JobFailed."""
    held_out = questions(0, NUM_HELD_OUT, held_out=True)
    base = await share_right(client, "tiny", held_out)
    say(f"base model: {base:.3f} of the answers are right")
    examples = [as_example(item) for item in questions(0, NUM_EXAMPLES, held_out=False)]
    method: Item = {"type": "supervised", "supervised": {"hyperparameters": SUPERVISED}}
    checked = [as_example(item) for item in held_out[:64]]
    tuned = await train(client, "tiny", method, examples, checked, seed)
    supervised = await share_right(client, tuned, held_out)
    say(f"after {NUM_EXAMPLES} examples: {supervised:.3f}")
    method = {"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": REINFORCEMENT}}
    tuned = await train(client, tuned, method, questions(1, NUM_ITEMS, held_out=False), held_out[:64], seed)
    reinforced = await share_right(client, tuned, held_out)
    say(f"after rewards: {reinforced:.3f}")
    return Shares(base, supervised, reinforced)


async def train(
    client: AsyncOpenAI, model: str, method: Item, rows: Sequence[Item], checked: Sequence[Item], seed: int
) -> str:
    """The name of the model that a job makes of `model`."""
    files = [await upload(client, "rows.jsonl", rows), await upload(client, "checked.jsonl", checked)]
    job = await client.fine_tuning.jobs.create(
        model=model, training_file=files[0], validation_file=files[1], method=method, seed=seed  # pyright: ignore
    )  # fmt: skip
    say(f"{job.id}: {method['type']}, from {model}")
    while job.status not in ("succeeded", "failed", "cancelled"):
        await asyncio.sleep(PERIOD_S)
        job = await client.fine_tuning.jobs.retrieve(job.id)
    if job.status != "succeeded" or job.fine_tuned_model is None:
        raise JobFailed(f"{job.id} {job.status}: {job.error and job.error.message}")
    events = [event.message async for event in client.fine_tuning.jobs.list_events(job.id, limit=100)]
    say("; ".join(reversed([message for message in events if message.startswith("Evaluation")])))
    return job.fine_tuned_model


async def share_right(client: AsyncOpenAI, model: str, items: Sequence[Item]) -> float:
    places = asyncio.Semaphore(AT_ONCE)

    async def is_right(item: Item) -> bool:
        async with places:
            reply = await client.chat.completions.create(
                model=model, messages=item["messages"], temperature=1.0, max_tokens=16
            )
        return reply.choices[0].message.content == item["answer"]

    return sum(await asyncio.gather(*map(is_right, items))) / len(items)


async def main() -> None:
    async with LocalCluster(data_dir=DATA_DIR, port=0, notify=say) as cluster, client_of(cluster) as client:
        await learn(client)


if __name__ == "__main__":
    asyncio.run(main())
