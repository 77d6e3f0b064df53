"""Files that are no JSONL, and items in TRL's forms, through the real HTTP API."""

import json
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidInput
from manager_service.http.reading.csv_tables import MAX_MADE, convert_csv
from manager_service.owner.jobs.items import Items
from tests.support.api_server import ApiServer, create, jsonl, method, upload

SETTINGS = {"max_file_bytes": 100_000, "max_line_bytes": 10_000}


async def send(server: ApiServer, content: bytes, name: str = "items.csv") -> str:
    return (await server.openai.files.create(file=(name, content), purpose="fine-tune")).id


async def kept(server: ApiServer, file: str) -> list[dict[str, Any]]:
    content = (await server.openai.files.content(file)).content
    return [json.loads(line) for line in content.splitlines()]


async def test_a_table_becomes_items_and_is_trained_on(server: ApiServer) -> None:
    rows = b'\xef\xbb\xbfprompt,answer\r\n"add 1,\n""2""",3\r\n\r\nadd 2+2,4\r\n'
    file = await send(server, rows)
    assert await kept(server, file) == [
        {"prompt": 'add 1,\n"2"', "answer": "3"},
        {"prompt": "add 2+2", "answer": "4"},
    ]
    job = await create(server.openai, training_file=file, method=method(batch_size=1))
    assert job.to_dict()["num_items"] == 2
    # And conversations in a table are JSON
    talk = json.dumps([{"role": "user", "content": "min 3,1"}, {"role": "assistant", "content": "1"}])
    quoted = talk.replace('"', '""')
    file = await send(server, f'messages,note\n"{quoted}",x\n'.encode())
    assert await kept(server, file) == [{"messages": json.loads(talk), "note": "x"}]


BAD = [
    (b"question,answer\na,b\n", "one must be 'prompt' .* there are 'question', 'answer'"),
    (b"prompt;answer\na;b\n", "a comma separates columns"),
    (b"prompt,prompt\na,b\n", "two columns have the name 'prompt'"),
    (b"prompt,answer\na,b\nc\n", "row 2 has 1 values, and there are 2 columns"),
    (b"prompt,answer\na,b\n,c\n", "row 2: prompt must be a list of at least one chat message, or a text"),
    (b'prompt,answer\na,b\n"c,d\n', "row 2: unexpected end of data"),
    (b'prompt,answer\na,"b"c\n', "row 1: ',' expected after"),
    (b"prompt,answer\na,b\n\xff,c\n", "row 2: not UTF-8"),
    (b"messages,answer\n[,b\n", "row 1, column 'messages': not JSON"),
    (b'messages,answer\n"[{""role"": ""robot""}]",b\n', r"row 1: messages\[0\].role"),
    (b"", "the file is empty: it needs the columns' names, and a row"),
    (b"prompt,answer\n", "the file is empty: it needs the columns' names, and a row"),
    (b"prompt,answer\n" + b"x" * 20_000 + b",3\n", "row 1: 200.. bytes as JSON; a row has at most 10000"),
    (b"PAR1" + b"\0" * 100, "Parquet file, which is converted on your side"),
]


async def test_what_is_wrong_with_a_table_is_said_by_row_and_column(server: ApiServer) -> None:
    for content, complaint in BAD:
        with pytest.raises(openai.BadRequestError, match=complaint) as refused:
            await send(server, content)
        assert refused.value.param == "file"
    name = b"n" * 128
    with pytest.raises(openai.APIStatusError, match="as JSONL this file has more than 100000 bytes") as refused:
        await send(server, b"prompt," + name + b"\n" + b"a,\n" * 10_000)
    assert refused.value.status_code == 413


async def test_an_item_in_each_of_trls_forms_is_one_with_messages(server: ApiServer) -> None:
    asked = [{"role": "user", "content": "add 1+2"}]
    rows = jsonl({"prompt": "add 1+2", "answer": "3"}, {"prompt": asked, "answer": "3"})
    file = await upload(server.openai, rows)
    assert (await server.openai.files.content(file)).content == rows, "the file stays as it is"
    items = Items(rows.splitlines())
    assert [items[n]["messages"] for n in range(2)] == [asked, asked]
    job = await create(server.openai, training_file=file, method=method(batch_size=1))
    assert job.to_dict()["num_items"] == 2
    for row, complaint in (
        ({"prompt": [{"role": "robot"}]}, r"line 1: prompt\[0\].role"),
        ({"prompt": ""}, "line 1: prompt must be"),
        ({"prompt": 3}, "line 1: prompt must be"),
        ({"prompt": None}, 'line 1: the field "messages" is missing'),
    ):
        with pytest.raises(openai.BadRequestError, match=complaint):
            await upload(server.openai, jsonl(row))


def converted(content: bytes, size: int) -> bytes:
    """Converts a file in parts of this size."""
    made, at, columns, before = b"", 0, list[str](), 0
    while at < len(content):
        part = content[at : at + size]
        is_last = at + len(part) == len(content)
        done = convert_csv(part, columns=columns, before=before, is_last=is_last, max_line_bytes=1000)
        made, at, columns, before = made + done.lines, at + done.num_bytes, done.columns, before + done.num_rows
    return made


def test_rows_that_the_end_of_a_part_cuts_are_read_whole() -> None:
    rows = "".join(f'"{n} ü\n,""{n}""",{n}\r\n' for n in range(40))
    content = f"prompt,answer\n{rows}".encode()
    whole = converted(content, len(content))
    assert whole.count(b"\n") == 40
    assert {converted(content, size) for size in range(30, 200, 7)} == {whole}
    with pytest.raises(InvalidInput, match="row 1 does not end within 30 bytes"):
        converted(b"prompt\n" + b"x" * 100 + b"\ny\n", 30)


def test_a_table_that_grows_is_converted_a_little_at_a_time() -> None:
    part = b"prompt," + b"n" * 128 + b"\n" + b"a,\n" * 100_000
    done = convert_csv(part, columns=[], before=0, is_last=True, max_line_bytes=1000)
    assert MAX_MADE <= len(done.lines) <= MAX_MADE + 1000 and done.num_bytes < len(part)


TALK = '"[{""role"": ""user"", ""content"": ""%s""}]"'
JSON_CELLS = [TALK % "hi", TALK % "\\ud800", '"[NaN]"', '"[1e999]"', f'"{"[" * 5000}"']
CELLS = [*JSON_CELLS, '"', '""', "\0", '"a\nb"', "\r", "=1+1", "\ufeff"]
NAMES = ["prompt", "messages", "tools", "answer", "prompt ", "", '"prompt"', "\ufeffprompt", "x" * 200, "__proto__"]
ROWS = st.lists(st.one_of(st.text(max_size=20), st.sampled_from(CELLS)), max_size=4).map(",".join)


@st.composite
def tables(draw: st.DrawFn) -> bytes:
    """With a few bytes of anything within."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4))
    end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    table = (end.join([",".join(names), *draw(st.lists(ROWS, max_size=5))]) + end).encode("utf-8", "surrogatepass")
    at = draw(st.integers(0, len(table)))
    return table[:at] + draw(st.binary(max_size=2)) + table[at:]


@settings(max_examples=80, deadline=None)
@given(tables(), st.integers(1, 80))
def test_whatever_a_table_holds_it_is_refused_or_read_as_one_whole(content: bytes, size: int) -> None:
    try:
        in_parts = converted(content, size)
    except InvalidInput:
        return
    assert in_parts == converted(content, 1 << 20)
    assert all(len(line) <= 1000 and isinstance(json.loads(line), dict) for line in in_parts.splitlines())
