"""The number of rollout workers that a cell wants, the one that retires, and `marlaas up --rollout MIN:MAX`, which follows."""

import asyncio
import random
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.bus.bus import Bus
from common.bus.streams import Cell
from common.cancellation import cancel_all
from common.children.processes import Command, SupervisedProcess
from common.errors import InvalidInput
from harness.live import Api, is_balanced
from harness.proxy import Proxy
from harness.standin import FixedSlots, job_spec
from manager_service.launcher import supervisor
from manager_service.launcher.elastic_pool import ElasticPool
from manager_service.launcher.supervisor import LocalCluster, ServiceCommand
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.leases import Leases
from manager_service.owner.surroundings import PoolSizer
from manager_service.records.cluster import Cluster, WantedWorkers, wanted_of
from manager_service.scheduling.elastic import (
    RETIRE_EVERY_S,
    TARGET,
    Retirement,
    WorkerLoad,
    WorkerRange,
    retire,
    row_slots,
    wanted,
)
from tests.common.test_worker import until
from tests.manager.test_api_cluster import report, tell
from tests.manager.test_supervisor import API, SLEEP, connect, python
from tests.support.forked import running
from tests.support.owner_world import World


@st.composite
def loads(draw: st.DrawFn) -> list[WorkerLoad]:
    """Workers as they may be: full, empty, of several sizes, with and without what they say of keys and values."""
    found: list[WorkerLoad] = []
    for number in range(draw(st.integers(0, 6))):
        slots = draw(st.sampled_from((1, 8, 64)))
        kv_tokens = draw(st.none() | st.integers(1, 2000))
        used = None if kv_tokens is None else draw(st.integers(0, kv_tokens))
        found.append(WorkerLoad(f"w{number}", slots, draw(st.integers(0, slots)), kv_tokens, used))
    return found


@given(loads(), st.integers(0, 6), st.booleans())
def test_who_retires_leaves_a_worker_and_never_overfills_the_others(
    workers: list[WorkerLoad], number: int, repack: bool
) -> None:
    name = retire(workers, number, repack=repack)
    if name is None:
        return
    assert len(workers) > max(1, number), "as many as are wanted stay, and one always"
    (gone,) = [each for each in workers if each.worker == name]
    others = [each for each in workers if each.worker != name]
    assert gone.rows == min(each.rows for each in workers)
    assert not gone.rows or (repack and 2 * gone.rows < gone.slots)
    # Its rows find slots, and its keys and values room, however its rows are shared out among those with a free slot
    assert gone.rows <= sum(max(0, int(TARGET * each.slots) - each.rows) for each in others)
    if gone.rows and all(each.kv_tokens is not None for each in others):
        rest = sum(max(0.0, TARGET * (each.kv_tokens or 0) - (each.kv_used or 0)) for each in others)
        assert (gone.kv_used or 0) <= rest


@given(loads(), st.integers(0, 1000))
def test_so_many_workers_are_wanted_that_all_turns_fit_and_no_more(workers: list[WorkerLoad], turns: int) -> None:
    each = row_slots(workers)
    number = wanted(turns, each)
    if not each:
        assert number == min(1, turns)
    else:
        assert TARGET * each * number >= turns > TARGET * each * (number - 1) or not turns == number == 0


def test_rows_with_long_contexts_count_for_the_slots_that_they_leave_no_memory_for() -> None:
    assert row_slots([WorkerLoad("a", 64, rows=4, kv_tokens=1600, kv_used=400)]) == 16
    assert row_slots([WorkerLoad("a", 64, rows=4), WorkerLoad("b", 32)]) == 48


