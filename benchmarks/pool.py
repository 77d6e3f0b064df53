"""Measures what several base models on one pool cost: a switch from each tier, and a pool worker without work.

    python -m benchmarks.pool [--switches 20] [--idle_s 80] [--json FILE]

A cluster as `marlaas up` starts it has three base models: `tiny`, a twin, and `wide`, of 170 MB. Chats to `wide` and to the twin take
turns, so that each switches the rollout worker. A switch lasts from the choice of the next base model until it is told to read, by the
worker's log; of a base model without a process, loading counts too. The processor time of a worker without work is that of its own
process, in the last quarter of `idle_s` seconds after the start.
"""

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._report import Goal, Report, make_table, run
from common.pool.choosing import OpenSlice, WaitingBase, choose
from common.settings import TINY
from harness.bases import FIRST_WORD, make_random_base
from harness.live import Api, running
from harness.processes import cpu_s
from manager_service.launcher.supervisor import LocalCluster

WIDE = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
}
MOST = {"host": 0.6, "device": 0.05}
"""Seconds of a switch, at most."""
MOST_CHOICE_US = 50
NUM_CHOICES, NUM_BASES = 2000, 32


async def chat(api: Api, base: str) -> None:
    asked = {"model": base, "max_tokens": 1, "messages": [{"role": "user", "content": "1+1="}]}
    await api.post("/chat/completions", asked)


def switches(cluster: LocalCluster, base: str) -> dict[str, list[float]]:
    """Seconds of each switch to a base model by the tier that it came from."""
    found: dict[str, list[float]] = {"host": [], "disk": [], "device": []}
    loading: tuple[str, float] | None = None
    for line in cluster.log_file("rollout-0").read_text().splitlines():
        row: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
        if row.get("base_model") != base:
            continue
        if row["event"] == "loaded":
            loading = row["tier"], row["seconds"]
        elif row["event"] == "opened":
            tier, seconds = loading or ("device", 0.0)
            found[tier].append(seconds + row["seconds"])
            loading = None
    return found


async def measure(num_switches: int, idle_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        wide = make_random_base(Path(folder) / "wide", last_word=FIRST_WORD, **WIDE)
        bases = {"tiny": TINY, "twin": TINY, "wide": wide}
        environment = {"MARLAAS_BASE_MODELS": ",".join(f"{name}={where}" for name, where in bases.items())}
        async with running(environment=environment) as (cluster, api):
            await asyncio.sleep(0.75 * idle_s)
            before, since = cpu_s(cluster.pids["rollout-0"]), time.monotonic()
            await asyncio.sleep(0.25 * idle_s)
            idle = (cpu_s(cluster.pids["rollout-0"]) - before) / (time.monotonic() - since)
            about = next(each for each in (await api.get("/models"))["data"] if each["id"] == "wide")["base"]
            for _ in range(num_switches):
                await chat(api, "wide")
                await chat(api, "twin")
            return {"idle": idle, "opens_in_s": about["opens_in_s"], "tier": about["tier"], **switches(cluster, "wide")}


def choice_s() -> float:
    """Seconds of one choice among NUM_BASES, the median."""
    waiting = [
        WaitingBase(base=str(n), waited_s=5.0 + n, operation_s=1.0, opening_s=0.2, since_closed_s=n)
        for n in range(NUM_BASES)
    ]
    current = OpenSlice(base="open", is_busy=False, lasted_s=9.0, idle_s=3.0, opening_s=1.0)
    times: list[float] = []
    for _ in range(NUM_CHOICES):
        since = time.perf_counter()
        choose(current, waiting, num_bases=NUM_BASES, slice_max_s=30.0)
        times.append(time.perf_counter() - since)
    return statistics.median(times)


def report(given: Any) -> Report:
    found = asyncio.run(measure(given.switches, given.idle_s))
    medians = {tier: statistics.median(found[tier]) for tier in MOST if found[tier]}
    figures: dict[str, float] = {
        **{f"from_{tier}_s": seconds for tier, seconds in medians.items()},
        "idle": found["idle"],
    }
    figures |= {"opens_in_s": found["opens_in_s"], "choice_s": choice_s()}
    table = make_table("A pool worker", ("figure", "measured"), list(figures.items()))
    goals = [Goal(f"a switch from {tier}", s, MOST[tier], " s", more_is_better=False) for tier, s in medians.items()]
    goals += [
        Goal("processor time without work", 100 * figures["idle"], 1, " %", more_is_better=False),
        Goal("a choice of 32", 1e6 * figures["choice_s"], MOST_CHOICE_US, " µs", more_is_better=False),
    ]
    return Report([table], figures, goals)


if __name__ == "__main__":
    run(__doc__, report, {"switches": 2, "idle_s": 4}, switches=20, idle_s=280)
