"""Measures N clients of the Tinker protocol at once, each with a loop of its own through the unmodified `tinker` SDK.

    make tinker                                              # once: installs the SDK in .tinker
    python -m benchmarks.tinker_protocol [--clients 1,4,8] [--steps 12] [--json FILE]

The cluster of `make up` on this machine, which the clients share it with: threads of one process, a run each. A step saves for the
sampler, samples 4 answers of 32 tokens to each of 4 prompts, and takes the gradient and the optimiser step of all 16, pipelined. The
first two steps of each client are not counted.

    steps/s    of all clients together, over the time in which all of them were at work
    parts      medians: save for sampler; sample; forward_backward and optim_step, until both results are there
    memory     PSS of all processes of the service together, after the last step

Figures of a peer: docs/tinker.md.
"""

import asyncio
import json
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._report import Goal, Report, make_table, parser, show
from harness.live import running
from harness.processes import memory_below

PYTHON, CLIENTS = Path(".tinker/bin/python"), Path(__file__).with_name("_tinker_clients.py")
GOALS = {1: 6.0, 4: 8.0}
"""Number of clients → steps a second at least."""


@dataclass(frozen=True, slots=True)
class Figures:
    clients: int
    steps_per_s: float
    p50_ms: float
    p95_ms: float
    save_ms: float
    sample_ms: float
    train_ms: float
    pss_mb: float


async def measure(clients: int, steps: int) -> Figures:
    async with running() as (cluster, _):
        own = {"TINKER_BASE_URL": cluster.base_url, "TINKER_API_KEY": f"tml-{cluster.api_key}", "TINKER_TELEMETRY": "0"}
        command = [str(PYTHON), str(CLIENTS), str(clients), str(steps)]
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, **own}, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert process.returncode == 0, f"the clients ended with {process.returncode}"
        pss_mb = sum(memory_below(pid).pss_mb for pid in cluster.pids.values())
    return figures(json.loads(out.splitlines()[-1]), pss_mb)


def figures(told: list[list[list[float]]], pss_mb: float) -> Figures:
    """`told`: for each client and step, when it began and each of its parts ended, seconds."""
    counted = [step for client in told for step in client]
    began, ended = max(client[0][0] for client in told), min(client[-1][-1] for client in told)
    within = [step for step in counted if began <= step[-1] <= ended]
    whole = sorted(1000 * (step[-1] - step[0]) for step in counted)
    save, sample, train = (statistics.median(1000 * (step[n + 1] - step[n]) for step in counted) for n in range(3))
    p95 = whole[min(len(whole) - 1, round(0.95 * len(whole)))]
    return Figures(len(told), len(within) / (ended - began), statistics.median(whole), p95, save, sample, train, pss_mb)


def report(given: Any) -> Report:
    if not PYTHON.exists():
        raise SystemExit("error: the tinker SDK is not installed: make tinker")
    found = [asyncio.run(measure(int(clients), given.steps)) for clients in given.clients.split(",")]
    columns = ("clients", "steps/s", "p50 ms", "p95 ms", "save ms", "sample ms", "train ms", "PSS MB")
    table = make_table("The Tinker protocol", columns, [tuple(asdict(each).values()) for each in found])
    goals = [
        Goal(f"steps/s, {f.clients} clients", f.steps_per_s, GOALS[f.clients]) for f in found if f.clients in GOALS
    ]
    goals += [Goal(f"p95 over p50, {f.clients} clients", f.p95_ms / f.p50_ms, 2, more_is_better=False) for f in found]
    return Report([table], [asdict(each) for each in found], goals)


if __name__ == "__main__":
    options = parser(__doc__, steps=12)
    options.add_argument("--clients", default="1,4,8", help="default 1,4,8")
    chosen = options.parse_args()
    show(report(chosen), chosen.json)
