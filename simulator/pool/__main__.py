"""Predicts how jobs of many base models share pools of workers, by a trace of months in minutes.

    python -m simulator.pool --draw SEED | --trace FILE [--days 90] [--load 2] [--picture FILE] [--write-trace FILE]
    python -m simulator.pool --trace FILE --trainer 2 --rollout 2 --slots 8 --lag 0    # a pool such as `marlaas up` starts

FILE: JSON lines, or the log of a public cluster: `simulator/pool/trace.py` says which, and what is assumed.

What opens next, and which worker is whose place, production's own functions decide (`common/pool`). Without --trainer there are trainers
of each size in the trace, `load` times fewer than jobs with one of their own would need; rollouts have GPUs of their own, as PlexRL's
(arXiv 2605.20863). It trains whole models, so there each job has its own base, and the first table says so; the second has the bases of
the trace: jobs of one base need no switch.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any, get_args

import msgspec

from common.pool.placement import PlacementRule
from simulator.pool.cluster import PoolCluster, Setup
from simulator.pool.figures import PairFigures, PlacementFigures, figures_of, paired, sized
from simulator.pool.places import Costs, PoolSize
from simulator.pool.trace import DAY_S, TraceJob, draw, read_trace, write_trace
from simulator.report import Goal, Report, make_table, natural, parser, positive, show, writable

PICTURE_S = 2 * DAY_S
PLEXRL_SAVED = {"7B": 31.36, "30B": 30.10, "235B": 37.58}
"""Percent of GPU-hours, against split and asynchronous with a private trainer."""
LEAST_SAVED = {(2, "7B"): 31.0, (2, "235B"): 36.0, (3, "235B"): 37.58}
MOST_SLOWDOWN = 1.08
PLEXRL_COMPLETION = {"pack": "about 70 %", "spread": "about 65 %", "backfill": "56.0 %"}
"""Total completion time of its trace of three months, over isolated."""
MOST_COMPLETION = {"pack": 60.0, "spread": 65.0, "backfill": 56.0}
MOST_MAKESPAN = 80.0
HEAD = (
    *("placement", "GPU h/step", "completion h", "%", "p95 h", "slowdown", "p95", "makespan d", "%", "floor d"),
    *("switches", "switch %", "busy %"),
)


def options() -> argparse.ArgumentParser:
    result = parser(__doc__)
    source = result.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE")
    source.add_argument("--draw", type=natural, metavar="SEED")
    result.add_argument("--days", type=positive, default=90, help="of the trace; default %(default)s")
    result.add_argument("--jobs-per-day", type=positive, default=60, help="of --draw; default %(default)s")
    result.add_argument("--load", type=above_zero, default=2.0, help="default %(default)s")
    result.add_argument("--trainer", type=positive, metavar="N", help="pool workers for jobs of all sizes")
    result.add_argument("--rollout", type=positive, metavar="N", help="pool workers that all rollouts share")
    result.add_argument("--slots", type=positive, default=8, help="of --rollout; default %(default)s")
    result.add_argument("--lag", type=natural, default=1, help="untrained steps before a rollout; default %(default)s")
    result.add_argument("--bases", type=positive, default=3, help="with a place on a worker; default %(default)s")
    result.add_argument("--loaded", type=positive, default=1, help="of these on the device; default %(default)s")
    result.add_argument(
        "--costs",
        type=costs,
        default=Costs(),
        metavar="DEVICE,HOST,DISK",
        help="seconds to open a base in each tier; default 0.5,7,80",
    )
    result.add_argument(
        "--picture", type=writable, metavar="FILE", help="of the first two days of `backfill`, SVG or PNG"
    )
    result.add_argument("--write-trace", type=writable, metavar="FILE")
    return result


def above_zero(text: str) -> float:
    try:
        if 0 < (value := float(text)) < inf:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")


def costs(text: str) -> Costs:
    if len(parts := text.split(",")) != len(Costs._fields):
        raise argparse.ArgumentTypeError(f"{text!r} is not DEVICE,HOST,DISK in seconds")
    return Costs(*map(above_zero, parts))


def trace_of(args: Any) -> list[TraceJob]:
    """Raises ValueError, OSError."""
    if args.trace:
        jobs = read_trace(args.trace, seed=0, days=args.days)
    elif not (jobs := draw(args.draw, days=args.days, jobs_per_day=args.jobs_per_day)):
        raise ValueError(f"no job came in {args.days} days: more --days, or more --jobs-per-day")
    if args.write_trace:
        write_trace(jobs, args.write_trace)
    return jobs


def setups(jobs: Sequence[TraceJob], args: Any) -> Iterator[Setup]:
    """One for each placement."""
    size = PoolSize(args.trainer or 1, device_bases=args.loaded, host_bases=args.bases)
    trainers = {0: size} if args.trainer else sized(jobs, args.load, size)
    rollouts = size._replace(workers=args.rollout, slots=args.slots) if args.rollout else None
    for placement in get_args(PlacementRule):
        yield Setup(placement, trainers, rollouts, args.costs, args.lag, seed=args.draw or 0)


def run_all(title: str, jobs: Sequence[TraceJob], args: Any, picture: Path | None) -> list[PlacementFigures]:
    """The trace under each placement."""
    found: list[PlacementFigures] = []
    for setup in setups(jobs, args):
        sys.stderr.write(f"{title}, {setup.placement} …\n")
        cluster = PoolCluster(setup, keep_slices=picture is not None and setup.placement == "backfill")
        cluster.run(jobs)
        found.append(figures_of(cluster))
        if picture and setup.placement == "backfill":
            from simulator.pool.picture import draw_slices  # here: matplotlib takes a second

            draw_slices(cluster.slices, PICTURE_S, picture)
    return found


def lines(found: Sequence[PlacementFigures]) -> Iterator[tuple[Any, ...]]:
    first = found[0]
    for each in found:
        yield (
            *(each.placement, each.gpu_hours_a_step),
            *(each.completion_h.mean, 100 * each.completion_h.mean / first.completion_h.mean, each.completion_h.p95),
            *(each.slowdown.mean, each.slowdown.p95),
            *(each.makespan_d, 100 * each.makespan_d / first.makespan_d, each.floor_d),
            *(each.switches, 100 * each.switch_share, 100 * each.busy_share),
        )


def pair_line(found: PairFigures, strict: PairFigures) -> tuple[Any, ...]:
    return (
        f"{found.size}, {found.jobs_a_trainer} jobs a trainer",
        *(100 * found.limit, 100 * found.saved, found.slowdown),
        *(PLEXRL_SAVED[found.size] if found.jobs_a_trainer == 2 else None, 100 * strict.saved, strict.slowdown),
    )


def pair_goals(pairs: Sequence[PairFigures]) -> Iterator[Goal]:
    for pair in pairs:
        if least := LEAST_SAVED.get((pair.jobs_a_trainer, pair.size)):
            what = f"GPU-hours a step saved, {pair.size}, {pair.jobs_a_trainer} jobs a trainer, limit {100 * pair.limit:.1f}"
            yield Goal(what, 100 * pair.saved, least, " %")
        if pair.jobs_a_trainer > 2:
            what = f"slowdown of a job's own time, {pair.size}, {pair.jobs_a_trainer} jobs a trainer"
            yield Goal(what, pair.slowdown, MOST_SLOWDOWN, more_is_better=False)


def trace_goals(found: Sequence[PlacementFigures]) -> Iterator[Goal]:
    """PlexRL's "total completion time" may be the mean over jobs, or the makespan, which arrivals bound from below: both stand here."""
    isolated = found[0]
    for each in found[1:]:
        share = 100 * each.completion_h.mean / isolated.completion_h.mean
        what = f"mean completion, from arrival to end, {each.placement} over isolated (PlexRL {PLEXRL_COMPLETION[each.placement]})"
        yield Goal(what, share, MOST_COMPLETION[each.placement], " %", more_is_better=False)
    last, floor = found[-1], 100 * found[-1].floor_d / isolated.makespan_d
    what = f"makespan, backfill over isolated, floor {floor:.3g} % (PlexRL {PLEXRL_COMPLETION['backfill']})"
    yield Goal(what, 100 * last.makespan_d / isolated.makespan_d, MOST_MAKESPAN, " %", more_is_better=False)


