"""Spikes on elastic pools, simulated: arrivals are like those that were measured, and each way to start a worker does what it says."""

import json
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from simulator.fleet import PoolRule
from simulator.spikes.__main__ import main
from simulator.spikes.arrivals import TraceRequest, draw, read
from simulator.spikes.serving import MODELS, WAYS, SpikePlan, SpikePool, Way, plan

LARGE = MODELS[1]
MEASURED = (4.05, 3.85, 4.5, 9.7, 12.6, 14.3, 0.40, 0.947, 0.729, 0.384, 1.25, 9.9, 23)
"""Figures of lambdaScale's `workload/Burst.txt`: mean, deviation, median, p90, p99, most; share below 1; correlation with what was 1, 10,
100 seconds before; from second to second the deviation, the largest rise, and rises of 3 or more."""
APART = (*9 * [0.05], 0.25, 0.1, 0.1, 0.2)
"""Relative errors that the means over drawn traces may have."""


def figures(rates: Sequence[float]) -> Sequence[float]:
    mean, hundredths = statistics.mean(rates), statistics.quantiles(rates, n=100)
    steps = [after - before for before, after in pairwise(rates)]

    def correlation(lag: int) -> float:
        pairs = zip(rates, rates[lag:], strict=False)
        return sum((a - mean) * (b - mean) for a, b in pairs) / sum((a - mean) ** 2 for a in rates)

    few = sum(rate < 1 for rate in rates) / len(rates)
    values = (mean, statistics.pstdev(rates), *(hundredths[p - 1] for p in (50, 90, 99)), max(rates), few)
    rises = (statistics.pstdev(steps), max(steps), sum(step >= 3 for step in steps))
    return (*values, *map(correlation, (1, 10, 100)), *rises)


def test_drawn_rates_are_like_those_of_a_measured_burst() -> None:
    drawn = zip(*(figures(draw(seed).rates) for seed in range(40)), strict=True)
    for measured, apart, values in zip(MEASURED, APART, drawn, strict=True):
        assert statistics.mean(values) == pytest.approx(measured, rel=apart)
    assert draw(1) == draw(1) != draw(2)


def test_rates_and_azures_rows_are_read(tmp_path: Path) -> None:
    rates, azure = tmp_path / "rates.txt", tmp_path / "azure.csv"
    rates.write_text("5\n0\n2.5\n")
    rows = ("2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:46.9,5,0", "2023-11-16 18:15:48.9951690,396,109")
    azure.write_text("\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert read(rates).rates == [5.0, 0.0, 2.5]
    assert (read(azure).rates, read(azure).lengths) == ([2.0, 0.0, 1.0], [(374, 44), (5, 1), (396, 109)])
    requests = read(azure).requests(100)
    assert requests == sorted(requests) and 250 < len(requests) < 350
    assert {int(each.at_s) for each in requests} == {0, 2}


NO_TRACES = {
    "5\nmany\n": "trace, line 2: 'many' is neither a number of requests nor",
    "-1\n": "trace, line 1: '-1' is neither",
    "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n": "trace, line 2: 'noon,1,2' is neither",
    "0\n": "trace: no request in it",
}


@pytest.mark.parametrize(("text", "error"), NO_TRACES.items())
def test_what_is_no_trace_is_refused(text: str, error: str, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(ValueError, match=error):
        read(file)


def test_all_requests_are_served_and_the_faster_workers_start_the_less_they_wait() -> None:
    planned, waits, cost = plan(draw(1), LARGE.machine, slots=8, workers=6), dict[str, float](), dict[str, float]()
    for way in WAYS:
        pool = SpikePool(LARGE, way, planned)
        found = pool.run()
        assert len(pool.waits_s) == len(planned.requests) and found.most <= 6
        waits[way.name], cost[way.name] = found.p99_wait_s, found.worker_s
    assert cost["static"] == pytest.approx(6 * planned.seconds, rel=0.01)
    assert waits["node folder"] < waits["chain"] < waits["store"] < waits["store, stream lengths"]
    assert all(each < 0.75 * cost["static"] for name, each in cost.items() if name != "static")


@pytest.mark.parametrize(("source", "serve"), [("chain", [2, 4]), ("pipeline", [4, 4])])
def test_two_newcomers_that_load_from_two_holders_serve_from_half_of_the_load_on(source: Any, serve: list[int]) -> None:
    requests = [TraceRequest(0.5, 100, 5000)] * 30  # of four workers' 40 slots, 0.8 of which are to be filled
    pool = SpikePool(LARGE, Way("", source, PoolRule(keep_s=30)), SpikePlan(requests, 60.0, 2, 4, 10))
    assert at_times(pool, 1 + 0.55 * pool.load_s, 1 + 1.05 * pool.load_s) == serve


def test_kubernetes_autoscaler_doubles_at_most_and_keeps_what_a_look_of_the_last_seconds_wanted() -> None:
    requests = [TraceRequest(0.5, 100, 200)] * 300
    rule = PoolRule(15.0, fill=True, growth=2.0, keep_s=30.0)
    pool = SpikePool(LARGE, Way("", "folder", rule), SpikePlan(requests, 120.0, 1, 32, 8))
    looked = at_times(pool, 0.9, 15, 20, 45, 47)  # it looks at 1, 16, 31, 46
    assert looked == [1, 5, 10, 10, 1], "first four more, as that is more than twice as many"


def at_times(pool: SpikePool, *times: float) -> list[int]:
    """Live workers."""
    live: list[int] = []
    for at_s in times:
        pool.clock.at(at_s, lambda: live.append(len(pool.fleet.live)))
    pool.run()
    return live


def test_the_command_shows_each_model_and_says_what_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, found = tmp_path / "spike.txt", tmp_path / "found.json"
    trace.write_text("2\n2\n9\n9\n0\n" * 8)
    words = ["spikes", "--trace", str(trace), "--workers", "4", "--slots", "4", "--json", str(found)]
    monkeypatch.setattr(sys, "argv", words)
    main()
    assert "70B: " in (shown := capsys.readouterr().out) and shown.count("node folder") >= 4
    assert [len(each) for _, each in json.loads(found.read_text())["figures"]] == 2 * [len(WAYS)]
    trace.write_text("many")
    with pytest.raises(SystemExit, match="neither a number of requests"):
        main()
