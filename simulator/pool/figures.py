"""Computes the figures of simulated clusters."""

from collections.abc import Iterator, Sequence

import msgspec

from common.pool.placement import PlacementRule
from simulator.calibration import Spread
from simulator.pool.cluster import PoolCluster, Setup
from simulator.pool.places import Costs, PoolSize
from simulator.pool.trace import DAY_S, SHAPES, STEP_S, TraceJob

BUBBLES = {"7B": 0.801, "30B": 0.7067, "235B": 0.8111}
"""Share of a step in which training GPUs idle with one job and one step of lag: PlexRL's figures."""
PARAMETERS = {"7B": 7e9, "30B": 30e9, "235B": 235e9}
STATE_BYTES, GPU_BYTES_A_SECOND = 16, 10e9
"""Assumed: weights, gradient, master weights and moments of a parameter; what a GPU copies to and from its host."""
PAIRED_POOLS, PAIRED_S = 4, 3 * DAY_S
"""Trainers, and the length of the jobs, of `paired`."""


class PlacementFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One trace under one placement. Completion: from arrival to end; slowdown: from start to end, over the same alone."""

    placement: str
    gpu_hours_a_step: float
    completion_h: Spread
    slowdown: Spread
    makespan_d: float
    floor_d: float  # what no placement can undercut
    switches: int
    switch_share: float  # of the trainers' time
    busy_share: float


class PairFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of one size that share trainers, against each with a trainer of its own."""

    size: str
    jobs_a_trainer: int
    lag: int
    limit: float  # share of GPU-hours a step that sharing without any loss would save
    saved: float
    slowdown: float


def figures_of(cluster: PoolCluster) -> PlacementFigures:
    """The figures of a cluster that has run."""
    ended, places = (
        cluster.ended,
        [(gpus, each.books) for gpus, pool in cluster.trainers.items() for each in pool.workers],
    )
    wall = sum(books.wall for _, books in places)
    return PlacementFigures(
        placement=cluster.setup.placement,
        gpu_hours_a_step=_gpu_hours(cluster) / sum(each.job.steps for each in ended),
        completion_h=Spread.of([each.completion_s / 3600 for each in ended]),
        slowdown=Spread.of([each.slowdown for each in ended]),
        makespan_d=max(each.ended_s for each in ended) / DAY_S,
        floor_d=floor_s(cluster) / DAY_S,
        switches=sum(books.switches for _, books in places),
        switch_share=sum(books.switch for _, books in places) / wall,
        busy_share=sum(books.busy for _, books in places) / wall,
    )


def floor_s(cluster: PoolCluster) -> float:
    """The least makespan: no job ends before it came and ran alone, no trainer trains more than all the time."""
    floors = [each.job.at_s + each.alone_s for each in cluster.ended]
    for gpus, pool in cluster.trainers.items():
        jobs = [each.job for each in cluster.ended if each.job.shape.train == gpus or cluster.setup.one_pool]
        if jobs:
            work_s = sum(job.steps * job.train_s for job in jobs)
            floors.append(min(job.at_s for job in jobs) + work_s / pool.size.workers)
    return max(floors)


def _gpu_hours(cluster: PoolCluster) -> float:
    """GPU-hours of rollouts while their job runs, or in a pool, and of trainers, while bases have their place
    there. A worker of a pool for jobs of all sizes counts as one GPU."""
    if cluster.rollouts:
        rollout_s = sum(worker.books.held for worker in cluster.rollouts.workers)
    else:
        rollout_s = sum(each.job.shape.rollout * (each.ended_s - each.started_s) for each in cluster.ended)
    return (
        rollout_s + sum((g or 1) * w.books.held for g, pool in cluster.trainers.items() for w in pool.workers)
    ) / 3600


def sized(jobs: Sequence[TraceJob], load: float, size: PoolSize) -> dict[int, PoolSize]:
    """Trainers of each size, so many that jobs with one of their own each would need `load` times as many."""
    days_s = max(job.at_s for job in jobs) - min(job.at_s for job in jobs) or DAY_S
    found = dict[int, PoolSize]()
    for gpus in sorted({job.shape.train for job in jobs}):
        alone_s = sum(
            job.steps * max(job.rollout_s + job.tool_s, job.train_s) for job in jobs if job.shape.train == gpus
        )
        found[gpus] = size._replace(workers=max(1, round(alone_s / days_s / load)))
    return found


def paired(jobs_a_trainer: int, lag: int) -> Iterator[PairFigures]:
    """PlexRL's comparison: so many jobs of one size, each its own base, share each trainer; rollouts have GPUs of their own."""
    for size, shape in SHAPES.items():
        train_s = STEP_S[size] * (1 - BUBBLES[size])
        num = PAIRED_POOLS * jobs_a_trainer
        jobs = [
            TraceJob(
                at_s=0.0,
                tenant=f"t{number}",
                base=f"own-{number}",
                shape=shape,
                steps=round(PAIRED_S / STEP_S[size]),
                rollout_s=STEP_S[size],
                train_s=train_s,
            )
            for number in range(num)
        ]
        host_s = 2 * PARAMETERS[size] * STATE_BYTES / shape.train / GPU_BYTES_A_SECOND
        costs = Costs(host_s=host_s)
        alone = _run("isolated", jobs, PoolSize(num), costs, lag)
        shared = _run("spread", jobs, PoolSize(PAIRED_POOLS, host_bases=jobs_a_trainer), costs, lag)
        yield PairFigures(
            size=size,
            jobs_a_trainer=jobs_a_trainer,
            lag=lag,
            limit=(1 - 1 / jobs_a_trainer) * shape.train / (shape.rollout + shape.train),
            saved=1 - shared.gpu_hours_a_step / alone.gpu_hours_a_step,
            slowdown=shared.slowdown.mean,
        )


def _run(
    placement: PlacementRule, jobs: Sequence[TraceJob], size: PoolSize, costs: Costs, lag: int
) -> PlacementFigures:
    cluster = PoolCluster(Setup(placement, {jobs[0].shape.train: size}, costs=costs, lag=lag))
    cluster.run(jobs)
    return figures_of(cluster)
