"""Checkpoints behind the API: their deletion, their end, and the files of their versions. The owner and the store are real."""

import io
import tarfile
import time
from typing import Any

import msgspec
import pytest

from common.store.adapters import PEFT_FILES, AdapterStore
from common.wire.messages import AdapterRef
from manager_service.http.tinker.rest.file_links import VALID_S, Grant, sign, verified
from manager_service.records.run_records import RunState, run_of
from tests.support.api_server import ApiServer
from tests.support.tinker_client import TinkerClient

DAY_S = 86_400

pytestmark = pytest.mark.usefixtures("trainer")


async def save(client: TinkerClient, run: str, seq: int, action: str = "save_weights", **body: Any) -> str:
    """The path of what is saved."""
    return (await client.done(action, model_id=run, seq_id=seq, **body))["path"]


async def state_of(server: ApiServer, run: str) -> RunState:
    key = server.bus.cell.run(run_of(run) or "")
    return msgspec.json.decode(await server.bus.client.hget(key, "state") or b"", type=RunState)


def about(path: str) -> str:
    """The route of a checkpoint."""
    run, _, name = path.removeprefix("tinker://").partition("/")
    return f"training_runs/{run}/checkpoints/{name}"


async def uses(client: TinkerClient, path: str, session: str) -> list[int]:
    """The statuses of sampling, chat, a start, a new run, and a question about a checkpoint."""
    named = await client.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, model_path=path)
    model = {"model": path, "messages": [{"role": "user", "content": "a"}]}
    job = {"model": path, "training_file": "file-0", "method": {"type": "supervised"}}
    headers = {"Authorization": f"Bearer {client.key}"}
    loaded = await client.post("load_weights", session_id=session, model_seq_id=900, path=path)
    answers = [
        named,
        await client.http.post("/v1/chat/completions", json=model, headers=headers),
        await client.http.post("/v1/fine_tuning/jobs", json=job, headers=headers),
        loaded,
        await client.post("weights_info", tinker_path=path),
    ]
    assert all("there is no checkpoint" in answer.text for answer in answers), [answer.text for answer in answers]
    return [answer.status_code for answer in answers]


async def listed(client: TinkerClient, run: str) -> list[str]:
    rows = (await client.get(f"training_runs/{run}/checkpoints")).json()["checkpoints"]
    everywhere = (await client.get("checkpoints")).json()["checkpoints"]
    assert [row["tinker_path"] for row in rows] == [row["tinker_path"] for row in everywhere]
    return [row["checkpoint_id"] for row in rows]


# ---- names that go --------------------------------------------------------------------------------------------------


async def test_a_deleted_checkpoint_is_gone_everywhere(server: ApiServer, client: TinkerClient) -> None:
    run = await client.run(session := await client.session())
    first, second = await save(client, run, 1, path="first"), await save(client, run, 2, path="second")
    assert (await client.delete(about(first))).status_code == 200
    assert await listed(client, run) == ["weights/second"]
    assert await uses(client, first, session) == [404, 404, 400, 404, 404]
    assert (await client.get(f"training_runs/{run}")).json()["last_checkpoint"]["tinker_path"] == second
    again = await client.delete(about(first))
    assert again.status_code == 404 and "it was deleted" in again.json()["error"]["message"]
    assert await save(client, run, 3, path="first") == first
    assert await listed(client, run) == ["weights/second", "weights/first"]


async def test_an_expired_checkpoint_is_gone_everywhere(server: ApiServer, client: TinkerClient) -> None:
    run = await client.run(session := await client.session())
    path = await save(client, run, 1, path="first", ttl_seconds=3600)
    assert await listed(client, run) == ["weights/first"]
    state = await state_of(server, run)
    state.checkpoints = [msgspec.structs.replace(one, expires_at=int(time.time())) for one in state.checkpoints]
    await server.bus.client.hset(server.bus.cell.run(run_of(run) or ""), mapping=state.fields())
    assert await listed(client, run) == []
    assert await uses(client, path, session) == [404, 404, 400, 404, 404]
    assert (await client.put(f"{about(path)}/ttl", ttl_seconds=None)).status_code == 404


async def test_a_sampler_ends_with_the_checkpoint_that_it_was_made_of(client: TinkerClient) -> None:
    run = await client.run(session := await client.session())
    path = await save(client, run, 1, "save_weights_for_sampler", path="first")
    body: dict[str, Any] = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
    body["sampling_session_id"] = await client.sampler(session, model_path=path)
    assert (await client.post("asample", **body)).status_code == 200
    assert (await client.delete(about(path))).status_code == 200
    asked = await client.post("asample", **body, seq_id=2)
    assert asked.status_code == 404 and "it was deleted" in asked.text


async def test_the_end_of_a_checkpoint_is_set_and_cleared(server: ApiServer, client: TinkerClient) -> None:
    run = await client.run(await client.session())
    path = await save(client, run, 1, path="first")

    async def end_s() -> float | None:
        """Seconds from now."""
        (known,) = (await state_of(server, run)).checkpoints
        return None if known.expires_at is None else known.expires_at - time.time()

    assert await end_s() is None
    for ttl_s in (3600, 10 * 365 * DAY_S):
        assert (await client.put(f"{about(path)}/ttl", ttl_seconds=ttl_s)).status_code == 200
        assert ttl_s - 30 < (await end_s() or 0) <= ttl_s
    for ttl_s in (3599, 11 * 366 * DAY_S, -1):
        refused = await client.put(f"{about(path)}/ttl", ttl_seconds=ttl_s)
        assert refused.status_code == 400 and "between 3600" in refused.text
    assert (await client.put(f"{about(path)}/ttl", ttl_seconds=None)).status_code == 200
    assert await end_s() is None
    assert (await client.put(f"{about(path)}/ttl")).status_code == 400


