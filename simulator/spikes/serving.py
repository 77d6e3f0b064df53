"""Simulates a pool of rollout workers that serves requests, by engines, links and fleet of the simulator.

Models, with lambdaScale's constants (github.com/lambda-scale/lambda-scale: `hardware_config.json`, `real_transfer_data`):

                    8B, 16 GB                           70B, 140 GB
    store           4.7 GB/s: 3.4 s                     4.7 GB/s: 30 s, as from its disk of 5 GB/s
    link            30 GB/s: 0.5 s; its 7B: 0.45 s      18.8 GB/s: 7.4 s, from machine to machine
    node folder     55 GB/s: 0.3 s                      55 GB/s: 2.55 s, from the machine's memory

The store gives each reader that rate, however many there are. lambdaScale tells no seconds of a token; a step's are of NVIDIA's figures
for NIM (docs.nvidia.com/nim/benchmarking/llm: Llama 3.1 8B 1.8.0 and 70B 1.3.0, one request and a hundred), a prompt's are assumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, log
from statistics import quantiles
from typing import Literal, NamedTuple

import msgspec

from common.wire.messages import AdapterRef, EnvSpec, Sampling, Start
from manager_service.scheduling.elastic import TARGET, wanted
from simulator.calibration import LogNormal, Machine, Size, Workload
from simulator.clock import Act, Clock, SimulatedHost
from simulator.engine import EngineTurns, SimulatedEngine
from simulator.fleet import MARLAAS_UP, Fleet, PoolRule
from simulator.links import Links
from simulator.spikes.arrivals import Arrivals, TraceRequest
from simulator.workers import Flight

BASE = AdapterRef("", "base", 0)
"""The one file that travels over the links."""
REQUEST = Start(
    id="", tenant="", job="", partition=0, adapter=AdapterRef("", "", 0), purpose="chat", seed=0, group=0, samples=(), item=None,
    env=EnvSpec(""), sampling=Sampling(),
)  # fmt: skip
"""The fields that are alike in all requests."""
BEGIN_S, KEEP_S, HPA_LOOK_S = 10, 30.0, 15.0
"""First seconds, for whose requests there are workers; seconds for which one stays; time between looks of Kubernetes' autoscaler."""


class Model(NamedTuple):
    """A base model on its machines."""

    name: str
    weights: float  # bytes
    store: float  # bytes a second
    link: float
    folder: float
    machine: Machine


def _machine(step_s: float, row_s: float, token_s: float) -> Machine:
    times = {"decode_step_s": step_s, "decode_row_s": row_s, "prefill_token_s": token_s}
    return Machine(**times, train_step_s=0.0, train_token_s=0.0)


MODELS = (
    Model("8B", 16e9, 4.7e9, 30e9, 55e9, _machine(0.0046, 0.00003, 0.00002)),
    Model("70B", 140e9, 4.7e9, 18.8e9, 55e9, _machine(0.0132, 0.0001, 0.00005)),
)


class Way(NamedTuple):
    """The source of a pool's workers, and how many there are."""

    name: str
    source: Literal["static", "store", "chain", "pipeline", "folder"]
    rule: PoolRule = MARLAAS_UP


RULE = PoolRule(1.0, keep_s=KEEP_S)
WAYS = (
    Way("static", "static"),
    Way("store, stream lengths", "store", PoolRule(HPA_LOOK_S, fill=True, growth=2.0, keep_s=KEEP_S)),
    Way("store", "store", RULE),
    Way("chain", "chain", RULE),
    Way("execute while load", "pipeline", RULE),
    Way("node folder", "folder", RULE),
    Way("node folder, marlaas up", "folder", MARLAAS_UP._replace(look_s=1.0)),
)
"""Elastic pools beyond the first follow `wanted` every second."""


class PoolFigures(msgspec.Struct, frozen=True):
    """One trace on one pool. TTFT: from a request's arrival to its first token; wait: until it has a slot."""

    model: str
    way: str
    load_s: float  # of one worker alone
    p50_ttft_s: float
    p99_ttft_s: float
    p99_wait_s: float
    worker_s: float  # starts included
    most: int  # workers at a time


class SpikePlan(NamedTuple):
    """Requests, and pools that suit them."""

    requests: Sequence[TraceRequest]
    seconds: float
    first: int  # workers when it begins
    peak: int  # and at most
    slots: int  # of a worker


def plan(arrivals: Arrivals, machine: Machine, slots: int, workers: int) -> SpikePlan:
    """Plays the trace so many times that the most requests under way at a time want so many workers, if none waits."""
    rows, num, rates = TARGET * slots, len(arrivals.lengths), arrivals.rates
    token_s = machine.decode_step_s + machine.decode_row_s * rows
    prefill_s = machine.prefill_token_s * rows * sum(prompt for prompt, _ in arrivals.lengths) / num  # the other rows'
    request_s = token_s * sum(tokens for _, tokens in arrivals.lengths) / num + prefill_s
    window = ceil(request_s)
    times = rows * workers * window / request_s / max(sum(rates[at : at + window]) for at in range(len(rates)))
    first = wanted(times * request_s * sum(rates[:BEGIN_S]) / BEGIN_S, slots)
    if len(requests := arrivals.requests(times)) < 100:
        raise ValueError(f"{arrivals.name}: {len(requests)} requests have no p99; --workers and --slots make them more")
    return SpikePlan(requests, float(len(rates)), min(workers, max(1, first)), workers, slots)


