"""Kills trainers and the manager between the operations of a run, many times, and compares the adapter's bytes with those of an
undisturbed run: `python -m tests.system.tinker_kills [--kills 200]`.

Deterministic mode, two trainers, the unmodified SDK. Each kill is a SIGKILL of a process drawn by a seed, at a moment drawn by it; the
next comes when the process runs again. Exit status: 0 if both runs end in the same bytes and no version is missing.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
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
BETWEEN_S = (0.1, 1.5)
"""From the moment at which the process of before runs again, to the next kill."""
LIMIT_S = 3600.0

TRAIN = """
import json, os, tinker
from tinker import types
def datum(n):
    tokens = [(7 * n + i) % 200 for i in range(12)]
    inputs = {{"target_tokens": tokens[1:] + [0], "weights": [1.0] * 12}}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
client = tinker.ServiceClient().create_lora_training_client("tiny", rank=8, seed=3).result()
done, versions = 0, []
while done < {steps} and not os.path.exists({stop!r}):
    for part in range(3):
        client.forward_backward([datum(3 * done + part)], "cross_entropy").result()
    versions.append(int(client.optim_step(types.AdamParams(learning_rate=1e-4)).result().metrics["version"]))
    done += 1
    if done % 10 == 0:
        client.save_state(f"at-{{done}}").result()
print(json.dumps([client.save_state("end").result().path, versions]))
"""


async def train(cluster: LocalCluster, steps: int, stop: Path) -> tuple[dict[str, bytes], int]:
    """The files of the last version, and how many steps were made: at most `steps`, fewer if the file `stop` appears."""
    program = TRAIN.format(steps=steps, stop=str(stop))
    told: Any = await run_sdk(program, url=cluster.base_url, key=cluster.api_key, timeout_s=LIMIT_S)
    path, versions = told
    assert versions == list(range(1, len(versions) + 1)), "a version is missing, or there twice"
    run = run_of(path.removeprefix("tinker://").partition("/")[0])
    assert run is not None
    store = AdapterStore(Objects.open((cluster.data_dir / "store").as_uri()))
    return await store.read(AdapterRef(TENANT, run, len(versions)), PEFT_FILES), len(versions)


async def kill(cluster: LocalCluster, num: int, rng: random.Random) -> Counter[str]:
    """Kills so many times; which processes how often."""
    killed: Counter[str] = Counter()
    while killed.total() < num:
        await asyncio.sleep(rng.uniform(*BETWEEN_S))
        name = rng.choice(VICTIMS)
        before = cluster.pids.get(name)
        if before is None or not cluster.kill(name):
            continue
        killed[name] += 1
        while cluster.pids.get(name) in (before, None):
            await asyncio.sleep(0.05)
    return killed


async def main(num: int, seed: int) -> bool:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        stop, began = folder / "stop", time.monotonic()
        async with running(folder / "killed", environment=DETERMINISTIC, trainer=2) as (cluster, _):
            training = asyncio.create_task(train(cluster, 10**9, stop))
            killed = await kill(cluster, num, random.Random(seed))
            stop.touch()
            disturbed, steps = await training
        killed_s, began = time.monotonic() - began, time.monotonic()
        async with running(folder / "alone", environment=DETERMINISTIC) as (cluster, _):
            alone, _ = await train(cluster, steps, folder / "none")
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