def test_one_worker_retires_after_the_other_and_none_once_turns_come() -> None:
    idle, retirement = [WorkerLoad(name, 8) for name in "abc"], Retirement()
    assert retirement.look(0.0, idle, 1, settled=True) == "a"
    assert retirement.look(1.0, idle[1:], 1, settled=True) == "a", "the next one once reports show what the first left"
    assert retirement.look(2.0, idle, 3, settled=True) is None, "a burst"
    assert retirement.look(RETIRE_EVERY_S, idle[1:], 1, settled=True) is None, "this may be a lull"
    assert retirement.look(2.0 + RETIRE_EVERY_S, idle[1:], 1, settled=True) == "b"
    assert retirement.look(9 * RETIRE_EVERY_S, idle[2:], 1, settled=True) is None


def test_when_a_worker_has_started_none_retires_for_as_long_as_that_took() -> None:
    idle, retirement = [WorkerLoad(name, 8) for name in "abc"], Retirement()
    found = {at_s: retirement.look(at_s, idle, 1, settled=not 10 <= at_s < 70) for at_s in range(200)}
    assert [found[at_s] for at_s in (0, 9, 10, 69, 70, 129, 130)] == ["a", "a", None, None, None, None, "a"]


def test_a_range_of_workers_is_read_or_refused_with_what_to_write() -> None:
    assert WorkerRange.parse(" 1:4 ") == (1, 4) and str(WorkerRange(1, 4)) == "1:4"
    assert [WorkerRange.parse(text).is_fixed for text in ("0", "3", "2:2", "1:4")] == [True, True, True, False]
    assert [WorkerRange(2, 4).clamp(number) for number in (0, 3, 9)] == [2, 3, 4]
    for text in ("4:1", "0:2", "x", "", "1:", ":2", "-1", "1:2:3", "1.5"):
        with pytest.raises(
            ValueError, match="neither a number of workers nor a range of one or more: write --rollout 1:4"
        ):
            WorkerRange.parse(text)


def test_jobs_want_what_they_would_be_issued_if_there_were_slots_until_they_pause_or_may_not() -> None:
    world = World(random.Random(1), cluster=FixedSlots(rollout=2, trainer=1, env=0))
    hyper: dict[str, Any] = {"batch_size": 8, "group_size": 4, "max_staleness": 1}
    job = world.add(job_spec("job", created_at=1, num_steps=4, **hyper))
    while job.state.version < 0 or not job.num_waiting:
        world.turn()
    demand, partition = world.allocator.demand, job.partition

    def turns(*, exhausted: bool = False) -> float:
        return demand.turns([partition], 0.0, lambda _: exhausted)[partition]

    assert 0 < job.num_waiting < 2 * 8 * 4 == turns(), "two batches of eight groups of four"
    assert turns(exhausted=True) == job.num_waiting == demand.open_work
    assert demand.turns([partition], demand.open_work, lambda _: False)[partition] == turns() - demand.open_work
    job.pause(0.0, Changes())
    world.jobs.touch(job.id)
    world.allocator.follow(world.jobs, 0.0)
    assert job.num_waiting and turns() == 0


async def test_the_owner_tells_how_many_are_wanted_and_which_retires(bus: Bus) -> None:
    leases, cluster = Leases(bus, "owner", 60), Cluster(bus)
    pool = PoolSizer(bus, cluster, WorkerRange(1, 3), repack=True)
    # Given three workers of 10 slots, and turns for two in both what owners and what API replicas tell
    await leases.round({0: 1.0})
    await leases.round({0: 1.0}, 0.0, {0: 5.0, 1: 99.0})
    await bus.client.set(bus.cell.asked, "4.5")
    live = [report(name, "rollout", slots=10, in_use=rows) for name, rows in (("a", 5), ("b", 2), ("c", 3))]
    await tell(bus, *live, report("t", "trainer"))
    await cluster.follow_once()
    await pool.look(0.0)
    # Then the one with the fewest retires, whose rows the others have room for
    assert await wanted_of(bus.client, bus.cell) == WantedWorkers(2, 10, 3, "1:3", "b")
    assert 0 < await bus.client.pttl(bus.cell.wanted) <= 10_000
    # And it is counted once, when it has gone, as is the time of all
    for at_s, state in ((1.0, "draining"), (2.0, "stopped"), (4.0, "stopped")):
        await tell(bus, report("b", "rollout", state=state))
        await cluster.follow_once()
        await pool.look(at_s)
    assert await bus.client.hgetall(bus.cell.scaled) == {b"held_worker_seconds": b"9", b"retired": b"1"}
    assert await wanted_of(bus.client, bus.cell) == WantedWorkers(2, 10, 2, "1:3")
    # And a burst wants more, but no more than there may be; where nobody follows, as many as it takes, and none retires
    await bus.client.set(bus.cell.asked, "500")
    await pool.look(5.0)
    assert (await wanted_of(bus.client, bus.cell) or WantedWorkers(0, 0, 0)).workers == 3
    await PoolSizer(bus, cluster, None, repack=True).look(6.0)
    assert await wanted_of(bus.client, bus.cell) == WantedWorkers(64, 505, 2)
    # And while none is heard of, as many as before
    await tell(bus, *(report(name, "rollout", state="stopped") for name in "ac"))
    await cluster.follow_once()
    await pool.look(7.0)
    assert await wanted_of(bus.client, bus.cell) == WantedWorkers(3, 505, 0, "1:3")


