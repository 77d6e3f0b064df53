"""Files through the real HTTP API and the real `openai` client."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import InvalidInput
from common.settings import TINY
from common.text.examples import is_example, read_example, with_messages
from common.text.tokens import ChatTokenizer
from manager_service.http.openai.files import file_store
from manager_service.http.reading.item_lines import FoundItems, check_lines
from tests.support.api_server import ITEMS, ApiServer, item, jsonl, running_api, upload

CHATTY = ChatTokenizer.load(TINY)
KEYS = ["role", "content", "tool_calls", "name", "type", "text", "function", "arguments", "tool_call_id"]


SETTINGS = {"max_file_bytes": 100_000, "max_line_bytes": 10_000}


async def test_a_file_is_uploaded_listed_read_and_deleted(server: ApiServer) -> None:
    made = await server.openai.files.create(file=("items.jsonl", ITEMS), purpose="fine-tune")
    assert (made.filename, made.bytes, made.purpose, made.status) == (
        "items.jsonl",
        len(ITEMS),
        "fine-tune",
        "processed",
    )
    assert (await server.openai.files.retrieve(made.id)).id == made.id
    assert (await server.openai.files.content(made.id)).content == ITEMS
    assert [file.id async for file in server.openai.files.list()] == [made.id]
    assert (await server.openai.files.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        await server.openai.files.content(made.id)


async def test_files_are_paged_newest_first(server: ApiServer) -> None:
    ids = [await upload(server.openai) for _ in range(5)]
    first = await server.openai.files.list(limit=2)
    assert ([file.id for file in first.data], first.has_more) == ([ids[4], ids[3]], True)
    assert [file.id async for file in server.openai.files.list(limit=2)] == ids[::-1]
    assert [file.id async for file in server.openai.files.list(order="asc")] == ids


async def test_an_unknown_cursor_is_refused(server: ApiServer) -> None:
    await upload(server.openai)
    with pytest.raises(openai.BadRequestError, match="after: 'nothing' is not in this list"):
        await server.openai.files.list(after="nothing")


BAD = [
    (b"", "the file is empty"),
    (b"\n\n  \n", "the file is empty"),
    (ITEMS + b"{", "line 11: not JSON"),
    (ITEMS + b"\n\n[]\n", "line 13: must be a JSON object, not a list"),
    (b"3\n", "line 1: must be a JSON object, not a number"),
    (b"{}\n", 'line 1: the field "messages" is missing'),
    (b'{"messages": []}\n', "line 1: messages must be a list of at least one"),
    (b'{"messages": "x"}\n', "line 1: messages must be a list"),
    (b'{"messages": ["x"]}\n', r"line 1: messages\[0\] must be an object"),
    (jsonl({"messages": [{"role": "robot", "content": "x"}]}), r"line 1: messages\[0\].role"),
    (jsonl({"messages": [{"role": "assistant", "content": "x"}]}), "line 1: before the assistant's first message"),
    (jsonl({"completion": 3}), "line 1: prompt must be a list"),
    (b'{"a": 1, "a": 2}\n', "line 1: the key 'a' stands twice"),
    (b'{"messages": [{"role": "user", "content": "x"}], "n": NaN}\n', "line 1: NaN is not a JSON number"),
    (b'{"messages": [{"role": "user", "content": "x"}], "n": 1e999}\n', "line 1: the number 1e999 is too large"),
    (b'{"messages": [{"role": "user", "content": "x"}], "n": 36893488147419103232}\n', "does not fit into 64 bits"),
    (b'{"messages": [{"role": "user", "content": "x"}], "n": ' + b"9" * 5000 + b"}\n", "line 1: "),
    (b'{"messages": [{"role": "user", "content": "x"}], "n": "\\ud800"}\n', "line 1: a string is not valid Unicode"),
    (b"\xff\xfe\n", "line 1: not UTF-8"),
    (b"[" * 9000 + b"\n", "line 1: nested too deeply"),
    (jsonl(item("x" * 20_000)), "line 1: .* a line has at most 10000"),
]


async def test_malformed_content_is_refused_with_its_line(server: ApiServer) -> None:
    for content, complaint in BAD:
        with pytest.raises(openai.BadRequestError, match=complaint) as refused:
            await upload(server.openai, content)
        assert refused.value.param == "file"


async def test_windows_files_and_other_fields_are_welcome(server: ApiServer) -> None:
    rows = jsonl(item() | {"meta": {"level": [1, 2.5, None, True]}, "nul": "\0"}, item())
    file = await upload(server.openai, b"\xef\xbb\xbf" + rows.replace(b"\n", b"\r\n"))
    assert (await server.http.get(f"/v1/files/{file}")).json()["num_items"] == 2


async def test_a_file_that_is_too_large_is_refused(server: ApiServer) -> None:
    for size in (100_100, 400_000):
        with pytest.raises(openai.APIStatusError, match="at most") as refused:
            await upload(server.openai, b"x" * size)
        assert refused.value.status_code == 413


async def test_other_purposes_and_missing_parts_are_named(server: ApiServer) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose 'batch'"):
        await server.openai.files.create(file=("f.jsonl", ITEMS), purpose="batch")
    answer = await server.http.post("/v1/files", data={"purpose": "fine-tune"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "file is missing")


async def test_another_tenant_sees_no_file(server: ApiServer) -> None:
    file = await upload(server.openai)
    other = await server.new_tenant("acme")
    for call in (other.files.retrieve, other.files.delete, other.files.content):
        with pytest.raises(openai.NotFoundError):
            await call(file)
    assert [f async for f in other.files.list()] == []


# Whatever passes can be used ----------------------------------------------------------------------------------------

SCALARS = st.sampled_from(
    [None, True, 0, -1, 2**63, 1e308, "", "x", "\0", "\ud800", "tool", "assistant", "function", "{}"]
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
)


@given(
    st.dictionaries(
        st.sampled_from(["answer", "messages", "prompt", "\ud800"]),
        st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4), max_size=3) | VALUES,
    )
)
@example({"messages": [{"role": "user", "content": "x", "tool_calls": True}]})
@example({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]})
@example({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "x"}}]}]})
@settings(max_examples=60)
def test_an_item_that_passes_the_check_can_be_sent_and_rendered(row: dict[str, Any]) -> None:
    try:
        found = check_lines(jsonl(row), before=0, max_line_bytes=10_000, tokenizers={"tiny": CHATTY})
    except InvalidInput as error:
        assert str(error).startswith("line 1: ")
        return
    msgspec.msgpack.encode(row)
    assert msgspec.json.decode(jsonl(row)) == row
    fields = frozenset(row)
    if is_example(row):
        length = {"tiny": len(read_example(row, CHATTY).tokens)}
        assert found == FoundItems(
            1, 1, length, 1, length, int("messages" not in row and isinstance(row["completion"], str)), fields
        )
    else:
        length = {"tiny": len(CHATTY.render(with_messages(row)["messages"]))}
        assert found == FoundItems(1, 1, length, 0, length, fields=fields)
    assert found.longest["tiny"]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("gpj\u202eexe.jsonl", "gpj_exe.jsonl"),
        ("a\x07b\x9f", "a_b_"),
        ("\u00fc \u4e2d.jsonl", "\u00fc \u4e2d.jsonl"),
        ("a" * 300, "a" * 255),
    ],
)
async def test_a_files_name_is_kept_as_it_can_be_shown(server: ApiServer, name: str, kept: str) -> None:
    assert (await send(server, name)).json()["filename"] == kept


@pytest.mark.parametrize(
    ("name", "hint"), [("a" * 10_000, "a file's name has at most"), (None, "send it with a file name")]
)
async def test_a_file_without_a_fit_name_is_refused_with_what_to_do(
    server: ApiServer, name: str | None, hint: str
) -> None:
    answer = await send(server, name)
    assert answer.status_code == 400 and hint in answer.json()["error"]["message"]


async def send(server: ApiServer, name: str | None) -> httpx.Response:
    """Uploads a file under a name that clients themselves would write in another way."""
    named = b"" if name is None else b'; filename="' + name.encode() + b'"'
    file = b'--b\r\nContent-Disposition: form-data; name="file"' + named + b"\r\n\r\n" + jsonl(item())
    purpose = b'\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--b--\r\n'
    headers = {"content-type": "multipart/form-data; boundary=b"}
    return await server.http.post("/v1/files", content=file + purpose, headers=headers)


async def test_the_files_that_a_tenant_keeps_are_bounded_in_number_and_bytes_even_in_a_race(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = jsonl(item("x" * 10)), jsonl(*(item("x" * 1000) for _ in range(30)))
    async with running_api(redis_url, tmp_path / "data", max_stored_bytes=2 * len(large) + 1000) as server:

        async def send(content: bytes) -> Any:
            form: dict[str, Any] = {"files": {"file": ("items.jsonl", content)}, "data": {"purpose": "fine-tune"}}
            return await server.http.post("/v1/files", **form)

        answers = await asyncio.gather(*(send(large) for _ in range(6)))
        assert Counter(answer.status_code for answer in answers) == {200: 2, 429: 4}
        refused = next(answer.json()["error"] for answer in answers if answer.status_code == 429)
        assert (
            refused["code"] == "too_many_files" and f"you have 2 files of {2 * len(large)} bytes" in refused["message"]
        )
        assert len(await server.api.objects.paths("files/default")) == 2, "what was refused is not kept"
        kept = [answer.json()["id"] for answer in answers if answer.status_code == 200]
        await server.openai.files.delete(kept[0])
        assert (await send(large)).status_code == 200
        monkeypatch.setattr(file_store, "MAX_FILES", 3)
        assert [(await send(small)).status_code for _ in range(2)] == [200, 429]
        other = await server.new_tenant("acme")
        await upload(other, small)


def test_a_file_keeps_the_names_of_fields_that_all_of_its_items_have() -> None:
    rows = [
        {"prompt": "x", "answer": "1", "meta": {}, "y" * 65: 1},
        {"prompt": "x", "answer": None, "only": 2, "y" * 65: 1},
    ]
    found = [check_lines(jsonl(*some), before=0, max_line_bytes=10_000, tokenizers={}) for some in (rows, rows[:1], [])]
    assert found[0].fields == {"prompt", "answer"} and found[2].fields is None
    assert (found[2] + found[0] + found[1]).fields == {"prompt", "answer"}
    many = check_lines(
        jsonl({"prompt": "x"} | {f"field{i:03}": i for i in range(100)}), before=0, max_line_bytes=10_000, tokenizers={}
    )
    assert many.fields is not None and len(many.fields) == 64


async def test_a_file_of_too_many_rows_is_refused_with_the_number(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "MAX_ROWS", 3)
    await upload(server.openai, jsonl(*(item() for _ in range(3))))
    with pytest.raises(openai.BadRequestError, match="more than 3 rows") as refused:
        await upload(server.openai, jsonl(*(item() for _ in range(4))))
    assert refused.value.code == "too_many_rows"
