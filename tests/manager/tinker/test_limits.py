"""What a tenant may have of the Tinker protocol: sessions and what they say of themselves, runs, what they hold in Redis."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from manager_service.tinker.store import sessions
from tests.support.api_server import ApiServer, running_api
from tests.support.tinker_client import TinkerClient, client_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def server(redis_url: str, tmp_path: Path) -> AsyncGenerator[ApiServer]:
    async with running_api(redis_url, tmp_path / "data") as running:
        yield running


@pytest.fixture
async def client(server: ApiServer) -> TinkerClient:
    return await client_of(server)


# ---- sessions -------------------------------------------------------------------------------------------------------


async def test_what_a_session_or_a_run_says_of_itself_has_a_limit(client: TinkerClient) -> None:
    for told in (
        {"user_metadata": {"note": "x" * 4100}},
        {"display_name": "x" * 4100},
        {"user_metadata": {"note": "x" * 2100}, "display_name": "y" * 2100},
        {"tags": ["x" * 100] * 50},
    ):
        refused = await client.post("create_session", **({"tags": []} | told))
        assert refused.status_code == 400 and "at most 4096" in refused.json()["error"]["message"]
    session = (await client.post("create_session", tags=["a"], user_metadata={"note": "x" * 4000})).json()["session_id"]
    body: dict[str, Any] = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
    refused = await client.post("create_model", **body, user_metadata={"note": "x" * 4100})
    assert refused.status_code == 400 and "user_metadata" in refused.json()["error"]["message"]
    assert (await client.post("create_model", **body, user_metadata={"note": "x" * 4000})).status_code == 200


async def test_a_tenant_has_so_many_sessions_alive_and_no_more_even_in_a_race(
    server: ApiServer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_ALIVE", 5)
    answers = await asyncio.gather(*(client.post("create_session", tags=[]) for _ in range(12)))
    assert Counter(answer.status_code for answer in answers) == {200: 5, 400: 7}
    refused = next(answer for answer in answers if answer.status_code == 400)
    assert "5 of your sessions are alive: end some" in refused.json()["error"]["message"]
    assert refused.headers["x-should-retry"] == "false"  # the SDK says it at once
    mine = [answer.json()["session_id"] for answer in answers if answer.status_code == 200]
    assert (await client.post("session_heartbeat", session_id=mine[0])).status_code == 200
    assert (await client.post(f"sessions/{mine[0]}/finish", reason={"type": "success"})).status_code == 200
    assert (await client.post("create_session", tags=[])).status_code == 200
    other = await client_of(server, "acme")
    assert (await other.post("create_session", tags=[])).status_code == 200


async def test_a_silent_session_makes_room(
    server: ApiServer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_ALIVE", 1)
    assert (await client.post("create_session", tags=[])).status_code == 200
    assert (await client.post("create_session", tags=[])).status_code == 400
    monkeypatch.setattr(sessions, "SESSION_ALIVE_S", 1)
    while (answer := await client.post("create_session", tags=[])).status_code == 400:
        await asyncio.sleep(0.05)
    assert answer.status_code == 200


async def test_the_oldest_sessions_that_have_ended_are_forgotten(
    server: ApiServer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_KEPT", 4)
    alive = await client.session()
    ended = [await client.session() for _ in range(3)]
    for session in ended:
        await client.post(f"sessions/{session}/finish", reason={"type": "success"})
    newest = [await client.session() for _ in range(3)]
    kept = (await client.get("sessions?limit=100")).json()["sessions"]
    assert set(kept) == {alive, *newest}
    for session in ended:
        assert (await client.get(f"sessions/{session}")).status_code == 404
    assert (await client.get(f"sessions/{alive}")).status_code == 200
