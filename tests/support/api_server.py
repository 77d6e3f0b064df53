"""The API for tests: the real application behind a real uvicorn, and honest stand-ins for the workers behind it."""

import asyncio
import dataclasses
import json
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
from msgspec.structs import replace
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types.fine_tuning import FineTuningJob

from common.bus.bus import Bus, Out, Settlement
from common.bus.streams import GROUP_ENV, GROUP_ROLLOUT, partition_of
from common.cancellation import cancel_all
from common.store.adapters import PEFT_FILES, AdapterStore, Manifest
from common.wire.messages import (
    AdapterRef,
    Array,
    Failure,
    GradeRequest,
    GradeResult,
    TurnDelta,
    TurnRequest,
    TurnResult,
    Usage,
    f32,
    i32,
)
from common.wire.transcript import wrote
from harness.redis_server import free_port
from harness.standin import StandInEnv
from manager_service.http.context import Api, ApiLimits
from manager_service.http.server import make_api, serve
from manager_service.http.tinker.parts import Records, make_records
from manager_service.owner.jobs.journal import MAX_TEXT
from manager_service.records.archive import SampleFiles
from manager_service.records.job_records import FINAL, VERSION, JobSpec, JobState
from manager_service.records.keys import JSON
from manager_service.records.sample_records import LIMITS, CheckpointRecord, EventRecord, Kept, SampleKind, SampleRecord
from manager_service.settings import ManagerSettings
from tests.support.forked_helpers import forked_api


@dataclass
class ApiServer:
    """A running API and how to reach it."""

    api: Api
    tinker: Records
    url: str
    key: str
    admin_key: str
    http: httpx.AsyncClient  # with the tenant's key
    openai: AsyncOpenAI
    clients: list[AsyncOpenAI] = field(default_factory=list)  # of other tenants

    @property
    def bus(self) -> Bus:
        return self.api.bases["tiny"].bus

    def as_admin(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.admin_key}"}

    async def new_tenant(self, tenant: str, **limits: Any) -> AsyncOpenAI:
        """A client of another tenant."""
        admin = self.as_admin()
        made = await self.http.post("/v1/admin/tenants", json={"id": tenant, **limits}, headers=admin)
        assert made.status_code == 200, made.text
        key = (await self.http.post(f"/v1/admin/tenants/{tenant}/keys", headers=admin)).json()["key"]
        self.clients.append(openai_client(self.url, key))
        return self.clients[-1]


def openai_client(url: str, key: str) -> AsyncOpenAI:
    """Without certificates, whose loading takes longer than most tests."""
    plain = DefaultAsyncHttpxClient(verify=False)
    return AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=plain)


@asynccontextmanager
async def running_api(
    redis_url: str, folder: Path, *, forks: bool = True, **settings: Any
) -> AsyncGenerator[ApiServer]:
    """The API alone: no owner, no workers. `settings`: of the manager, and limits of the API. `forks`: its helpers, which are the same
    and start sooner; else it executes them."""
    port = free_port()
    names = {field.name for field in dataclasses.fields(ApiLimits)}
    limits = ApiLimits(**{name: value for name, value in settings.items() if name in names})
    given = {name: value for name, value in settings.items() if name not in names}
    own = ManagerSettings(redis_url=redis_url, data_dir=folder, port=port, **given)
    async with forked_api(own, limits) if forks else make_api(own, limits) as api:
        stop = asyncio.Event()
        tinker = make_records(api)
        loops = [asyncio.create_task(each.run()) for each in (api.bases["tiny"], tinker)]
        serving = asyncio.create_task(serve(api, tinker, stop))
        url, key = f"http://127.0.0.1:{port}", (folder / "api_key").read_text().strip()
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            httpx.AsyncClient(
                base_url=url,
                headers=headers,
                trust_env=False,
                timeout=120,
                verify=False,
                # shorter than the server's, which may end a connection at the moment in which it is used again
                limits=httpx.Limits(max_connections=None, keepalive_expiry=1.0),
            ) as http,
            openai_client(url, key) as client,
        ):
            await _until_up(http)
            running = ApiServer(api, tinker, url, key, (folder / "admin_key").read_text().strip(), http, client)
            yield running
            for other in running.clients:
                await other.close()
        stop.set()
        await serving
        await cancel_all(loops)


