"""Answers to the SDK's RestClient beside checkpoints: use by the hour, searches, clients that join; and refusals of the rest."""

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from common.store.adapters import AdapterStore
from common.wire.messages import AdapterRef
from manager_service.records.run_records import run_of
from manager_service.records.usage import hour_of
from tests.common.test_worker import until
from tests.support.api_server import ApiServer, Script, played
from tests.support.run_world import HashingTrainer, owned_runs
from tests.support.tinker_client import TinkerClient, client_of, pass_over

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [104, 105]}]}
EVENTS = "billing/usage/events"


# ---- use ------------------------------------------------------------------------------------------------------------


def window(hours_back: int = 1, hours_on: int = 2) -> str:
    """A query whose window holds this moment, even if the hour ends now."""
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    start, end = hour - timedelta(hours=hours_back), hour + timedelta(hours=hours_on)
    return f"starting_on={start:%Y-%m-%dT%H:00:00Z}&ending_before={end:%Y-%m-%dT%H:00:00Z}"


async def used(client: TinkerClient) -> dict[tuple[str | None, str], int]:
    """Tokens by session and kind."""
    told = (await client.get(f"{EVENTS}?{window()}")).json()
    assert all(row["estimated_cost_usd"] is None and row["base_model"] == "tiny" for row in told["data"])
    assert told["sessions"].keys() == {row["session_id"] for row in told["data"]} - {None}
    found: dict[tuple[str | None, str], int] = {}
    for row in told["data"]:
        key = row["session_id"], row["event_info"]["type"]
        found[key] = found.get(key, 0) + row["event_info"]["token_count"]
    return found


async def test_use_is_told_by_hour_session_and_kind(
    server: ApiServer, client: TinkerClient, trainer: HashingTrainer
) -> None:
    assert await used(client) == {}
    session = await client.session()
    run = await client.run(session)
    future = (await client.send(pass_over(run, 1))).json()["request_id"]
    assert (await client.retrieve(future)).status_code == 200
    sampler = await client.sampler(session)
    sampling: dict[str, Any] = {"prompt": PROMPT, "sampling_params": {"max_tokens": 8}}
    async with played(Script(server.bus, text="ok", stop_reason="length", inbox=server.bus.cell.rollout)):
        for of in ({"sampling_session_id": sampler}, {"base_model": "tiny"}):
            asked = await client.post("asample", **sampling, **of)
            assert (await client.retrieve(asked.json()["request_id"])).status_code == 200
    expected = {
        (session, "training"): 1,
        (session, "sampling_prefill"): 2,
        (session, "sampling_sample"): 2,
        (None, "sampling_prefill"): 2,
        (None, "sampling_sample"): 2,
    }

    async def all_told() -> bool:
        return await used(client) == expected

    await until(all_told)
    assert await used(await client_of(server, "stranger")) == {}
    keys = [server.bus.cell.hours("default", hour_of(time.time() + late)) for late in (0, -3600)]
    assert max([await server.bus.client.ttl(key) for key in keys]) > 14 * 86_400


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("starting_on=2026-01-01T00:30:00Z&ending_before=2026-01-02T00:00:00Z", "full hour"),
        ("starting_on=2026-01-01T00:00:00Z&ending_before=2026-01-01T00:00:00Z", "at most 14 days"),
        ("starting_on=2026-01-01T00:00:00Z&ending_before=2026-01-15T01:00:00Z", "at most 14 days"),
        ("starting_on=2999-01-01T00:00:00Z&ending_before=2999-01-02T00:00:00Z", "future"),
        ("starting_on=0001-01-01T00:00:00%2B14:00&ending_before=0001-01-02T00:00:00Z", "starting_on"),
        ("starting_on=x&ending_before=2999-01-02T00:00:00Z", "starting_on"),
        ("ending_before=2999-01-02T00:00:00Z", "starting_on"),
    ],
)
async def test_a_window_that_makes_no_sense_is_refused(client: TinkerClient, query: str, reason: str) -> None:
    answer = await client.get(f"{EVENTS}?{query}")
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]


async def test_what_checkpoints_take_is_counted_once_a_version(
    server: ApiServer, client: TinkerClient, trainer: HashingTrainer
) -> None:
    stored = "billing/usage/checkpoints/current"
    assert (await client.get(stored)).json()["data"] == []
    run = await client.run(await client.session())
    for seq, name in ((1, "save_weights"), (2, "save_weights_for_sampler"), (3, "save_weights_external")):
        await client.done(name, model_id=run, seq_id=seq, path="a")
    (row,) = (await client.get(stored)).json()["data"]
    manifest = await AdapterStore(server.api.objects).manifest(AdapterRef("default", run_of(run) or "", 0))
    assert manifest is not None
    assert (row["checkpoint_count"], row["size_bytes"]) == (3, sum(file.size for file in manifest.files.values()))
    assert (await client.get(f"{stored}?project_id=p")).status_code == 400


# ---- sessions -------------------------------------------------------------------------------------------------------


async def named_sessions(client: TinkerClient, *names: str) -> list[str]:
    made = [await client.post("create_session", display_name=name, user_metadata={"n": name}) for name in names]
    return [answer.json()["session_id"] for answer in made]


