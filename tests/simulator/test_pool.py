"""The simulator of pools: its books balance, its jobs do the same work under each placement, and traces are read as they are told."""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.pool.choosing import WaitingBase, choose
from common.pool.placement import PlacementRule, may_open
from simulator.pool.__main__ import main
from simulator.pool.cluster import PoolCluster, Setup, factors_of
from simulator.pool.figures import figures_of, floor_s, sized
from simulator.pool.places import Costs, PoolSize, SimulatedWorker, WorkerSlice
from simulator.pool.trace import JobShape, TraceJob, draw, read_trace, write_trace

TIMES = st.floats(0.5, 50)
JOBS = st.lists(
    st.builds(
        TraceJob,
        at_s=st.floats(0, 300),
        tenant=st.just("t"),
        base=st.sampled_from("abcd"),
        shape=st.builds(JobShape, st.just(2), st.sampled_from([4, 8])),
        steps=st.integers(1, 6),
        rollout_s=TIMES,
        train_s=TIMES,
        tool_s=st.floats(0, 20),
    ),
    min_size=1,
    max_size=8,
)
SIZES = st.builds(
    PoolSize,
    workers=st.integers(1, 3),
    slots=st.integers(1, 3),
    device_bases=st.integers(1, 3),
    host_bases=st.integers(1, 3),
    slice_max_s=st.floats(1, 60),
)
COSTS = st.builds(Costs, st.floats(0.01, 1), st.floats(1, 10), st.floats(10, 100))


def has_run(setup: Setup, jobs: Sequence[TraceJob]) -> PoolCluster:
    cluster = PoolCluster(setup, keep_slices=True)
    cluster.run(jobs)
    return cluster


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(get_args(PlacementRule)), JOBS, SIZES, st.one_of(st.none(), SIZES), COSTS, st.integers(0, 2))
def test_books_balance_and_every_operation_is_done_once_whoever_shares_what(
    placement: PlacementRule, jobs: list[TraceJob], size: PoolSize, rollouts: PoolSize | None, costs: Costs, lag: int
) -> None:
    cluster = has_run(Setup(placement, {4: size, 8: size}, rollouts, costs, lag), jobs)
    assert sorted(map(msgspec.json.encode, jobs)) == sorted(msgspec.json.encode(each.job) for each in cluster.ended)
    for pool in cluster.pools:
        for worker in pool.workers:
            assert (
                worker.books.wall == pytest.approx(cluster.clock.now) and worker.books.held <= worker.books.wall + 1e-6
            )
    if size.slots == 1:
        busy = sum(worker.books.busy for pool in cluster.trainers.values() for worker in pool.workers)
        done = sum(job.train_s * sum(factors(job, jobs, cluster.setup)) for job in jobs)
        assert busy == pytest.approx(done)
    own = defaultdict[str, list[WorkerSlice]](list)
    for each in cluster.slices:
        own[each.worker].append(each)
    for slices in own.values():
        assert all(one.end_s <= other.start_s for one, other in pairwise(slices)), "one is open"
    assert all(each.slowdown > 1 - 1e-9 and each.started_s >= each.job.at_s for each in cluster.ended)
    assert floor_s(cluster) <= max(each.ended_s for each in cluster.ended) * (1 + 1e-9) or size.slots > 1


def factors(job: TraceJob, jobs: list[TraceJob], setup: Setup) -> list[float]:
    return factors_of(job, next(number for number, each in enumerate(jobs) if each is job), setup)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(get_args(PlacementRule)), JOBS, SIZES, COSTS)
def test_what_is_not_asked_of_production_it_would_not_choose(
    monkeypatch: pytest.MonkeyPatch, placement: PlacementRule, jobs: list[TraceJob], size: PoolSize, costs: Costs
) -> None:
    """Workers look only when a base could follow, and ask about those bases alone."""
    candidates: Any = SimulatedWorker._candidates  # pyright: ignore[reportPrivateUsage]

    def asked(worker: SimulatedWorker) -> list[WaitingBase]:
        return checked(worker, candidates(worker))

    monkeypatch.setattr(SimulatedWorker, "_candidates", asked)
    has_run(Setup(placement, {4: size, 8: size}, None, costs, lag=1), jobs)
    monkeypatch.undo()


