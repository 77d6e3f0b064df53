"""Measures what a trainer's process takes, and holds to it what `marlaas plan` says."""

from pathlib import Path

import pytest

from benchmarks.planned_memory import LIMIT, SHAPES, Way, measured, predicted
from harness.bases import make_random_base

NUM_TOKENS = 512
WAYS = [
    Way("decoder", "float32", checkpointed=False),
    Way("transformers", "bfloat16", checkpointed=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_trainer_takes_what_is_planned(tmp_path: Path, way: Way) -> None:
    folder = make_random_base(tmp_path / "base", last_word=300, **SHAPES["deep"])
    expected = predicted(folder, way, NUM_TOKENS).total
    limit = 0.2 if way.dtype == "bfloat16" else LIMIT  # a processor with instructions for bfloat16 takes less
    assert expected == pytest.approx(measured(folder, way, NUM_TOKENS), rel=limit)
