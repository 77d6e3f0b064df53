"""Redis' users against real servers: each service can do its work, and nothing else."""

import asyncio
import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from common.bus.bus import Bus, Idle, Progress
from common.bus.fullness import memory_used
from common.bus.streams import GROUP_ROLLOUT, Cell
from common.peers.convoys import Convoy
from common.peers.holders import STORE, Holders
from common.peers.server import Offer
from common.pool.looking import Lookout
from common.store.known_store import recognised
from common.store.parts import StoredFile
from common.store.store_folder import IDENTITY, StoreFolder
from common.worker.own_streams import OwnStreams
from deploy.acl import SERVICES, USERS, acl_file
from harness.live import Api, is_balanced
from harness.redis_server import RedisServer, find_valkey
from manager_service.launcher.embedded_redis import find_server
from manager_service.launcher.supervisor import ServiceCommand
from manager_service.records.receivers import LOGGERS
from rollout_service.settings import RolloutSettings
from tests.common.test_bus import start
from tests.manager.test_export import create, exporter, nothing_waits, until
from tests.support.api_server import running_api, running_jobs
from tests.support.forked import running
from tests.support.processes import restart
from tests.support.standin_runs import standing_in
from tests.support.tinker_client import client_of, pass_over

CELL = Cell("tiny")
PASSWORDS = {user: [f"{user}-password"] for user in USERS}


on_valkey = pytest.mark.parametrize("server", [7], indirect=True)
"""Marks tests of whole services: its rules are the stricter ones, and each takes seconds."""


@pytest.fixture(params=[6, 7])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    """The embedded Redis 6.2, and a Valkey: since Redis 7 a key's readers and its writers can be told apart."""
    program = find_server() if request.param == 6 else find_valkey()
    file = tmp_path / "users.acl"
    file.write_text(acl_file(PASSWORDS, ["tiny"], redis_version=request.param))
    server = RedisServer.start(tmp_path, program=program, options=("--aclfile", str(file)))
    yield server
    server.stop()


def client(server: RedisServer, user: str) -> "redis.Redis":
    return redis.Redis(port=server.port, username=user, password=PASSWORDS[user][0])


def allowed(server: RedisServer, user: str, *command: str) -> bool:
    """Says whether Redis would do it; other errors of the command do not count."""
    with client(server, user) as connection:
        try:
            connection.execute_command(*command)
        except NoPermissionError:
            return False
        except ResponseError as error:
            refusals = ("executing the script", "can't access", "ACL failure in script")
            return not any(refusal in str(error) for refusal in refusals)
        return True


OTHERS_KEYS = {
    "env": [
        CELL.train,
        CELL.job("j"),
        CELL.jobs(3),
        CELL.adapters(3),
        "marlaas:{@}:keys",
        "marlaas:{@}:tenants",
        CELL.lease(1),
    ],
    "exporter": [
        CELL.env,
        CELL.scored(3),
        CELL.lease(1),
        CELL.usage("acme"),
        "marlaas:{@}:keys",
        "marlaas:{@}:tenants",
    ],
    "rollout": [CELL.train, CELL.job("j"), CELL.jobs(3), CELL.adapters(3), "marlaas:{@}:keys", CELL.usage("acme")],
    "trainer": [CELL.env, CELL.rollout, CELL.scored(3), CELL.job("j"), CELL.ledger("j"), "marlaas:{@}:keys"],
}


@pytest.mark.parametrize("user", OTHERS_KEYS)
def test_a_worker_can_neither_read_nor_write_what_is_not_its_own(server: RedisServer, user: str) -> None:
    for key in OTHERS_KEYS[user]:
        for command in (["XADD", key, "*", "a", "b"], ["XREAD", "STREAMS", key, "0"], ["XDEL", key, "1-1"]):
            assert not allowed(server, user, *command), command
        for script in ("return redis.call('XADD', KEYS[1], '*', 'a', 'b')", "return redis.call('HGETALL', KEYS[1])"):
            assert not allowed(server, user, "EVAL", script, "1", key)
            own = {"env": CELL.env, "exporter": CELL.exports, "rollout": CELL.rollout, "trainer": CELL.train}[user]
            smuggled = script.replace("KEYS[1]", "ARGV[1]")
            assert not allowed(server, user, "EVAL", smuggled, "1", own, key)


@pytest.mark.parametrize("user", ["env", "rollout", "trainer", "exporter", "manager"])
def test_no_service_may_administer_redis(server: RedisServer, user: str) -> None:
    for command in (["FLUSHALL"], ["CONFIG", "GET", "*"], ["ACL", "LIST"], ["KEYS", "*"], ["SHUTDOWN"], ["MONITOR"]):
        assert not allowed(server, user, *command), command


