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


async def test_a_file_is_uploaded_listed_read_and_deleted_by_its_tenant_alone(server: ApiServer) -> None:
    made = await server.openai.files.create(file=("items.jsonl", ITEMS), purpose="fine-tune")
    assert (made.filename, made.bytes) == ("items.jsonl", len(ITEMS))
    assert (made.purpose, made.status) == ("fine-tune", "processed")
    assert (await server.openai.files.retrieve(made.id)).id == made.id
    assert (await server.openai.files.content(made.id)).content == ITEMS
    assert [file.id async for file in server.openai.files.list()] == [made.id]
    other = (await server.new_tenant("acme")).files
    for call in (other.retrieve, other.delete, other.content):
        with pytest.raises(openai.NotFoundError):
            await call(made.id)
    assert [file async for file in other.list()] == []
    assert (await server.openai.files.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        await server.openai.files.content(made.id)


async def test_files_are_paged_newest_first(server: ApiServer) -> None:
    ids = [await upload(server.openai) for _ in range(5)]
    first = await server.openai.files.list(limit=2)
    assert ([file.id for file in first.data], first.has_more) == ([ids[4], ids[3]], True)
    assert [file.id async for file in server.openai.files.list(limit=2)] == ids[::-1]
    assert [file.id async for file in server.openai.files.list(order="asc")] == ids
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
    # And what Windows writes, with other fields, is welcome
    rows = jsonl(item() | {"meta": {"level": [1, 2.5, None, True]}, "nul": "\0"}, item())
    file = await upload(server.openai, b"\xef\xbb\xbf" + rows.replace(b"\n", b"\r\n"))
    assert (await server.http.get(f"/v1/files/{file}")).json()["num_items"] == 2


async def test_a_file_that_is_too_large_or_has_too_many_rows_is_refused(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (100_100, 400_000):
        with pytest.raises(openai.APIStatusError, match="at most") as refused:
            await upload(server.openai, b"x" * size)
        assert refused.value.status_code == 413
    monkeypatch.setattr(file_store, "MAX_ROWS", 3)
    await upload(server.openai, jsonl(*[item()] * 3))
    with pytest.raises(openai.BadRequestError, match="more than 3 rows") as too_many:
        await upload(server.openai, jsonl(*[item()] * 4))
    assert too_many.value.code == "too_many_rows"


async def test_other_purposes_and_missing_parts_are_named(server: ApiServer) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose 'batch'"):
        await server.openai.files.create(file=("f.jsonl", ITEMS), purpose="batch")
    answer = await server.http.post("/v1/files", data={"purpose": "fine-tune"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "file is missing")


# Whatever passes can be used ----------------------------------------------------------------------------------------


def checked(*rows: dict[str, Any], tokenizers: dict[str, ChatTokenizer] | None = None) -> FoundItems:
    return check_lines(jsonl(*rows), before=0, max_line_bytes=10_000, tokenizers=tokenizers or {})


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
        found = checked(row, tokenizers={"tiny": CHATTY})
    except InvalidInput as error:
        assert str(error).startswith("line 1: ")
        return
    msgspec.msgpack.encode(row)
    assert msgspec.json.decode(jsonl(row)) == row
    fields = frozenset(row)
    if is_example(row):
        length = {"tiny": len(read_example(row, CHATTY).tokens)}
        plain = int("messages" not in row and isinstance(row["completion"], str))
        assert found == FoundItems(1, 1, length, 1, length, plain, fields)
    else:
        length = {"tiny": len(CHATTY.render(with_messages(row)["messages"]))}
        assert found == FoundItems(1, 1, length, 0, length, fields=fields)
    assert found.longest["tiny"]


async def test_a_files_name_is_kept_as_it_can_be_shown_or_refused_with_what_to_do(server: ApiServer) -> None:
    for name, kept in (
        ("gpj\u202eexe.jsonl", "gpj_exe.jsonl"),
        ("a\x07b\x9f", "a_b_"),
        ("\u00fc \u4e2d.jsonl", "\u00fc \u4e2d.jsonl"),
        ("a" * 300, "a" * 255),
    ):
        assert (await send(server, name)).json()["filename"] == kept
    for name, hint in (("a" * 10_000, "a file's name has at most"), (None, "send it with a file name")):
        answer = await send(server, name)
        assert answer.status_code == 400 and hint in answer.json()["error"]["message"]


async def test_a_form_has_one_file_and_a_few_small_fields(server: ApiServer) -> None:
    file = ("file", ("items.jsonl", jsonl(item())))
    for files, more, hint in (
        ([file] * 2, {}, "number of files is 1"),
        ([file], {f"field{i}": "" for i in range(8)}, "number of fields is 8"),
        ([file], {"purpose": "x" * (65 << 10)}, "size of 64KB"),
    ):
        answer = await server.http.post("/v1/files", files=files, data={"purpose": "fine-tune"} | more)
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
        assert refused["code"] == "storage_exceeded"
        assert f"you store {2 * len(large):,} bytes, this is {len(large):,}" in refused["message"]
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
    found = [checked(*some) for some in (rows, rows[:1], [])]
    assert found[0].fields == {"prompt", "answer"} and found[2].fields is None
    assert (found[2] + found[0] + found[1]).fields == {"prompt", "answer"}
    many = checked({"prompt": "x"} | {f"field{i:03}": i for i in range(100)})
    assert many.fields is not None and len(many.fields) == 64
