"""Measures what several base models on one pool cost: a switch from each tier, a pool worker without work, the rule, and jobs.

    python -m benchmarks.pool [--part switches|jobs] [--switches 20] [--idle_s 280] [--json FILE]

A cluster as `marlaas up` starts it has three base models: `tiny`, a twin, and `wide`, of 170 MB. Chats to `wide` and to the twin take
turns, so that each switches the rollout worker. A switch lasts from the choice of the next base model until it is told to read, by the
worker's log; of a base model without a process, loading counts too. The processor time of a worker without work is that of its own
process, in the last quarter of `idle_s` seconds after the start. Mean waits and rates under the rule and others are computed, not
measured, by an exact model of one place (`_one_place.py`): four base models at load 0.8, and two whose clients think for 0.1 s. The part
`jobs`, of three minutes, has jobs of four base models (`_four_bases.py`).

On a GPU the same measures the tiers of real base models, which vLLM puts to sleep:

    MARLAAS_ENGINE=vllm MARLAAS_ROLLOUT_DEVICE=cuda MARLAAS_ROLLOUT_KV_BYTES=10GB python -m benchmarks.pool --bases a=/models/a,b=/models/b
"""

import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._four_bases import bases_report
from benchmarks._one_place import Rule, by_ratio, first_come, in_turn, mean_wait_s, rate
from benchmarks._report import Goal, Report, at_most, joined, make_table, parsed, parser, show
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
NUM_OPERATIONS = 2000


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


async def measure(num_switches: int, idle_s: float, given: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        if not given:
            wide = make_random_base(Path(folder) / "wide", last_word=FIRST_WORD, **WIDE)
            given = f"tiny={TINY},twin={TINY},wide={wide}"
        other, last = [each.partition("=")[0] for each in given.split(",")][-2:]
        engine = {name: value for name, value in os.environ.items() if name.startswith("MARLAAS_")}
        async with running(environment={**engine, "MARLAAS_BASE_MODELS": given}) as (cluster, api):
            await asyncio.sleep(0.75 * idle_s)
            before, since = cpu_s(cluster.pids["rollout-0"]), time.monotonic()
            await asyncio.sleep(0.25 * idle_s)
            idle = (cpu_s(cluster.pids["rollout-0"]) - before) / (time.monotonic() - since)
            about = next(each for each in (await api.get("/models"))["data"] if each["id"] == last)["base"]
            for _ in range(num_switches):
                await chat(api, last)
                await chat(api, other)
            return {"idle": idle, "opens_in_s": about["opens_in_s"], "tier": about["tier"], **switches(cluster, last)}


def computed() -> dict[str, float]:
    """The rule against others: mean waits over theirs, the median of four seeds, and rates with and without lingering."""

    def over(other: Rule) -> float:
        same = [(seed, 0.8, 1.0, NUM_OPERATIONS, 4) for seed in range(4)]
        return statistics.median(mean_wait_s(by_ratio, *each) / mean_wait_s(other, *each) for each in same)

    rates = rate(lingers=True) / rate(lingers=False)
    return {"wait_over_first_come": over(first_come), "wait_over_in_turn": over(in_turn), "rate_by_lingering": rates}


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


def switches_report(given: Any) -> Report:
    found, rule = asyncio.run(measure(given.switches, given.idle_s, given.bases)), computed()
    medians = {tier: statistics.median(found[tier]) for tier in MOST if found[tier]}
    figures: dict[str, float] = {
        **{f"from_{tier}_s": seconds for tier, seconds in medians.items()},
        "idle": found["idle"],
    }
    figures |= {"opens_in_s": found["opens_in_s"], "choice_s": choice_s(), **rule}
    table = make_table("A pool worker", ("figure", "measured"), list(figures.items()))
    goals = [at_most(f"a switch from {tier}", s, MOST[tier], " s") for tier, s in medians.items()]
    goals += [
        at_most("processor time without work", 100 * figures["idle"], 1, " %"),
        at_most("a choice of 32", 1e6 * figures["choice_s"], MOST_CHOICE_US, " µs"),
        at_most("mean wait over first come's, computed", rule["wait_over_first_come"], 0.5),
        at_most("mean wait over that in turn, computed", rule["wait_over_in_turn"], 1.1),
        Goal("rate with lingering over without, computed", rule["rate_by_lingering"], 2, ""),
    ]
    return Report([table], figures, goals)


def report(given: Any) -> Report:
    parts = {"switches": switches_report, "jobs": bases_report}
    return joined([parts[part](given) for part in ([given.part] if given.part else parts)])


if __name__ == "__main__":
    options = parser(__doc__, switches=20, idle_s=280)
    options.add_argument("--part", choices=("switches", "jobs"), help="default: both")
    options.add_argument(
        "--bases", default="", metavar="NAME=FOLDER,...", help="base models to switch between; default: made ones"
    )
    asked = parsed(options, {"switches": 2, "idle_s": 4, "part": "switches"})
    show(report(asked), asked.json)
