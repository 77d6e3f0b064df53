"""Versions of a run that nobody needs are deleted, and never another, whoever dies meanwhile."""

import asyncio
import random
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from common.bus.bus import Bus
from common.bus.streams import GROUP_MANAGER, Cell
from common.store.adapters import OPTIMIZER_FILE
from common.store.objects import Objects
from common.wire.messages import AdapterRef, LoraSpec
from common.wire.operations import Forget, SaveWeights
from manager_service.owner.jobs.changes import KEEP_RESULTS_S, Changes
from manager_service.owner.runs import runs
from manager_service.owner.runs.run_retention import RunRetention
from manager_service.records.keys import JSON
from manager_service.records.run_records import NAME_BYTES, UNNAMED_KEPT_S, Checkpoint, RunSpec, RunState, use
from manager_service.records.tenants import TENANTS, TenantRecord
from tests.common.test_worker import until
from tests.support.run_world import SESSION, TENANT, WEIGHTS, World

STORED = {"whole": True, "bare": False}


@pytest.fixture
async def world(bus: Bus, objects: Objects, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(runs, "RETIRE_EVERY_S", 0.0)
    monkeypatch.setattr(runs, "LOOK_AGAIN_S", 0.1)
    monkeypatch.setattr(runs, "GRACE_S", 0.1)
    world = World(bus, objects)
    world.start_owner()
    yield world
    await world.stop()


async def step(world: World, run: str, first: int, num: int = 1) -> int:
    """Makes versions; returns the number of the next operation."""
    for seq in range(first, first + num):
        await world.send(run, (seq, "optim_step"))
        await world.result(run, seq)
    return first + num


async def stored(world: World, run: str) -> dict[int, str]:
    """The state of each version in the store: `whole`, or `bare` without the optimiser's state."""
    paths = await world.objects.paths(f"adapters/{TENANT}/{run}")
    names = {(int(path.split("/")[3]), path.rpartition("/")[2]) for path in paths}
    weights = {version for version, name in names if name == WEIGHTS}
    return {version: "whole" if (version, OPTIMIZER_FILE) in names else "bare" for version in sorted(weights)}


async def until_stored(world: World, run: str, expected: dict[int, str]) -> None:
    async def are() -> bool:
        return await stored(world, run) == expected and (await world.state(run)).leaving is None

    await until(are)
    listed = {
        int(v): whole == b"1" for v, whole in (await world.bus.client.hgetall(world.bus.cell.versions(run))).items()
    }
    assert listed == {version: STORED[kind] for version, kind in expected.items()}


async def names_counted(world: World, run: str) -> int:
    """The names for which the run counts towards what its tenant stores; versions have a few bytes here."""
    return int(await world.bus.client.hget(world.bus.cell.stored(TENANT), run) or 0) // NAME_BYTES


async def test_only_the_newest_two_the_named_and_the_used_versions_stay(world: World) -> None:
    async with world.hashing_trainer():
        run = await world.create()
        await world.save(run, 1, SaveWeights("begin"), "save_weights")
        await step(world, run, 2)
        await world.save(run, 3, SaveWeights("sampled"))
        await step(world, run, 4)
        await world.save(run, 5, SaveWeights(sampler="s:0"))
        await step(world, run, 6)
        assert await use(world.bus, AdapterRef(TENANT, run, 3))
        await step(world, run, 7)
        assert await use(world.bus, AdapterRef(TENANT, run, 4), with_optimizer=True)
        await step(world, run, 8, num=4)
        kept = {0: "whole", 1: "bare", 2: "bare", 3: "bare", 4: "whole", 7: "whole", 8: "whole"}
        await until_stored(world, run, kept)
        assert [await use(world.bus, AdapterRef(TENANT, run, version)) for version in (2, 5)] == [True, False]
        assert not await use(world.bus, AdapterRef(TENANT, run, 1), with_optimizer=True)
        for version in (2, 3, 4):  # an hour later
            for whole in (False, True):
                await world.bus.client.delete(world.bus.cell.use(run, version, with_optimizer=whole))
        await until_stored(world, run, {0: "whole", 1: "bare", 7: "whole", 8: "whole"})
        state = await world.state(run)
        assert len(state.checkpoints) == 2
        assert [await world.store.manifest(AdapterRef(TENANT, run, version)) is None for version in range(9)] == [
            False
        ] * 9
        await step(world, run, 12)


async def test_a_name_that_expires_keeps_its_version_no_longer_also_when_its_run_has_ended(world: World) -> None:
    async with world.hashing_trainer():
        run = await world.create()
        await world.save(run, 1, SaveWeights("live", ttl_s=1), "save_weights")
        seq = await step(world, run, 2, num=3)
        await until_stored(world, run, {2: "whole", 3: "whole"})
        assert not (await world.state(run)).checkpoints and not await names_counted(world, run)
        await world.save(run, seq, SaveWeights("ends", ttl_s=2), "save_weights")
        await step(world, run, seq + 1, num=2)
        await world.send(run, (seq + 3, "unload"))
        await world.result(run, seq + 3)
        await world.kill_owner()
        world.start_owner()
        await until_stored(world, run, {4: "whole", 5: "whole"})
        await until(lambda: _nothing_to_retire(world))


async def test_runs_that_cannot_be_read_do_not_stop_those_behind_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "LOAD_COUNT", 2)
    key = world.bus.cell.retire(world.partition)
    await world.bus.client.hset(world.bus.cell.run("run-0-1"), mapping={"spec": b"{", "state": b"{"})
    await world.bus.client.zadd(key, {"run-0-1": 1, "run-0-2": 2, "run-0-3": 3})  # the latter two are lost
    await until(lambda: _nothing_to_retire(world))


