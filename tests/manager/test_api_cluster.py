"""Workers, timeline, dead letters and metrics, from real telemetry messages."""

import asyncio
import dataclasses
import time
from typing import Any

import msgspec
import openai
import pytest

from common.bus.bus import Bus
from common.bus.streams import Cell
from common.models.base_digest import base_digest
from common.settings import TINY
from common.wire.messages import DeadLetter, Outside, Span, WorkerReport
from common.wire.reported import InPool
from common.worker.telemetry import KEEP_S
from manager_service.records.cluster import BaseTurn, Cluster, WantedWorkers
from tests.support.api_server import ApiServer, create, method, upload


def report(worker: str, service: str, **changes: Any) -> WorkerReport:
    values = {"state": "busy", "busy": 0.5, "slots": 8, "in_use": 3, "base_model": "tiny", "pid": 7, "host": "h"}
    return WorkerReport(id=worker, tenant="", job="", partition=0, service=service, **values | changes)  # type: ignore[arg-type]


async def tell(bus: Bus, *reports: WorkerReport) -> None:
    for one in reports:
        await bus.broadcast(bus.cell.telemetry, one, keep_s=KEEP_S)


async def until(server: ApiServer, count: int) -> None:
    async with asyncio.timeout(60):
        while len(server.api.bases["tiny"].cluster.workers()) != count:
            await asyncio.sleep(0.02)


async def test_the_alive_are_listed_and_the_stopped_are_not(bus: Bus) -> None:
    cluster = Cluster(bus)
    await tell(bus, report("r1", "rollout"), report("r2", "rollout", slots=4, max_lora_rank=16), report("t", "trainer"))
    await tell(bus, report("t", "trainer", state="stopped"))
    await cluster.follow_once()
    assert [worker.id for worker in cluster.workers()] == ["r1", "r2"]
    assert (cluster.slots("rollout"), cluster.slots("trainer"), cluster.max_lora_rank()) == (12, 0, 16)
    assert cluster.kv_tokens() is cluster.least_kv_tokens() is None, "none of them says"
    # And a rollout worker that does not say what it holds counts as the others for its slots
    await tell(bus, *(report(f"r{n}", "rollout", slots=4, kv_tokens=1000 * n) for n in (1, 2)))
    await tell(bus, report("silent", "rollout", slots=8))
    await cluster.follow_once()
    assert (cluster.kv_tokens(), cluster.least_kv_tokens()) == (6000, 1000)


async def test_a_closed_base_model_opens_where_that_is_soonest_and_a_job_says_that_it_waits_for_it(bus: Bus) -> None:
    cluster = Cluster(bus)
    assert cluster.turn("rollout").state == "absent"
    slow, soon = InPool("rollout-0", "disk", 9.0, 4.0), InPool("rollout-1", "device", 0.5, 4.0)
    await tell(bus, *(report(each.worker, "rollout", state="closed", pool=each) for each in (slow, soon)))
    await cluster.follow_once()
    assert cluster.turn("rollout") == BaseTurn("closed", "device", 0.5, 4.0)
    assert cluster.slots("rollout") == 16, "owners publish, and the pool hears of it"
    assert "its base model, which rollout workers open in about 0.5 s" in cluster.waits_for("job")
    # And once one reads, nobody waits; a base model that is refused everywhere is not waited for either
    await tell(bus, report(soon.worker, "rollout", state="idle", pool=soon))
    await cluster.follow_once()
    assert (cluster.turn("rollout").state, cluster.waits_for("job")) == ("open", "")
    await tell(bus, *(report(each.worker, "rollout", state="refused", reason="why") for each in (slow, soon)))
    await cluster.follow_once()
    assert (cluster.turn("rollout").state, cluster.slots("rollout")) == ("refused", 0)
    assert cluster.refusals(["rollout", "env"]) == "rollout workers refuse its base model: why"


async def test_a_chat_with_a_base_model_that_opens_too_late_hears_when_to_ask_again(server: ApiServer) -> None:
    await tell(server.bus, report("r", "rollout", state="closed", pool=InPool("rollout-0", "disk", 500.5, 0.0)))
    await until(server, 1)
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "1+1="}]}
    answer = await server.http.post("/v1/chat/completions", json=asked)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "501"), answer.text
    (shown,) = (await server.http.get("/v1/models")).json()["data"]
    told = {name: shown["base"][name] for name in ("state", "tier", "opens_in_s", "waiting_s")}
    assert told == {"state": "closed", "tier": "disk", "opens_in_s": 500.5, "waiting_s": 0.0}
    await tell(server.bus, report("r", "rollout", state="refused", reason="why"))
    await tell(server.bus, report("other", "rollout", state="refused", reason="why"))
    await until(server, 2)
    answer = await server.http.post("/v1/chat/completions", json=asked)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "60"), answer.text


