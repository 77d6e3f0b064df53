"""Rights of the API's users: keys, tenants, first start, errors in OpenAI's shape, Redis away."""

import asyncio
import itertools
import re
import stat
from pathlib import Path
from typing import cast

import openai
import pytest
import redis.asyncio as aioredis
from fastapi.routing import APIRoute
from structlog.testing import capture_logs

from common.errors import InvalidInput
from harness.redis_server import RedisServer
from manager_service.http.app import ROUTERS
from manager_service.records.tenants import KEYS, Tenants, bootstrap, read_or_make_key
from tests.support.api_server import ApiServer, Script, create, played, running_api


async def test_without_a_known_key_nothing_is_answered(server: ApiServer) -> None:
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": "Basic x"}):
        answer = await server.http.get("/v1/models", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    answer = await server.http.get("/v1/models", headers={b"Authorization": b"Bearer sk-\xe9\xff"})
    assert answer.status_code == 401


async def test_tinkers_paths_and_keys_and_any_path_to_a_base_are_those_of_openai(server: ApiServer) -> None:
    name = "org/models/tiny"
    async with (
        openai.AsyncOpenAI(base_url=f"{server.url}/oai/api/v1", api_key=f"tml-{server.key}") as client,
        played(Script(server.bus)),
    ):
        assert [model.id async for model in client.models.list()] == ["tiny"]
        model = await client.models.retrieve(name)
        chat = await client.chat.completions.create(model=name, messages=[{"role": "user", "content": "add 37+58"}])
        text = await client.completions.create(model=name, prompt="ab")
    job = await create(server.openai, model=name)
    assert (model.id, chat.model, text.model, job.model) == (name,) * 4
    assert (chat.choices[0].message.content, text.choices[0].text) == ("95", "95")
    with pytest.raises(openai.NotFoundError):
        await server.openai.models.retrieve("tinker://run/weights/tiny")
    assert (await server.http.get("/oai/api/v1/files")).status_code == 404


async def test_every_answer_has_an_id(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manager_service.http.openai.models._base", None)
    with capture_logs() as logs:
        answers = [await server.http.get(path) for path in ("/healthz", "/v1/models", "/v1/models/none", "/", "/none")]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert [answer.status_code for answer in answers] == [200, 500, 404, 200, 404]
    assert len(set(ids)) == 5 and logs[-1]["request_id"] == ids[1]


async def test_what_is_not_there_says_what_is(server: ApiServer) -> None:
    async def told(method: str, path: str, **options: object) -> str:
        answer = await server.http.request(method, path, **options)  # type: ignore[arg-type]
        assert 400 <= answer.status_code < 500
        return answer.json()["error"]["message"]

    assert "did you mean '/v1/chat/completions'? GET /docs" in await told("POST", "/chat/completions", json={})
    assert await told("GET", "/v9") == "there is no GET /v9; GET /docs shows all that there is"
    assert await told("GET", "/v1/completions") == "/v1/completions takes POST, and not GET"
    wrong = {"content": b'{"model": "tiny" "n": 1}', "headers": {"Content-Type": "application/json"}}
    assert "(column 18), where '\"n\": 1}' is" in await told("POST", "/v1/completions", **wrong)
    assert "where the end is" in await told("POST", "/v1/completions", **{**wrong, "content": b"{"})
    form = {"files": {"file": ("x.jsonl", b"{}")}, "data": {"purpose": "fine-tune", "expires_after[seconds]": "60"}}
    assert "expires_after is not offered" in await told("POST", "/v1/files", **form)


async def test_the_admin_key_administers_and_a_tenants_key_does_not(server: ApiServer) -> None:
    assert (await server.http.get("/v1/admin/tenants")).status_code == 403
    assert (await server.http.get("/v1/files", headers=server.as_admin())).status_code == 403
    tenants = (await server.http.get("/v1/admin/tenants", headers=server.as_admin())).json()["data"]
    assert [tenant["id"] for tenant in tenants] == ["default"]


async def test_a_tenant_is_made_changed_and_given_keys(server: ApiServer) -> None:
    admin = server.as_admin()
    client = await server.new_tenant("acme", name="Acme", weight=2.0, max_jobs=3)
    assert [model.id async for model in client.models.list()] == ["tiny"]
    again = await server.http.post("/v1/admin/tenants", json={"id": "acme"}, headers=admin)
    assert again.status_code == 409
    misspelt = await server.http.post("/v1/admin/tenants/acme", json={"wieght": 5}, headers=admin)
    assert misspelt.status_code == 400 and "did you mean 'weight'?" in misspelt.json()["error"]["message"]
    changed = await server.http.post("/v1/admin/tenants/acme", json={"max_tokens_per_day": 5}, headers=admin)
    assert (changed.json()["weight"], changed.json()["max_tokens_per_day"]) == (2.0, 5)
    (key,) = (await server.http.get("/v1/admin/tenants/acme/keys", headers=admin)).json()["data"]
    assert key["key"] is None
    gone = await server.http.delete(f"/v1/admin/tenants/acme/keys/{key['id']}", headers=admin)
    assert gone.json()["deleted"]
    with pytest.raises(openai.AuthenticationError):
        await client.models.list()


async def test_a_tenants_weight_is_in_its_range_and_its_id_plain(server: ApiServer) -> None:
    for weight in (0.001, 1000):
        for path, given in (("", {"id": f"w{weight:g}".replace(".", "")}), ("/default", {})):
            body = {**given, "weight": weight}
            kept = await server.http.post(f"/v1/admin/tenants{path}", json=body, headers=server.as_admin())
            assert (kept.status_code, kept.json()["weight"]) == (200, weight)
    for weight in ("1e-300", "0.0009", "0", "-1", "1000.1"):
        for path, given in (("", '"id": "other", '), ("/default", "")):
            body = f'{{{given}"weight": {weight}}}'
            headers = {**server.as_admin(), "Content-Type": "application/json"}
            refused = await server.http.post(f"/v1/admin/tenants{path}", content=body, headers=headers)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "weight"), weight
            assert "from 0.001 to 1000" in error["message"]
    assert (await server.http.get("/v1/admin/tenants/default", headers=server.as_admin())).json()["weight"] == 1000
    # And an id is plain
    for tenant in ["", "A", "a:b", "a/b", "admin", "other", "-", "x" * 64, "\u00e9", "../x", "a\0"]:
        answer = await server.http.post("/v1/admin/tenants", json={"id": tenant}, headers=server.as_admin())
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "id")