@dataclass
class SpikePool:
    """A pool under a trace. A start is its load alone: processes and imports are not counted."""

    model: Model
    way: Way
    plan: SpikePlan
    clock: Clock = field(default_factory=Clock)
    waits_s: list[float] = field(default_factory=list[float])  # for slots
    ttfts_s: list[float] = field(default_factory=list[float])
    _arrived_s: dict[Flight, float] = field(default_factory=dict[Flight, float])  # of those that wait
    _under_way: int = 0  # requests, those that wait included
    _left: int = 0  # requests that have not ended, and one for the trace
    _newcomers: list[tuple[SimulatedEngine, Act]] = field(default_factory=list[tuple[SimulatedEngine, Act]])
    _partial: set[SimulatedEngine] = field(default_factory=set[SimulatedEngine])  # serve without the whole base

    def __post_init__(self) -> None:
        model, source, peak = self.model, self.way.source, self.plan.peak
        relay = source in ("chain", "pipeline")
        rate = model.link if relay else model.folder if source == "folder" else model.store
        self.load_s = 0.0 if source == "static" else model.weights / rate
        travel = Size(adapter_bytes=model.weights, link_bytes_per_s=rate, store_bytes_per_s=rate * peak, relay=relay)
        self.links, self.host = Links(self.clock, 0.0, travel), SimulatedHost(self.clock, None)
        self.turns = EngineTurns(self.clock, model.machine.hop_s)
        start_s = self.load_s * (source == "folder")
        elastic = int(source != "static")
        self.size = Size(rollout=peak, least_rollout=elastic, rollout_slots=self.plan.slots, start_s=start_s)
        hooks = (self._make, lambda: self._under_way if self._left else None, lambda: None)
        self.fleet = Fleet(self.clock, self.size, *hooks, self.way.rule, self._load)

    def run(self) -> PoolFigures:
        """Serves all requests, until the trace has ended too."""
        self.fleet.begin(self.plan.first)
        for engine in self.fleet.live:
            self.links.hold(engine, BASE)
        for number, request in enumerate(self.plan.requests):
            self.clock.at(request.at_s, partial(self._arrive, number, request))
        self._left = len(self.plan.requests) + 1
        self.clock.at(self.plan.seconds, self._end)
        while self.clock.step():
            pass
        ttft, wait = (quantiles(each, n=100) for each in (self.ttfts_s, self.waits_s))
        cost = (self.fleet.held_s, self.fleet.most)
        return PoolFigures(self.model.name, self.way.name, self.load_s, ttft[49], ttft[98], wait[98], *cost)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _arrive(self, number: int, request: TraceRequest) -> None:
        fixed = LogNormal(log(request.tokens), 0.0)
        workload = Workload(prefill_tokens=request.prompt, turn_tokens=fixed, max_tokens=request.tokens)
        flight = Flight(REQUEST, number, workload)
        self._arrived_s[flight] = self.clock.now
        self._under_way += 1
        self.turns.put(flight)

    def _began(self, engine: SimulatedEngine, flight: Flight) -> None:
        if flight in self._arrived_s:
            self.waits_s.append(self.clock.now - self._arrived_s.pop(flight))
            self.ttfts_s.append(self.waits_s[-1] + engine.first_token_s)

    def _end(self, flight: Flight | None = None) -> None:
        """A request ends; None: the trace does."""
        self._under_way -= flight is not None
        self._left -= 1
        if not self._left:
            self.fleet.end()

    # ---- workers ----------------------------------------------------------------------------------------------------

    def _make(self, name: str) -> SimulatedEngine:
        made = (self.host, self.model.machine, self.size, self.turns, self.links, self._end)
        engine = SimulatedEngine(name, *made, lambda flight: self._began(engine, flight))
        self.links.hold(engine, REQUEST.adapter)
        return engine

    def _load(self, engine: SimulatedEngine, act: Act) -> None:
        if self.way.source == "folder":
            act()
        elif self.way.source == "pipeline":
            self._newcomers.append((engine, act))
            self.clock.after(0.0, self._form)
        else:
            self.links.when_here(engine, BASE, act)

    def _form(self) -> None:
        """Newcomers of one moment load from k holders, each another part first: k of them have the whole after 1/k of the load, and
        serve together, as k workers do if the requests in flight fill every stage."""
        newcomers, self._newcomers = self._newcomers, []
        members = min(len(set(self.fleet.live) - self._partial), len(newcomers))
        for number, (engine, act) in enumerate(newcomers):
            if members > 1 and number < len(newcomers) // members * members:
                self._partial.add(engine)
                self.links.when_here(engine, BASE, partial(self._partial.discard, engine))
                self.clock.after(self.load_s / members, act)
            else:
                self.links.when_here(engine, BASE, act)