def checked(worker: Any, found: list[WaitingBase]) -> list[WaitingBase]:
    """`found`, if production finds the same among all that waits; nearer than a millisecond rules may see it either way."""
    pool, is_busy = worker.pool, worker.running > 0 or worker.open in worker.pool.waiting
    waiting = [worker._waiting(base, queue[0].at) for base, queue in pool.waiting.items() if base != worker.open]
    able = may_open(pool.placement, worker.name, waiting, pool.places, is_idle=not is_busy)
    current = worker._current(is_busy=is_busy) if worker.open else None
    expected = choose(current, able, num_bases=len(pool.places), slice_max_s=pool.size.slice_max_s)
    late = {base.base for base in expected} ^ {base.base for base in found}
    for base in (base for base in waiting if base.base in late):
        assert (
            abs(worker._follows_at(base.base, pool.clock.now - base.waited_s, is_idle=not is_busy) - pool.clock.now)
            < 1e-3
        )
    assert late or found == expected
    return found


def test_alone_a_job_takes_the_sum_of_its_parts() -> None:
    job = TraceJob(at_s=5, tenant="t", base="a", shape=JobShape(1, 1), steps=3, rollout_s=10, train_s=4, tool_s=1)
    for lag, expected in ((0, 3 * 15), (1, 3 * 11 + 4)):
        costs = Costs(0.5, 2.0, 8.0)
        cluster = has_run(Setup("backfill", {1: PoolSize(1)}, costs=costs, lag=lag, sigma=0.0), [job])
        assert cluster.ended[0].alone_s == expected
        # The first training is asked for at 16, when the base's files, placed at 5, were read at 13: it waits as long as it opens.
        late_s = 4.0 if lag == 0 else 0.0
        assert cluster.ended[0].ended_s == pytest.approx(5 + expected + late_s)
        [worker] = cluster.trainers[1].workers
        assert asdict(worker.books) == pytest.approx(
            {
                "busy": 12.0,
                "switch": 2.0,
                "idle": cluster.clock.now - 14,
                "held": cluster.ended[0].ended_s - 5,
                "switches": 1,
            }
        )


def test_a_job_of_three_turns_asks_for_its_base_three_times_a_step() -> None:
    job = TraceJob(
        at_s=0, tenant="t", base="a", shape=JobShape(1, 1), steps=2, rollout_s=9, train_s=4, tool_s=3, turns=3
    )
    cluster = has_run(Setup("backfill", {0: PoolSize(1)}, PoolSize(1), lag=0, sigma=0.0), [job])
    assert cluster.rollouts is not None
    [other] = cluster.rollouts.workers
    assert cluster.ended[0].alone_s == 2 * 16 and other.books.busy == pytest.approx(18)
    assert other.books.idle > 2 * (2 + 4), "it waits for tools between turns"


def test_two_runs_are_the_same_to_the_last_digit() -> None:
    jobs = draw(3, days=1, jobs_per_day=40)
    assert jobs == draw(3, days=1, jobs_per_day=40) != draw(4, days=1, jobs_per_day=40)
    one, other = (figures_of(has_run(Setup("backfill", sized(jobs, 2.0, PoolSize(1))), jobs)) for _ in range(2))
    assert one == other


def test_sharing_ends_jobs_earlier_and_isolated_workers_open_each_base_once() -> None:
    jobs = [msgspec.structs.replace(job, base=str(n)) for n, job in enumerate(draw(1, days=2, jobs_per_day=60))]
    found = {
        placement: figures_of(has_run(Setup(placement, sized(jobs, 2.0, PoolSize(1))), jobs))
        for placement in get_args(PlacementRule)
    }
    isolated = found.pop("isolated")
    assert isolated.switches == len(jobs) and isolated.slowdown.mean < 1.01
    for each in found.values():
        assert each.completion_h.mean < 0.6 * isolated.completion_h.mean and each.makespan_d <= isolated.makespan_d
        assert each.gpu_hours_a_step < isolated.gpu_hours_a_step
    assert found["pack"].gpu_hours_a_step < found["spread"].gpu_hours_a_step, "it leaves trainers free"
    assert found["spread"].slowdown.mean < found["pack"].slowdown.mean


# ---- traces ---------------------------------------------------------------------------------------------------------

ACME = """job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time
5778432,u5907,1,8,128,Other,FAILED,2023-03-01 00:18:22+08:00,2023-03-01 00:18:54+08:00,2023-03-01 00:20:51+08:00,117,32,936.0
5778469,u5907,1,8,128,Other,COMPLETED,2023-03-01 00:23:58+08:00,2023-03-01 00:24:11+08:00,2023-03-01 01:09:04+08:00,2693,13,21544.0
5778470,u1,4,64,128,RLHF,COMPLETED,2023-03-01 02:23:58+08:00,,,7000,13,21544.0
"""
HELIOS = """job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
1425511,uXBbc,vcJkd,1,1,1,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-10 04:55:09,36848,0
1425512,uVMrF,vchbv,4,16,1,FAILED,2020-06-09 18:41:27,2020-06-09 18:41:27,2020-06-09 18:45:36,2049,0
"""
PHILLY_CSV = "user,num_gpus,submitted_time,run_time\nu1,16,1000,3600\nu2,,2000,\n"