def places(counts: Any, environment: Any) -> list[ServiceCommand]:
    rollouts = [ServiceCommand(f"rollout-{number}", python(SLEEP)) for number in range(counts["rollout"])]
    return [ServiceCommand("manager", python(API)), *rollouts]


async def tell_wanted(client: Any, wanted: WantedWorkers | None) -> None:
    key = Cell("tiny").wanted
    await (client.set(key, msgspec.json.encode(wanted)) if wanted else client.delete(key))


def id_of(cluster: LocalCluster, name: str) -> str:
    return f"rollout-{socket.gethostname()}-{cluster.pids[name]}-abc"


async def test_up_starts_workers_for_a_burst_and_ends_those_that_retire(tmp_path: Path) -> None:
    heard: list[str] = []
    up = LocalCluster(data_dir=tmp_path, rollout=WorkerRange(1, 3), services=places, notify=heard.append)
    async with up as cluster, connect(cluster) as client:
        tells = partial(tell_wanted, client)

        def workers() -> set[str]:
            return {name for name in cluster.pids if name.startswith("rollout")}

        assert workers() == {"rollout-0"}, "it begins with the least"
        await tells(WantedWorkers(9, 900, 1))
        await until(lambda: len(workers()) == 3)
        assert heard == [f"rollout-{n} starts: 900 turns want 9 rollout workers" for n in (1, 2)]
        # When fewer are wanted nobody goes but who is chosen, and nobody at all while that worker is needed
        before = cluster.pids
        await tells(WantedWorkers(1, 9, 3, retires=id_of(cluster, "rollout-1")))
        await until(lambda: len(workers()) == 2)
        assert (
            heard[2:] == ["rollout-1 retires: 9 turns want 1 rollout workers"] and cluster.pids.items() < before.items()
        )
        # When nothing is told, or another's worker is to go, all stay; a place that came free is taken again
        await tells(None)
        await tells(WantedWorkers(1, 9, 2, retires=f"rollout-elsewhere-{cluster.pids['rollout-2']}-abc"))
        await tells(WantedWorkers(3, 300, 2, retires=id_of(cluster, "rollout-2")))
        await until(lambda: len(workers()) == 3)
        assert heard[3:] == ["rollout-1 starts: 300 turns want 3 rollout workers"]
        assert all(cluster.pids[name] == before[name] for name in ("redis", "manager", "rollout-0", "rollout-2"))
        pids = list(cluster.pids.values())
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "and all end with it"


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


