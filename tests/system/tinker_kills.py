"""A run of the unmodified SDK whose processes are killed between its operations, and what came of it.

Each kill is a SIGKILL at a moment drawn by a seed; the next comes once the client has got an answer since. Every operation is answered,
once and with success; the versions have no gap, and each sample is of the version that was saved; trained tokens are charged once.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import redis.asyncio as aioredis

from common.bus.streams import Cell
from common.store.adapters import PEFT_FILES, AdapterStore
from common.store.objects import Objects
from common.wire.messages import AdapterRef
from common.wire.operations import OperationResult
from harness.live import Api
from manager_service.launcher.supervisor import LocalCluster
from manager_service.records.run_records import run_of
from tests.support.tinker_sdk import run_sdk

TENANT = "default"
CELL = Cell("tiny")
BETWEEN_S = (0.0, 0.4)
"""Time from the answer that the run got after the kill of before, to the next kill: several operations may be answered in this time."""
LIMIT_S = 3600.0
PARTS, TOKENS = 3, 12
"""Passes of a step, each over one datum of so many tokens."""

TRAIN = """
import json, os, tinker
from tinker import types
def datum(n):
    tokens = [(7 * n + i) % 200 for i in range({tokens})]
    inputs = {{"target_tokens": tokens[1:] + [0], "weights": [1.0] * {tokens}}}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
client = tinker.ServiceClient().create_lora_training_client("tiny", rank=8, seed=3).result()
prompt, done, steps, samples, answers = types.ModelInput.from_ints([259, *b"add 37+58", 256, 260]), 0, [], [], 0
def answered(future):
    global answers
    result, answers = future.result(), answers + 1
    with open({told!r}, "w") as file:
        file.write(str(answers))
    return result
while done < {steps} and not os.path.exists({stop!r}):
    losses = [answered(client.forward_backward([datum({parts} * done + part)], "cross_entropy")).metrics["loss:sum"]
              for part in range({parts})]
    metrics = answered(client.optim_step(types.AdamParams(learning_rate=1e-4))).metrics
    steps.append([int(metrics["version"]), metrics["grad_norm"], losses])
    done += 1
    sampler = answered(client.save_weights_and_get_sampling_client())
    found = answered(sampler.sample(prompt, 2, types.SamplingParams(max_tokens=8, seed=done))).sequences
    samples.append([[int(s.sequence_id.rpartition("@")[2]), list(s.tokens)] for s in found])
    if done % 10 == 0:
        answered(client.save_state(f"at-{{done}}"))
print(json.dumps([client.save_state("end").result().path, steps, samples]))
"""


@dataclass(frozen=True, slots=True)
class Trained:
    """The outcome of a run."""

    steps: list[tuple[int, float, list[float]]]  # version, norm of the gradient, losses of the passes
    samples: list[list[tuple[int, list[int]]]]  # by step: version and tokens of each
    adapter: dict[str, bytes]  # files of the last version
    faults: list[str]


async def train(cluster: LocalCluster, api: Api, steps: int, stop: Path, told_in: Path) -> Trained:
    """Makes at most `steps` steps, fewer if the file `stop` appears. The number of answers that the client got so far stands in the
    file `told_in`."""
    program = TRAIN.format(steps=steps, stop=str(stop), told=str(told_in), parts=PARTS, tokens=TOKENS)
    path, *told = await run_sdk(program, url=cluster.base_url, key=cluster.api_key, timeout_s=LIMIT_S)
    run = run_of(path.removeprefix("tinker://").partition("/")[0])
    assert run is not None
    made, samples = msgspec.convert(
        told, tuple[list[tuple[int, float, list[float]]], list[list[tuple[int, list[int]]]]]
    )
    store = AdapterStore(Objects.open((cluster.data_dir / "store").as_uri()))
    adapter = await store.read(AdapterRef(TENANT, run, len(made)), PEFT_FILES)
    charged = [row["trained_tokens"] for row in (await api.get("/usage"))["data"] if row["job"] == run]
    faults = [*numbering(made, samples), *await unanswered(cluster.redis_url, run)]
    if charged != (due := [len(made) * PARTS * TOKENS]):
        faults.append(f"{charged} trained tokens were charged instead of {due}")
    return Trained(made, samples, adapter, faults)


def numbering(steps: list[tuple[int, float, list[float]]], samples: list[list[tuple[int, list[int]]]]) -> list[str]:
    """The faults of the versions' numbers."""
    expected = list(range(1, len(steps) + 1))
    faults = [] if [step[0] for step in steps] == expected else ["a version is missing, or there twice"]
    sampled = [[version for version, _ in found] for found in samples]
    return faults if sampled == [[version] * 2 for version in expected] else [*faults, "a sample is of another version"]


async def unanswered(redis_url: str, run: str) -> list[str]:
    """Operations of a run without a result or with a failure."""
    client: Any = aioredis.from_url(redis_url)  # pyright: ignore[reportUnknownMemberType]
    async with client:
        found: dict[bytes, bytes] = await client.hgetall(CELL.results(run))
        submitted = int(await client.hget(CELL.seqs(run), "last"))
    results = {int(number): msgspec.msgpack.decode(body, type=OperationResult) for number, body in found.items()}
    faults = [f"operation {number} has no result" for number in range(submitted + 1) if number not in results]
    return faults + [f"operation {number}: {each.failure}" for number, each in results.items() if each.failure]


async def left(redis_url: str) -> list[str]:
    """Work that is left in the cell's streams, and dead letters."""
    client: Any = aioredis.from_url(redis_url)  # pyright: ignore[reportUnknownMemberType]
    async with client:
        kinds = [await client.keys(CELL.key(f"{kind}:[0-9]*")) for kind in ("ops", "adapters")]
        inboxes = [key.decode() for keys in kinds for key in keys]
        work = [CELL.train, CELL.rollout, CELL.rollout_first, CELL.rollout_chat, CELL.dead, *inboxes]
        return [f"{key} holds {num} entries" for key in work if (num := await client.xlen(key))]


async def kill(cluster: LocalCluster, victims: Iterable[str], rng: random.Random, told_in: Path) -> Counter[str]:
    """Kills one after the other, each once the client has got an answer since; which processes how often."""
    killed: Counter[str] = Counter()
    before = 0
    for name in victims:
        while (answers := read_number(told_in)) == before:
            await asyncio.sleep(0.02)
        await asyncio.sleep(rng.uniform(*BETWEEN_S))
        while not cluster.kill(name):
            await asyncio.sleep(0.02)
        killed[name] += 1
        before = max(answers, read_number(told_in))
    return killed


async def either(killing: Coroutine[Any, Any, Counter[str]], training: asyncio.Task[Any]) -> Counter[str]:
    """The report of the killing; the training's error if that ends first."""
    task = asyncio.create_task(killing)
    await asyncio.wait([task, training], return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        training.result()
        raise AssertionError("the training ended by itself")
    return task.result()


def read_number(file: Path) -> int:
    """0 while nothing is told."""
    return int((file.read_text() if file.exists() else "") or 0)


def differences(killed: Trained, alone: Trained) -> list[str]:
    """Differences between a run that was disturbed and one that was not."""
    same = {"bytes": killed.adapter == alone.adapter, "samples": killed.samples == alone.samples}
    return [f"other {what} than undisturbed" for what, equal in same.items() if not equal]
