"""A trainer's order of steps: no tenant waits for another's large step, and none is overtaken for ever."""

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from base_model.decoder import Decoder
from common.bus.bus import Bus
from common.bus.streams import GROUP_TRAINER, Cell
from common.store.adapters import AdapterStore
from common.store.objects import Objects
from common.wire.operations import Operations
from common.worker.telemetry import About, Reporter
from common.worker.worker import Habits, Inbox, Worker
from tests.common.test_worker import length, until
from tests.support.run_cases import forward_backward, make_datum, make_run, optim_step, segment
from tests.support.trainer_cases import load_shallow, make_init, make_rows, make_step, nothing
from trainer_service import run_step
from trainer_service.backbone.interface import Sequences
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.fusion import EXPRESS_PART, Fusion
from trainer_service.handler import TrainHandler
from trainer_service.open_step import OpenBatch, TrainState
from trainer_service.packing import Budget
from trainer_service.run_step import Gradient
from trainer_service.training import Taken, Trainer

BUDGET = 64


@dataclass(slots=True)
class Noting(Trainer):
    num_micro_batches: int = 0
    budgets: list[int] = field(default_factory=list[int])  # of each micro-batch

    def micro_batch(self, opened: Sequence[OpenBatch], budget: Budget | None = None) -> None:
        self.num_micro_batches += 1
        self.budgets.append((budget or self.budget).tokens)
        Trainer.micro_batch(self, opened, budget)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load_shallow(1)


class OneThread(DecoderBackbone):
    @property
    def concurrent(self) -> bool:
        return False


@pytest.fixture
def fusion(decoder: Decoder) -> Fusion:
    """One whose base model computes in one thread at a time."""
    return Fusion(Noting(OneThread(decoder), Budget(BUDGET), share_prefixes=False))


class Tenants:
    """Sends steps, and notes in which order they end."""

    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion
        self.sent: Counter[str] = Counter()  # tenant -> tokens
        self.ends: list[str] = []

    async def step(self, tenant: str, name: str, num_groups: int, weight: float = 1.0) -> None:
        rows = make_rows(len(name), num_groups=num_groups, group_size=2)
        self.sent[tenant] += len(rows.tokens)
        state = self.fusion.trainer.init(make_init(name))
        await self.fusion.train(make_step(0, rows, name, tenant=tenant, weight=weight), state, nothing)
        self.ends.append(name)

    async def all(self, *steps: tuple[str, str, int]) -> list[str]:
        await asyncio.gather(*(self.step(*step) for step in steps))
        return self.ends


async def test_a_step_that_comes_late_overtakes_at_the_next_micro_batch(fusion: Fusion) -> None:
    tenants, trainer = Tenants(fusion), fusion.trainer
    assert isinstance(trainer, Noting)
    large = asyncio.create_task(tenants.step("a", "large", 20))
    while not trainer.num_micro_batches:
        await asyncio.sleep(0.001)
    await tenants.step("b", "small", 1)
    assert tenants.ends == ["small"] and not large.done()
    await large


@pytest.mark.parametrize(
    ("sent", "ends"),
    [
        ((("a", "large", 20), ("b", "small", 1)), ["small", "large"]),
        ((("a", "large", 6), ("a", "small", 1), ("b", "other", 3)), ["other", "large", "small"]),
        (tuple((f"tenant-{n}", f"{n}", 4) for n in range(5)), ["0", "1", "2", "3", "4"]),
    ],
    ids=["the small before another tenant's large", "a tenant's own by age", "those of one size by age"],
)
async def test_the_order_in_which_steps_end(fusion: Fusion, sent: tuple[Any, ...], ends: list[str]) -> None:
    assert await Tenants(fusion).all(*sent) == ends


async def test_tenants_of_like_steps_are_served_in_turn(fusion: Fusion) -> None:
    """Each sends its next step when the last has ended. With the shortest always first, one tenant would have all of its steps done."""
    tenants, leads, names = Tenants(fusion), list[int](), ("a", "bb", "ccccc", "dddddd")

    async def train(name: str) -> None:
        for _ in range(6):
            await tenants.step(name, name, 2)
            ended = [tenants.ends.count(each) for each in names]
            leads.append(max(ended) - min(ended))

    await asyncio.gather(*map(train, names))
    assert max(leads) <= 2, leads