def main() -> None:
    args = options().parse_args()
    try:
        jobs = trace_of(args)
    except (OSError, ValueError) as error:
        sys.exit(f"simulator.pool: {error}")
    shared = run_all("bases of the trace", jobs, args, args.picture)
    tables = [make_table("Bases of the trace: jobs of one base need no switch", HEAD, lines(shared))]
    figures: dict[str, Any] = {"shared": shared}
    goals: list[Goal] = []
    if not args.trainer:
        own = [msgspec.structs.replace(job, base=f"own-{number}") for number, job in enumerate(jobs)]
        alone = run_all("each job its own base", own, args, None)
        pairs = [*paired(2, 1), *paired(3, 1)]
        strict = [*paired(2, 0), *paired(3, 0)]
        head = ("PlexRL's comparison", "limit %", "saved %", "slowdown", "PlexRL %", "strict: saved %", "slowdown")
        tables.insert(0, make_table("Each job its own base, as in PlexRL", HEAD, lines(alone)))
        tables.append(make_table("GPU-hours a step, one step of lag", head, map(pair_line, pairs, strict)))
        figures |= {"own": alone, "paired": pairs, "paired_strict": strict}
        goals = [*pair_goals(pairs), *trace_goals(alone)]
    steps = sum(job.steps for job in jobs)
    notes = [f"{len(jobs)} jobs, {steps:,} steps, {args.days} days, load {args.load:g}; all figures are simulated"]
    show(Report(tables, msgspec.to_builtins(figures), goals, notes), args.json)


if __name__ == "__main__":
    main()
