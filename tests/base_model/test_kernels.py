"""Kernels are chosen and remembered, by a self-test that knows what it wants instead of the machine's."""

import json
import os
from pathlib import Path

import pytest

from base_model import kernels
from base_model.kernels import CANDIDATES, Kernels, NotDeterministic, choose
from common.errors import InvalidInput, MarlaasError
from common.settings import TINY

PICKY = "tests.support.picky_selftest"


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MKL_CBWR", "as it is")


def num_runs(folder: Path) -> int:
    return len((folder / "runs").read_text())


def chosen(folder: Path, monkeypatch: pytest.MonkeyPatch, passes: str) -> Kernels:
    monkeypatch.setenv("MARLAAS_TEST_PASSES", passes)
    return choose(PICKY, folder).kernels


@pytest.mark.parametrize(
    "passes,expected",
    [("as it is 4", CANDIDATES[0]), ("AUTO,STRICT 4", CANDIDATES[1]), ("as it is 8", CANDIDATES[2])],
)
def test_the_first_candidate_that_passes_is_chosen_and_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: str, expected: Kernels
) -> None:
    assert chosen(tmp_path, monkeypatch, passes) == expected
    assert num_runs(tmp_path) == CANDIDATES.index(expected) + 1
    assert os.environ["MKL_CBWR"] == (expected.mkl_cbwr or "as it is")


def test_the_choice_is_remembered_for_this_machine_as_it_is_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MKL_ENABLE_INSTRUCTIONS", raising=False)
    first = chosen(tmp_path, monkeypatch, "as it is 8")
    assert chosen(tmp_path, monkeypatch, "as it is 8") == first
    assert num_runs(tmp_path) == 3
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "SSE4_2")
    assert chosen(tmp_path, monkeypatch, "as it is 8") == first
    assert num_runs(tmp_path) == 6


def test_the_sizes_of_a_self_test_reach_it_and_each_has_a_choice_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARLAAS_TEST_PASSES", "as it is 4 128")
    for _ in range(2):
        assert choose(PICKY, tmp_path, sizes=[128]).kernels == CANDIDATES[0]
    assert num_runs(tmp_path) == 1
    with pytest.raises(NotDeterministic):
        choose(PICKY, tmp_path, sizes=[64])


def test_a_machine_on_which_nothing_passes_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotDeterministic, match="unset MARLAAS_DETERMINISTIC") as refused:
        chosen(tmp_path, monkeypatch, "nothing")
    assert len(str(refused.value).splitlines()) == 1 and num_runs(tmp_path) == len(CANDIDATES)
    assert os.environ["MKL_CBWR"] == "as it is"


def test_a_base_model_that_is_not_computed_is_refused_by_its_own_reason_alone(tmp_path: Path) -> None:
    config = json.loads((TINY / "config.json").read_text()) | {"model_type": "gemma3_text"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InvalidInput, match=r"^deterministic mode: .*'gemma3_text'.*, outside deterministic mode: "
    ) as error:
        choose("trainer_service.selftest", tmp_path)
    assert "common.errors" not in str(error.value) and "\n" not in str(error.value)


def test_a_self_test_that_cannot_be_run_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="no such processor") as error:
        chosen(tmp_path, monkeypatch, "crash")
    assert not isinstance(error.value, NotDeterministic)


def test_a_self_test_that_does_not_end_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PROBE_TIMEOUT_S", 0.01)
    with pytest.raises(InvalidInput, match=r"did not end in 0\.01 s"):
        chosen(tmp_path, monkeypatch, "as it is 4")


@pytest.mark.parametrize("passes", ["as it is 4", "AUTO,STRICT 4"])
def test_a_choice_that_does_not_hold_any_more_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: str
) -> None:
    def differs() -> str:
        raise NotDeterministic("bits differ")

    monkeypatch.setenv("MARLAAS_TEST_PASSES", passes)
    with pytest.raises(MarlaasError, match="start again"):
        choose(PICKY, tmp_path).fingerprint(differs)
    monkeypatch.setenv("MKL_CBWR", "as it is")  # as a process that starts again has it
    assert chosen(tmp_path, monkeypatch, "as it is 8") == CANDIDATES[2]


def test_without_a_cache_folder_each_start_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    for _ in range(2):
        chosen(tmp_path, monkeypatch, "as it is 4")
    assert num_runs(tmp_path) == 2


def test_a_memory_that_cannot_be_read_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen(tmp_path, monkeypatch, "as it is 4")
    (file,) = (tmp_path / "cache" / "marlaas").iterdir()
    file.write_text('{"mkl_cbwr": "nonsense", "min_rows": 4}')
    assert chosen(tmp_path, monkeypatch, "as it is 4") == CANDIDATES[0]
    assert kernels.Memory.of_this_machine(PICKY, tmp_path).recall(CANDIDATES) == CANDIDATES[0]
