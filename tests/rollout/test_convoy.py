"""Loaders of one base model that serve together: their tokens are the whole engine's, over real sockets; nothing is lost."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from base_model.decoder import Decoder
from common.bus.bus import Bus
from common.bus.streams import GROUP_ROLLOUT, Cell
from common.cancellation import cancel_all
from common.models.stages import Stage, divided
from common.models.weight_files import read_weights, stored_tensors
from common.peers.server import PeerServer
from common.store.bases import push_base
from common.store.objects import Objects
from common.wire.messages import BASE, AdapterRef, TurnRequest, TurnResult, WorkerReport
from harness.proxy import Proxy
from rollout_service.embedded.backbone.fused import FusedDecoder
from rollout_service.embedded.convoy.stage import serve_head
from rollout_service.embedded.convoy.staged import StagedDecoder, StageLink
from rollout_service.embedded.torch_engine import TorchEngine
from tests.common.test_worker import until
from tests.support.rollout_cases import TINY, NoEnd, exact_limits, files_of, nearly, one, prompt, ref, request, running

pytestmark = pytest.mark.asyncio
CELL = Cell("tiny")
KEY = "k"
FILES: dict[AdapterRef, dict[str, bytes]] = {
    ref("a"): files_of(1, rank=8),
    ref("b"): files_of(2, rank=8),
    ref("c"): files_of(3, rank=16, targets=("q_proj", "down_proj")),
}


def staged(stage: Stage) -> FusedDecoder:
    decoder = Decoder.load(TINY, stage=stage)
    return FusedDecoder(decoder, exact=True)


@contextlib.asynccontextmanager
async def convoy(
    num_stages: int, *, slots: int = 32, proxy: Proxy | None = None
) -> AsyncGenerator[tuple[TorchEngine, asyncio.Event]]:
    """The head's engine, and whether a stage is lost. `proxy`: the last stage is behind it."""
    with (TINY / "model.safetensors").open("rb") as file:
        head, *others = divided(stored_tensors(file), num_stages)
    async with contextlib.AsyncExitStack() as stack:
        links, lost = list[StageLink](), asyncio.Event()
        for stage in others:
            server = PeerServer({}, lambda: KEY, None)
            server.serve_stage = partial(serve_head, staged(stage), 1 << 20)
            address = await server.open("127.0.0.1", 0)
            stack.push_async_callback(server.close)
            if proxy and stage is others[-1]:
                proxy.target_port = int(address.rpartition(":")[2])
                await proxy.open()
                stack.push_async_callback(proxy.shut)
                address = f"127.0.0.1:{proxy.port}"
            links.append(await asyncio.to_thread(StageLink, address, KEY, stage.layers))
            stack.callback(links[-1].close)
        on_lost = asyncio.get_running_loop().call_soon_threadsafe
        model = StagedDecoder(staged(head), read_weights(TINY).shapes, links, lambda: on_lost(lost.set))
        limits = exact_limits(4, slots=slots, prefix_bytes=0)
        engine = TorchEngine(model, NoEnd(), limits=limits)
        await engine.start()
        stack.push_async_callback(engine.stop)
        stack.callback(model.close)
        for adapter, files in FILES.items():
            await engine.load_files(adapter, files)
        yield engine, lost


def turns() -> list[TurnRequest]:
    """Turns of all adapters and the base, of several lengths; some share a prompt, and some want its log-probs."""
    texts = ("add 37+58", "reverse cabin", "count a in " + "banana " * 12)
    return [
        request(
            [*FILES, BASE][number % 4],
            tokens=prompt(texts[number % 3]),
            sample=number // 8,
            group=number % 8,
            max_tokens=(5, 40, 17, 66, 9)[number % 5],
            prompt_logprobs=0 if number == 7 else -1,
        )
        for number in range(24)
    ]


@pytest.mark.parametrize("num_stages", [2, 4])
async def test_tokens_are_the_whole_engines_while_rows_join_and_leave(num_stages: int) -> None:
    asked = turns()
    async with running(adapters=FILES, ends=False) as engine:
        usual = await asyncio.gather(*(one(engine, each) for each in asked))
    async with running(limits=exact_limits(4, prefix_bytes=0), adapters=FILES, ends=False) as engine:
        whole = await asyncio.gather(*(one(engine, each) for each in asked))
    async with convoy(num_stages, slots=9) as (engine, _):
        found = await asyncio.gather(*(one(engine, each) for each in asked))
    assert all(map(nearly, found, usual))
    for mine, theirs in zip(found, whole, strict=True):
        assert mine.tokens == theirs.tokens and mine.adapter == theirs.adapter
        assert np.abs(np.array(mine.logprobs) - theirs.logprobs).max() < 1e-5
        of_prompts = mine.prompt_logprobs.numpy(), theirs.prompt_logprobs.numpy()
        np.testing.assert_allclose(*of_prompts, atol=1e-5)


