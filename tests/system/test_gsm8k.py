"""`examples.gsm8k`: GSM8K's rows become items, and the base model starts with what fits."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from common.errors import InvalidInput
from common.settings import TINY
from examples.gsm8k import as_item, main, read_items, read_rows, start_for
from marlaas_client.cluster_file import CLUSTER_FILE, ClusterFile
from tests.support.api_server import running_api

ROW = {"question": "Two and 1,000?", "answer": "2 + 1000 = <<2+1000=1002>>1002\n#### 1,002"}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of one row."""
    (tmp_path / "train.jsonl").write_text(json.dumps(ROW) + "\n\n")
    return tmp_path / "train.jsonl"


def test_a_row_becomes_an_item_with_its_final_answer(rows: Path) -> None:
    (item,) = map(as_item, read_rows(rows))
    assert item["answer"] == "1002" and item["messages"][0]["content"].startswith("Two and 1,000?\n")


def test_the_hubs_parquet_has_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "train-00000-of-00001.parquet"
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist([ROW]), file)
    assert list(read_rows(file)) == [ROW]
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as where it is not installed
    with pytest.raises(InvalidInput, match="pip install pyarrow"):
        list(read_rows(file))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("broken.jsonl", "{", r"broken\.jsonl"),
        ("junk.parquet", "junk", r"junk\.parquet"),
        ("empty.jsonl", "\n", r"empty\.jsonl has no rows"),
        ("list.jsonl", "[1, 2]", r"no row of GSM8K.*\[1, 2\]"),
        ("blank.jsonl", json.dumps({"question": "x", "answer": "7 #### "}), "no row of GSM8K"),
    ],
)
def test_a_file_of_something_else_is_refused_in_a_line(tmp_path: Path, name: str, content: str, told: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidInput, match=told):
        read_items(tmp_path / name)


def test_a_gpu_gets_what_the_plan_chooses() -> None:
    assert start_for(str(TINY), None) == ({"MARLAAS_BASE_MODELS": f"q={TINY}"}, 1, 2048, None)
    planned, workers, context, row = start_for(str(TINY), "24GB", tokens=500)
    assert planned["MARLAAS_MAX_CONTEXT"] == "1012" and planned["MARLAAS_TRAINER_DEVICE"] == "cuda"
    assert (workers, context, row and row.context) == (1, 1012, 1012), "what the job needs, not what fits"
    assert start_for(str(TINY), "24GB", tokens=2000).context == 2048
    with pytest.raises(InvalidInput, match="does not fit on 1GB"):
        start_for(str(TINY), "1GB")
    with pytest.raises(InvalidInput, match="name the GPUs with --gpu"):
        start_for(str(TINY), None, gpus=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (f"--base {TINY} --tokens 5000", "--tokens 5000 leaves no room for a prompt in a context of 2048"),
        (f"--base {TINY} --steps 0", "max_steps"),
        (f"--base {TINY} --gpus 2", "name the GPUs with --gpu"),
        ("--gpus 2", "go with --base"),
    ],
)
def test_what_cannot_work_is_refused_in_a_line_before_anything_starts(
    rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str, said: str
) -> None:
    data = rows.with_name("data")
    monkeypatch.setattr(sys, "argv", ["gsm8k", "--file", str(rows), "--data", str(data), *options.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert said in f"{ended.value.code} {capsys.readouterr().err}" and not data.exists()


async def test_what_the_api_refuses_is_said_in_a_line(
    redis_url: str, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_api(redis_url, tmp_path / "data") as server:
        found = ClusterFile(url=server.url, pid=os.getpid(), redis_url=redis_url)
        (tmp_path / "data" / CLUSTER_FILE).write_text(found.model_dump_json())
        words = ["gsm8k", "--file", str(rows), "--data", str(tmp_path / "data"), "--model", "nobody"]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit, match=r"^error: .*nobody"):
            await asyncio.to_thread(main)


def test_items_are_written_for_the_command_line(
    rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    items = rows.with_name("items.jsonl")
    monkeypatch.setattr(sys, "argv", ["gsm8k", "--file", str(rows), "--prepare", str(items)])
    main()
    assert "1 items are in" in capsys.readouterr().out
    assert json.loads(items.read_text())["answer"] == "1002"
