"""Traps of the real vLLM, each once: docs/real-models.md tells their symptoms. Its contract is in `test_engine_contract.py`."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from msgspec.structs import replace

from base_model.adapter import CONFIG_FILE, save_adapter
from benchmarks.training import step_of
from common.errors import InvalidInput
from common.tasks.skills import generate
from common.wire.messages import BASE, AdapterRef, LoraSpec, LossSpec, Rows, TurnRequest, f32, i32, u8
from common.wire.transcript import transcript
from rollout_service.engine import CorruptAdapter, Engine
from rollout_service.process import process_engine
from rollout_service.settings import RolloutSettings
from tests.support.engines_under_test import ProcessRunning, Running, SharedCore, SharedVllm, needs_vllm, vllm_core
from tests.support.rollout_cases import adapter_of, beat, decoder, files_of, one, prompt, ref, request, tokenizer
from trainer_service import lora
from trainer_service.backbone.sequences import DecoderBackbone
from trainer_service.optimiser import Moments
from trainer_service.training import Trainer, TrainState

real = [
    pytest.mark.vllm,
    needs_vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.parametrize("running", ["vllm"], indirect=True),
]
LONG = prompt("add 37+58" + " " * 600)  # some blocks of the prefix cache


def on_vllm(test: Any) -> Any:
    for mark in real:
        test = mark(test)
    return test


def greedy(adapter: AdapterRef, **options: Any) -> Any:
    plain: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}
    return request(adapter, **plain | options)


@on_vllm
async def test_an_adapter_that_vllm_cannot_read_fails_its_own_job_alone(running: Running) -> None:
    files = files_of(2)
    strange = {**files, CONFIG_FILE: json.dumps({**json.loads(files[CONFIG_FILE]), "use_dora": True}).encode()}
    async with running(adapters={ref("a"): files_of(1), ref("bad"): strange}, ends=False) as engine:
        expected = await one(engine, greedy(ref("a"), max_tokens=60))
        good = asyncio.create_task(one(engine, greedy(ref("a"), max_tokens=60)))
        with pytest.raises(CorruptAdapter):
            await one(engine, greedy(ref("bad")))
        assert (await good).tokens == expected.tokens


@on_vllm
async def test_a_reloaded_adapter_is_served_nothing_that_was_cached_under_its_name(running: Running) -> None:
    async with running(adapters={ref("a"): files_of(1), ref("b"): files_of(2)}, ends=False) as engine:
        old = await one(engine, greedy(ref("a"), tokens=LONG))
        new = await one(engine, greedy(ref("b"), tokens=LONG))
        await engine.drop(ref("a"))
        await engine.load_files(ref("a"), files_of(2))
        reloaded = await one(engine, greedy(ref("a"), tokens=LONG))
    assert np.allclose(reloaded.logprobs, new.logprobs, atol=1e-4) and reloaded.tokens == new.tokens
    assert not np.allclose(reloaded.logprobs, old.logprobs, atol=1e-3)


@on_vllm
async def test_an_adapter_that_is_dropped_serves_the_turns_that_name_it_to_their_end(running: Running) -> None:
    others = {ref(f"other{i}"): files_of(10 + i) for i in range(6)}
    async with running(adapters={ref("a"): files_of(1), **others}, ends=False) as engine:
        expected = await one(engine, greedy(ref("a"), max_tokens=80))
        came = asyncio.Event()
        task = asyncio.create_task(
            engine.generate(greedy(ref("a"), max_tokens=80), on_token=lambda token, logprob: came.set(), beat=beat)
        )
        await came.wait()
        await engine.drop(ref("a"))
        churn = await asyncio.gather(*[one(engine, greedy(other, max_tokens=4)) for other in others])
        found = await task
    assert found.tokens == expected.tokens and np.allclose(found.logprobs, expected.logprobs, atol=1e-4)
    assert len(churn) == 6


@on_vllm
async def test_it_says_how_many_tokens_its_memory_holds(running: Running) -> None:
    async with running() as engine:
        config = decoder().config
        most = (1 << 28) // (
            2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
        )  # as `vllm_core` starts it
        assert engine.kv_tokens is not None and 0.9 * most < engine.kv_tokens <= most


async def sampling_gap(engine: Engine, temperature: float) -> float:
    """The metric of a real training step on turns of an adapter; every second turn is rewarded."""
    adapter, texts = adapter_of(0), [row["messages"] for row in generate("sort", 0, 64)]
    await engine.load_files(ref("gap"), save_adapter(adapter, "tiny"))
    asked = [
        request(ref("gap"), tokens=tokenizer().render(text), sample=i, max_tokens=32, temperature=temperature)
        for i, text in enumerate(texts)
    ]
    turns = list(zip(asked, await asyncio.gather(*[one(engine, turn) for turn in asked]), strict=True))
    rows = Rows(
        transcript=transcript(
            np.concatenate([part for turn, found in turns for part in (turn.tokens.numpy(), found.tokens)]),
            np.concatenate([part for turn, found in turns for part in (0.0 * turn.tokens.numpy(), found.logprobs)]),
            np.concatenate([[0] * turn.num_prompt + [1] * len(found.tokens) for turn, found in turns]),
        ),
        lengths=i32([turn.num_prompt + len(found.tokens) for turn, found in turns]),
        groups=i32([0] * len(turns)),
        samples=i32(range(len(turns))),
        rewards=f32([i % 2 for i in range(len(turns))]),
        versions=i32([1] * len(turns)),
        truncated=u8([0] * len(turns)),
    )
    state = TrainState.of(adapter, Moments.zeros(lora.flatten(adapter).numel(), torch.device("cpu")))
    spec = LoraSpec(adapter.spec.rank, adapter.spec.alpha)
    step = step_of(rows, ref("gap"), spec, LossSpec(temperature=temperature))
    trained = Trainer(DecoderBackbone(decoder())).step(step, state, lambda: None)
    await engine.drop(ref("gap"))
    return trained.metrics["sampling_gap"] or 1.0


@on_vllm
async def test_log_probs_are_the_trainers_at_the_sampling_temperature(running: Running) -> None:
    async with running() as engine:
        gaps = [await sampling_gap(engine, temperature) for temperature in (1.0, 0.7)]
    assert max(gaps) < 1e-3


@on_vllm
async def test_a_temperature_that_vllm_does_not_take_is_refused_before_it_hears_of_it(running: Running) -> None:
    async with running() as engine:
        with pytest.raises(InvalidInput, match=r"\[0, 2\]"):
            await one(engine, request(temperature=2.5))
        assert (await one(engine, request(temperature=2.0, max_tokens=2))).tokens


@on_vllm
async def test_a_turn_that_is_handed_back_brings_the_tokens_that_waited_for_others(
    running: Running, vllm: SharedVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(await vllm.core(), "_interval", 1000)  # on CUDA a few
    async with running(ends=False) as engine:
        asked = greedy(BASE, max_tokens=1500)
        task = asyncio.create_task(engine.generate(asked, beat=beat))
        while not ((first := engine.partial(asked.id)) and first.num_sampled):
            await asyncio.sleep(0.001)
        await one(engine, greedy(BASE, sample=1, max_tokens=20))  # in step with it
        before = engine.partial(asked.id)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        partial, again = engine.partial(asked.id), await one(engine, greedy(BASE, max_tokens=20))
    assert before and before.num_sampled == 1, "the rest waits"
    assert partial and partial.num_sampled == len(partial.tokens) == len(partial.logprobs) >= 20
    assert partial.tokens[:20] == again.tokens and np.allclose(partial.logprobs[:20], again.logprobs, atol=1e-4)


@on_vllm
async def test_a_chat_goes_before_the_turns_that_wait_in_vllm(running: Running) -> None:
    ends = list[bool]()
    at_once = RolloutSettings(rollout_slots=64).engine_slots  # of `vllm_core`
    asked = [greedy(BASE, sample=n, max_tokens=12) for n in range(2 * at_once + 20)]
    asked.append(replace(greedy(BASE, sample=len(asked), max_tokens=12), chat=True))
    async with running(ends=False, slots=len(asked)) as engine:

        async def sampled(each: TurnRequest) -> None:
            await one(engine, each)
            ends.append(each.chat)

        await asyncio.gather(*map(sampled, asked))
    assert ends.index(True) < 2 * at_once


@on_vllm
@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_a_killed_process_is_replaced_and_turns_go_on_from_their_tokens(
    running: Running, vllm: SharedVllm, capfd: pytest.CaptureFixture[str], num_processes: int
) -> None:
    # Given turns of several adapters, and what they are when nothing happens
    names = [ref("a"), ref("b"), BASE, ref("a")]
    adapters = {ref("a"): files_of(1), ref("b"): files_of(2)}
    asked = [greedy(name, sample=i, max_tokens=60) for i, name in enumerate(names)]
    async with running(adapters=adapters, ends=False) as engine:
        expected = await asyncio.gather(*[one(engine, each) for each in asked])

    # When their process is killed, whose successor may be spread over two
    cores = iter([SharedCore(vllm), vllm_core(tensor_parallel=num_processes)])
    async with ProcessRunning(lambda: next(cores))(adapters=adapters, ends=False) as engine:
        came = asyncio.Event()
        tasks = [
            asyncio.create_task(engine.generate(each, on_token=lambda token, logprob: came.set(), beat=beat))
            for each in asked
        ]
        await came.wait()
        before = engine.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        found = await asyncio.gather(*tasks)

        # Then they go on there, with the same tokens and log-probs
        assert engine.pid not in (None, before) and engine.counters()["engine_restarts"] == 1
        for each, whole in zip(found, expected, strict=True):
            assert each.tokens == whole.tokens and each.num_sampled == 60
            assert np.allclose(each.logprobs, whole.logprobs, atol=1e-4)
        assert "engine_died" in capfd.readouterr().out


@pytest.mark.slow
@on_vllm
async def test_of_two_processes_one_ends_with_the_other(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_engine, "RESTART_DELAYS_S", (3600.0,))  # its next start is not waited for
    async with ProcessRunning(lambda: vllm_core(tensor_parallel=2))(adapters={}, ends=False) as engine:
        halves = psutil.Process(engine.pid).children()
        assert len(halves) == 2
        os.kill(halves[1].pid, signal.SIGKILL)
        while engine.counters()["engine_restarts"] < 1:
            await asyncio.sleep(0.05)
    assert not psutil.wait_procs(halves, timeout=30)[1]


def test_the_guard_ends_a_process_with_the_one_that_it_watches(tmp_path: Path) -> None:
    child = "import os, sys, time; from rollout_service.process.vllm_guard import Guard; Guard().end_with(int(sys.argv[1])); "
    child += "print(os.getpid(), flush=True); time.sleep(100)"
    script = (
        f"import os, subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script + "time.sleep(100)"], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    guarded = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while _lives(guarded):
        assert time.monotonic() < deadline, "it outlived the process that it watches"
        time.sleep(0.01)
    parent.stdout.close()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
