"""Futures and the numbers of operations, over real HTTP and a real Redis; a stand-in for the owner."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.bus import payloads
from common.wire.messages import f32
from common.wire.operations import OperationsAnswered, Outputs
from harness.redis_server import RedisServer
from manager_service.http.stores import operation_store
from manager_service.http.tinker import operations, retrieval
from manager_service.http.tinker.futures import operation_futures
from manager_service.http.tinker.wire import protobuf, tinker_pb2
from manager_service.records import run_records
from manager_service.records.run_records import RunState, run_of
from tests.manager.test_api_cluster import report, tell, until
from tests.support.api_server import ApiServer, running_api
from tests.support.standin_runs import StandInRuns, standing_in
from tests.support.tinker_client import TinkerClient, client_of, pass_over, result_of

SHORT_S = 0.2


@pytest.fixture
async def run(client: TinkerClient) -> str:
    return await client.run(await client.session())


def future(run: str, seq: int) -> str:
    return f"{run_of(run)}:{seq}"


# ---- waiting --------------------------------------------------------------------------------------------------------


async def test_a_result_that_takes_long_is_asked_for_again(
    server: ApiServer, client: TinkerClient, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "WAIT_S", SHORT_S)
    await client.send(pass_over(run, 1))
    waits = await client.retrieve(future(run, 1))
    told = {"type": "try_again", "request_id": future(run, 1), "queue_state": "paused_capacity"}
    assert (waits.status_code, waits.json()["queue_state"]) == (408, "paused_capacity")
    state = RunState(status="ready", version=0)
    await server.bus.client.hset(server.bus.cell.run(run_of(run) or ""), mapping=state.fields())
    assert (await client.retrieve(future(run, 1))).json() == told | {"queue_state_reason": "no trainer worker is there"}
    await tell(server.bus, report("t", "trainer"))
    await until(server, 1)
    waits = (await client.retrieve(future(run, 1))).json()
    assert waits == told | {"queue_state": "active", "queue_state_reason": None}
    await server.bus.client.hset(server.bus.cell.stored("default"), "total", 1 << 40)
    waits = (await client.retrieve(future(run, 1))).json()
    assert waits["queue_state"] == "paused_capacity" and "delete files, models" in waits["queue_state_reason"]


async def test_who_waits_is_woken_when_the_result_is_there(server: ApiServer, client: TinkerClient, run: str) -> None:
    await client.send(pass_over(run, 1))
    waiting = asyncio.create_task(client.retrieve(future(run, 1)))
    async with asyncio.timeout(60):
        while not server.tinker.futures["tiny"].answered._waiting:  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0.01)
        async with standing_in(server.bus):
            found = await waiting
    outputs = Outputs((f32([-0.5] * 3),), {"loss:sum": 3.0})
    assert (found.headers["content-type"], found.content) == (protobuf.CONTENT_TYPE, protobuf.write_outputs(outputs))


async def test_redis_has_no_more_to_do_while_many_wait(server: ApiServer, client: TinkerClient, run: str) -> None:
    bus, answered = server.bus, server.tinker.futures["tiny"].answered
    waiting: dict[Any, Any] = answered._waiting  # pyright: ignore[reportPrivateUsage]
    for seq in range(1, 31):
        await client.send(pass_over(run, seq))
    tasks = [asyncio.create_task(client.retrieve(future(run, seq))) for seq in range(1, 31)]
    async with asyncio.timeout(60):
        while len(waiting) < 30:
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)  # the last of them have looked once
    before = (await bus.client.info("stats"))["total_commands_processed"]
    await asyncio.sleep(1.0)
    during = (await bus.client.info("stats"))["total_commands_processed"] - before
    assert during < 30  # the loops of an idle API
    async with standing_in(bus), asyncio.timeout(120):
        found = await asyncio.gather(*tasks)
    assert {answer.status_code for answer in found} == {200}


async def test_an_announcement_wakes_only_those_whose_number_it_names(server: ApiServer) -> None:
    answered, run = server.tinker.futures["tiny"].answered, "run-0123456789abcdef-0"
    message = OperationsAnswered(id="x", tenant="default", job=run, partition=0, seqs=(2, 3))
    with answered.of(run, 1) as first, answered.of(run, 2) as second, answered.of("run-0-1", 3) as other:
        await server.bus.broadcast(server.bus.cell.done, message, keep_s=60)
        async with asyncio.timeout(60):
            await second.wait()
        assert not first.is_set() and not other.is_set()


async def test_a_client_that_waits_hears_no_error_while_redis_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "WAIT_S", SHORT_S)
    monkeypatch.setattr(retrieval, "HOLD_S", SHORT_S)
    (tmp_path / "redis").mkdir()
    redis = RedisServer.start(tmp_path / "redis")
    try:
        async with running_api(redis.url, tmp_path / "data") as server:
            client = await client_of(server)
            run = await client.run(await client.session())
            await client.send(pass_over(run, 1))
            redis.stop()
            waits = await client.retrieve(future(run, 1))
            assert (waits.status_code, waits.json()["queue_state"]) == (408, "paused_capacity")
            assert (await client.send(pass_over(run, 2))).status_code == 503
            redis.restart()
            assert (await client.retrieve(future(run, 1))).json()["type"] == "try_again"
    finally:
        redis.stop()


async def test_a_result_that_is_gone_is_not_waited_for(
    server: ApiServer, client: TinkerClient, run: str, owner: StandInRuns
) -> None:
    await client.send(pass_over(run, 1))
    assert (await client.retrieve(future(run, 1))).status_code == 200
    await server.bus.client.delete(server.bus.cell.results(run_of(run) or ""))
    assert (await client.retrieve(future(run, 1))).status_code == 410
    assert (await client.retrieve(future(run, 2))).status_code == 404


async def test_results_of_a_run_that_ended_an_hour_ago_are_gone_and_others_never_were(
    server: ApiServer, client: TinkerClient, run: str, owner: StandInRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seq in (1, 2):
        await client.send(pass_over(run, seq))
        assert (await client.retrieve(future(run, seq))).status_code == 200
    cell, redis, name = server.bus.cell, server.bus.client, run_of(run) or ""
    await redis.hset(cell.run(name), mapping=RunState(status="ended", version=0, head=3).fields())
    for key in (cell.results(name), cell.seqs(name)):  # what expires an hour after a run's end
        await redis.delete(key)
    told = [(await client.retrieve(future(run, seq))).status_code for seq in range(4)]
    assert told == [410, 410, 410, 404]


async def test_a_number_that_was_passed_over_is_of_no_request_and_one_of_long_ago_is_gone(
    server: ApiServer, client: TinkerClient, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation_futures, "NUM_SEQS_KEPT", 2)
    cell, name = server.bus.cell, run_of(run) or ""
    await server.bus.client.hset(cell.run(name), mapping=RunState(status="ready", version=0, head=5).fields())
    await server.bus.client.hset(cell.seqs(name), "last", 4)
    told = [(await client.retrieve(future(run, seq))).status_code for seq in (1, 2, 3)]
    assert told == [410, 410, 404]


# ---- creation -------------------------------------------------------------------------------------------------------


async def test_a_run_is_created_once(server: ApiServer, client: TinkerClient, owner: StandInRuns) -> None:
    session = await client.session()
    body = {"session_id": session, "model_seq_id": 3, "base_model": "Acme/tiny", "lora_config": {"rank": 4, "seed": 7}}
    first, again = await client.post("create_model", **body), await client.post("create_model", **body)
    assert first.json() == again.json()
    made = await client.retrieve(first.json()["request_id"])
    assert made.json() == {"model_id": f"{session}:train:3", "type": "create_model"}
    info = (await client.post("get_info", model_id=made.json()["model_id"])).json()
    assert (info["model_data"]["model_name"], info["lora_rank"]) == ("Acme/tiny", 4)
    assert Path(info["model_data"]["tokenizer_id"]).is_dir()
    (spec,) = owner.created
    assert (spec.public_id, spec.asked_model, spec.seed) == (f"{session}:train:3", "Acme/tiny", 7)
    assert (spec.lora.rank, spec.lora.alpha) == (4, 32.0)
    other = await client.post("create_model", **body | {"lora_config": {"rank": 8}})
    assert other.status_code == 400 and "with other arguments" in other.json()["error"]["message"]


async def test_a_run_that_cannot_be_created_says_why(server: ApiServer, client: TinkerClient) -> None:
    async with standing_in(server.bus, refuses="the rank is too large"):
        run = await client.run(await client.session())
        told = (await client.retrieve(future(run, 0))).json()
    assert told == {"error": "the rank is too large", "category": "user"}
    late = await client.send(pass_over(run, 1))
    assert late.status_code == 404 and "could not be created" in late.json()["error"]["message"]


# ---- numbers --------------------------------------------------------------------------------------------------------


async def test_a_large_operation_that_comes_again_leaves_nothing_in_the_store(
    server: ApiServer, client: TinkerClient, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "CLAIM_CHECK_BYTES", 64)
    answers = await asyncio.gather(*(client.send(pass_over(run, 1)) for _ in range(4)))
    assert {answer.status_code for answer in answers} == {200}
    assert len(await server.api.objects.paths(f"payloads/{run_of(run)}")) == 1


async def test_the_same_operation_is_taken_once_and_another_not_under_its_number(
    server: ApiServer, client: TinkerClient, run: str
) -> None:
    first, again = await client.send(pass_over(run, 1)), await client.send(pass_over(run, 1))
    assert (first.status_code, first.json()) == (200, again.json())
    assert first.json() == {"request_id": future(run, 1), "model_id": run}
    for other in (
        await client.send(pass_over(run, 1, token=2)),
        await client.post("optim_step", model_id=run, seq_id=1, adam_params={}),
    ):
        assert (other.status_code, other.headers["x-should-retry"]) == (400, "false")
        assert "the seq_id 1 is taken" in other.json()["error"]["message"]
    async with standing_in(server.bus) as owner:
        await client.retrieve(future(run, 1))
        assert [operation.seq for operation in owner.seen] == [1]
        late = await client.send(pass_over(run, 1))
        assert late.json() == first.json()


@pytest.mark.parametrize("seq", [0, -1])
async def test_operations_are_numbered_from_one(client: TinkerClient, run: str, seq: int) -> None:
    assert (await client.send(pass_over(run, seq))).status_code == 400


async def test_the_first_open_operation_is_taken_when_no_more_are(
    client: TinkerClient, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_records, "LEAST_HELD", 0)
    monkeypatch.setattr(operation_store, "MAX_OPEN", 4)
    statuses = [(await client.send(pass_over(run, seq))).status_code for seq in (2, 3, 4, 5, 6)]
    assert statuses == [200, 200, 200, 429, 429]
    assert (await client.send(pass_over(run, 1))).status_code == 200
    monkeypatch.setattr(operation_store, "MAX_OPEN", 100)
    monkeypatch.setattr(operation_store, "MAX_HELD_BYTES", 5000)
    assert (await client.post("optim_step", model_id=run, seq_id=5, adam_params={})).status_code == 200
    statuses = [(await client.send(pass_over(run, seq, num_tokens=100))).status_code for seq in range(6, 16)]
    assert statuses[0] == 200 and statuses[-1] == 429, "there is room again once the step is done"


async def test_numbers_are_not_remembered_for_ever(
    server: ApiServer, client: TinkerClient, run: str, owner: StandInRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operation_store, "NUM_SEQS_KEPT", 4)
    for seq in range(1, 11):
        await client.send(pass_over(run, seq))
        assert (await client.retrieve(future(run, seq))).status_code == 200
    numbers = await server.bus.client.hkeys(server.bus.cell.seqs(run_of(run) or ""))
    assert {int(number) for number in numbers if number != b"last"} == {0, *range(7, 11)}


async def test_a_run_ends_behind_all_its_operations(
    server: ApiServer, client: TinkerClient, run: str, owner: StandInRuns
) -> None:
    await client.send(pass_over(run, 1))
    ended, again = await client.post("unload_model", model_id=run), await client.post("unload_model", model_id=run)
    assert ended.json() == again.json() == {"request_id": future(run, 2), "model_id": run}
    assert (await client.retrieve(future(run, 2))).json() == {"model_id": run, "type": "unload_model"}
    late = await client.send(pass_over(run, 3))
    assert late.status_code == 404 and "has ended" in late.json()["error"]["message"]


# ---- data -----------------------------------------------------------------------------------------------------------


async def test_a_large_pass_is_read_in_a_helper_process(client: TinkerClient, run: str, owner: StandInRuns) -> None:
    body = pass_over(run, 1, num_tokens=100, num_data=1500)
    assert len(body) > 1 << 20
    assert (await client.send(body)).status_code == 200
    found = tinker_pb2.ForwardBackwardOutput.FromString((await client.retrieve(future(run, 1))).content)
    assert found.metrics == {"loss:sum": 150_000.0} and found.loss_fn_outputs[0].num_datums == 1500


async def test_older_clients_are_told_what_to_install(client: TinkerClient, run: str, owner: StandInRuns) -> None:
    """They send JSON. It fails in its turn, so that it leaves no hole in the numbers."""
    for name, key, seq in (("forward_backward", "forward_backward_input", 1), ("forward", "forward_input", 2)):
        sent = await client.post(name, **{"model_id": run, "seq_id": seq, key: {"data": [], "loss_fn": "ppo"}})
        assert "install tinker 0.24.1 or newer" in result_of(await client.retrieve(sent.json()["request_id"]))["error"]
    assert (await client.send(pass_over(run, 3))).status_code == 200
    assert "metrics" in result_of(await client.retrieve(future(run, 3)))


async def test_what_the_model_cannot_read_fails_in_its_turn(
    client: TinkerClient, run: str, owner: StandInRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "MAX_POSITIONS", 2500)
    passes = [
        (pass_over(run, 1, num_tokens=1500, num_data=2), "3,000 positions in one operation are too many"),
        (pass_over(run, 2, num_tokens=2049), "the context of 'tiny' is 2048"),
        (pass_over(run, 3, token=70_000), "there is no token 70000"),
    ]
    for seq, (body, fault) in enumerate(passes, start=1):
        assert (await client.send(body)).status_code == 200
        told = (await client.retrieve(future(run, seq))).json()
        assert told["category"] == "user" and fault in told["error"]
    told = await client.done("optim_step", model_id=run, seq_id=4, adam_params={"learning_rate": 1e-3})
    assert told["error"] == "operation 3 of this step failed"
    assert all(operation.payload == b"" for operation in owner.seen[:2])


async def test_a_sample_that_is_to_end_with_a_token_outside_the_vocabulary_is_refused(
    server: ApiServer, client: TinkerClient
) -> None:
    size = server.api.bases["tiny"].tokenizer.vocab_size
    asked: dict[str, Any] = {"base_model": "tiny", "prompt": {"chunks": [{"tokens": [104]}]}}
    for stop, status in (([1, size], 400), ([2**64], 400), ([1, size - 1], 200)):
        answer = await client.post("asample", **asked, sampling_params={"max_tokens": 1, "stop": stop})
        assert answer.status_code == status, answer.text
        assert status == 200 or "sampling_params.stop" in answer.text


STEPS: list[tuple[dict[str, Any], str]] = [
    ({"adam_params": {"learning_rat": 1.0}}, "adam_params has no 'learning_rat'; did you mean 'learning_rate'?"),
    ({"adam_params": {"beta1": 1.0}}, "beta1 cannot be 1"),
    ({"adam_params": {"eps": "small"}}, "eps must be a number"),
    ({"adam_params": {"eps": 10**400}}, "eps must be a number"),
    ({"optimizer_params": {"type": "dimuon", "learning_rate": 1.0}}, "the optimizer 'dimuon' is not offered"),
]


@pytest.mark.parametrize(("body", "told"), STEPS)
async def test_a_step_that_makes_no_sense_fails(
    client: TinkerClient, run: str, owner: StandInRuns, body: dict[str, Any], told: str
) -> None:
    assert told in (await client.done("optim_step", model_id=run, seq_id=1, **body))["error"]


async def test_a_step_has_tinkers_defaults(client: TinkerClient, run: str, owner: StandInRuns) -> None:
    assert (await client.done("optim_step", model_id=run, seq_id=1, adam_params={"grad_clip_norm": 2.0}))["metrics"][
        "version"
    ] == 1.0
    assert msgspec.msgpack.decode(owner.seen[0].payload) == {
        "learning_rate": 1e-4,
        "weight_decay": 0.0,
        "grad_clip": 2.0,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
    }