async def test_rows_keep_their_tokens_when_a_stage_is_lost() -> None:
    proxy, asked = Proxy(0), [request(ref("a"), sample=number, max_tokens=1500) for number in range(3)]
    async with running(adapters=FILES, ends=False) as engine:
        whole = await asyncio.gather(*(one(engine, request(ref("a"), sample=n, max_tokens=20)) for n in range(3)))
    async with convoy(2, proxy=proxy) as (engine, lost):
        tasks = [asyncio.create_task(one(engine, each)) for each in asked]

        def tokens() -> list[list[int]]:
            return [found.tokens if (found := engine.partial(each.id)) else [] for each in asked]

        await until(lambda: all(len(each) >= 20 for each in tokens()))
        await proxy.shut()
        await until(lost.is_set)
        assert not any(task.done() for task in tasks)
        assert [each[:20] for each in tokens()] == [each.tokens for each in whole]
        await cancel_all(tasks)


async def test_a_stage_tells_why_a_forward_failed_and_goes_on() -> None:
    async with convoy(2) as (engine, lost):
        broken = engine._running._model  # pyright: ignore[reportPrivateUsage]
        assert isinstance(broken, StagedDecoder)
        (link,) = broken._links  # pyright: ignore[reportPrivateUsage]
        link._numbers[next(iter(engine._adapters.values()))] = 99  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(RuntimeError, match=r"at the stage 127.0.0.1:\d+: KeyError: 99"):
            await one(engine, request(ref("a"), max_tokens=5))
        assert len((await one(engine, request(ref("b"), max_tokens=5))).tokens) == 5
        assert not lost.is_set()


# ---- real workers ---------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def loaders(redis_url: str, store: str, where: str, gate: Path, num: int) -> AsyncGenerator[Sequence[int]]:
    """Workers that have all weights but load them only once the gate is there. Gives their process ids."""
    processes = list[asyncio.subprocess.Process]()
    try:
        for number in range(num):
            variables = {
                "MARLAAS_REDIS_URL": redis_url,
                "MARLAAS_STORE_URL": store,
                "MARLAAS_BASE_MODELS": f"tiny={where}",
                "MARLAAS_CACHE_DIR": str(gate.parent / str(number)),
                "MARLAAS_PEERS": "1",
                "MARLAAS_CONVOYS": str(num),
                "MARLAAS_ROLLOUT_PROGRESS_S": "0.1",
                "MARLAAS_TEST_SERVICE": "rollout",
                "MARLAAS_TEST_GO_ON": str(gate),
            }
            command = (sys.executable, "-m", "tests.support.slow_worker")
            processes.append(await asyncio.create_subprocess_exec(*command, env={**os.environ, **variables}))
        yield [each.pid for each in processes]
    finally:
        for each in processes:
            if each.returncode is None:
                each.send_signal(signal.SIGTERM)
        assert [await each.wait() for each in processes] == [0] * num


async def test_turns_begin_before_any_worker_is_whole_and_end_at_the_first_that_is(
    bus: Bus, redis_url: str, objects: Objects, tmp_path: Path
) -> None:
    # Given two workers that load a base model from the store, and turns
    store, gate, num_turns, num_tokens = f"file://{tmp_path}/store", tmp_path / "gate", 4, 1500
    where = await push_base(objects, "tiny", TINY, lambda _: None)
    asked = [request(BASE, sample=n, max_tokens=num_tokens, stop_ids=()) for n in range(num_turns)]
    await bus.ensure_group(CELL.rollout, GROUP_ROLLOUT)
    await bus.publish([(CELL.rollout, each) for each in asked])
    async with loaders(redis_url, store, where, gate, 2) as pids:

        async def reports() -> list[WorkerReport]:
            told = await bus.follow(CELL.telemetry, "0", block_ms=None)
            return [each for _, each in told if isinstance(each, WorkerReport) and each.pid in pids]

        async def num_kept() -> bool:
            return len(await bus.client.keys(CELL.partial(CELL.rollout, "*:by"))) == num_turns

        # Then all turns have tokens before either worker is whole
        await until(num_kept)
        states = {(each.id.endswith("-convoy"), each.state) for each in await reports()}
        assert not states & {(False, "idle"), (False, "busy")}
        # And when they are whole the turns go on with their tokens, each of which was sampled once
        gate.touch()
        results = list[TurnResult]()
        while len(results) < num_turns:
            told = await bus.follow(CELL.env, "0", block_ms=None)
            results = [message for _, message in told if isinstance(message, TurnResult)]
            await asyncio.sleep(0.05)
    assert {each.id for each in results} == {each.id for each in asked} and len(results) == num_turns
    assert any(each.worker for each in results)  # a convoy asks for no later turns
    for each in results:
        assert each.failure is None and not each.worker.endswith("-convoy")
        assert len(each.tokens) == len(each.logprobs) == each.usage.sampled_tokens == num_tokens
    assert await bus.client.xlen(CELL.rollout) == 0 and await bus.client.keys(CELL.convoy("*")) == []
