"""Receivers of a tenant's reports are checked when they are given, and no key or secret ever comes back."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.fine_tuning import FineTuningJob
from typer.testing import CliRunner

from manager_service.launcher.commands.main import app
from manager_service.records.receivers import MAX_WEBHOOKS, Receivers
from tests.support.api_server import ApiServer, create, item, jsonl, running_api

KEY = "local-key_of_a_tenant_0123456789_0123456789_01"


@pytest.fixture
async def server(redis_url: str, tmp_path: Path) -> AsyncGenerator[ApiServer]:
    hosts: dict[str, Any] = {"logger_hosts": "api.wandb.ai, *.example.org", "webhook_hosts": "*.example.org, 127.0.0.1"}
    async with running_api(redis_url, tmp_path / "data", **hosts) as running:
        await Receivers(running.api.redis).tell_installed(["wandb"])
        yield running


async def logged(server: ApiServer, *integrations: Any) -> FineTuningJob:
    return await create(server.openai, integrations=list(integrations))


async def test_a_job_shows_its_integrations_as_openai_does(server: ApiServer) -> None:
    assert (await logged(server)).integrations == []
    assert not await server.api.redis.exists(server.bus.cell.exports), "it waits for no exporter"
    given = {"project": "mine", "name": "run 1", "entity": "team", "tags": ["a", "b"]}
    job = await logged(server, {"type": "wandb", "wandb": given})
    (shown,) = (await server.openai.fine_tuning.jobs.retrieve(job.id)).integrations or []
    assert (shown.type, shown.wandb.to_dict()) == ("wandb", given)
    assert await server.api.redis.hgetall(server.bus.cell.exports) == {job.id.encode(): b"default"}


async def test_wrong_integrations_are_refused_with_what_to_do(server: ApiServer) -> None:
    project = {"project": "p"}
    for given, said in (
        ({"type": "wanbd", "wandb": project}, "did you mean 'wandb'"),
        ({"type": "wandb"}, '"wandb": {"project": …}'),
        ({"type": "wandb", "wandb": project, "trackio": project}, '"wandb": {"project": …}'),
        ({"type": "wandb", "wandb": {"project": "../p"}}, "use 1 to 128 letters"),
        ({"type": "wandb", "wandb": project | {"entity": "a/b"}}, "use 1 to 128 letters"),
        ({"type": "wandb", "wandb": project | {"key": KEY}}, "key"),
        ({"type": "trackio", "trackio": project}, "pip install 'marlaas[trackio]'"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await logged(server, given)
        assert said in refused.value.message


async def test_two_integrations_of_one_type_and_names_of_trackios_own_files_are_refused(server: ApiServer) -> None:
    await Receivers(server.api.redis).tell_installed(["wandb", "trackio"])
    one = {"type": "wandb", "wandb": {"project": "p"}}
    with pytest.raises(openai.BadRequestError, match="one of each type"):
        await logged(server, one, one)
    with pytest.raises(openai.BadRequestError, match="trackio keeps this name"):
        await logged(server, {"type": "trackio", "trackio": {"project": "model_configs"}})


async def test_without_an_exporter_integrations_are_refused(redis_url: str, tmp_path: Path) -> None:
    async with running_api(redis_url, tmp_path / "data") as server:
        with pytest.raises(openai.BadRequestError, match="no exporter"):
            await logged(server, {"type": "wandb", "wandb": {"project": "p"}})


# ---- keys and secrets -----------------------------------------------------------------------------------------------


async def test_keys_and_secrets_come_back_by_no_route(server: ApiServer) -> None:
    set_key = await server.http.post("/v1/loggers/wandb", json={"api_key": KEY})
    made = await server.http.post("/v1/webhooks", json={"url": "https://hooks.example.org/x"})
    assert (set_key.status_code, made.status_code) == (200, 200)
    secret = made.json()["secret"]
    job = await logged(server, {"type": "wandb", "wandb": {"project": "p"}})
    refused = [await server.http.post("/v1/loggers/wandb", json=bad) for bad in wrong_keys()]
    assert {answer.status_code for answer in refused} == {400}
    texts = [answer.text for answer in (set_key, *refused)]
    for headers in ({}, server.as_admin(), {**server.as_admin(), "MARLaaS-Tenant": "default"}):
        texts += [answer.text for answer in await every_get(server, job.id, headers)]
    assert json.loads(texts[0]) == {**json.loads(texts[0]), "id": "wandb", "base_url": "https://api.wandb.ai"}
    assert any(made.json()["id"] in text for text in texts)
    assert [text for text in texts if KEY in text or secret in text] == []


def wrong_keys() -> list[dict[str, Any]]:
    return [
        {"api_key": KEY, "base_url": "https://elsewhere.test"},
        {"api_key": KEY, "base_url": "ftp://api.wandb.ai"},
        {"api_key": f"{KEY}\n"},
        {"api_key": KEY, "unknown": 1},
        {"api_key": [KEY]},
        {"api_key": KEY * 100},
        {"api_key": KEY.replace("-", "+")},
    ]


async def every_get(server: ApiServer, job: str, headers: dict[str, str]) -> list[httpx.Response]:
    """Answers of all routes that can be read."""
    paths = (await server.http.get("/openapi.json")).json()["paths"]
    readable = [
        path.replace("{job_id}", job).replace("{tenant_id}", "default") for path in paths if "get" in paths[path]
    ]
    return [await server.http.get(path, headers=headers) for path in readable if "{" not in path]


async def test_a_key_that_wandbs_library_would_refuse_is_refused_at_once(server: ApiServer) -> None:
    given = [KEY[:-1], KEY, "a" * 39, "a" * 40, "aa.bb.cc"]
    answers = [await server.http.post("/v1/loggers/wandb", json={"api_key": key}) for key in given]
    assert [answer.status_code for answer in answers] == [400, 200, 400, 200, 200]
    assert "yours has 39 characters" in answers[0].json()["error"]["message"]


async def test_a_tenants_keys_and_webhooks_are_its_own(server: ApiServer) -> None:
    beta = await server.new_tenant("beta")
    await server.http.post("/v1/loggers/wandb", json={"api_key": KEY})
    webhook = (await server.http.post("/v1/webhooks", json={"url": "https://hooks.example.org/x"})).json()["id"]
    theirs = {"Authorization": f"Bearer {beta.api_key}"}
    for path in ("/v1/loggers", "/v1/webhooks"):
        assert (await server.http.get(path, headers=theirs)).json()["data"] == []
    for path in ("/v1/loggers/wandb", f"/v1/webhooks/{webhook}"):
        assert (await server.http.delete(path, headers=theirs)).status_code == 404
        assert (await server.http.delete(path)).status_code == 200
        assert (await server.http.delete(path)).status_code == 404


async def test_an_address_that_is_none_or_that_the_operator_does_not_allow_is_refused(server: ApiServer) -> None:
    for url in ("http://169.254.169.254/latest", "https://example.org/", "http://10.0.0.1/", "nonsense"):
        refused = await server.http.post("/v1/webhooks", json={"url": url})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "url")
    for path, given in (("webhooks", {}), ("loggers/wandb", {"api_key": KEY})):
        field = "base_url" if given else "url"
        error = (await server.http.post(f"/v1/{path}", json=given | {field: "https://a:99999/"})).json()["error"]
        assert error["message"] == f"{field}: the port 99999 is not between 1 and 65535"


async def test_a_tenant_has_a_few_webhooks_at_most_though_many_are_made_at_once(server: ApiServer) -> None:
    made = [server.http.post("/v1/webhooks", json={"url": "https://a.example.org/"}) for _ in range(MAX_WEBHOOKS + 8)]
    refused = [answer for answer in await asyncio.gather(*made) if not answer.is_success]
    assert [(one.status_code, one.json()["error"]["code"]) for one in refused] == [(400, "too_many_webhooks")] * 8


# ---- the command line -----------------------------------------------------------------------------------------------


async def marlaas(server: ApiServer, *words: str, given: str = "") -> str:
    """The output of the command."""
    options = ["--url", server.url]
    environment = {"MARLAAS_API_KEY": server.key}
    result = await asyncio.to_thread(CliRunner().invoke, app, [*words, *options], input=given, env=environment)
    assert result.exit_code == 0, result.output
    return result.output


async def test_the_command_line_sets_keys_and_webhooks_and_shows_neither_again(
    server: ApiServer, tmp_path: Path
) -> None:
    assert KEY not in await marlaas(server, "loggers", "wandb", given=f"{KEY}\n")
    (record,) = (await Receivers(server.api.redis).keys("default")).values()
    assert (record.key, record.base_url) == (KEY, "https://api.wandb.ai")
    made = json.loads(await marlaas(server, "webhooks", "--add", "https://hooks.example.org/x", "--json"))
    shown = await marlaas(server, "loggers") + await marlaas(server, "webhooks")
    assert "api.wandb.ai" in shown and made["id"] in shown
    assert KEY not in shown and made["secret"] not in shown
    await marlaas(server, "loggers", "wandb", "--delete")
    await marlaas(server, "webhooks", "--delete", made["id"])
    assert not await Receivers(server.api.redis).keys("default")
    assert not await Receivers(server.api.redis).webhooks("default")


async def test_the_command_line_submits_a_job_with_a_logger(server: ApiServer, tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_bytes(jsonl(item(), item()))
    words = "--grader string_check:answer --log wandb:mine --json"
    job = json.loads(await marlaas(server, "submit", str(tmp_path / "items.jsonl"), *words.split()))
    assert job["integrations"][0]["wandb"]["project"] == "mine"
