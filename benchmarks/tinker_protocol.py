"""Measures N clients of the Tinker protocol at once, each with a loop of its own through the unmodified `tinker` SDK: on this service,
and in turn on SkyRL's server.

    make tinker                                              # once: installs the SDK in .tinker
    make bench-peers ARGS=--help                             # once: installs SkyRL in .peers, with the newest SDK that it serves
    python -m benchmarks.tinker_protocol [--clients 1,4,8] [--steps 12] [--rounds 1] [--json FILE]

A base of 0.14 M random weights, so that a step's cost is mostly the systems' own. A step saves for the sampler, samples 4 answers
of 32 tokens to each of 4 prompts, and takes the gradient and the optimiser step of all 16, pipelined. The clients are threads of one
process and share two cores with the service: the cluster of `make up`; SkyRL as its documentation advises (`peers/skyrl_server.py`). The
first steps of each client are not counted, more of SkyRL's, since XLA compiles in them. Without .peers only this service is measured.

    steps/s    of all clients together, over the time in which all of them were at work
    parts      medians: save for sampler; sample; forward_backward and optim_step, until both results are there
    memory     PSS of all processes of the service together, after the last step
"""

import asyncio
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._report import Goal, Report, make_table, parsed, parser, show
from benchmarks.peers.measure import PEERS, environment
from benchmarks.peers.settings import MODEL
from benchmarks.peers.skyrl_server import serving
from harness.live import running
from harness.processes import memory_below

CLIENTS = Path(__file__).with_name("_tinker_clients.py")
OURS, SKYRL = "MARLaaS", "SkyRL"
PYTHON = {OURS: Path(".tinker/bin/python").absolute(), SKYRL: PEERS / "skyrl" / "bin" / "python"}
UNCOUNTED = {OURS: 3, SKYRL: 8}
ROWS, RANK = 16, 8
GOALS = {1: 6.0, 4: 8.0}
"""Number of clients → steps a second at least."""
TIMES_SKYRL = 3.0
"""A multiple of SkyRL's steps a second, with 4 clients."""


@dataclass(frozen=True, slots=True)
class Figures:
    system: str
    clients: int
    steps_per_s: float
    p50_ms: float
    p95_ms: float
    save_ms: float
    sample_ms: float
    train_ms: float
    pss_mb: float


@dataclass(frozen=True, slots=True)
class Served:
    """A system that runs: what its clients are told, and the processes whose memory counts."""

    model: str
    environment: Mapping[str, str]
    pids: tuple[int, ...]


def make_base(folder: Path) -> Path:
    """A model of 0.14 M random weights with the tokenizer of `tiny`: 2 layers, width 64, vocabulary 1,024."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors", "README.md"))
    set_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 1024}
    known: dict[str, Any] = (
        Qwen3Config.from_pretrained(MODEL).to_dict() | sizes | {"layer_types": ["full_attention"] * 2}
    )
    Qwen3ForCausalLM(Qwen3Config(**known)).save_pretrained(folder)
    return folder


@asynccontextmanager
async def serving_ours(base: Path, clients: int) -> AsyncGenerator[Served]:
    async with running(environment={"MARLAAS_BASE_MODELS": f"base={base}"}) as (cluster, _):
        own = {"TINKER_BASE_URL": cluster.base_url, "TINKER_API_KEY": f"tml-{cluster.api_key}"}
        yield Served("base", {**os.environ, **own}, tuple(cluster.pids.values()))


@asynccontextmanager
async def serving_skyrl(base: Path, clients: int) -> AsyncGenerator[Served]:
    inherited = environment(threads=1)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(PYTHON[SKYRL], Path(folder), base, jobs=clients, rows=ROWS, rank=RANK, environment=inherited) as server,
    ):
        own = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-local"}
        yield Served(str(base), {**inherited, **own}, (server.pid,))


SERVING = {OURS: serving_ours, SKYRL: serving_skyrl}


async def measure(system: str, base: Path, clients: int, steps: int) -> Figures:
    async with SERVING[system](base, clients) as served:
        command = [str(PYTHON[system]), str(CLIENTS), str(clients), str(steps), served.model, str(UNCOUNTED[system])]
        told = {**served.environment, "TINKER_TELEMETRY": "0"}
        process = await asyncio.create_subprocess_exec(*command, env=told, stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        if process.returncode:
            raise SystemExit(f"error: {system}: the clients ended with {process.returncode}")
        return figures(system, json.loads(out.splitlines()[-1]), memory_below(*served.pids).pss_mb)


def figures(system: str, told: list[list[list[float]]], pss_mb: float) -> Figures:
    """`told`: for each client and step, when it began and each of its parts ended, seconds."""
    counted = [step for client in told for step in client]
    began, ended = max(client[0][0] for client in told), min(client[-1][-1] for client in told)
    within = [step for step in counted if began <= step[-1] <= ended]
    whole = sorted(1000 * (step[-1] - step[0]) for step in counted)
    save, sample, train = (statistics.median(1000 * (step[n + 1] - step[n]) for step in counted) for n in range(3))
    p95 = whole[min(len(whole) - 1, round(0.95 * len(whole)))]
    speed = len(within) / (ended - began)
    return Figures(system, len(told), speed, statistics.median(whole), p95, save, sample, train, pss_mb)


def report(given: Any) -> Report:
    if not PYTHON[OURS].exists():
        raise SystemExit("error: the tinker SDK is not installed: make tinker")
    systems = [system for system, python in PYTHON.items() if python.exists()]
    with tempfile.TemporaryDirectory() as folder:
        base = make_base(Path(folder) / "base")
        found = [
            asyncio.run(measure(system, base, clients, given.steps))
            for clients in map(int, given.clients.split(","))
            for _ in range(given.rounds)
            for system in systems
        ]
    columns = ("system", "clients", "steps/s", "p50 ms", "p95 ms", "save ms", "sample ms", "train ms", "PSS MB")
    table = make_table("The Tinker protocol", columns, [tuple(asdict(each).values()) for each in found])
    return Report([table], [asdict(each) for each in found], goals(found))


def goals(found: list[Figures]) -> list[Goal]:
    speeds: dict[tuple[str, int], list[float]] = {}
    for each in found:
        speeds.setdefault((each.system, each.clients), []).append(each.steps_per_s)
    medians = {key: statistics.median(speed) for key, speed in speeds.items()}
    result = [
        Goal(f"steps/s, {clients} clients", speed, GOALS[clients])
        for (system, clients), speed in medians.items()
        if system == OURS and clients in GOALS
    ]
    if (SKYRL, 4) in medians:
        result.append(Goal("times SkyRL's steps/s, 4 clients", medians[OURS, 4] / medians[SKYRL, 4], TIMES_SKYRL))
    for each in found:
        if each.system == OURS:
            ratio = each.p95_ms / each.p50_ms
            result.append(Goal(f"p95 over p50, {each.clients} clients", ratio, 2, more_is_better=False))
    return result


if __name__ == "__main__":
    options = parser(__doc__, steps=12, rounds=1)
    options.add_argument("--clients", default="1,4,8", help="default 1,4,8")
    chosen = parsed(options, {"clients": "1", "steps": 2})
    show(report(chosen), chosen.json)