async def test_a_version_goes_with_the_name_that_is_deleted_also_when_its_run_has_ended(world: World) -> None:
    async with world.hashing_trainer():
        run = await world.create()
        await world.save(run, 1, SaveWeights("one"), "save_weights")
        await step(world, run, 2)
        await world.save(run, 3, SaveWeights("two"), "save_external")
        await step(world, run, 4, num=3)
        one, two = (await world.state(run)).checkpoints
        await until_stored(world, run, {0: "whole", 1: "bare", 3: "whole", 4: "whole"})
        assert await names_counted(world, run) == 2
        await world.change_name(run, one, deletes=True)
        await until_stored(world, run, {1: "bare", 3: "whole", 4: "whole"})
        assert await names_counted(world, run) == 1
        await world.send(run, (7, "unload"))
        await world.result(run, 7)
        await until(lambda: _nothing_to_retire(world))
        await world.change_name(run, two, expires_at=1 << 40)
        await until(lambda: _ends_at(world, run, 1 << 40))
        await world.change_name(run, msgspec.structs.replace(two, expires_at=1 << 40), deletes=True)
        await until_stored(world, run, {3: "whole", 4: "whole"})
        await until(lambda: _nothing_to_retire(world))


async def _ends_at(world: World, run: str, expires_at: int) -> bool:
    return [one.expires_at for one in (await world.state(run)).checkpoints] == [expires_at]


async def _nothing_to_retire(world: World) -> bool:
    """True once the run without a name is forgotten."""
    key = world.bus.cell.retire(world.partition)
    return not await world.bus.client.zcount(key, "-inf", time.time() + UNNAMED_KEPT_S / 2)


async def test_a_run_that_ends_while_its_versions_go_loses_the_rest_of_them(world: World) -> None:
    async with world.hashing_trainer():
        run = await world.create()
        seq = await step(world, run, 1)
        await world.save(run, seq, SaveWeights(sampler="s:0"))
        await step(world, run, seq + 1, num=2)
        await world.bus.client.delete(world.bus.cell.session(SESSION))
        await until(lambda: _ended(world, run))
        await until_stored(world, run, {1: "bare", 2: "whole", 3: "whole"})
        await world.bus.client.delete(world.bus.cell.use(run, 1))
        await until_stored(world, run, {2: "whole", 3: "whole"})


@pytest.mark.parametrize("owner", ["the same", "the next"])
async def test_the_answer_for_a_run_that_has_ended_meanwhile_is_taken_in(world: World, owner: str) -> None:
    async with world.hashing_trainer() as trainer:
        run = await world.create()
        trainer.hold_forget = asyncio.Event()
        seq = await step(world, run, 1, num=2)
        await until(lambda: _leaves(world, run, asked=True))
        await world.send(run, (seq, "unload"))
        await world.result(run, seq)
        if owner == "the next":
            await world.kill_owner()
            trainer.hold_forget.set()
            await until(lambda: _answered(world))
            world.start_owner()
        busy = await world.bus.client.xadd(world.bus.cell.env, {"a": "b"})  # so that nothing is ever taken for lost
        trainer.hold_forget.set()
        await until_stored(world, run, {1: "whole", 2: "whole"})
        assert await world.bus.client.xlen(world.bus.cell.env) == 1 and busy


async def _ended(world: World, run: str) -> bool:
    return (await world.state(run)).status == "ended"


async def test_a_version_stays_until_the_run_that_begins_with_it_has_its_copy(world: World) -> None:
    record = TenantRecord(id=TENANT, created_at=0, max_jobs=1)
    await world.bus.client.hset(TENANTS, TENANT, JSON.encode(record))
    async with world.hashing_trainer():
        run = await world.create()
        await step(world, run, 1, num=2)
        source = AdapterRef(TENANT, run, 1)
        second = await world.create(1, source=source, with_optimizer=True)
        await until(lambda: _queued(world, second))
        await step(world, run, 3, num=3)
        await until_stored(world, run, {1: "whole", 4: "whole", 5: "whole"})
        await world.send(run, (6, "unload"))
        await world.result(second, 0)
        await until_stored(world, run, {4: "whole", 5: "whole"})