async def test_a_step_that_must_be_alone_shares_no_micro_batch_and_has_its_turns_like_others(
    fusion: Fusion, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a large step that has failed together with another
    tenants, trainer, together = Tenants(fusion), fusion.trainer, list[int]()

    def failing(own: Trainer, opened: Sequence[OpenBatch], budget: Budget | None = None) -> None:
        together.append(len(opened))
        if len(together) == 1:
            raise RuntimeError("a fault of ours")
        Trainer.micro_batch(own, opened, budget)

    monkeypatch.setattr(type(trainer), "micro_batch", failing)
    large, other = (asyncio.create_task(tenants.step(*step)) for step in (("a", "large", 20), ("b", "other", 3)))
    await asyncio.sleep(0)
    while len(together) < 3:
        await asyncio.sleep(0.001)
    # When small ones come, then none waits for its end, and none is computed with it
    await tenants.step("c", "small", 1)
    await other
    assert not large.done() and together[0] == 2 and set(together[1:]) == {1}
    await large


async def test_a_step_that_comes_again_makes_its_own_micro_batches_smaller_only(fusion: Fusion) -> None:
    tenants, trainer = Tenants(fusion), fusion.trainer
    assert isinstance(trainer, Noting)
    fusion.again["large/1"] = 3  # halvings
    large, other = (asyncio.create_task(tenants.step(*step)) for step in (("a", "large", 20), ("b", "other", 6)))
    await other
    assert not large.done() and max(trainer.budgets) >= BUDGET // 2
    num_before = len(trainer.budgets)
    await large
    assert set(trainer.budgets[num_before:]) == {BUDGET >> 3}


@pytest.mark.parametrize("weight", [1.0, 3.0])
async def test_a_flood_of_small_steps_does_not_starve_a_large_one(fusion: Fusion, weight: float) -> None:
    """The flood's tenant has this weight, and so many times as much while both are there."""
    tenants = Tenants(fusion)
    large = asyncio.create_task(tenants.step("a", "large", 20))
    await asyncio.sleep(0)

    async def flood(name: str) -> None:
        while not large.done() and tenants.sent["b"] < 20 * tenants.sent["a"]:
            await tenants.step("b", name, 1, weight)

    await asyncio.gather(*(flood(f"small-{n}") for n in range(4)))

    assert large.done()
    share = tenants.sent["b"] / tenants.sent["a"]  # until the large step ends, as if both had been served at once
    assert 0.7 * weight < share < 1.3 * weight


async def test_a_tenant_that_comes_back_has_not_saved_up_its_turns(fusion: Fusion) -> None:
    tenants = Tenants(fusion)
    await tenants.step("b", "before", 15)
    large = asyncio.create_task(tenants.step("a", "large", 15))
    await asyncio.sleep(0)
    await tenants.step("b", "small", 1)
    assert tenants.ends == ["before", "small"] and not large.done()
    await large


async def optimise(fusion: Fusion, state: TrainState) -> None:
    """An optimiser's step of tenant b: it needs no micro-batch."""
    trainer = fusion.trainer
    await fusion.run(
        "b",
        lambda driver: run_step.begin(driver, [optim_step(1)], state, Gradient(1, 0)),
        lambda run: run_step.finish(trainer, run),
        nothing,
        tokens=0,
    )


async def test_a_step_that_needs_no_forward_waits_for_no_micro_batch(fusion: Fusion) -> None:
    trainer, tenants = fusion.trainer, Tenants(fusion)
    assert isinstance(trainer, Noting)
    state = trainer.init(make_run("run"))
    large = asyncio.create_task(tenants.step("a", "large", 20))
    await asyncio.sleep(0)
    await optimise(fusion, state)
    assert trainer.num_micro_batches <= 1, "that of the large step had begun"
    await large


async def gradient(fusion: Fusion, tenant: str, state: TrainState, *, num_rows: int = 1, num_answer: int = 4) -> None:
    """A step of a run, which its optimiser's step follows."""
    trainer = fusion.trainer
    rows = [make_datum("cross_entropy", number, num_answer=num_answer) for number in range(num_rows)]
    operation = forward_backward(1, "cross_entropy", *rows)
    await fusion.run(
        tenant,
        lambda driver: run_step.begin(driver, [operation], state, Gradient(1, 0)),
        lambda run: run_step.finish(trainer, run),
        nothing,
        tokens=operation.tokens,
        goes_on=True,
    )


async def test_a_large_step_waits_for_the_step_that_follows_a_small_one(
    fusion: Fusion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer_service.driver.FOLLOWER_WAIT_PART", 1e9)
    trainer, tenants = fusion.trainer, Tenants(fusion)
    assert isinstance(trainer, Noting)
    state = trainer.init(make_run("run"))
    large = asyncio.create_task(tenants.step("a", "large", 20))
    await asyncio.sleep(0)
    await gradient(fusion, "b", state)
    before = trainer.num_micro_batches
    await asyncio.sleep(0.1)
    await optimise(fusion, state)
    assert trainer.num_micro_batches <= before + 1, "the large step has gone on since"
    await large


# ---- small steps beside a large one -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Stopping(Trainer):
    """Its large micro-batches wait for `goes_on`, under way."""

    goes_on: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)

    def _sequences(self, taken: Taken) -> Sequences:
        if sum(len(tree) for _, trees in taken for tree in trees) > EXPRESS_PART * BUDGET:
            self.began.set()
            assert self.goes_on.wait(60)
        return Trainer._sequences(self, taken)


@pytest.fixture
def both(decoder: Decoder) -> Fusion:
    """One with an express driver, whose micro-batches of large steps wait."""
    return Fusion(Stopping(DecoderBackbone(decoder), Budget(BUDGET), share_prefixes=False))


async def busy(
    both: Fusion, num_rows: int = 6, num_answer: int = BUDGET
) -> "tuple[TrainState, Stopping, asyncio.Task[None]]":
    """Begins a large step of tenant a, whose first micro-batch waits; with a state to train from."""
    trainer = both.trainer
    assert isinstance(trainer, Stopping)
    state = trainer.init(make_run("run"))
    large = asyncio.create_task(gradient(both, "a", state, num_rows=num_rows, num_answer=num_answer))
    await asyncio.to_thread(trainer.began.wait, 60)
    return state, trainer, large


@pytest.mark.parametrize(("num_rows", "num_answer"), [(6, BUDGET), (1, BUDGET // 2)], ids=["large", "its last rows"])
async def test_a_small_step_ends_while_a_micro_batch_of_anothers_large_one_is_under_way(
    both: Fusion, num_rows: int, num_answer: int
) -> None:
    state, trainer, large = await busy(both, num_rows, num_answer)

    await gradient(both, "b", state)
    await optimise(both, state)

    assert not large.done()
    trainer.goes_on.set()
    await large


async def test_what_memory_has_no_room_for_beside_the_large_step_waits(decoder: Decoder) -> None:
    budget = Budget(BUDGET, num_bytes=BUDGET, bytes_per_token=10.0)
    both = Fusion(Stopping(DecoderBackbone(decoder), budget, share_prefixes=False))
    state, trainer, large = await busy(both)

    small = asyncio.create_task(gradient(both, "b", state))
    await optimise(both, state)

    assert not (small.done() or large.done())
    trainer.goes_on.set()
    await asyncio.gather(large, small)


async def test_a_flood_of_small_steps_comes_behind_the_large_one_in_the_end(both: Fusion) -> None:
    state, trainer, large = await busy(both)

    async def flood() -> None:
        while not large.done():
            await gradient(both, "b", state)

    flooding = asyncio.create_task(flood())
    await until(lambda: any(member.tenant == "b" for member in both._main.members), seconds=60)  # pyright: ignore
    assert not large.done()
    trainer.goes_on.set()
    await asyncio.gather(large, flooding)


# ---- what a trainer takes -------------------------------------------------------------------------------------------


@pytest.fixture
def handler(decoder: Decoder, tmp_path: Path) -> TrainHandler:
    return TrainHandler(
        Trainer(DecoderBackbone(decoder), Budget(BUDGET)), AdapterStore(Objects.open(tmp_path.as_uri())), "tiny"
    )


def operation(job: str, num_data: int) -> Operations:
    data = [make_datum("cross_entropy", n, num_answer=40) for n in range(num_data)]
    return segment(forward_backward(1, "cross_entropy", *data), job=job)


async def test_a_trainer_that_is_full_of_one_tenant_takes_anothers_small_operation_and_ends_it_first(
    bus: Bus, handler: TrainHandler
) -> None:
    cell, stop = Cell("tiny"), asyncio.Event()
    for name in ("large", "small"):
        await handler(make_run(name), nothing)
    reporter, inboxes = Reporter("w", "trainer", "tiny", About(slots=8)), [Inbox(cell.train, GROUP_TRAINER, at_once=1)]
    habits = Habits(has_room=handler.has_room, takes_leftovers=handler.takes_leftovers)
    worker = Worker(bus, handler, inboxes, reporter, habits=habits)
    working = asyncio.create_task(worker.run(stop))

    await bus.publish([(cell.train, operation("large", 50))])
    await until(lambda: not handler.has_room())
    await bus.publish([(cell.train, replace(operation("small", 1), tenant="other"))])
    await until(lambda: length(bus, cell.adapters(3), 2), seconds=60)

    answers = [message.job for _, message in await bus.follow(cell.adapters(3), "0", block_ms=1) if message]
    assert answers == ["small", "large"]
    stop.set()
    await working