@pytest.mark.parametrize(
    "name", ["training_runs/x/checkpoints/weights/a", "training_runs/ftjob-1/checkpoints/sampler_weights/1"]
)
async def test_what_is_no_runs_checkpoint_is_not_deleted(client: TinkerClient, name: str) -> None:
    assert (await client.delete(name)).status_code in (400, 404)
    assert (await client.delete(f"{name.rpartition('/')[0][:-4]}odd/a")).status_code == 400


# ---- files ----------------------------------------------------------------------------------------------------------


async def external(client: TinkerClient, run: str, seq: int = 1, name: str = "first") -> tuple[str, dict[str, str]]:
    """The path of a version's files, and their urls."""
    path = await save(client, run, seq, "save_weights_external", path=name, ttl_seconds=3600)
    return path, (await client.get(f"{about(path)}/external_weights_urls")).json()["urls"]


async def test_the_files_of_a_version_are_read_by_urls_without_a_key(server: ApiServer, client: TinkerClient) -> None:
    run = await client.run(await client.session())
    path, urls = await external(client, run)
    assert path == f"tinker://{run}/external_weights/first" and sorted(urls) == sorted(PEFT_FILES)
    stored = await AdapterStore(server.api.objects).read(AdapterRef("default", run_of(run) or "", 0))
    for name, url in urls.items():
        found = await server.http.get(url, headers={"Authorization": ""})
        assert (found.status_code, found.content) == (200, stored[name])


async def test_a_url_has_the_host_and_the_scheme_that_its_client_asked(server: ApiServer, client: TinkerClient) -> None:
    path, _ = await external(client, await client.run(await client.session()))
    headers = {"X-API-Key": f"tml-{client.key}", "Host": "models.example", "X-Forwarded-Proto": "https"}
    told = await server.http.get(f"/api/v1/{about(path)}/external_weights_urls", headers=headers)
    assert all(url.startswith("https://models.example/api/v1/signed/") for url in told.json()["urls"].values())


async def test_a_url_that_was_not_signed_here_is_refused(server: ApiServer, client: TinkerClient) -> None:
    _, urls = await external(client, await client.run(await client.session()))
    url = urls[PEFT_FILES[0]]
    head, _, token = url.rpartition("/")
    middle = len(token) // 2
    for wrong in (
        token[:-4],
        token[:middle] + ("a" if token[middle] != "a" else "b") + token[middle + 1 :],
        "x",
        "%ff",
    ):
        found = await server.http.get(f"{head}/{wrong}")
        assert found.status_code == 403 and "not as it was signed" in found.json()["error"]["message"], wrong


async def test_a_url_ends_after_its_time_and_with_its_checkpoint(server: ApiServer, client: TinkerClient) -> None:
    run = await client.run(await client.session())
    path, urls = await external(client, run)
    url = urls[PEFT_FILES[0]]
    key = await server.bus.client.get("marlaas:{@}:signing-key")
    assert isinstance(key, bytes)
    head, _, token = url.rpartition("/")
    grant = verified(key, token)
    assert grant is not None and 0 < grant.expires_at - time.time() <= VALID_S
    late = await server.http.get(f"{head}/{sign(key, msgspec.structs.replace(grant, expires_at=int(time.time())))}")
    assert late.status_code == 403 and "has expired" in late.text
    stranger = await server.http.get(f"{head}/{sign(key, msgspec.structs.replace(grant, tenant='stranger'))}")
    assert stranger.status_code == 404
    assert (await client.delete(about(path))).status_code == 200
    gone = await server.http.get(url)
    assert gone.status_code == 404 and "it was deleted" in gone.text


async def test_a_url_is_of_the_version_that_it_was_signed_for(server: ApiServer, client: TinkerClient) -> None:
    run = await client.run(await client.session())
    _, urls = await external(client, run)
    await client.done("optim_step", model_id=run, seq_id=2, adam_params={})
    _, newer = await external(client, run, 3)
    old, new = [await server.http.get(each[PEFT_FILES[0]]) for each in (urls, newer)]
    assert old.status_code == 404 and "saved again" in old.text and new.status_code == 200


async def test_an_archive_is_a_redirection_to_a_tar_of_all_files(server: ApiServer, client: TinkerClient) -> None:
    path = await save(client, await client.run(await client.session()), 1, path="first")
    answer = await client.get(f"{about(path)}/archive")
    assert answer.status_code == 302 and answer.headers["Expires"].endswith("GMT")
    found = await server.http.get(answer.headers["Location"], headers={"Authorization": ""})
    with tarfile.open(fileobj=io.BytesIO(found.content)) as archive:
        assert sorted(archive.getnames()) == sorted((*PEFT_FILES, "checkpoint_complete"))


def test_a_grant_is_read_only_with_its_key() -> None:
    grant = Grant("t", "tinker://a/weights/b", 3, "f", 5)
    token = sign(b"k" * 32, grant)
    assert verified(b"k" * 32, token) == grant
    assert [verified(key, each) for key, each in ((b"l" * 32, token), (b"k" * 32, token * 100), (b"k" * 32, "é"))] == [
        None
    ] * 3
