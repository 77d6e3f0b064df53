"""Limits of a tenant in the Tinker protocol: sessions with their words about themselves, runs, their bytes in Redis."""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from common.bus.bus import Bus
from common.bus.fullness import MAX_USED_FOR_NEW
from common.sharing.places import Rounds
from common.store.adapters import PEFT_FILES
from common.wire.messages import Usage
from manager_service.http import body_limit, quota
from manager_service.http.stores import operation_store, session_store
from manager_service.http.stores import run_store as store_runs
from manager_service.http.tinker import retrieval
from manager_service.owner.runs import run_retention, runs
from manager_service.records import run_records
from manager_service.records.keys import GLOBAL
from manager_service.records.run_records import run_of
from tests.common.test_worker import until
from tests.support.api_server import ApiServer, method, running_api, upload
from tests.support.run_world import owned_runs
from tests.support.standin_runs import standing_in
from tests.support.tinker_client import TinkerClient, client_of, pass_over, result_of

# ---- sessions -------------------------------------------------------------------------------------------------------


async def test_an_hour_tells_so_many_sessions_apart(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "MAX_HOUR_COUNTERS", 4)
    for number in range(5):
        await quota.count_inference(bus.client, bus.cell, "acme", Usage(1, 2), f"ses-{number}")
    counters = Counter[Any]()
    for key in await bus.client.keys(bus.cell.hours("acme", "*")):
        for name, num in (await bus.client.hgetall(key)).items():
            counters[name] += int(num)
    apart = {
        b"ses-0/prompt_tokens": 1,
        b"ses-0/sampled_tokens": 2,
        b"ses-1/prompt_tokens": 1,
        b"ses-1/sampled_tokens": 2,
    }
    assert counters == apart | {b"/prompt_tokens": 3, b"/sampled_tokens": 6}


async def test_what_a_session_or_a_run_says_of_itself_has_a_limit(client: TinkerClient) -> None:
    refused = await client.post("create_session", tags=[], user_metadata={"note": "x" * 8192})
    assert refused.status_code == 400 and "at most 8192: keep what is longer" in refused.json()["error"]["message"]
    session = (await client.post("create_session", tags=["a"], user_metadata={"note": "x" * 8000})).json()["session_id"]
    body: dict[str, Any] = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
    assert (await client.post("create_model", **body, user_metadata={"note": "x" * 8192})).status_code == 400
    assert (await client.post("create_model", **body, user_metadata={"note": "x" * 8000})).status_code == 200


async def test_the_oldest_sessions_are_forgotten(
    server: ApiServer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_records, "MAX_KEPT", 4)
    other = await client_of(server, "acme")
    theirs = await other.session()
    old = await client.session()
    await server.bus.client.zadd(f"{GLOBAL}sessions:default", {old: time.time() - 1000})
    newest = [await client.session() for _ in range(4)]
    assert set((await client.get("sessions?limit=100")).json()["sessions"]) == set(newest)
    assert (await client.post("session_heartbeat", session_id=old)).status_code == 404
    assert (await other.post("session_heartbeat", session_id=theirs)).status_code == 200


async def test_large_sessions_are_forgotten_sooner(client: TinkerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_store, "MAX_LARGE", 2)
    small, note = await client.session(), {"note": "x" * 8000}
    large = [(await client.post("create_session", tags=[], user_metadata=note)).json()["session_id"] for _ in range(4)]
    alive = [await client.post("session_heartbeat", session_id=session) for session in (small, *large)]
    assert Counter(answer.status_code for answer in alive) == {200: 3, 404: 2}
    assert alive[0].status_code == 200
    kept = [session for session, answer in zip((small, *large), alive, strict=True) if answer.status_code == 200]
    assert set((await client.get("sessions?limit=100")).json()["sessions"]) == set(kept)


async def test_searches_read_sessions_a_few_at_a_time_in_turn_with_the_tenants_other_reads(
    server: ApiServer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_store, "READ_COUNT", 2)
    sessions = [await client.session() for _ in range(5)]
    turn = server.api.reads.of("default")
    async with turn, turn:
        search = asyncio.create_task(client.post("sessions/search"))
        assert (await (await client_of(server, "acme")).post("sessions/search")).status_code == 200
        assert not search.done()
    assert {row["session_id"] for row in (await search).json()["sessions"]} == set(sessions)


# ---- runs -----------------------------------------------------------------------------------------------------------


async def keys_of(server: ApiServer, run: str) -> set[str]:
    """Kinds of records that Redis has of a run."""
    found = [name.decode() async for name in server.bus.client.scan_iter(f"marlaas:*{run_of(run)}*")]
    return {name.split(":")[2] for name in found}


