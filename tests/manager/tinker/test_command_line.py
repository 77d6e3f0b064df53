"""The SDK's own command line, `tinker`, and what its RestClient can do. The owner and the store are real."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from common.store.adapters import PEFT_FILES, AdapterStore
from common.wire.messages import AdapterRef
from manager_service.records.run_records import run_of
from tests.support.api_server import ApiServer
from tests.support.tinker_sdk import VERSION, Ended, run_commands, run_program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("trainer"),
]  # the first one installs the SDK

SAVE = """
client = service.create_lora_training_client("tiny", rank=4)
client = client.result() if hasattr(client, "result") else client
client.optim_step(types.AdamParams()).result()
names = ("one", "two")
paths = [client.save_state(name).result().path for name in names]
print(json.dumps({"run": client.model_id, "paths": paths}))
"""


async def tinker(server: ApiServer, *lines: str, version: str = VERSION) -> list[Ended]:
    return await run_commands(lines, url=server.url, key=server.key, version=version)


async def test_runs_models_checkpoints_and_use_are_listed_changed_and_deleted(server: ApiServer) -> None:
    saved = await run_program(server, SAVE)
    run, (one, two) = saved["run"], saved["paths"]
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    start, end = (f"{hour + timedelta(hours=hours):%Y-%m-%dT%H:00:00Z}" for hours in (-1, 2))
    usage, storage, runs, info, models, kept, shown, lasting, again, wrong, deleted, left = await tinker(
        server,
        f"billing usage {start} {end}",
        "billing checkpoint-storage",
        "run list",
        f"run info {run}",
        "model list",
        f"checkpoint set-ttl {one} --ttl 86400",
        f"checkpoint info {one}",
        f"checkpoint set-ttl {one} --remove",
        f"checkpoint info {one}",
        f"checkpoint set-ttl {one} --ttl 60",
        f"checkpoint delete --yes {one}",
        f"checkpoint list --run-id {run}",
    )
    assert [row["training_run_id"] for row in runs.json()["runs"]] == [run]
    assert info.json()["lora_rank"] == 4
    assert models.json()["models"][0]["model_name"] == "tiny"
    assert (kept.code, lasting.code) == (0, 0)
    told = shown.json()
    assert (told["checkpoint_id"], told["lora_rank"], bool(told["expires_at"])) == ("weights/one", 4, True)
    assert again.json()["expires_at"] is None
    assert wrong.code != 0 and "between 3600" in wrong.err
    assert deleted.json() == {"deleted_count": 1, "failed": []}
    assert [row["tinker_path"] for row in left.json()["checkpoints"]] == [two]
    # And use is shown by the hour
    used = usage.json()
    assert {row["session_id"] for row in used["data"]} == used["sessions"].keys() == {run.partition(":train:")[0]}
    assert sum(row["event_info"]["token_count"] for row in used["data"]) == 1
    assert {row["event_info"]["type"] for row in used["data"]} == {"training"}
    stored = storage.json()
    assert [row["checkpoint_count"] for row in stored["data"]] == [2] and stored["data"][0]["size_bytes"] > 0


@pytest.mark.parametrize("version", [VERSION, "0.24.1"])
async def test_a_checkpoint_is_downloaded(server: ApiServer, tmp_path: Path, version: str) -> None:
    """The newest client copies it to a run of its own, and fetches file by file; older ones fetch an archive."""
    saved = await run_program(server, SAVE, version=version)
    stored = await AdapterStore(server.api.objects).read(AdapterRef("default", run_of(saved["run"]) or "", 1))
    (done,) = await tinker(server, f"checkpoint download {saved['paths'][0]} --output {tmp_path}", version=version)
    found = {path.name: path.read_bytes() for path in Path(done.json()["destination"]).iterdir()}
    assert found.keys() - {"checkpoint_complete"} == set(PEFT_FILES)
    if version != VERSION:
        assert {name: found[name] for name in PEFT_FILES} == stored
    everything = (await server.http.get("/api/v1/checkpoints")).json()["checkpoints"]
    assert sorted(row["checkpoint_id"] for row in everything) == ["weights/one", "weights/two"]


async def test_the_files_of_a_version_are_fetched_by_urls(server: ApiServer) -> None:
    told = await run_program(
        server,
        """
client = service.create_lora_training_client("tiny", rank=4).result()
path = client.save_weights_external("out", ttl_seconds=3600).result().path
rest = service.create_rest_client()
urls = rest.get_external_weights_urls(path).result()
sizes = {name: len(urllib.request.urlopen(url).read()) for name, url in urls.urls.items()}
kinds = [row.checkpoint_type for row in rest.list_checkpoints(client.model_id).result().checkpoints]
rest.delete_checkpoint_from_tinker_path(path).result()
print(json.dumps({"sizes": sizes, "kinds": kinds, "gone": told(rest.get_external_weights_urls(path)),
    "sealed": told(client.save_weights_external("sealed", age_encryption_recipients=["age1x"]))}))
""",
    )
    assert told["sizes"].keys() == set(PEFT_FILES) and all(told["sizes"].values())
    assert told["kinds"] == ["external"]
    assert "NotFoundError" in told["gone"] and "it was deleted" in told["gone"]
    assert "encryption is not offered" in told["sealed"]


async def test_sessions_are_searched_and_what_is_not_offered_says_so(server: ApiServer) -> None:
    told = await run_program(
        server,
        """
from tinker.types import AccessibleSearchOwner, SessionSearchRequest
rest = service.create_rest_client()
service.create_lora_training_client("tiny", rank=4).result().save_state("one").result()
found = rest.search_sessions(SessionSearchRequest(owner=AccessibleSearchOwner(), limit=1)).result()
(session,) = found.sessions
print(json.dumps({"id": session.session_id, "checkpoints": session.checkpoints_count, "status": session.status.type,
    "all": rest.list_sessions().result().sessions, "more": found.next_cursor is not None,
    "publish": told(rest.publish_checkpoint_from_tinker_path("tinker://a/weights/b")),
    "copy": told(rest.copy_weights("tinker://a/weights/b", "p")),
    "trace": told(rest.export_session_trace(session.session_id))}))
""",
    )
    assert [told["id"]] == told["all"] and (told["checkpoints"], told["status"], told["more"]) == (1, "active", False)
    assert "NotFoundError" in told["publish"] and "download it" in told["publish"]
    assert "use the path itself" in told["copy"] and "/v1/cluster/timeline" in told["trace"]