def test_workers_publish_and_settle_what_is_theirs(server: RedisServer) -> None:
    assert allowed(server, "env", "XADD", CELL.scored(15), "*", "a", "b")
    assert allowed(server, "env", "XGROUP", "CREATE", CELL.env, "env", "0", "MKSTREAM")
    assert allowed(server, "rollout", "XADD", CELL.reply("someone"), "NOMKSTREAM", "*", "a", "b")
    assert allowed(server, "rollout", "XGROUP", "CREATE", CELL.rollout_chat, "rollout", "0", "MKSTREAM")
    assert not allowed(server, "env", "XADD", CELL.rollout_chat, "*", "a", "b")
    assert allowed(server, "rollout", "XREAD", "STREAMS", CELL.adapters_new, "0")
    assert allowed(server, "trainer", "XADD", CELL.adapters(0), "*", "a", "b")
    assert allowed(server, "trainer", "XGROUP", "CREATE", CELL.trainer("w"), "trainer", "0", "MKSTREAM")
    assert allowed(server, "manager", "SISMEMBER", CELL.active(0), "job")
    assert allowed(server, "scaler", "XLEN", CELL.rollout)
    assert not allowed(server, "scaler", "XADD", CELL.rollout, "*", "a", "b")


@pytest.mark.parametrize("user", SERVICES)
async def test_each_service_finds_out_whether_its_store_is_the_cells(
    server: RedisServer, tmp_path: Path, user: str
) -> None:
    url = f"redis://{user}:{user}-password@127.0.0.1:{server.port}/0"
    async with asyncio.timeout(60):
        await recognised(StoreFolder(tmp_path / "store"), url, ["tiny"], pytest.fail)
    with client(server, "operator") as operator:
        assert operator.get(CELL.store) == (tmp_path / "store" / IDENTITY).read_bytes().strip()


async def test_only_rollout_workers_find_each_other_and_know_what_opens_their_files(server: RedisServer) -> None:
    offer = Offer(StoredFile("a" * 64, 1, ("b" * 64,)), Path())
    for user in ("rollout", *(other for other in SERVICES if other not in ("rollout", "manager"))):
        bus = Bus.connect(f"redis://{user}:{user}-password@127.0.0.1:{server.port}/0", CELL)
        holders = Holders(bus, "w", store_places=1)
        holders.address = "127.0.0.1:7600"
        try:
            with pytest.raises(ResponseError) if user != "rollout" else contextlib.nullcontext():
                assert await holders.join(offer, []) == (STORE, "")
                await holders.renew([offer])
                await holders.leave([offer])
                assert (await Convoy(bus, "w", holders.address, 2).enter()) == 0
        finally:
            await bus.close()
        assert allowed(server, user, "GET", CELL.peer_key) == (user == "rollout")
        assert allowed(server, user, "HGETALL", CELL.holders("a")) == (user == "rollout")


@pytest.mark.parametrize("user", ["env", "rollout", "trainer"])
async def test_a_pool_worker_looks_and_enters_with_its_own_rights(server: RedisServer, user: str) -> None:
    bus = Bus.connect(f"redis://{user}:{user}-password@127.0.0.1:{server.port}/0", CELL)
    with client(server, "operator") as operator:
        (stream, group) = next(each for each in CELL.work if each[1] == user)
        operator.xgroup_create(stream, group, mkstream=True)
        operator.xadd(stream, {"a": "b"})
        operator.hset(CELL.weights, "1", "2")
    lookout = Lookout({"tiny": bus}, user, f"{user}-0", 1.0)
    try:
        unread = (await lookout.look({"tiny": f"{user}-x"}))["tiny"]
        assert (unread.num, unread.weight) == (1, 2.0)
        assert await lookout.enter("tiny", unread, 4)
        await lookout.stay("tiny", opening=True)
        await lookout.leave("tiny")
    finally:
        await bus.close()