def philly(*, end: str | None = "2017-10-09 06:53:12") -> str:
    gpus = [{"ip": "m412", "gpus": [f"gpu{number}" for number in range(8)]}]
    attempts = [{"start_time": "2017-10-07 01:13:30", "end_time": end, "detail": gpus}]
    job = {"status": "Pass", "vc": "v", "jobid": "a", "submitted_time": "2017-10-07 01:11:39", "user": "ce2f4c"}
    return json.dumps([job | {"attempts": attempts}, job | {"attempts": []}])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ACME, [("u5907", 0.0, 8, 2693), ("u1", 7200.0, 64, 7000)]),
        (HELIOS, [("uVMrF", 0.0, 4, 2049)]),
        (PHILLY_CSV, [("u1", 0.0, 16, 3600)]),
        (philly(), [("ce2f4c", 0.0, 8, 193182)]),
    ],
)
def test_public_logs_give_arrivals_users_gpus_and_durations(
    tmp_path: Path, text: str, expected: list[tuple[str, float, int, float]]
) -> None:
    (tmp_path / "log").write_text(text)
    jobs = read_trace(tmp_path / "log", seed=1, days=90)
    assert [(job.tenant, job.at_s, job.shape.rollout + job.shape.train) for job in jobs] == [e[:3] for e in expected]
    for job, (*_, seconds) in zip(jobs, expected, strict=True):
        assert abs(job.steps * job.step_s - seconds) <= job.step_s


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("user,gpu_num\n", "no CSV with the column submit_time or submitted_time; it has user, gpu_num"),
        ("", "no JSON lines, and no CSV"),
        (PHILLY_CSV.replace("1000", "soon"), "line 2: Invalid isoformat string: 'soon'"),
        (PHILLY_CSV.replace("3600", "inf"), "line 2: 'inf' is no number"),
        ('[{"attempts": "x"}]', "log: 'str' object has no attribute"),
        (philly(end=None), "has no job of 2 GPUs or more"),
        ('{"at_s": 0}\n', "line 1: Object missing required field"),
        ('{"at_s": -1, "tenant": "t", "base": "b", "shape": {"rollout": 1, "train": 1}, "steps": 1, "rollout_s": 1, "train_s": 1}',
         "at_s, rollout_s, train_s and tool_s must be 0 or more"),
        ("[1]", "log: "),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused_with_the_line(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(ValueError, match=fault):
        read_trace(tmp_path / "log", seed=1, days=90)


def test_a_trace_is_written_as_it_is_read(tmp_path: Path) -> None:
    jobs = draw(1, days=2, jobs_per_day=10)
    write_trace(jobs, tmp_path / "trace")
    read = read_trace(tmp_path / "trace", seed=1, days=inf)
    begin = jobs[0].at_s
    assert read == [msgspec.structs.replace(job, at_s=job.at_s - begin) for job in jobs]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ("--draw 1 --trace x", "not allowed with argument"),
        ("--trace nowhere", "simulator.pool: .*No such file"),
        ("--draw 1 --load 0", "'0' is no number above 0"),
        ("--draw 1 --costs 1,2", "'1,2' is not DEVICE,HOST,DISK in seconds"),
        ("--draw 1 --costs 1,2,nan", "'nan' is no number above 0"),
        ("--draw 6 --days 1 --jobs-per-day 1", "no job came in 1 days"),
    ],
)
def test_wrong_options_are_told_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str, fault: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["pool", *options.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert re.search(fault, f"{ended.value.code} {capsys.readouterr().err}")


def test_the_command_prints_its_tables_and_draws_who_used_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, picture, figures = (tmp_path / name for name in ("trace", "picture.svg", "figures.json"))
    write_trace(draw(1, days=1, jobs_per_day=12), trace)
    options: list[Any] = ["--trace", trace, "--trainer", 2, "--rollout", 1, "--lag", 0, "--picture", picture]
    monkeypatch.setattr(sys, "argv", ["pool", *map(str, options), "--json", str(figures)])
    main()
    assert picture.read_text().startswith("<?xml")
    placements = [each["placement"] for each in json.loads(figures.read_text())["figures"]["shared"]]
    assert placements == list(get_args(PlacementRule))