async def test_a_version_stays_until_it_is_loaded(world: World) -> None:
    async with world.hashing_trainer():
        run, second = await world.create(), await world.create(1)
        await world.result(second, 0)
        seq = await step(world, run, 1, num=2)
        await world.load(second, 2, AdapterRef(TENANT, run, 1))
        await until(lambda: _read(world))
        await step(world, run, seq, num=3)
        await until_stored(world, run, {1: "bare", 4: "whole", 5: "whole"})
        await world.send(second, (1, "forward"))
        await world.result(second, 2)
        await until_stored(world, run, {4: "whole", 5: "whole"})
        assert await world.weights(second, 1)


async def _read(world: World) -> bool:
    """Has the owner read the one operation that is there?"""
    pending = await world.bus.client.xpending(world.bus.cell.ops(world.partition), GROUP_MANAGER)
    return pending["pending"] == 1


async def _queued(world: World, run: str) -> bool:
    """Has the owner read that it is to be created?"""
    return (
        await world.bus.client.xlen(world.bus.cell.jobs(world.partition)) == 0
        and (await world.state(run)).status == "queued"
    )


@pytest.mark.parametrize("dies", ["when marked", "when asked", "when deleted", "the message"])
async def test_what_is_to_be_deleted_is_deleted_whatever_is_lost(
    world: World, dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.hashing_trainer() as trainer:
        run = await world.create()
        trainer.hold_forget = asyncio.Event()
        if dies == "when marked":
            monkeypatch.setattr(RunRetention, "ask", _die)
        await step(world, run, 1, num=2)
        await until(lambda: _leaves(world, run, asked=dies != "when marked"))
        assert not await use(world.bus, AdapterRef(TENANT, run, 0))
        if dies == "the message":
            await world.bus.client.delete(world.bus.cell.train)
            await world.bus.ensure_group(world.bus.cell.train, "trainer")
        else:
            await world.kill_owner()
            monkeypatch.undo()
            monkeypatch.setattr(runs, "RETIRE_EVERY_S", 0.0)
            if dies == "when deleted":
                trainer.hold_forget.set()
                await until(lambda: _answered(world))
            world.start_owner()
        trainer.hold_forget.set()
        await until_stored(world, run, {1: "whole", 2: "whole"})


def _die(*_: object) -> None:
    raise asyncio.CancelledError


async def _leaves(world: World, run: str, *, asked: bool) -> bool:
    leaving = (await world.state(run)).leaving
    return leaving is not None and leaving.asked == asked


async def _answered(world: World) -> bool:
    return await world.bus.client.xlen(world.bus.cell.adapters(world.partition)) > 0


async def test_what_may_be_used_is_there_whatever_happens_at_the_same_time(world: World) -> None:
    """Readers come and go at random while versions are made, named and deleted as fast as can be."""
    rng, named, used, refused = random.Random(5), dict[str, int](), set[int](), 0
    async with world.hashing_trainer():
        run = await world.create()
        seq = 1
        for version in range(1, 40):
            seq = await step(world, run, seq)
            if rng.random() < 0.2:
                saved = await world.save(run, seq, SaveWeights(f"v{version}"))
                named[saved.name], seq = saved.version, seq + 1
            for old in rng.sample(range(version + 1), k=min(3, version)):
                if await use(world.bus, AdapterRef(TENANT, run, old)):
                    used.add(old)
                else:
                    refused += 1
            for old in used | set(named.values()):
                assert await world.weights(run, old)
        assert refused and used and named
        expected = used | set(named.values()) | {38, 39}
        await until(lambda: _stores(world, run, expected))


async def _stores(world: World, run: str, versions: set[int]) -> bool:
    return set(await stored(world, run)) == versions


# ---- the decision alone ---------------------------------------------------------------------------------------------

CELL = Cell("tiny")


def retention(num: int, *checkpoints: Checkpoint) -> RunRetention:
    """The retention of a run with this many versions, all whole."""
    spec = RunSpec("run-0123456789abcdef-0", TENANT, SESSION, "tiny", "tiny", LoraSpec(), seed=5, created_at=0)
    state = RunState(status="ready", version=num - 1, checkpoints=list(checkpoints))
    return RunRetention(CELL, spec, state, dict.fromkeys(range(num), True))


def asked(changes: Changes) -> list[Forget]:
    return [message for _, message in changes.published if isinstance(message, Forget)]


def test_a_use_from_before_the_mark_takes_it_back() -> None:
    keeping, changes = retention(5), Changes()
    keeping.look(({}, {}), 0.0, changes)
    assert keeping.versions == {3: True, 4: True} and not asked(changes)
    assert set(keeping.doubtful({}, 0.0)) == {0, 1, 2}
    keeping.look(({0: False}, {1: True}), 0.0, changes := Changes())
    [message] = asked(changes)
    assert (message.versions, message.optimizers) == ((2,), ())
    assert keeping.versions == {0: True, 1: True, 3: True, 4: True}
    assert changes.opened == {CELL.versions(message.job): {"0": "1", "1": "1"}}
    assert keeping.doubtful({}, 0.0) == [], "there is no way back from what a trainer was asked for"


def test_marks_that_are_all_taken_back_ask_for_nothing() -> None:
    keeping = retention(3)
    keeping.look(({}, {}), 0.0, Changes())
    keeping.look(({}, {0: True}), 0.0, changes := Changes())
    assert (asked(changes), keeping.state.leaving, keeping.versions[0]) == ([], None, True)


def test_an_optimisers_state_goes_first_and_comes_back_if_it_is_needed() -> None:
    keeping = retention(4, Checkpoint("sampler_weights", "a", 0, 0), Checkpoint("weights", "b", 1, 0))
    keeping.look(({}, {}), 0.0, Changes())
    assert keeping.versions == {0: False, 1: True, 2: True, 3: True}
    keeping.look(({}, {0: True}), 0.0, Changes())
    assert (keeping.versions[0], keeping.state.leaving) == (True, None)


def test_answers_to_other_messages_change_nothing() -> None:
    keeping = retention(3)
    keeping.look(({}, {}), 0.0, Changes())
    keeping.look(({}, {}), 0.0, changes := Changes())
    keeping.forgotten("another", Changes())
    assert keeping.under_way
    keeping.forgotten(asked(changes)[0].id, Changes())
    assert not keeping.under_way


@pytest.mark.parametrize(
    ("checkpoints", "due"),
    [([], None), ([Checkpoint("weights", "a", 0, 0)], None), ([Checkpoint("weights", "a", 0, 0, 70)], 70.0)],
)
def test_an_ended_run_is_looked_at_when_something_may_go(checkpoints: list[Checkpoint], due: float | None) -> None:
    keeping = retention(2, *checkpoints)
    assert keeping.due_at(10.0, wait_s=60) == due
    keeping.state.version += 3
    keeping.versions[4] = True
    assert keeping.due_at(10.0, wait_s=60) == 70.0


def test_a_run_that_never_had_a_version_is_forgotten_with_its_results() -> None:
    keeping = retention(0)
    assert keeping.due_at(0.0, wait_s=1) is None and not keeping.is_over(1e9)
    keeping.state.status, keeping.state.ended_at = "ended", 1000
    assert keeping.due_at(1000.0, wait_s=1) == 1000 + KEEP_RESULTS_S
    over_at = 1000.0 + KEEP_RESULTS_S
    assert [until_erased(keeping, now) for now in (over_at - 1, over_at)] == [[], [((), True)]]
    assert [keeping.is_over(now) for now in (over_at - 1, over_at)] == [False, True]


def until_erased(keeping: RunRetention, now: float) -> list[tuple[tuple[int, ...], bool]]:
    """The orders to a trainer when a run is looked at again and again: versions, and whether all the rest goes too."""
    found: list[tuple[tuple[int, ...], bool]] = []
    for _ in range(10):
        keeping.look(({}, {}), now, changes := Changes())
        for message in asked(changes):
            found.append((message.versions, message.everything))
            keeping.forgotten(message.id, Changes())
        if keeping.is_over(now):
            break
    return found


def test_all_that_the_store_has_of_a_run_goes_with_the_last_of_its_versions() -> None:
    keeping = retention(4)
    assert until_erased(keeping, 0.0) == [((0, 1), False)], "while it lives, its manifests stay"
    keeping.state.status, keeping.state.ended_at = "ended", 1000
    assert until_erased(keeping, 1000.0 + UNNAMED_KEPT_S - 1) == []
    assert until_erased(keeping, 1000.0 + UNNAMED_KEPT_S) == [((2, 3), True)]


def test_a_forgotten_runs_version_that_is_used_keeps_the_rest_until_it_goes() -> None:
    keeping, now = retention(2), 1e9
    keeping.state.status, keeping.state.ended_at = "ended", 1000
    keeping.look(({}, {}), now, Changes())
    keeping.look(({}, {1: False}), now, changes := Changes())
    assert [(message.versions, message.everything) for message in asked(changes)] == [((0,), False)]
    keeping.forgotten(asked(changes)[0].id, Changes())
    assert not keeping.is_over(now)
    assert until_erased(keeping, now) == [((1,), True)]
