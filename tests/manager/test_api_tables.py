"""Files that are no JSONL, and items in TRL's forms, through the real HTTP API."""

import openai
import pytest

from manager_service.owner.jobs.items import Items
from tests.support.api_server import ApiServer, create, jsonl, method, upload


async def test_a_table_is_refused_with_what_makes_lines_of_it(server: ApiServer) -> None:
    for name, content in (("items.csv", b"prompt,answer\na,b\n"), ("items", b"PAR1" + b"\0" * 100)):
        with pytest.raises(openai.BadRequestError, match=r"this is a table, .* `marlaas submit FILE`") as refused:
            await server.openai.files.create(file=(name, content), purpose="fine-tune")
        assert refused.value.param == "file"


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