async def test_a_rollout_worker_keeps_progress_with_its_own_rights(server: RedisServer) -> None:
    bus = Bus.connect(f"redis://rollout:rollout-password@127.0.0.1:{server.port}/0", CELL)
    try:
        await bus.ensure_group(CELL.rollout, GROUP_ROLLOUT)
        with client(server, "operator") as operator:
            operator.xadd(CELL.rollout, {"payload": "x"})
        (held,) = await bus.read([CELL.rollout], GROUP_ROLLOUT, "w", count=1)
        assert await memory_used(bus) == 0.0
        for begin in (2, 4):
            new = {held.entry: Progress(b"1.", begin, b"xx")}
            assert await bus.renew(CELL.rollout, GROUP_ROLLOUT, "w", [held.entry], new) == 1
        idle = await bus.find_idle(CELL.rollout, GROUP_ROLLOUT, min_idle_ms=0)
        assert idle == [Idle(held.entry, 1, advanced=True)]
        with client(server, "operator") as operator:
            assert operator.get(CELL.partial(CELL.rollout, held.entry)) == b"1.xxxx"
            assert [entry for entry in operator.acl_log() if "client" not in str(entry["object"])] == []
    finally:
        await bus.close()


async def test_a_rollout_worker_has_its_own_streams_with_its_own_rights(server: RedisServer) -> None:
    gone, heir_name = "rollout-gone", "rollout-heir"
    urls = [f"redis://{user}:{user}-password@127.0.0.1:{server.port}/0" for user in ("rollout", "env")]
    rollout, env = (Bus.connect(url, CELL) for url in urls)
    inboxes = RolloutSettings().inboxes(CELL, gone)[1:]
    own = OwnStreams(rollout, gone, inboxes, lease_s=0.0)
    try:
        await rollout.ensure_group(CELL.rollout_first, GROUP_ROLLOUT)
        await own.begin()
        await env.publish([(CELL.rollout_worker(gone), start(n)) for n in range(2)])
        found = await rollout.read_in_order([CELL.rollout_worker(gone)], GROUP_ROLLOUT, gone, count=1, tells=own.tells)
        assert len(found) == 1
        heir = OwnStreams(rollout, heir_name, RolloutSettings().inboxes(CELL, heir_name)[1:], lease_s=1.0)
        await asyncio.sleep(0.01)
        await heir.begin()
        assert [inbox.stream for inbox in heir.pending()] == [CELL.rollout_worker(who) for who in (heir_name, gone)]
        with client(server, "operator") as operator:
            assert [operator.xlen(stream) for stream in (CELL.rollout_worker(gone), CELL.rollout_first)] == [1, 1]
            assert [entry for entry in operator.acl_log() if "client" not in str(entry["object"])] == []
    finally:
        await rollout.close()
        await env.close()


def test_redis_7_keeps_reading_and_appending_apart(server: RedisServer) -> None:
    with client(server, "operator") as operator:
        version = int(str(operator.info("server")["redis_version"]).split(".")[0])
    readable = allowed(server, "env", "XREAD", "STREAMS", CELL.scored(0), "0")
    writable = allowed(server, "env", "XADD", CELL.control, "*", "a", "b")
    assert (readable, writable) == ((True, True) if version < 7 else (False, False))


def test_nobody_comes_in_without_a_password_and_both_of_two_are_valid(server: RedisServer, tmp_path: Path) -> None:
    with redis.Redis(port=server.port) as nobody, pytest.raises(AuthenticationError):
        nobody.ping()
    version = 6 if "%" not in (tmp_path / "users.acl").read_text() else 7
    rotating = {**PASSWORDS, "env": ["env-password", "new"]}
    (tmp_path / "users.acl").write_text(acl_file(rotating, ["tiny"], redis_version=version))
    with client(server, "operator") as operator:
        operator.acl_load()
    for password in rotating["env"]:
        with redis.Redis(port=server.port, username="env", password=password) as connection:
            assert connection.ping()


def test_a_restart_brings_back_what_scripts_wrote(server: RedisServer) -> None:
    """Redis replays its append-only file as the user `default`, and leaves out what that one may not do."""
    write_both = "redis.call('SET', KEYS[1], 'a'); redis.call('SET', KEYS[2], 'b')"
    with client(server, "manager") as manager:
        manager.eval(write_both, 2, "marlaas:one", "marlaas:two")
    server.stop()
    server.restart()
    with client(server, "manager") as manager:
        assert manager.mget("marlaas:one", "marlaas:two") == [b"a", b"b"]
    with redis.Redis(port=server.port) as nobody, pytest.raises(AuthenticationError):
        nobody.get("marlaas:one")


def test_a_base_model_is_a_name_and_not_a_pattern() -> None:
    text = acl_file({"env": ["p"]}, ["a*b"], redis_version=7)
    assert "~marlaas:{a\\*b}:env" in text and "~marlaas:{a*b}:env" not in text


