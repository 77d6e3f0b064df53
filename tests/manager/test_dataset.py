"""Tables and datasets that the command line converts, sent to the real API."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from manager_service.launcher.commands.main import app
from marlaas_client.client import JOBS, Client
from marlaas_client.dataset import Columns, as_jsonl, rows_of_file
from marlaas_client.errors import InvalidInput
from tests.support.api_server import ApiServer
from tests.support.hub_server import running_hub

ROWS: list[dict[str, Any]] = [{"question": f"add {n}+1", "answer": str(n + 1), "level": n} for n in range(20)]
NAMED = ("--prompt", "question", "--grader", "string_check:answer", "--hyper", "batch_size=1")


async def submit(server: ApiServer, *words: object) -> Any:
    """The job that `marlaas submit` creates; its error, if there is one."""
    command = ("submit", *map(str, words), "--url", server.url, "--json")
    ended = await asyncio.to_thread(CliRunner().invoke, app, command, env={"MARLAAS_API_KEY": server.key})
    return json.loads(ended.stdout.splitlines()[-1]) if ended.exit_code == 0 else f"{ended.exception} {ended.output}"


async def items(server: ApiServer, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (await server.openai.files.content(file)).content.splitlines()]


def table(file: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    file.write_text("\n".join(lines))
    return file


async def test_a_table_of_other_columns_is_submitted_by_naming_them(server: ApiServer, tmp_path: Path) -> None:
    file = table(tmp_path / "sums.csv")
    job = await submit(server, file, "--validation", file, *NAMED)
    assert job["num_items"] == 20 and job["validation_file"]
    for made in (job["training_file"], job["validation_file"]):
        assert (await items(server, made))[0] == {"prompt": "add 0+1", "answer": "1", "level": "0"}
    lines = tmp_path / "sums.jsonl"
    lines.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    job = await submit(server, lines, *NAMED, "--columns", "answer")
    assert await items(server, job["training_file"]) == [
        {"prompt": row["question"], "answer": row["answer"]} for row in ROWS
    ]


async def test_the_named_columns_of_examples_become_messages(server: ApiServer, tmp_path: Path) -> None:
    file = table(tmp_path / "sums.csv")
    words = ("--prompt", "question", "--completion", "answer", "--columns", "level", "--method", "supervised")
    asked, said = [{"role": "user", "content": "add 0+1"}], [{"role": "assistant", "content": "1"}]
    job = await submit(server, file, *words)
    learned = {"prompt": asked, "completion": said, "level": "0"}
    assert (await items(server, job["training_file"]))[0] == learned
    # What is already so stays as it is
    lines = tmp_path / "sums.jsonl"
    lines.write_text(json.dumps({"prompt": "add 0+1", "completion": "1"}))
    job = await submit(server, lines, "--method", "supervised")
    assert (await items(server, job["training_file"]))[0] == {"prompt": "add 0+1", "completion": "1"}


async def test_nothing_is_uploaded_of_a_table_with_a_fault(server: ApiServer, tmp_path: Path) -> None:
    file, odd = table(tmp_path / "sums.csv"), tmp_path / "odd.csv"
    odd.write_text("question,answer\na,1\nb\n")
    bare = tmp_path / "bare.csv"
    bare.write_text("question,answer\n")
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"question": "a"}\n3\n')
    refused = [
        ((file, "--prompt", "qestion"), "row 1: there is no column 'qestion'; did you mean 'question'?"),
        ((file, "--prompt", "question", "--columns", "x"), "no column 'x'; there are 'question', 'answer', 'level'"),
        (
            (file, "--answer", "answer"),
            "no `messages`; the columns are 'question', 'answer', 'level': name the one that asks, --prompt",
        ),
        ((odd, "--prompt", "question"), "row 2: its values are not as many as the columns"),
        ((bare, "--prompt", "question"), "there are no rows"),
        ((wrong, "--prompt", "question"), "line 2: must be a JSON object"),
        ((tmp_path / "none.csv", "--prompt", "question"), "No such file"),
        ((file, "--dataset", tmp_path), "give FILE or --dataset"),
        ((file, "--validation-split", "test"), "--validation-split is a part of a --dataset"),
    ]
    for words, complaint in refused:
        assert complaint in await submit(server, *words, "--grader", "string_check:answer"), words
    assert [file async for file in server.openai.files.list()] == []


def test_a_tables_cells_are_texts_and_its_conversations_json(tmp_path: Path) -> None:
    file = tmp_path / "talks.csv"
    talk = json.dumps([{"role": "user", "content": "min 3,1"}])
    quoted = talk.replace('"', '""')
    file.write_bytes(b'\xef\xbb\xbfmessages,note\r\n"%s","a, ""b""\n"\r\n,3\r\n' % quoted.encode())
    assert list(rows_of_file(file)) == [
        {"messages": json.loads(talk), "note": 'a, "b"\n'},
        {"messages": None, "note": "3"},
    ]
    for content, complaint in (
        (b"prompt,prompt\na,b\n", "two columns have one name"),
        (b"prompt,answer\n\xff,c\n", "invalid start byte"),
        (b"messages,answer\n[,b\n", "row 1, column 'messages': not JSON"),
        (b'prompt,answer\na,"b"c\n', "line 2: ',' expected after"),
    ):
        file.write_bytes(content)
        with pytest.raises(InvalidInput, match=complaint):
            list(rows_of_file(file))


async def test_the_client_converts_a_table_too(server: ApiServer, tmp_path: Path) -> None:
    file = tmp_path / "sums.csv"
    file.write_text("prompt,answer\nadd 1+1,2\n")
    with Client(server.url, server.key) as client:
        job = await asyncio.to_thread(client.submit, file, grader="string_check:answer")
        record = await asyncio.to_thread(client.get, f"{JOBS}/{job['id']}")
    assert await items(server, record["training_file"]) == [{"prompt": "add 1+1", "answer": "2"}]


def test_a_value_that_is_no_json_is_named_by_row_and_column() -> None:
    rows: list[dict[str, Any]] = [{"prompt": "a", "picture": None}, {"prompt": "b", "picture": object()}]
    with pytest.raises(InvalidInput, match=r"row 2, column 'picture': .* --columns"), as_jsonl(rows, Columns()):
        pass
    with as_jsonl(rows, Columns(kept=frozenset({"prompt"}))) as file:
        assert file.read() == b'{"prompt":"a"}\n{"prompt":"b"}\n'


# ---- with the extra `data` ------------------------------------------------------------------------------------------


def parquet(file: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    arrow: Any = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), file)
    return file


async def test_a_parquet_file_is_converted(server: ApiServer, tmp_path: Path) -> None:
    file = parquet(tmp_path / "sums.parquet")
    job = await submit(server, file, *NAMED)
    assert (await items(server, job["training_file"]))[19] == {"prompt": "add 19+1", "answer": "20", "level": 19}
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(InvalidInput, match=r"sums\.parquet"):
        list(rows_of_file(file))


async def test_a_datasets_folder_is_converted_by_its_splits(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets: Any = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    plain, saved = tmp_path / "plain", tmp_path / "saved"
    plain.mkdir()
    for split in ("train", "test"):
        parquet(plain / f"{split}.parquet")
    halves = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:5])}
    datasets.DatasetDict(halves).save_to_disk(str(saved))
    for folder, held_out in ((plain, 20), (saved, 5)):
        job = await submit(server, "--dataset", folder, "--validation-split", "test", *NAMED)
        assert job["num_items"] == 20, job
        assert len(await items(server, job["validation_file"])) == held_out
        assert "split 'dev'" in await submit(server, "--dataset", folder, "--split", "dev", *NAMED)
    assert "no such folder" in await submit(server, "--dataset", tmp_path / "none", *NAMED)


SUBMIT = """
import json, sys
from typer.testing import CliRunner
from manager_service.launcher.commands.main import app

