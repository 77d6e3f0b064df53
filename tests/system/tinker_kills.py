"""Kills trainers and the manager between the operations of a run, many times, and compares the adapter's bytes with those of an
undisturbed run: `python -m tests.system.tinker_kills [--kills 200]`.

Deterministic mode, two trainers, the unmodified SDK. Each kill is a SIGKILL of a process drawn by a seed, at a moment drawn by it; the
next comes once the run has got an answer since. Exit status: 0 if both runs end in the same bytes and no version is missing.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from common.adapters import PEFT_FILES, AdapterStore
from common.messages import AdapterRef
from common.objects import Objects
from harness.live import running
from manager_service.local.supervisor import LocalCluster
from manager_service.runs.records import run_of
from tests.support.tinker_sdk import run_sdk

TENANT = "default"
DETERMINISTIC = {"MARLAAS_DETERMINISTIC": "1", "MARLAAS_LEASE_S": "2"}
VICTIMS = ("trainer-0", "trainer-1", "manager")
BETWEEN_S = (0.0, 0.4)
"""From the answer that the run got after the kill of before, to the next kill: several operations may be answered in this time."""
LIMIT_S = 3600.0

TRAIN = """
import json, os, tinker
from tinker import types
def datum(n):
    tokens = [(7 * n + i) % 200 for i in range(12)]
    inputs = {{"target_tokens": tokens[1:] + [0], "weights": [1.0] * 12}}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
client = tinker.ServiceClient().create_lora_training_client("tiny", rank=8, seed=3).result()
done, versions, answers = 0, [], 0
def answered(future):
    global answers
    result, answers = future.result(), answers + 1
    with open({told!r}, "w") as file:
        file.write(str(answers))
    return result
while done < {steps} and not os.path.exists({stop!r}):
    for part in range(3):
        answered(client.forward_backward([datum(3 * done + part)], "cross_entropy"))
    versions.append(int(answered(client.optim_step(types.AdamParams(learning_rate=1e-4))).metrics["version"]))
    done += 1
    if done % 10 == 0:
        answered(client.save_state(f"at-{{done}}"))
print(json.dumps([client.save_state("end").result().path, versions]))
"""


async def train(cluster: LocalCluster, steps: int, stop: Path, told_in: Path) -> tuple[dict[str, bytes], int]:
    """The files of the last version, and how many steps were made: at most `steps`, fewer if the file `stop` appears. The number
    of operations that were answered so far stands in the file `told_in`."""
    program = TRAIN.format(steps=steps, stop=str(stop), told=str(told_in))
    told: Any = await run_sdk(program, url=cluster.base_url, key=cluster.api_key, timeout_s=LIMIT_S)
    path, versions = told
    assert versions == list(range(1, len(versions) + 1)), "a version is missing, or there twice"
    run = run_of(path.removeprefix("tinker://").partition("/")[0])
    assert run is not None
    store = AdapterStore(Objects.open((cluster.data_dir / "store").as_uri()))
    return await store.read(AdapterRef(TENANT, run, len(versions)), PEFT_FILES), len(versions)


async def kill(cluster: LocalCluster, num: int, rng: random.Random, told_in: Path) -> Counter[str]:
    """Kills so many times; which processes how often."""
    killed: Counter[str] = Counter()
    before = 0
    while killed.total() < num:
        while (answers := read_number(told_in)) == before:
            await asyncio.sleep(0.02)
        await asyncio.sleep(rng.uniform(*BETWEEN_S))
        if cluster.kill(name := rng.choice(VICTIMS)):
            killed[name] += 1
            before = max(answers, read_number(told_in))
    return killed


async def either(killing: Coroutine[Any, Any, Counter[str]], training: asyncio.Task[Any]) -> Counter[str]:
    """What the killing tells; the training's error if that ends first."""
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


async def main(num: int, seed: int) -> bool:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        stop, began = folder / "stop", time.monotonic()
        async with running(folder / "killed", environment=DETERMINISTIC, trainer=2) as (cluster, _):
            training = asyncio.create_task(train(cluster, 10**9, stop, folder / "told"))
            killed = await either(kill(cluster, num, random.Random(seed), folder / "told"), training)
            stop.touch()
            disturbed, steps = await training
        killed_s, began = time.monotonic() - began, time.monotonic()
        async with running(folder / "alone", environment=DETERMINISTIC) as (cluster, _):
            alone, _ = await train(cluster, steps, folder / "none", folder / "told-alone")
        same = alone == disturbed
        told = {"kills": killed.total(), "of": dict(killed), "seed": seed, "steps": steps, "operations": 4 * steps}
        seconds = {"seconds": round(killed_s), "seconds_alone": round(time.monotonic() - began)}
        print(json.dumps(told | seconds | {"same_bytes": same}))
        return same


if __name__ == "__main__":
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--kills", type=int, default=200)
    given.add_argument("--seed", type=int, default=1)
    options = given.parse_args()
    sys.exit(0 if asyncio.run(main(options.kills, options.seed)) else 1)
