"""Predicts what spikes of requests wait for in pools that start workers in several ways, and what each pool costs.

    python -m simulator.spikes --draw SEED | --trace FILE [--workers 32] [--slots 16]

FILE: `simulator/spikes/arrivals.py` says what it may be, and `serving.py` the constants of the models. So many times the trace is played
that its peak wants `--workers` of `--slots` requests. A worker costs from the beginning of its start; elastic pools have one at least.

    static                  as many workers as the peak wants, always
    store, stream lengths   each newcomer loads all from the store; KEDA's redis-streams scaler says how many, Kubernetes' autoscaler looks
                            every 15 s and at most doubles them, or adds four
    store                   the same; production's `wanted` says how many every second, as it does below
    chain                   newcomers load from workers, and pass on what they have
    execute while load      newcomers that load from k holders also serve, k together, from 1/k of the load on, as pipelines that never idle
    node folder             each newcomer's machine has the base in its memory
    node folder, marlaas up the same; workers retire by production's rule, one in 5 s at most

The other elastic pools keep as many workers as a look of the last 30 s wanted. A worker that stops hands its requests on.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from simulator.report import Goal, Report, at_most, make_table, natural, parser, positive, show
from simulator.spikes.arrivals import Arrivals, draw, read
from simulator.spikes.serving import MODELS, WAYS, Model, PoolFigures, SpikePool, plan

FASTER, CHEAPER, MOST_WAIT_S = 5.0, 25.0, 0.5
"""lambdaScale (arXiv 2502.09922): tail latency up to 5 times lower, cost 31.3 % lower."""
HEAD = ("pool", "load s", "TTFT p50 s", "p99 s", "times lower", "wait p99 s", "worker s", "of static %", "most")


def line(each: PoolFigures, static: PoolFigures, store: PoolFigures) -> tuple[Any, ...]:
    lower, share = store.p99_ttft_s / each.p99_ttft_s, 100 * each.worker_s / static.worker_s
    waits = (each.load_s, each.p50_ttft_s, each.p99_ttft_s, lower, each.p99_wait_s)
    return (each.way, *waits, each.worker_s, share, each.most)


def goals(found: Sequence[PoolFigures]) -> Iterator[Goal]:
    static, store, _, *ours = found
    for each in ours:
        what = f"p99 of TTFT, times lower than by the store and stream lengths: {each.model}, {each.way}"
        yield Goal(what, store.p99_ttft_s / each.p99_ttft_s, FASTER)
    for each in ours[-2:]:
        saved, name = 100 * (1 - each.worker_s / static.worker_s), f"{each.model}, {each.way}"
        yield Goal(f"cost below the static pool: {name}", saved, CHEAPER, " %")
        what = f"p99 of TTFT, static {static.p99_ttft_s:.3g}: {name}"
        yield at_most(what, each.p99_ttft_s, MOST_WAIT_S, " s")


def run_all(arrivals: Arrivals, model: Model, args: Any) -> tuple[str, list[PoolFigures]]:
    """The trace on each pool, under a title."""
    planned = plan(arrivals, model.machine, args.slots, args.workers)
    found: list[PoolFigures] = []
    for way in WAYS:
        sys.stderr.write(f"{model.name}, {way.name} …\n")
        found.append(SpikePool(model, way, planned).run())
    return f"{model.name}: {len(planned.requests):,} requests of {arrivals.name} in {planned.seconds:,.0f} s", found


def main() -> None:
    options = parser(__doc__)
    source = options.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE")
    source.add_argument("--draw", type=natural, metavar="SEED")
    for name, default in (("workers", 32), ("slots", 16)):
        options.add_argument(f"--{name}", type=positive, default=default, metavar="N", help="default %(default)s")
    args = options.parse_args()
    try:
        arrivals = read(args.trace) if args.trace else draw(args.draw)
        played = [run_all(arrivals, model, args) for model in MODELS]
    except (OSError, ValueError) as error:
        sys.exit(f"simulator.spikes: {error}")
    tables = [make_table(title, HEAD, [line(each, *found[:2]) for each in found]) for title, found in played]
    show(Report(tables, msgspec.to_builtins(played), [goal for _, found in played for goal in goals(found)]), args.json)


if __name__ == "__main__":
    main()
