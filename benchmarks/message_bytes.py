"""Measures the bytes that a trajectory has written to Redis, by message, and its processor time when nothing is sampled.

    python -m benchmarks.message_bytes [--rounds 3] [--steps 8] [--json FILE]

A real Redis with the settings of `marlaas up`, a real owner, env workers' real handler, and the worker loops of a rollout that
answers at once and of a trainer that commits a byte. Steps of 8 groups of 8. A message counts with its payload and the fields
beside it; `Redis` is all that Redis was sent (`total_net_input_bytes`), acknowledgements, renewals and records too.

    single   a question as in `benchmarks.paper`, one answer of 6 tokens
    long     the same with an answer of 2,000
    agentic  three calls of a tool, then an answer, as in `benchmarks.paper`
    many     fifteen calls
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from benchmarks._report import Report, in_turns, make_table, run
from benchmarks.paper.agentic import CALCULATOR
from common.adapters import AdapterStore
from common.bus import Bus, Out, Settlement
from common.handlers import Beat
from common.messages import EnvSpec, TurnRequest, TurnResult, Usage, f32, i32
from common.objects import Objects
from common.settings import TINY
from common.streams import GROUP_ENV, GROUP_ROLLOUT, GROUP_TRAINER, Cell
from common.telemetry import About, Reporter
from common.text.tokens import ChatTokenizer
from common.worker import Inbox, Worker, worker_id
from env_service.environment import Step, Turn
from env_service.environments.catalogue import Catalogue
from env_service.handler import EnvHandler
from harness.live import GRADER
from harness.redis_server import RedisServer, embedded_redis
from harness.standin import FixedSlots, StandIn, StandInTrainer, create_job, job_spec, stand_in_worker, until_status
from manager_service.owner.owner import Owner
from manager_service.tenants import Tenants

BATCH_SIZE, GROUP_SIZE, SLOTS = 8, 8, 64
SINGLE = EnvSpec("single_turn", {"grader": GRADER})
AGENTIC = EnvSpec("paper_agentic", {})


@dataclass(frozen=True, slots=True)
class Talk:
    """An environment that answers so many turns with a tool's number, and rewards the next."""

    spec: EnvSpec
    calls: int
    answer: int  # tokens of each turn of the model

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return (CALCULATOR,) if self.calls else ()

    def make_item(self, seed: int, held_out: bool) -> dict[str, Any]:
        asked = "calc 347*86" if self.calls else "sort 40213"
        return {"messages": [{"role": "user", "content": asked}], "answer": "29842"}

    def reset(self, item: dict[str, Any], seed: int) -> tuple[int, Any]:
        return seed & 0x7FFFFFFF, item["messages"]

    async def step(self, state: int, turn: Turn) -> Step:
        if turn.index >= self.calls:
            return Step(state=state, done=True, reward=float(int(turn.key.split("/")[2]) % 2))
        return Step(state=state, done=False, messages=[{"role": "tool", "content": turn.item["answer"]}], reward=0.0)


CASES = {
    "single": Talk(SINGLE, 0, 6),
    "long": Talk(SINGLE, 0, 2000),
    "agentic": Talk(AGENTIC, 3, 20),
    "many": Talk(AGENTIC, 15, 20),
}


@dataclass(frozen=True)
class OneEnvironment(Catalogue):
    """Has nothing but a talk."""

    talk: Talk

    def get(self, spec: EnvSpec) -> Any:
        return self.talk

    def is_live(self, spec: EnvSpec) -> bool:
        return False


@dataclass(slots=True)
class Answers(StandIn):
    """A turn request in, the finished turn out."""

    cell: Cell
    tokens: list[int]

    async def __call__(self, message: TurnRequest, beat: Beat) -> list[Out]:
        num = len(self.tokens)
        result = TurnResult(
            **message.about(),
            id=message.id,
            request=message,
            adapter=message.adapter,
            tokens=i32(self.tokens),
            logprobs=f32([-0.1 * (n % 7 + 1) for n in range(num)]),
            stop_reason="stop",
            usage=message.usage + Usage(message.num_prompt, num, rollout_s=0.01),
        )
        return [(self.cell.env, result)]


class CountingBus(Bus):
    """Counts the bytes of the entries that it appends, by the kind of their message."""

    counts: "Counter[str]"

    def sending(self, settlements: Sequence[Settlement]) -> list[list[Any]]:
        fields = super().sending(settlements)
        outputs = [(message, each) for each in settlements for _, message in each.outputs or ()]
        for (message, each), sent in zip(outputs, fields, strict=True):
            self._count(message, sent, short=each.refers_to is not None)
        return fields

    def fields_at(self, message: Any, path: str) -> list[Any]:
        fields = super().fields_at(message, path)
        self._count(message, fields)
        return fields

    def _count(self, message: Any, fields: list[Any], *, short: bool = False) -> None:
        kind = type(message).__name__
        sent = [part if isinstance(part, bytes) else str(part).encode() for part in fields]
        self.counts[kind.replace("Turn", "Short") if short else kind] += sum(map(len, sent))