async def _until_up(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await http.get("/healthz")
                return
            except httpx.TransportError:
                await asyncio.sleep(0.02)


@asynccontextmanager
async def running_jobs(server: ApiServer, **settings: Any) -> AsyncGenerator[StandInEnv]:
    """The real owner, with stand-ins for the workers."""
    from tests.support.owning import System  # here: most tests of the API do without

    system = System(server.bus, server.api.objects, lease_s=1.0, tenants=server.api.tenants, **settings)
    await system.start()
    try:
        yield system.env
    finally:
        await system.stop()


# ---- a rollout worker that knows its lines ---------------------------------------------------------------------------


@dataclass
class Script:
    """The answers of a played rollout worker: this text, a few tokens at a time."""

    bus: Bus
    text: str = "95"
    stop_reason: str = "stop"
    failure: Failure | None = None  # of every turn
    chunk: int = 1
    dies_after: int | None = None  # tokens of the first attempt, after which nothing more is heard of it
    gives_back_after: int | None = None  # tokens of the first attempt, with which its request goes back
    silent_sample: int | None = None  # of whose first attempt nothing is heard
    seen: list[TurnRequest] = field(default_factory=list)
    inbox: str = ""  # the stream that it reads; empty: the one of inference

    def is_silent(self, request: TurnRequest) -> bool:
        return request.trajectory.attempt == 0 and request.trajectory.sample == self.silent_sample

    async def take_over(self, count: int = 256) -> None:
        """Ends the turns of which nothing more was heard, the oldest first, as the worker that takes them over."""
        stream = self.inbox or self.bus.cell.rollout_chat
        idle = await self.bus.find_idle(stream, GROUP_ROLLOUT, min_idle_ms=0, count=count)
        for delivery in await self.bus.claim(stream, GROUP_ROLLOUT, "other", idle, min_idle_ms=0):
            request = delivery.message
            assert isinstance(request, TurnRequest)
            await self.bus.settle([Settlement(delivery, [self.result(request, self._tokens(request))])])

    async def run(self) -> None:
        stream = self.inbox or self.bus.cell.rollout_chat
        await self.bus.ensure_group(stream, GROUP_ROLLOUT)
        while True:
            for delivery in await self.bus.read([stream], GROUP_ROLLOUT, "played", count=8, block_ms=20):
                request = delivery.message
                assert isinstance(request, TurnRequest)
                self.seen.append(request)
                if self.is_silent(request):
                    continue
                if self.gives_back_after and request.trajectory.attempt == 0:
                    await self.bus.settle([Settlement(delivery, [self._given_back(request, self.gives_back_after)])])
                    continue
                dies = self.dies_after if request.trajectory.attempt == 0 else None
                tokens = self._tokens(request)[:dies]
                if request.stream:
                    await self.bus.publish(self._deltas(request, tokens))
                if dies is None:
                    await self.bus.settle([Settlement(delivery, [self.result(request, tokens)])])

    def _tokens(self, request: TurnRequest) -> list[int]:
        """Bytes are tokens in the tiny model; 256 is its end of turn."""
        partial = [int(t) for t in request.tokens.numpy()[request.num_prompt :]]
        whole = [*self.text.encode(), END] if self.stop_reason == "stop" else list(self.text.encode())
        assert whole[: len(partial)] == partial
        return whole[: request.sampling.max_tokens]

    def _deltas(self, request: TurnRequest, tokens: Sequence[int]) -> list[Out]:
        starts = range(request.num_partial, len(tokens), self.chunk)
        return [(request.reply_to, self._delta(request, i, tokens[i : i + self.chunk])) for i in starts]

    def _delta(self, request: TurnRequest, offset: int, tokens: Sequence[int]) -> TurnDelta:
        values: dict[str, Any] = _plain(request) | {
            "offset": offset,
            "tokens": i32(tokens),
            "logprobs": _logprobs(len(tokens)),
        }
        return TurnDelta(adapter=request.adapter, **values)

    def _given_back(self, request: TurnRequest, num: int) -> Out:
        partial = wrote(self._tokens(request)[:num], [-0.5] * num)
        usage = Usage(sampled_tokens=num)
        return request.reply_to, replace(request, transcript=request.transcript + partial, num_partial=num, usage=usage)

    def result(self, request: TurnRequest, tokens: Sequence[int] | None = None) -> Out:
        """The result of these tokens; None: of all."""
        tokens = self._tokens(request) if tokens is None else tokens
        tops = [[(int(t), -0.5), (65, -2.0)][: request.sampling.num_top_logprobs] for t in tokens]
        of_prompt: dict[str, Any] = {}
        if request.sampling.prompt_logprobs:
            before = request.num_prompt - 1
            top = [(66, -0.25), (67, -0.25)][: request.sampling.num_top_logprobs]
            of_prompt = {
                "prompt_logprobs": f32([math.nan] + [-1.5] * before),
                "prompt_top_logprobs": [[]] + [top] * before,
            }
        result = TurnResult(
            **_plain(request),
            **of_prompt,
            request=request,
            adapter=request.adapter,
            tokens=i32(tokens),
            logprobs=_logprobs(len(tokens)),
            stop_reason="failed" if self.failure else self.stop_reason,  # type: ignore[arg-type]
            failure=self.failure,
            top_logprobs=tops if request.sampling.num_top_logprobs else [],
            usage=Usage(prompt_tokens=request.num_prompt, sampled_tokens=len(tokens), rollout_s=0.25),
        )
        return request.reply_to, result


END = 256


def _plain(request: TurnRequest) -> dict[str, Any]:
    names = ("id", "tenant", "job", "partition", "epoch")
    return {name: getattr(request, name) for name in names}


def _logprobs(count: int) -> Array:
    return f32([-0.5] * count)


@asynccontextmanager
async def played(script: Script) -> AsyncGenerator[Script]:
    task = asyncio.create_task(script.run())
    try:
        yield script
    finally:
        await cancel_all([task])


@asynccontextmanager
async def played_grader(bus: Bus, reward: Callable[[GradeRequest], GradeResult]) -> AsyncGenerator[None]:
    """An env worker that only grades."""

    async def run() -> None:
        await bus.ensure_group(bus.cell.env, GROUP_ENV)
        while True:
            for delivery in await bus.read([bus.cell.env], GROUP_ENV, "played", count=8, block_ms=20):
                assert isinstance(delivery.message, GradeRequest)
                out = (delivery.message.reply_to, reward(delivery.message))
                await bus.settle([Settlement(delivery, [out])])

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        await cancel_all([task])


# ---- values ----------------------------------------------------------------------------------------------------------

GRADER = {
    "type": "string_check",
    "name": "exact",
    "input": "{{sample.output_text}}",
    "reference": "{{item.answer}}",
    "operation": "eq",
}


def method(**hyperparameters: Any) -> dict[str, Any]:
    return {"type": "reinforcement", "reinforcement": {"grader": GRADER, "hyperparameters": hyperparameters}}


def jsonl(*items: Any) -> bytes:
    return "".join(json.dumps(item) + "\n" for item in items).encode()


def item(question: str = "add 1+2", answer: str = "3") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "answer": answer}