for words in sys.argv[1:]:
    ended = CliRunner().invoke(app, json.loads(words))
    print(json.dumps([ended.stdout, str(ended.exception)]))
"""
"""A script for a process of its own, since the hub's client reads its environment once."""
CARD = """---
configs:
- config_name: main
  data_files: [{split: train, path: train.parquet}, {split: test, path: test.parquet}]
---
"""


async def test_a_dataset_of_the_hub_is_submitted_by_its_name(server: ApiServer, tmp_path: Path) -> None:
    repo, old = tmp_path / "repo", tmp_path / "old"
    for folder in (repo, old):
        folder.mkdir()
        (folder / "README.md").write_text(CARD)
        parquet(folder / "train.parquet", ROWS if folder is repo else ROWS[:7])
        parquet(folder / "test.parquet")
    with running_hub({"owner/sums": {"b" * 40: repo, "a" * 40: old}}, gated=set()) as (url, _):
        asked = [
            ["owner/sums:main", "--validation-split", "test"],
            [f"owner/sums:main@{'a' * 40}"],
            ["owner/none"],
        ]
        hub = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        common = [*NAMED, "--url", server.url, "--json"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SUBMIT),
            *[json.dumps(["submit", "--dataset", *words, *common]) for words in asked],
            env={"PATH": "", "MARLAAS_API_KEY": server.key} | hub,
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
    newest, pinned, absent = [json.loads(line) for line in out.splitlines()]
    job = json.loads(newest[0])
    assert await items(server, job["training_file"]) == [
        {"prompt": row["question"], "answer": row["answer"], "level": row["level"]} for row in ROWS
    ]
    assert job["validation_file"] and json.loads(pinned[0])["num_items"] == 7
    assert "--dataset owner/none, split 'train': Dataset 'owner/none' doesn't exist on the Hub" in absent[1]