async def test_while_a_worker_hangs_as_it_retires_others_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "GRACE_S", 0.1)
    heard: list[str] = []

    def services(counts: Any, environment: Any) -> list[ServiceCommand]:
        made = places(counts, environment)
        return [replace(each, argv=python(DEAF)) if each.name == "rollout-1" else each for each in made]

    up = LocalCluster(data_dir=tmp_path, rollout=WorkerRange(1, 3), services=services, notify=heard.append)
    async with up as cluster, connect(cluster) as client:
        await tell_wanted(client, WantedWorkers(2, 50, 1))
        log = cluster.log_file("rollout-1")
        await until(lambda: log.exists() and log.read_text() == "deaf\n")
        hangs = cluster.pids["rollout-1"]
        await tell_wanted(client, WantedWorkers(1, 9, 2, retires=id_of(cluster, "rollout-1")))
        await until(lambda: len(heard) == 2)
        await tell_wanted(client, WantedWorkers(2, 50, 1))
        await until(lambda: "rollout-2" in cluster.pids)
        assert cluster.pids["rollout-1"] == hangs, "its place is taken until it has ended"


async def test_while_redis_does_not_answer_a_pool_stays_as_it_is(
    redis_url: str, redis_client: Any, tmp_path: Path
) -> None:
    link = Proxy(int(redis_url.rpartition(":")[2].partition("/")[0]))
    running: dict[str, SupervisedProcess] = {}
    pool = ElasticPool(WorkerRange(1, 3), {}, running, lambda line: None)
    for name in ("rollout-0", "rollout-1", "rollout-2"):
        command = Command(name=name, argv=python(SLEEP), environment={}, log=tmp_path / "log")
        pool.add(name, partial(SupervisedProcess, command, lambda line: None))
    redis_client.set(Cell("tiny").wanted, msgspec.json.encode(WantedWorkers(3, 900, 1)))
    link.fall_silent()
    await link.open()
    async with asyncio.TaskGroup() as group:
        follows = group.create_task(pool.follow(f"redis://127.0.0.1:{link.port}/0", group))
        await until(lambda: link.num_swallowed)
        assert list(running) == ["rollout-0"]
        link.speak()
        await until(lambda: len(running) == 3)
        await cancel_all([follows])
        await asyncio.gather(*(running[name].stop(10) for name in ("rollout-1", "rollout-2")))
    await link.shut()


def test_a_range_is_refused_where_the_number_of_workers_is_fixed(tmp_path: Path) -> None:
    for settings, why in (
        ({"MARLAAS_DETERMINISTIC": "1"}, "in deterministic mode no workers come and go; write --rollout 4"),
        ({"MARLAAS_BASE_MODELS": "tiny,q=/q"}, "with several base models no workers come and go; write --rollout 4"),
    ):
        with pytest.raises(InvalidInput, match=why):
            LocalCluster(data_dir=tmp_path, rollout=WorkerRange(1, 4), environment=settings)


async def test_a_job_brings_workers_and_they_go_when_it_has_ended(tmp_path: Path) -> None:
    heard: list[str] = []
    options: dict[str, Any] = {"environment": {"MARLAAS_ROLLOUT_SLOTS": "4"}, "notify": heard.append}
    async with running(tmp_path, rollout=WorkerRange(1, 3), **options) as (cluster, api):
        job = await api.submit("sort", batch_size=4, group_size=8, max_steps=1000, max_tokens=64)
        await until(lambda: "rollout-2" in cluster.pids)
        await api.post(f"/fine_tuning/jobs/{job}/cancel")
        await api.until_done(job)
        await until(lambda: sum(name.startswith("rollout") for name in cluster.pids) == 1)
        admin = Api(cluster.base_url, cluster.admin_key)
        told = (await admin.get("/cluster/wanted"))["tiny"]
        assert (told["workers"], told["turns"], told["bounds"]) == (1, 0, "1:3")
        ledger = await api.ledger(job)
        assert is_balanced(ledger) and ledger["failed"] == 0
        figures = (await admin.http.get(f"{cluster.base_url}/metrics")).text
        await admin.close()
    assert sum("retires" in line for line in heard) >= 2
    assert all(f'marlaas_{name}_total{{base_model="tiny"}}' in figures for name in ("retired", "held_worker_seconds"))