async def weights_of(server: ApiServer, run: str) -> list[str]:
    paths = await server.api.objects.paths(f"adapters/default/{run_of(run)}")
    return [path for path in paths if path.endswith(PEFT_FILES[0])]


async def test_a_tenant_has_so_many_runs_that_have_not_ended(redis_url: str, tmp_path: Path) -> None:
    async with running_api(redis_url, tmp_path / "data", max_unfinished_jobs=3) as server, owned_runs(server):
        client = await client_of(server)
        session = await client.session()
        body = {"session_id": session, "base_model": "tiny"}
        answers = await asyncio.gather(*(client.post("create_model", **body, model_seq_id=i) for i in range(8)))
        assert Counter(answer.status_code for answer in answers) == {200: 3, 400: 5}
        refused = next(answer for answer in answers if answer.status_code == 400)
        assert "3 unfinished jobs and runs" in refused.json()["error"]["message"]
        assert refused.headers["x-should-retry"] == "false"
        again = await asyncio.gather(*(client.post("create_model", **body, model_seq_id=i) for i in range(8)))
        assert [answer.status_code for answer in again] == [answer.status_code for answer in answers]
        job = await server.http.post(
            "/v1/fine_tuning/jobs",
            json={"model": "tiny", "method": method()} | {"training_file": await upload(server.openai)},
        )
        assert job.status_code == 429 and job.json()["error"]["code"] == "too_many_jobs"
        mine = next(answer.json()["model_id"] for answer in answers if answer.status_code == 200)
        await client.done("unload_model", model_id=mine)
        assert 3500 < await server.bus.client.ttl(server.bus.cell.seqs(run_of(mine) or "")) <= 3600
        assert (await client.post("create_model", **body, model_seq_id=9)).status_code == 200
        other = await client_of(server, "acme")
        await other.run(await other.session())


async def test_a_run_that_ended_long_ago_without_a_checkpoint_leaves_redis_and_the_store(
    server: ApiServer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "RETIRE_EVERY_S", 0.0)
    monkeypatch.setattr(runs, "LOOK_AGAIN_S", 0.1)
    monkeypatch.setattr(run_retention, "UNNAMED_KEPT_S", 1)
    session = await client.session()
    async with owned_runs(server):
        bare, named = await client.run(session, 0), await client.run(session, 1)
        await client.done("save_weights", model_id=named, seq_id=1, path="mine")
        assert await weights_of(server, bare) and await weights_of(server, named)
        for run in (bare, named):
            assert (await client.post("unload_model", model_id=run)).status_code == 200

        async def has_left() -> bool:
            return not await keys_of(server, bare)

        await until(has_left, 60)
        assert await weights_of(server, named) and not await weights_of(server, bare)
        assert await server.api.objects.paths(f"adapters/default/{run_of(bare)}") == []
        listed = (await client.get("training_runs")).json()["training_runs"]
        assert [run["training_run_id"] for run in listed] == [named]
        assert (await client.get(f"training_runs/{bare}")).status_code == 404
        assert (await client.post("weights_info", tinker_path=f"tinker://{named}/weights/mine")).status_code == 200
        deleted = await client.delete(f"training_runs/{named}/checkpoints/weights/mine")
        assert deleted.status_code in (200, 204)
        for whole in (False, True):  # an hour later
            await server.bus.client.delete(server.bus.cell.use(run_of(named) or "", 0, with_optimizer=whole))

        async def has_left_too() -> bool:
            return not await keys_of(server, named)

        await until(has_left_too, 60)


async def test_a_tenant_has_so_many_runs_with_those_that_have_ended(
    client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_runs, "MAX_KEPT", 2)
    session = await client.session()
    for number in range(2):
        await client.run(session, number)
    refused = await client.post("create_model", session_id=session, model_seq_id=2, base_model="tiny")
    assert refused.status_code == 400 and "forgotten seven days after their end" in refused.json()["error"]["message"]


# ---- operations -----------------------------------------------------------------------------------------------------


