"""Clients that send what no SDK sends: bytes at random, numbers with holes, twice and in any order, the names of others. The real
owner, over real HTTP, and a trainer whose versions are hashes of all that led to them.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
import zstandard

from common.store.adapters import AdapterStore
from common.wire.messages import AdapterRef
from manager_service.owner.runs import run as runs
from manager_service.records.run_records import run_of
from tests.manager.tinker.test_clients import PROMPT
from tests.manager.tinker.test_fuzz import LOOKS, bodies, routes
from tests.support.api_server import ApiServer
from tests.support.run_world import WEIGHTS, HashingTrainer
from tests.support.tinker_client import TinkerClient, client_of, pass_over, result_of

SETTINGS = {"inference_silence_s": 120.0, "inference_timeout_s": 600.0}  # a busy machine is no lost worker


async def answered(client: TinkerClient, run: str, seq: int) -> dict[str, Any]:
    """The result of an operation, however long it takes."""
    while (told := await client.retrieve(f"{run_of(run)}:{seq}")).status_code == 408:
        pass
    return result_of(told)


async def send(client: TinkerClient, run: str, seq: int) -> httpx.Response:
    """An operation of the log LOG, to the run."""
    if LOG[seq] == "step":
        return await client.post("optim_step", model_id=run, seq_id=seq, adam_params={"learning_rate": 1e-3})
    return await client.send(pass_over(run, seq, token=seq))


async def test_a_checkpoints_name_is_no_folders(server: ApiServer, trainer: HashingTrainer) -> None:
    client = await client_of(server)
    run = await client.run(await client.session())
    for seq, name in enumerate((".", "..", "a/b", "a\n"), 1):
        await client.post("save_weights", model_id=run, seq_id=seq, path=name)
        assert "cannot be a checkpoint's name" in (await answered(client, run, seq))["error"], name
    for seq, name in enumerate(("...", ".a", "", None), 5):
        await client.post("save_weights", model_id=run, seq_id=seq, path=name)
        assert (await answered(client, run, seq))["path"].endswith(f"/weights/{name or f'{seq:06d}'}")


# ---- numbers --------------------------------------------------------------------------------------------------------

LOG = {1: "pass", 2: "pass", 3: "step", 4: "pass", 5: "pass", 6: "pass", 7: "step"}


async def one_by_one(client: TinkerClient, run: str) -> list[httpx.Response]:
    sent: list[httpx.Response] = []
    for seq in LOG:
        sent.append(await send(client, run, seq))
        await answered(client, run, seq)
    return sent


async def pipelined(client: TinkerClient, run: str) -> list[httpx.Response]:
    return [await send(client, run, seq) for seq in LOG]


async def last_first(client: TinkerClient, run: str) -> list[httpx.Response]:
    return [await send(client, run, seq) for seq in reversed(LOG)]


async def each_twice(client: TinkerClient, run: str) -> list[httpx.Response]:
    return [await send(client, run, seq) for seq in LOG for _ in range(2)]


async def all_again_when_done(client: TinkerClient, run: str) -> list[httpx.Response]:
    first = await pipelined(client, run)
    await answered(client, run, max(LOG))
    return first + await pipelined(client, run)


async def at_once_in_any_order(client: TinkerClient, run: str) -> list[httpx.Response]:
    numbers = [*LOG] * 3
    random.Random(run).shuffle(numbers)
    return list(await asyncio.gather(*(send(client, run, seq) for seq in numbers)))


WAYS: list[Callable[[TinkerClient, str], Awaitable[list[httpx.Response]]]] = [
    one_by_one, pipelined, last_first, each_twice, all_again_when_done, at_once_in_any_order,
]  # fmt: skip


async def test_one_log_leads_to_the_same_bytes_however_it_is_sent(
    server: ApiServer, trainer: HashingTrainer, client: TinkerClient
) -> None:
    session, store, found = await client.session(), AdapterStore(server.api.objects), list[bytes]()
    for number, way in enumerate(WAYS):
        run = await client.run(session, number, lora_config={"rank": 4, "seed": 5})
        assert {sent.status_code for sent in await way(client, run)} == {200}, way
        told = [await answered(client, run, seq) for seq in LOG]
        assert [metrics["metrics"]["loss:sum"] for metrics in told] == [*LOG], way
        name = run_of(run) or ""
        versions = await server.bus.client.hkeys(server.bus.cell.versions(name))
        assert max(int(version) for version in versions) == 2, way
        found.append((await store.read(AdapterRef("default", name, 2), (WEIGHTS,)))[WEIGHTS])
    assert len(set(found)) == 1


async def test_a_number_that_never_comes_fails_its_step_by_name_and_not_the_next(
    trainer: HashingTrainer, client: TinkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await client.run(await client.session())
    for seq in (1, 3, 4, 5, 7):  # 2 and 6 are missing: of the first step, and between two passes of the second
        sent = client.post("optim_step", model_id=run, seq_id=seq, adam_params={}) if seq in (4, 7) else None
        assert (await (sent or client.send(pass_over(run, seq)))).status_code == 200
    assert (await answered(client, run, 1))["metrics"] == {"loss:sum": 1.0}
    monkeypatch.setattr(runs, "HOLE_S", 0.2)
    assert (await answered(client, run, 3))["metrics"] == {"loss:sum": 3.0}
    assert "operation 2" in (await answered(client, run, 4))["error"]
    assert (await answered(client, run, 5))["metrics"] == {"loss:sum": 5.0}
    assert "operation 6" in (await answered(client, run, 7))["error"]
    late = await client.send(pass_over(run, 6))
    assert (late.status_code, late.headers["x-should-retry"]) == (400, "false")
    assert "it came too late" in late.json()["error"]["message"]
    assert (await client.send(pass_over(run, 8))).status_code == 200
    await client.post("optim_step", model_id=run, seq_id=9, adam_params={})
    assert "error" not in await answered(client, run, 9)


# ---- bodies ---------------------------------------------------------------------------------------------------------

GARBAGE: list[tuple[bytes, dict[str, str], int, str]] = [
    (b"\xff\xff\xff\xff", {}, 400, "no ForwardBackwardRequest"),
    (b"", {}, 404, "there is no run"),
    (pass_over("RUN", 1)[:-7], {}, 400, "no ForwardBackwardRequest"),
    (random.Random(1).randbytes(4000), {}, 400, "no ForwardBackwardRequest"),
    (bytes(17 << 20), {}, 413, "bytes"),
    (zstandard.compress(bytes(64 << 20)), {"Content-Encoding": "zstd"}, 400, "unpacked: at most"),
    (zstandard.compress(pass_over("RUN", 1))[:-5], {"Content-Encoding": "zstd"}, 400, "no zstd frame"),
    (pass_over("RUN", 1), {"Content-Encoding": "br"}, 400, "Content-Encoding 'br' is not known"),
    (pass_over("RUN", 1), {"Content-Type": "image/png"}, 400, "Content-Type 'image/png' is not known"),
    (b"[" * 100_000, {"Content-Type": "application/json"}, 400, ""),
]  # fmt: skip


async def test_what_nobody_can_read_is_refused_and_takes_no_number(
    trainer: HashingTrainer, client: TinkerClient
) -> None:
    session = await client.session()
    for number, (body, headers, status, told) in enumerate(GARBAGE):
        run = await client.run(session, number)
        refused = await client.send(body, **headers)
        assert refused.status_code == status, (number, refused.text)
        message = refused.json()["error"]["message"]
        assert message and told in message
        assert (await client.send(pass_over(run, 1))).status_code == 200
        await client.post("optim_step", model_id=run, seq_id=2, adam_params={})
        assert "error" not in await answered(client, run, 2)


# ---- others ---------------------------------------------------------------------------------------------------------


async def test_a_stranger_reads_and_changes_nothing_by_any_route(
    server: ApiServer, trainer: HashingTrainer, client: TinkerClient
) -> None:
    session = await client.session()
    run = await client.run(session)
    await client.post("save_weights", model_id=run, seq_id=1, path="mine")
    path = (await answered(client, run, 1))["path"]
    sampler = await client.sampler(session, 9, model_path=path)
    before = await mine(client, session, run, sampler)
    stranger = await client_of(server, "stranger")
    valid = bodies(session, run, path, 0)
    for route in routes("POST"):
        answer = await stranger.post(filled(route, session, run, sampler), **valid.get(route, {}))
        assert says_nothing(answer, session), f"{route}: {answer.status_code} {answer.text}"
    samples: list[dict[str, Any]] = [{"sampling_session_id": sampler, "seq_id": 0}, {"model_path": path}]
    for told in samples:
        answer = await stranger.post("asample", prompt=PROMPT, sampling_params={}, **told)
        assert answer.status_code == 404, answer.text
    for method, route in LOOKS:
        answer = await look(stranger, method, filled(route, session, run, sampler))
        assert says_nothing(answer, session), f"{method} {route}: {answer.status_code} {answer.text}"
    assert await mine(client, session, run, sampler) == before
    offered = [(method, route) for method, route in LOOKS if not route.endswith("/publish")]
    of_checkpoints = [(method, route) for method, route in offered if "{kind}/{name}" in route]
    assert {method for method, _ in of_checkpoints} == {"GET", "PUT", "DELETE"}
    for method, route in sorted(of_checkpoints, key=lambda each: each[0] == "DELETE"):
        url = filled(route, session, run, sampler)
        refused = await look(stranger, method, url)
        assert refused.status_code == 404, f"{method} {route}: {refused.status_code} {refused.text}"
        answer = await look(client, method, url)  # its owner may: so it was the stranger that was refused
        assert answer.status_code in (200, 302), f"{method} {route}: {answer.status_code} {answer.text}"
    assert (await client.get(f"training_runs/{run}/checkpoints")).json()["checkpoints"] == []


async def look(client: TinkerClient, method: str, path: str) -> httpx.Response:
    """Asks a route that takes no body, or that of `ttl`."""
    body = {"ttl_seconds": 3600} if method == "PUT" else None
    headers = {"X-API-Key": f"tml-{client.key}"}
    return await client.http.request(method, f"/api/v1/{path}", json=body, headers=headers, timeout=120)


def filled(route: str, session: str, run: str, sampler: str) -> str:
    """A path with the names of a tenant's things in it."""
    names = {"session_id": session, "sampler_id": sampler, "sampling_session_id": sampler}
    names |= {"kind": "weights", "name": "mine"}
    return route.format_map(Named(names, run))


class Named(dict[str, str]):
    """Names for the places of a path; those that are not known get the run."""

    def __init__(self, known: dict[str, str], run: str) -> None:
        super().__init__(known)
        self._run = run

    def __missing__(self, key: str) -> str:
        return self._run


def says_nothing(answer: httpx.Response, session: str) -> bool:
    """Does it not say that a tenant's things are there? An error may repeat the name that it was asked about."""
    return answer.status_code in (400, 403, 404, 410) or (answer.status_code == 200 and session not in answer.text)


async def mine(client: TinkerClient, session: str, run: str, sampler: str) -> list[Any]:
    """A tenant's view of its things."""
    seen = [
        await client.post("session_heartbeat", session_id=session),
        await client.post("get_info", model_id=run),
        await client.get(f"training_runs/{run}"),
        await client.get(f"training_runs/{run}/checkpoints"),
        await client.get(f"samplers/{sampler}"),
        await client.get(f"sessions/{session}"),
        await client.get("checkpoints"),
    ]
    assert [answer.status_code for answer in seen] == [200] * len(seen)
    return [answer.json() for answer in seen]