async def test_the_manager_serves_the_tinker_protocol_with_its_own_rights(server: RedisServer, tmp_path: Path) -> None:
    url = f"redis://manager:{PASSWORDS['manager'][0]}@127.0.0.1:{server.port}/0"
    async with running_api(url, tmp_path / "data") as api, standing_in(api.bus):
        tinker = await client_of(api)
        session = await tinker.session()
        await tinker.post("session_heartbeat", session_id=session)
        run = await tinker.run(session)
        sent = [
            await tinker.send(pass_over(run, 1)),
            await tinker.post("optim_step", model_id=run, seq_id=2, adam_params={}),
            await tinker.post("save_weights_for_sampler", model_id=run, seq_id=3, sampling_session_seq_id=0),
            await tinker.post("unload_model", model_id=run),
        ]
        for answer in sent:
            assert (await tinker.retrieve(answer.json()["request_id"])).status_code == 200
        sampler = {"sampling_session_id": f"{session}:sample:0", "seq_id": 0}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
        assert (await tinker.post("asample", prompt=prompt, sampling_params={}, **sampler)).status_code == 200
        assert (await tinker.get(f"sessions/{session}")).json()["training_run_ids"] == [run]
        ended = await tinker.post(f"sessions/{session}/finish", reason={"type": "success"})
        assert ended.status_code == 200
    with client(server, "operator") as operator:
        assert [entry for entry in operator.acl_log() if "client" not in str(entry["object"])] == []


@on_valkey
async def test_the_exporter_reports_with_its_own_rights(server: RedisServer, tmp_path: Path) -> None:
    manager, own = (f"redis://{user}:{user}-password@127.0.0.1:{server.port}/0" for user in ("manager", "exporter"))
    hosts: dict[str, Any] = {"webhook_hosts": "127.0.0.1"}
    async with (
        running_api(manager, tmp_path / "data", **hosts) as api,
        running_jobs(api),
        exporter(api, redis_url=own, webhook_give_up_s=0, **hosts),
    ):
        await until(lambda: api.api.redis.exists(LOGGERS))
        await api.http.post("/v1/webhooks", json={"url": "http://127.0.0.1:9/"})
        job = await create(api.openai, "wandb", max_steps=2)
        await until(lambda: nothing_waits(api))

        async def is_told() -> bool:
            return "The webhook" in (await api.http.get(f"/v1/fine_tuning/jobs/{job}/events")).text

        await until(is_told)
    with client(server, "operator") as operator:
        assert [entry for entry in operator.acl_log() if "client" not in str(entry["object"])] == []


@on_valkey
@pytest.mark.slow
async def test_a_job_succeeds_with_each_service_under_its_own_user(server: RedisServer, tmp_path: Path) -> None:
    def services(counts: Mapping[str, int], environment: Mapping[str, str]) -> list[ServiceCommand]:
        return [
            ServiceCommand(
                f"{name}-0" if name != "manager" else name,
                (sys.executable, "-m", "manager_service.export" if name == "exporter" else f"{name}_service"),
                {"MARLAAS_REDIS_URL": f"redis://{name}:{PASSWORDS[name][0]}@127.0.0.1:{server.port}/0"},
            )
            for name in SERVICES
        ]

    variables = {
        "MARLAAS_REDIS_URL": f"redis://manager:manager-password@127.0.0.1:{server.port}/0",
        "MARLAAS_LEASE_S": "2",
        "MARLAAS_ARCHIVE_AFTER_S": "0",
    }
    async with running(tmp_path / "data", environment=variables, services=services) as (cluster, api):
        submitted = await api.submit("calc", max_steps=2, batch_size=4, evaluate=True)
        for name in ("rollout-0", "env-0"):
            await restart(cluster, name)
        (job,) = await api.until_done(submitted)
        assert job["status"] == "succeeded", job["error"]
        assert is_balanced(await api.ledger(job["id"]))
        async with asyncio.timeout(60):
            while "archived" not in {row["job"] for row in (await api.get("/usage"))["data"]}:
                await asyncio.sleep(0.1)
        model = (await api.get(f"/fine_tuning/jobs/{submitted}"))["fine_tuned_model"]
        assert (await api.http.delete(f"/models/{model}")).status_code == 200
        answer = await api.post(
            "/chat/completions",
            {"model": "tiny", "messages": [{"role": "user", "content": "add 1+2"}], "max_tokens": 8},
        )
        assert answer["choices"]
        admin = Api(cluster.base_url, cluster.admin_key)
        assert (await admin.get("/cluster/dead"))["data"] == []
        metrics = await admin.http.get(f"{cluster.base_url}/metrics")
        assert metrics.status_code == 200 and "marlaas_stream_length" in metrics.text
        await admin.close()
    with client(server, "operator") as operator:
        refused = [entry for entry in operator.acl_log() if "client" not in str(entry["object"])]
    assert refused == [], refused
