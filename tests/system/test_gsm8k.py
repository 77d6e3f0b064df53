"""`examples.gsm8k`: GSM8K's rows become items, and the base model starts with what fits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import InvalidInput
from common.settings import TINY
from examples.gsm8k import as_item, read_rows, settings_for

ROOT = Path(__file__).resolve().parents[2]
ROW = {"question": "Two and 1,000?", "answer": "2 + 1000 = <<2+1000=1002>>1002\n#### 1,002"}


def test_a_row_becomes_an_item_with_its_final_answer(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(ROW) + "\n\n")
    (item,) = map(as_item, read_rows(tmp_path / "train.jsonl"))
    assert item["answer"] == "1002" and item["messages"][0]["content"].startswith("Two and 1,000?\n")


def test_the_hubs_parquet_has_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "train-00000-of-00001.parquet"
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist([ROW]), file)
    assert list(read_rows(file)) == [ROW]
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as where it is not installed
    with pytest.raises(InvalidInput, match="pip install pyarrow"):
        list(read_rows(file))


def test_what_is_no_row_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="an answer with ####"):
        as_item({"question": "x", "answer": "7"})
    (tmp_path / "broken.jsonl").write_text("{")
    with pytest.raises(InvalidInput, match=r"broken\.jsonl"):
        list(read_rows(tmp_path / "broken.jsonl"))


def test_a_gpu_gets_what_the_plan_chooses() -> None:
    assert settings_for(str(TINY), None) == ({"MARLAAS_BASE_MODELS": f"q={TINY}"}, 1)
    planned, workers = settings_for(str(TINY), "24GB")
    assert planned["MARLAAS_MAX_CONTEXT"] == "2048" and planned["MARLAAS_TRAINER_DEVICE"] == "cuda" and workers == 1
    with pytest.raises(InvalidInput, match="does not fit on 1GB"):
        settings_for(str(TINY), "1GB")


def test_eight_gpus_get_as_many_workers_as_the_plan_has() -> None:
    planned, workers = settings_for(str(TINY), "24GB", gpus=8, engine="vllm")
    first, last = planned["MARLAAS_DEVICES"].partition(",")[0].removeprefix("rollout:").split("-")
    assert planned["MARLAAS_ENGINE"] == "vllm" and workers == int(last) - int(first) + 1 > 1
    assert settings_for(str(TINY), None, engine="vllm")[0]["MARLAAS_ENGINE"] == "vllm"


def test_items_are_written_for_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(ROW) + "\n")
    argv = ["--file", str(tmp_path / "train.jsonl"), "--prepare", str(tmp_path / "items.jsonl")]
    done = subprocess.run(
        [sys.executable, "-m", "examples.gsm8k", *argv], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "1 items are in" in done.stdout
    assert json.loads((tmp_path / "items.jsonl").read_text())["answer"] == "1002"