@dataclass(frozen=True, slots=True)
class Spent:
    """The cost of a trajectory: bytes, and microseconds of the processor."""

    by_kind: dict[str, float] = field(default_factory=dict[str, float])
    redis_bytes: float = 0.0
    python_us: float = 0.0
    redis_us: float = 0.0


def workers(bus: Bus, store: AdapterStore, talk: Talk) -> list[Worker]:
    cell, tokenizer = bus.cell, ChatTokenizer.load(TINY)
    end = tokenizer.end_of_turn_ids[0]
    answer = [*(tokenizer.encode("29842") * talk.answer)[: talk.answer - 1], end]
    env = EnvHandler(cell=cell, tokenizer=tokenizer, environments=OneEnvironment(talk), slots=SLOTS)
    inboxes = [Inbox(stream, GROUP_ROLLOUT) for stream in (cell.rollout_first, cell.rollout)]
    reporter = Reporter(worker_id("rollout"), "rollout", cell.base_model, About(slots=SLOTS))
    trainer = Inbox(cell.train, GROUP_TRAINER)
    return [
        stand_in_worker(bus, "env", Inbox(cell.env, GROUP_ENV), env, slots=SLOTS, lease_s=10),
        Worker(bus, Answers(cell, answer), inboxes, reporter),
        stand_in_worker(bus, "trainer", trainer, StandInTrainer(cell, store), slots=1, lease_s=10),
    ]


async def measure(name: str, num_steps: int) -> Spent:
    objects = Objects.open("memory:///")
    store, talk = AdapterStore(objects), CASES[name]
    with embedded_redis() as server:
        bus, stop = CountingBus.connect(server.url, Cell("tiny"), objects), asyncio.Event()
        assert isinstance(bus, CountingBus)
        bus.counts = Counter()
        slots, tenants = FixedSlots(rollout=SLOTS), Tenants(bus.client)
        owner = Owner(bus=bus, cluster=slots, store=store, objects=objects, tenants=tenants)
        loops = [asyncio.create_task(each.run(stop)) for each in (owner, *workers(bus, store, talk))]
        await asyncio.sleep(0.5)  # until the owner has its partitions
        spec = job_spec(num_steps=num_steps, batch_size=BATCH_SIZE, group_size=GROUP_SIZE, max_turns=talk.calls + 1)
        spent = await spent_on(server, bus, msgspec.structs.replace(spec, env=talk.spec))
        stop.set()
        await asyncio.gather(*loops)
        await bus.close()
    return spent


async def spent_on(server: RedisServer, bus: CountingBus, spec: Any) -> Spent:
    async def now() -> tuple[float, float, float]:
        found: Any = await bus.client.info("stats")
        return found["total_net_input_bytes"], 1e6 * time.process_time(), 1e6 * server.cpu_s()

    before = await now()
    bus.counts.clear()
    await create_job(bus, spec)
    await until_status(bus, spec.id, "succeeded", seconds=600)
    num = spec.hyper.num_steps * BATCH_SIZE * GROUP_SIZE
    after = [(b - a) / num for a, b in zip(before, await now(), strict=True)]
    return Spent({kind: size / num for kind, size in bus.counts.items()}, *after)


def report(given: Any) -> Report:
    runs = {name: lambda name=name: asyncio.run(measure(name, given.steps)) for name in CASES}
    found = {name: middle(rounds) for name, rounds in in_turns(runs, given.rounds, warm_up=0).items()}
    kinds = sorted({kind for spent in found.values() for kind, size in spent.by_kind.items() if size >= 1})
    columns = ("", *kinds, "messages", "Redis", "python µs", "Redis µs")
    lines = [
        (
            name,
            *(spent.by_kind.get(kind, 0.0) for kind in kinds),
            sum(spent.by_kind.values()),
            *(spent.redis_bytes, spent.python_us, spent.redis_us),
        )
        for name, spent in found.items()
    ]
    figures = {name: msgspec.to_builtins(spent) for name, spent in found.items()}
    return Report([make_table("Bytes to Redis, per trajectory", columns, lines)], figures)


def middle(rounds: Sequence[Spent]) -> Spent:
    """The round with the median of processor time."""
    return sorted(rounds, key=lambda spent: spent.python_us + spent.redis_us)[len(rounds) // 2]


if __name__ == "__main__":
    run(__doc__, report, rounds=3, steps=8)