async def test_keys_are_kept_as_hashes_and_files_are_private(server: ApiServer) -> None:
    stored = await server.api.redis.hgetall(KEYS)
    assert server.key.encode() not in b"".join([*stored.keys(), *stored.values()])
    for name in ("api_key", "admin_key"):
        mode = (server.api.settings.data_dir / name).stat().st_mode
        assert stat.S_IMODE(mode) == 0o600


async def test_a_second_start_keeps_the_keys_and_restores_what_redis_lost(redis_url: str, tmp_path: Path) -> None:
    async with aioredis.Redis.from_url(redis_url) as client:
        tenants = Tenants(client)
        await asyncio.gather(*(bootstrap(tenants, tmp_path) for _ in range(5)))
        key = (tmp_path / "api_key").read_text().strip()
        await client.flushall()
        await bootstrap(tenants, tmp_path)
        assert (tmp_path / "api_key").read_text().strip() == key
        record = await tenants.authenticate(key)
        assert record is not None and (record.tenant, record.admin) == ("default", False)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["admin_key", "api_key"]


def test_a_file_that_holds_no_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "api_key").write_text("\n")
    with pytest.raises(InvalidInput, match="does not hold an API key"):
        read_or_make_key(tmp_path / "api_key")


async def test_every_error_has_openais_shape(server: ApiServer) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("PUT", "/v1/files", 405), ("GET", "/v1/files/%00", 404)):
        answer = await server.http.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


LONG = "a" * 5000
STRANGE_IDS = ["%00", "%F0%9F%98%80" * 300, "..%2F..", f"ftjob-{LONG}", f"ft:tiny:default::{LONG}"]


async def test_nothing_has_a_strange_id(server: ApiServer) -> None:
    routes = [cast(APIRoute, route) for noun in ROUTERS for route in noun.router.routes]
    with_id = [(route.path, verb) for route in routes for verb in route.methods or () if "{" in route.path]
    assert len(with_id) > 25
    for (path, verb), strange in itertools.product(with_id, STRANGE_IDS):
        url = re.sub(r"\{[^}]*}", strange, re.sub(r"\{(version|step|group|sample)}", "1", path))
        headers, body = server.as_admin() if "/admin/" in path else {}, {} if verb in ("POST", "PUT") else None
        answer = await server.http.request(verb, url, json=body, headers=headers)
        expected = (400, 403, 404) if path.startswith("/api/") else (404,)
        assert answer.status_code in expected, f"{verb} {path}: {answer.text}"


NO_JSON_FOR_US = [
    b"{",
    b"",
    b"[]",
    b'{"model": NaN}',
    b'{"model": "\\ud800"}',
    b'{"\\ud800": 1}',
    b"[" * 100_000,
    b"\xff",
    b'{"a":1,"a":2}',
    b'{"model": ' + b"9" * 10_000 + b"}",
]


async def test_a_body_that_is_no_json_for_us_is_refused(server: ApiServer) -> None:
    for body in NO_JSON_FOR_US:
        for path in ("/v1/fine_tuning/jobs", "/v1/chat/completions", "/v1/fine_tuning/alpha/graders/validate"):
            answer = await server.http.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["message"]


async def test_the_docs_need_no_other_server(server: ApiServer) -> None:
    answer = await server.http.get("/docs", headers={"Authorization": ""})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    document = (await server.http.get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        assert all(f"{method.upper()} {path}" in answer.text for method in methods)
    assert not re.search(r"<script|<link|@import|url\(|src=", answer.text)
    assert {link for link in re.findall(r'href="([^"]*)"', answer.text) if not link.startswith("#")} == {"openapi.json"}


@pytest.mark.slow
async def test_without_redis_requests_are_answered_within_seconds(tmp_path: Path) -> None:
    redis_server = RedisServer.start(tmp_path)
    try:
        async with running_api(redis_server.url, tmp_path / "data") as server:
            redis_server.stop()
            async with asyncio.timeout(60):
                answer = await server.http.get("/v1/files")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "redis_away")
            assert "does not answer" in answer.text and int(answer.headers["retry-after"]) > 0
            assert (await server.http.get("/readyz")).json()["waiting_for"][0] == "redis"
            redis_server.restart()
            assert (await server.http.get("/v1/files")).status_code == 200
    finally:
        redis_server.stop()