async def test_what_a_tenants_runs_hold_has_a_limit_that_a_step_ends(
    server: ApiServer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_records, "LEAST_HELD", 4000)
    monkeypatch.setattr(operation_store, "MAX_HELD_BYTES", 26_000)
    session = await client.session()
    async with owned_runs(server):
        first, second = await client.run(session, 0), await client.run(session, 1)
        seq = 6
        for run, number in ((second, 1), *((first, number) for number in range(1, seq + 1))):
            answer = await client.send(
                pass_over(run, number, num_tokens=200)
            )  # above the limit too: `first` holds the most
            assert answer.status_code == 200, answer.text
            # answered, and yet held: their gradient waits for its step
            assert (await client.retrieve(answer.json()["request_id"])).status_code == 200
        refused = await client.send(pass_over(second, 2, num_tokens=200))
        assert refused.status_code == 429 and "call optim_step" in refused.json()["error"]["message"]
        large = await client.send(pass_over(second, 3, num_tokens=2000, num_data=60))
        assert large.status_code == 200, "its future says what is wrong with it"
        assert await server.api.objects.paths(f"payloads/{run_of(second)}") == []
        other = await client_of(server, "acme")
        theirs = await other.run(await other.session())
        assert (await other.send(pass_over(theirs, 1, num_tokens=200))).status_code == 200
        await client.done("optim_step", model_id=first, seq_id=seq + 1, adam_params={})
        assert (await client.send(pass_over(second, 2, num_tokens=200))).status_code == 200
        for run in (first, second):
            await client.done("unload_model", model_id=run)
        assert await server.bus.client.hgetall(server.bus.cell.held("default")) == {}


async def test_while_redis_is_almost_full_a_run_sends_data_one_by_one_and_its_step_goes_through(
    server: ApiServer, client: TinkerClient
) -> None:
    run, redis = await client.run(await client.session(), 0), server.bus.client
    await redis.set("ballast", bytes(16 << 20))  # beside which clients' buffers, which do not count, are small

    async def is_almost_full() -> bool:
        await redis.config_set("maxmemory", int((await redis.info("memory"))["used_memory"] / 0.9))
        return await server.api.bases["tiny"].gauge.used() > MAX_USED_FOR_NEW

    try:
        await until(is_almost_full)
        refused = await client.send(pass_over(run, 2, num_tokens=20))
        assert refused.status_code == 503 and "takes no new work" in refused.json()["error"]["message"]
        assert (await client.send(pass_over(run, 1, num_tokens=20))).status_code == 200
        assert (await client.post("optim_step", model_id=run, seq_id=3, adam_params={})).status_code == 200
    finally:
        await redis.config_set("maxmemory", 0)
        await redis.delete("ballast")


@pytest.mark.parametrize(("least", "most"), [(0, 6000), (1000, 3000)])
async def test_one_step_has_so_many_bytes_and_small_operations_count_for_more(
    server: ApiServer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch, least: int, most: int
) -> None:
    monkeypatch.setattr(run_records, "LEAST_HELD", least)
    monkeypatch.setattr(operation_store, "MAX_HELD_BYTES", most)
    async with owned_runs(server):
        run = await client.run(await client.session())
        told: list[str] = []
        for seq in range(1, 8):
            sent = await client.send(pass_over(run, seq, num_tokens=200))
            told.append(result_of(await client.retrieve(sent.json()["request_id"])).get("error", ""))
        assert told[0] == "" and any("call optim_step before this one" in fault for fault in told)
        for seq in (8, 9):
            step = await client.post("optim_step", model_id=run, seq_id=seq, adam_params={})
            told.append(result_of(await client.retrieve(step.json()["request_id"])).get("error", ""))
        assert "not whole" in told[-2] and told[-1] == ""


async def test_more_data_than_wait_at_once_are_told_to_come_again_though_no_step_is_in_between(
    server: ApiServer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_records, "LEAST_HELD", 1000)
    monkeypatch.setattr(operation_store, "MAX_HELD_BYTES", 3000)
    run = await client.run(await client.session())
    passes = [pass_over(run, seq, is_forward=True) for seq in range(1, 5)]
    assert [(await client.send(each)).status_code for each in passes] == [200, 200, 200, 429]
    async with owned_runs(server):
        for seq in (1, 2, 3):
            await client.retrieve(f"{run_of(run)}:{seq}")
        answer = await client.send(passes[3])
        assert answer.status_code == 200, answer.text
        assert "error" not in result_of(await client.retrieve(answer.json()["request_id"]))


async def test_a_run_has_so_many_checkpoints(
    server: ApiServer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_records, "MAX_CHECKPOINTS", 2)
    async with owned_runs(server):
        run = await client.run(await client.session())

        async def save(seq: int, name: str) -> dict[str, Any]:
            return await client.done("save_weights", model_id=run, seq_id=seq, path=name)

        assert [("error" in await save(seq, name)) for seq, name in enumerate("abb", 1)] == [False] * 3
        refused = await save(4, "c")
        assert "tinker checkpoint delete" in refused["error"] and "ttl" in refused["error"]
        assert (await client.delete(f"training_runs/{run}/checkpoints/weights/a")).status_code in (200, 204)
        assert "error" not in await save(5, "c")