ITEMS = jsonl(*(item(f"add {i}+1", str(i + 1)) for i in range(10)))


async def upload(client: AsyncOpenAI, content: bytes = ITEMS) -> str:
    return (await client.files.create(file=("items.jsonl", content), purpose="fine-tune")).id


async def create(client: AsyncOpenAI, **changes: Any) -> FineTuningJob:
    """A job on ten sums, where `changes` of the request say nothing else."""
    body: dict[str, Any] = {"model": "tiny", "method": method(), **changes}
    if "training_file" not in body:
        body["training_file"] = await upload(client)
    return await client.fine_tuning.jobs.create(**body)


async def write_state(server: ApiServer, job: str, **changes: Any) -> None:
    """Writes a job's state as the owner would."""
    state = JobState(**changes)
    fields = {"state": JSON.encode(state), VERSION: state.version}
    await server.api.redis.hset(server.bus.cell.job(job), mapping=fields)
    if state.status in FINAL:
        await server.api.redis.srem(server.bus.cell.active(partition_of("default")), job)


async def write_events(
    server: ApiServer, job: str, rows: Sequence[dict[str, Any]], first: int = 1, **state: Any
) -> None:
    """Writes an event for each row of figures as the owner would, and its state; an empty one is a message."""
    key, pipe = server.bus.cell.events(job), server.api.redis.pipeline(transaction=False)
    number = 0
    for number, data in enumerate(rows, first):
        event = EventRecord(number, 1, "info", f"Event {number}", "metrics" if data else "message", data)
        pipe.xadd(key, {"event": JSON.encode(event)}, id=f"{number}-0")
    await pipe.execute()
    await write_state(server, job, **{"status": "running", "version": 1, "num_events": number, **state})


async def spec_of(server: ApiServer, job: str) -> JobSpec:
    return msgspec.json.decode(await server.api.redis.hget(server.bus.cell.job(job), "spec") or b"", type=JobSpec)


async def commit_version(server: ApiServer, job: str, version: int) -> None:
    """Stores a version of a job's adapter, of which each file holds its own name, and lists its checkpoint."""
    values: dict[str, Any] = {"attempt": "", "parent": 0, "batch": "b", "files": {}, "seed": 1, "next_group": 0}
    manifest = Manifest(adapter=AdapterRef("default", job, version), base_model="tiny", **values)
    files = {name: name.encode() for name in PEFT_FILES} | {"optimizer.safetensors": b"private"}
    await AdapterStore(server.api.objects).commit(manifest, files)
    record = JSON.encode(CheckpointRecord(version, 5, {"reward_mean": 0.5}))
    await server.api.redis.hset(server.bus.cell.checkpoints(job), str(version), record)


async def large_samples(server: ApiServer, num: int = 256) -> tuple[str, list[SampleRecord]]:
    """The path and the content of a job's samples, some megabytes: groups of `num`."""
    job, text = await create(server.openai), "\1" * MAX_TEXT  # six bytes each in JSON
    places = [(group, sample) for group in range(LIMITS.sample_groups) for sample in range(num)]
    samples = [SampleRecord(1, group, sample, text, 0.5, "stop", text) for group, sample in places]
    await keep_samples(server, job.id, 1, samples)
    return f"/v1/fine_tuning/jobs/{job.id}/samples", samples


async def keep_samples(
    server: ApiServer, job: str, version: int, records: Sequence[SampleRecord], kind: SampleKind = "samples"
) -> None:
    """Writes samples of a step or an evaluation, and what the job's state says of them, as its owner would."""
    await SampleFiles(server.api.objects, "tiny", kind).write("default", job, version, JSON.encode(records))
    key = server.bus.cell.job(job)
    state = msgspec.json.decode(await server.api.redis.hget(key, "state") or b"", type=JobState)
    if kind == "samples":
        state.kept.setdefault("samples", Kept()).newest = version
    await server.api.redis.hset(key, "state", JSON.encode(state))