async def search(client: TinkerClient, **asked: Any) -> list[str]:
    """All pages."""
    found: list[str] = []
    while True:
        answer = await client.post("sessions/search", **asked)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        found += [row["session_id"] for row in page["sessions"]]
        if page["next_cursor"] is None:
            return found
        assert len(page["sessions"]) == asked["limit"]
        asked = asked | {"cursor": page["next_cursor"]}


async def test_sessions_are_searched_page_by_page(server: ApiServer, client: TinkerClient) -> None:
    one, two, three = await named_sessions(client, "Nightly run 1", "nightly eval", "other")
    await client.post(f"sessions/{two}/finish", reason={"type": "errored"})
    await server.bus.client.delete(server.bus.cell.session(three))  # its client was silent for long
    everything = await search(client)
    assert sorted(everything) == sorted([one, two, three])
    for limit in (1, 2, 3):
        assert await search(client, limit=limit) == everything
    expected: list[tuple[dict[str, Any], list[str]]] = [
        ({"display_name": "NIGHTLY"}, [one, two]),
        ({"display_name": "1 night"}, [one]),
        ({"session_id": three}, [three]),
        ({"session_id": three, "display_name": "eval"}, [two, three]),
        ({"user_metadata": {"n": "other"}}, [three]),
        ({"user_metadata": {"n": "none"}}, []),
        ({"statuses": [{"type": "active"}]}, [one]),
        ({"statuses": [{"type": "client_finished"}, {"type": "active"}]}, [one, two]),
        ({"statuses": [{"type": "client_finished", "reasons": ["errored"]}]}, [two]),
        ({"statuses": [{"type": "client_finished", "reasons": ["success"]}]}, []),
        ({"statuses": [{"type": "active", "reasons": ["success"]}]}, []),
        ({"owner": {"type": "user", "owner_urns": ["stranger"]}}, []),
        ({"owner": {"type": "accessible"}}, [one, two, three]),
    ]
    for asked, found in expected:
        assert sorted(await search(client, **asked)) == sorted(found), asked
    assert await search(await client_of(server, "stranger"), owner={"type": "accessible"}) == []


NAIVE = {"cursor": {"last_session_id": "a", "last_created_at": "0001-01-01T00:00:00"}}


async def test_a_search_that_makes_no_sense_is_refused(client: TinkerClient) -> None:
    for asked in ({"limit": 0}, {"limit": 1000}, {"project_ids": ["p"]}, {"cursor": {"last_session_id": 1}}, NAIVE):
        assert (await client.post("sessions/search", **asked)).status_code == 400, asked


async def test_each_client_that_joins_a_sampler_gets_a_number(server: ApiServer, client: TinkerClient) -> None:
    session = await client.session()
    sampler = await client.sampler(session)
    joined = [(await client.post("join_sampling_session", sampling_session_id=sampler)).json() for _ in range(3)]
    assert [one["client_counter"] for one in joined] == [1, 2, 3]
    stranger = await client_of(server, "stranger")
    assert (await stranger.post("join_sampling_session", sampling_session_id=sampler)).status_code == 404


# ---- an owner that is away ------------------------------------------------------------------------------------------


async def test_a_change_of_a_name_waits_for_the_owner_and_says_so(
    server: ApiServer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with owned_runs(server):
        run = await client.run(await client.session())
        await client.done("save_weights", model_id=run, seq_id=1, path="a")
    route = f"training_runs/{run}/checkpoints"
    with monkeypatch.context() as patched:
        patched.setattr("manager_service.http.stores.run_store.WAIT_S", 0.2)
        refused = await client.delete(f"{route}/weights/a")
    assert refused.status_code == 503 and "owner is away" in refused.json()["error"]["message"]
    assert len((await client.get(route)).json()["checkpoints"]) == 1

    async def is_gone() -> bool:
        return (await client.get(route)).json()["checkpoints"] == []

    async with owned_runs(server):
        await until(is_gone)
    assert (await client.delete(f"{route}/weights/a")).status_code == 404


# ---- what is not offered --------------------------------------------------------------------------------------------

NOT_OFFERED = [
    ("POST", "training_runs/x/checkpoints/weights/a/publish", "download it"),
    ("DELETE", "training_runs/x/checkpoints/weights/a/publish", "download it"),
    ("POST", "copy_weights", "use the path itself"),
    ("POST", "create_custom_loss", "forward_backward_custom"),
    ("POST", "retrieve_futures", "retrieve_future waits"),
    ("POST", "auth/token", "TINKER_API_KEY"),
    ("GET", "auth/apikey/me", "TINKER_API_KEY"),
    ("GET", "audit", "/events"),
    ("PUT", "sessions/ses-1/project", "a tenant of its own"),
    ("GET", "sessions/ses-1/trace_export", "/v1/cluster/timeline"),
]


@pytest.mark.parametrize(("method", "name", "hint"), NOT_OFFERED)
async def test_what_is_not_offered_says_what_to_use(
    server: ApiServer, client: TinkerClient, method: str, name: str, hint: str
) -> None:
    headers = {"X-API-Key": f"tml-{client.key}"}
    refused = await server.http.request(method, f"/api/v1/{name}", headers=headers)
    assert refused.status_code == 404 and hint in refused.json()["error"]["message"] == refused.json()["detail"]
    nobody = await server.http.request(method, f"/api/v1/{name}", headers={"Authorization": ""})
    assert nobody.status_code == 401
