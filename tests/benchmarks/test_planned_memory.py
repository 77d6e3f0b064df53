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


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    narrow = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 32}  # as many bytes a token want fewer products
    return make_random_base(tmp_path_factory.mktemp("planned") / "base", last_word=300, **SHAPES["deep"] | narrow)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_trainer_takes_what_is_planned(base: Path, way: Way) -> None:
    expected = predicted(base, way, NUM_TOKENS).total
    limit = 0.2 if way.dtype == "bfloat16" else LIMIT  # a processor with instructions for bfloat16 takes less
    assert expected == pytest.approx(measured(base, way, NUM_TOKENS), rel=limit)
