"""Arrivals of a spike, as rates and traces give them."""

from pathlib import Path

import pytest

from benchmarks._elastic_spike import PEAK, TOKENS, Arrival, of_rates, of_trace


def test_rates_give_as_many_turns_at_even_distances() -> None:
    assert of_rates([2, 0, 1.5, 0.5]) == [(0.5, TOKENS), (1.0, TOKENS), (2 + 2 / 3, TOKENS), (4.0, TOKENS)]


def test_a_trace_of_rates_is_cut_to_its_steepest_stretch_whose_peak_takes_all_workers(tmp_path: Path) -> None:
    (file := tmp_path / "Burst.txt").write_text("9\n9\n9\n1\n1\n5\n5\n1\n1\n3\n3\n1\n1\n")
    arrivals = of_trace(file, 8)
    seconds = [sum(second < at <= second + 1 for at, _ in arrivals) for second in range(8)]
    assert seconds == pytest.approx([PEAK * rate / 5 for rate in (1, 1, 5, 5, 1, 1, 3, 3)], abs=1)


def test_a_table_of_turns_is_taken_as_it_is_from_where_they_become_more(tmp_path: Path) -> None:
    at = [f"2023-11-16 18:15:{second}.5000000" for second in (40, 44, 45, 45, 45, 46, 47, 51, 52)]
    rows = [f"{moment},374,{number + 10}" for number, moment in enumerate(at)]
    (file := tmp_path / "hour.txt").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    assert of_trace(file, 4) == [
        Arrival(0.0, 11),
        Arrival(1.0, 12),
        Arrival(1.0, 13),
        Arrival(1.0, 14),
        Arrival(2.0, 15),
        Arrival(3.0, 16),
    ]