async def test_old_reports_count_for_the_timeline_but_not_as_alive(bus: Bus) -> None:
    now_s = time.time()
    spans = (Span(now_s - 30, now_s - 29, "acme", "job", "rollout"),)
    fields = await bus.fields(report("old", "rollout", spans=spans))
    entry = dict(zip(fields[::2], fields[1::2], strict=True))
    await bus.client.xadd(bus.cell.telemetry, entry, id=f"{int((now_s - 29) * 1000)}-0")
    cluster = Cluster(bus)
    await cluster.follow_once()
    assert cluster.workers() == []
    assert [one.worker for one in cluster.timeline(now_s - 60)] == ["old"]
    assert cluster.timeline(now_s) == []


async def test_workers_and_timeline_are_for_the_operator(server: ApiServer) -> None:
    now_s = time.time()
    whose = (("default", "ftjob-y"), ("acme", "ftjob-x"))
    spans = tuple(Span(now_s, now_s + 1, tenant, job, "rollout") for tenant, job in whose)
    await tell(server.bus, report("r", "rollout", resident=("ftjob-y@1", "ftjob-x@2", "base"), spans=spans))
    await until(server, 1)
    for path in ("workers", "timeline", "dead"):
        answer = await server.http.get(f"/v1/cluster/{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_key_needed")
    (worker,) = (await server.http.get("/v1/cluster/workers", headers=server.as_admin())).json()["data"]
    assert worker["resident"] == ["ftjob-y@1", "ftjob-x@2", "base"]
    assert {work["tenant"] for work in worker["working_for"]} == {"default", "acme"}
    timeline = (await server.http.get("/v1/cluster/timeline", headers=server.as_admin())).json()["data"]
    assert {(span["tenant"], span["job"]) for span in timeline} == set(whose)
    later = await server.http.get("/v1/cluster/timeline", params={"since": now_s + 9}, headers=server.as_admin())
    assert later.json()["data"] == []


async def test_an_autoscaler_is_told_the_workers_of_all_bases_or_why_it_cannot_be(
    server: ApiServer, redis_url: str
) -> None:
    async def total() -> tuple[int, Any]:
        answer = await server.http.get("/v1/cluster/wanted/total", headers=server.as_admin())
        return answer.status_code, answer.json()

    assert (await server.http.get("/v1/cluster/wanted/total")).status_code == 403
    status, answer = await total()
    assert status == 503 and "how many rollout workers tiny wants" in answer["error"]["message"]
    bases = server.api.bases
    bases["wide"] = dataclasses.replace(bases["tiny"], bus=(wide := Bus.connect(redis_url, Cell("wide"))))
    for name, workers in (("tiny", 3), ("wide", 2)):
        assert (await total())[0] == 503, "not of all"
        await server.bus.client.set(bases[name].cell.wanted, msgspec.json.encode(WantedWorkers(workers, 99, 1)))
    assert await total() == (200, {"workers": 5})
    await wide.close()


async def test_readiness_says_what_is_missing(server: ApiServer) -> None:
    answer = await server.http.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["waiting_for"] == ["rollout (tiny)", "env (tiny)", "trainer (tiny)"]
    await tell(server.bus, *(report(service, service) for service in ("rollout", "env", "trainer")))
    await until(server, 3)
    answer = await server.http.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == (200, "ready")


async def test_a_replica_with_another_tokenizer_than_the_workers_is_not_ready(server: ApiServer) -> None:
    await tell(server.bus, *(report(service, service) for service in ("rollout", "env", "trainer")))
    await until(server, 3)
    for digest, status in ((base_digest(TINY), 200), ("f" * 32 + "-" + "0" * 32, 503)):
        await server.bus.client.hset(server.bus.cell.bits, "base", digest)
        answer = await server.http.get("/readyz")
        assert answer.status_code == status
    assert answer.json()["waiting_for"] == ["manager (tiny)"]
    assert "are others than those of the workers" in answer.json()["refused"][0]


async def test_a_rank_that_a_rollout_worker_cannot_take_is_refused(server: ApiServer) -> None:
    await tell(server.bus, report("r", "rollout", max_lora_rank=16))
    await until(server, 1)
    with pytest.raises(openai.BadRequestError, match="lora_rank 17 is above 16"):
        await create(server.openai, method=method(lora_rank=17))