async def test_lists_read_each_run_in_a_round_of_the_event_loop_of_its_own(
    server: ApiServer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[str] = []

    async def taken(self: Rounds, tenant: str) -> None:
        rounds.append(tenant)

    session = await client.session()
    for number in range(3):
        await client.run(session, number)
    monkeypatch.setattr(Rounds, "next", taken)
    for name in ("training_runs", "checkpoints", "billing/usage/checkpoints/current"):
        assert (await client.get(name)).status_code == 200
    assert rounds == ["default"] * 9


async def test_an_operation_of_too_many_positions_fails_and_says_how_to_send_them(
    server: ApiServer, client: TinkerClient
) -> None:
    async with standing_in(server.bus):
        run = await client.run(await client.session())
        sent = await client.send(pass_over(run, 1, num_tokens=2048, num_data=129))
        failed = (await client.retrieve(sent.json()["request_id"])).json()
        assert "264,192 positions in one operation are too many: at most 262,144" in failed["error"]
        assert failed["category"] == "user"
        sent = await client.send(pass_over(run, 2, num_tokens=2048, num_data=100))
        assert "error" not in result_of(await client.retrieve(sent.json()["request_id"]))


async def test_a_pass_may_be_larger_than_other_bodies(
    server: ApiServer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with standing_in(server.bus):
        run = await client.run(await client.session())
        large = pass_over(run, 1, num_tokens=2000, num_data=240)
        assert len(large) > body_limit.MAX_BODY_BYTES
        assert (await client.send(large)).status_code == 200
        assert (await client.send(bytes(17 << 20))).status_code == 413
        assert (await client.post("asample", prompt="x" * (5 << 20))).status_code == 413
        monkeypatch.setattr(body_limit, "MAX_PASSING_BYTES", 1 << 20)
        refused = await client.send(pass_over(run, 2, num_tokens=2000, num_data=120))
        assert refused.status_code == 429 and "under way" in refused.json()["error"]["message"]
        assert (await client.send(pass_over(run, 2))).status_code == 200


async def test_whoever_waits_behind_an_operation_that_never_came_is_told(
    server: ApiServer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "WAIT_S", 0.5)
    async with standing_in(server.bus):
        run = await client.run(await client.session())
        sent = await client.send(pass_over(run, 2))
        waits = await client.retrieve(sent.json()["request_id"])
        assert waits.status_code == 408
        assert "operation 1 of the run has not come" in waits.json()["queue_state_reason"]


async def test_the_samplers_that_expire_the_soonest_are_forgotten(
    server: ApiServer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samplers of saves go before those of base models."""
    monkeypatch.setattr(run_records, "MAX_KEPT", 3)
    session = await client.session()
    body: dict[str, Any] = {"session_id": session, "base_model": "tiny"}
    named = [
        (await client.post("create_sampling_session", **body, sampling_session_seq_id=number)).json()
        for number in range(2)
    ]
    async with owned_runs(server):
        run = await client.run(session)
        for seq in (1, 2, 3):
            saved = {"sampling_session_seq_id": 10 + seq, "kind": "inflight" if seq < 3 else "snapshot"}
            await client.done("save_weights_for_sampler", model_id=run, seq_id=seq, **saved)
        assert (await client.get(f"samplers/{named[0]['sampling_session_id']}")).status_code == 200  # it is used
        await client.post("create_sampling_session", **body, sampling_session_seq_id=2)
        await client.post("create_sampling_session", **body, sampling_session_seq_id=3)
        kept = (await client.get(f"sessions/{session}")).json()["sampler_ids"]
        assert set(kept) == {f"{session}:sample:{number}" for number in (0, 2, 3)}
        found = [(await client.get(f"samplers/{session}:sample:{number}")).status_code for number in (0, 1, 2, 3, 13)]
        assert found == [200, 404, 200, 200, 404]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [104]}]}
        gone: dict[str, Any] = {"prompt": prompt, "sampling_params": {"max_tokens": 1}}
        asked = await client.post("asample", **gone, sampling_session_id=f"{session}:sample:11", seq_id=0)
        assert asked.status_code == 404 and "save again" in asked.json()["error"]["message"]
        other = await client_of(server, "acme")
        theirs = {"session_id": await other.session(), "sampling_session_seq_id": 0, "base_model": "tiny"}
        assert (await other.post("create_sampling_session", **theirs)).status_code == 200
        assert len((await client.get(f"sessions/{session}")).json()["sampler_ids"]) == 3