async def test_a_host_that_an_env_worker_may_not_call_is_refused(server: ApiServer) -> None:
    file = await upload(server.openai)
    score = {"type": "score_model", "model": "m", "input": [{"role": "user", "content": "?"}]}
    check = {"type": "endpoint", "url": "https://allowed.test/x"}

    async def complaint(**reinforcement: Any) -> str:
        method = {"type": "reinforcement", "reinforcement": reinforcement}
        answer = await server.http.post(
            "/v1/fine_tuning/jobs", json={"model": "tiny", "training_file": file, "method": method}
        )
        return "" if answer.is_success else f"{answer.json()['error']['param']}: {answer.json()['error']['message']}"

    def openenv(**args: str) -> dict[str, Any]:
        return {"environment": {"name": "openenv", "args": args}}

    refused = [
        ({"grader": check | {"url": "https://other.test/"}}, "grader.url", "other.test; MARLAAS_ENDPOINT_HOSTS"),
        ({"grader": score | {"url": "http://127.0.0.1:9/v1"}}, "grader.url", "127.0.0.1; MARLAAS_GRADER_HOSTS"),
        (openenv(url="http://10.0.0.1:8000"), "environment.args.url", "10.0.0.1; MARLAAS_OPENENV_HOSTS"),
        (openenv(server="mazes"), "environment.args.server", "did you mean 'maze'?; MARLAAS_OPENENV_SERVERS"),
    ]
    assert [await complaint(**given) for given, _, _ in refused] == [""] * 4, "no worker says what it may call"
    allowed = Outside("*.test", "*.test", "10.1.0.0/16", ("maze",))
    one = report("e1", "env", outside=allowed)
    await tell(server.bus, one, report("e2", "env", outside=msgspec.structs.replace(allowed, endpoint="allowed.test")))
    await until(server, 2)
    for given, where, why in refused:
        said = await complaint(**given)
        assert said.startswith(f"method.reinforcement.{where}: ") and why in said
    for doing, more in (("validate", {}), ("run", {"model_sample": "1"})):
        tried = {"grader": check | {"url": "https://other.test/"}, **more}
        answer = await server.http.post(f"/v1/fine_tuning/alpha/graders/{doing}", json=tried)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "host_not_allowed")
    multi = {"type": "multi", "graders": {"a": check, "b": score | {"url": "https://b.test/v1"}}}
    graded = {"grader": multi | {"calculate_output": "a + b"}}
    for given in (graded, openenv(url="http://10.1.2.3"), openenv(server="maze")):
        assert await complaint(**given) == ""


async def test_a_group_that_never_fits_into_the_smallest_workers_memory_is_refused(server: ApiServer) -> None:
    await tell(server.bus, report("r1", "rollout", kv_tokens=100_000), report("r2", "rollout", kv_tokens=1000))
    await tell(server.bus, report("silent", "rollout"))
    await until(server, 3)
    file = await upload(server.openai)
    for asked in ("group_size", "eval_samples"):
        large, small = (method(max_tokens=100, **{asked: num}) for num in (16, 4))
        with pytest.raises(openai.BadRequestError, match=rf"{asked} 16 .* tokens at once; .* at most 1500") as refused:
            await create(server.openai, method=large, validation_file=file)
        assert refused.value.code == "group_too_large"
        await create(server.openai, method=small, validation_file=file)


def dead_letter(job: str, reason: str = "it raised") -> DeadLetter:
    about: dict[str, Any] = {"id": f"d{job}", "tenant": "acme", "job": job, "partition": 0, "deliveries": 10}
    return DeadLetter(**about, stream="s", entry="1-0", reason=reason, payload=b"what it was")


async def test_dead_letters_are_for_the_operator(server: ApiServer) -> None:
    for number in range(3):
        await server.bus.publish([(server.bus.cell.dead, dead_letter(f"job-{number}"))])
    await server.api.redis.xadd(server.bus.cell.dead, {"payload": b"junk"})
    assert (await server.http.get("/v1/cluster/dead")).status_code == 403
    first = (await server.http.get("/v1/cluster/dead", params={"limit": 2}, headers=server.as_admin())).json()
    assert (first["has_more"], first["data"][1]["job"], first["data"][1]["deliveries"]) == (True, "job-2", 10)
    params = {"after": first["last_id"]}
    rest = (await server.http.get("/v1/cluster/dead", params=params, headers=server.as_admin())).json()["data"]
    assert [letter["job"] for letter in rest] == ["job-1", "job-0"]
    for cursor in ("x", "1", "-1-0", "9" * 40 + "-0", "0-0"):
        answer = await server.http.get("/v1/cluster/dead", params={"after": cursor}, headers=server.as_admin())
        assert answer.status_code == 400


async def test_metrics_tell_of_streams_workers_and_jobs(server: ApiServer) -> None:
    await tell(server.bus, report("r", "rollout", counters={"tokens": 5.0}))
    await until(server, 1)
    await create(server.openai)
    await server.bus.client.zadd(server.bus.cell.env_workers, {"env-1": 1})
    await server.bus.client.xadd(server.bus.cell.env_worker("env-1"), {"payload": "a turn of a live session"})
    assert (await server.http.get("/metrics")).status_code == 403
    text = (await server.http.get("/metrics", headers=server.as_admin())).text
    assert 'marlaas_worker_busy{base_model="tiny",service="rollout",worker="r"} 0.5' in text
    assert 'marlaas_worker_events_total{base_model="tiny",name="tokens",service="rollout",worker="r"} 5.0' in text
    assert 'marlaas_jobs{base_model="tiny",status="validating_files"} 1.0' in text
    of_jobs = 'marlaas_stream_length{base_model="tiny",stream="jobs:'
    lengths = [line for line in text.splitlines() if line.startswith(of_jobs)]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in lengths) == 1.0
    assert 'marlaas_stream_length{base_model="tiny",stream="env:env-1"} 1.0' in text
    assert 'marlaas_dead_letters{base_model="tiny"} 0.0' in text
