"""A process engine that sleeps while another base model is open, over a core that is no process and wakes as told."""

from typing import Any

import pytest

from common.errors import InvalidInput, Unavailable
from rollout_service.__main__ import pooled
from rollout_service.process import sleeping
from rollout_service.settings import RolloutSettings
from tests.rollout.test_process_engine import Cores, started
from tests.support.rollout_cases import one, ref, request

pytestmark = pytest.mark.asyncio


async def test_turns_after_a_sleep_are_as_before_and_the_adapters_dropped_meanwhile_are_gone() -> None:
    cores = Cores()
    async with started(cores, "a", "b") as engine:
        asked = [request(ref(job), max_tokens=20, temperature=0.0) for job in ("a", "b")]
        before = [await one(engine, each) for each in asked]
        for _ in range(2):
            await engine.sleep()
            assert cores.last.is_asleep
            await engine.drop(ref("b"))
            await engine.wake()
        after = await one(engine, asked[0])
    assert (after.tokens, after.logprobs) == (before[0].tokens, before[0].logprobs) != (before[1].tokens, None)
    assert len(cores.made) == 1 and engine.resident() == [ref("a")]


async def test_a_process_that_dies_awake_is_started_again_and_sleeps_too() -> None:
    cores = Cores()
    async with started(cores, "a") as engine:
        await engine.sleep()
        await engine.wake()
        cores.last.dead.set()
        await one(engine, request(ref("a"), max_tokens=5))
        await engine.sleep()
        assert len(cores.made) == 2 and cores.last.is_asleep


@pytest.mark.parametrize(
    ("wakes", "reason"),
    [
        ("fails", "no memory"),
        ("hangs", "it hangs"),
        ("dies", "its process ended"),
        ("with other weights", "it scores a prompt otherwise than before"),
        ("without adapters", r"by 0 bare, \d\.\d* with an adapter"),
    ],
)
async def test_an_engine_whose_process_does_not_wake_as_it_was_is_of_no_use(
    wakes: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleeping, "LIMIT_S", 0.5 if wakes == "hangs" else 60.0)
    cores = Cores(wakes=wakes)
    async with started(cores) as engine:
        await engine.sleep()
        with pytest.raises(Unavailable, match=reason):
            await engine.wake()
    assert len(cores.made) == 1, "a second process would take the memory of the base model that is open"


async def test_a_process_that_dies_asleep_is_not_started_while_others_have_the_memory() -> None:
    cores = Cores()
    async with started(cores) as engine:
        await engine.sleep()
        cores.last.dead.set()
        with pytest.raises(Unavailable, match="its process ended"):
            await engine.wake()
        assert len(cores.made) == 1


@pytest.mark.parametrize("told", [{"rollout_device": "cpu", "rollout_kv_bytes": 1}, {"rollout_device": "cuda"}])
async def test_vllm_takes_turns_only_where_it_can_sleep_and_its_memory_is_known(told: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="on CUDA alone, with MARLAAS_ROLLOUT_KV_BYTES"):
        pooled(RolloutSettings(engine="vllm", **told))
    both: dict[str, Any] = {"rollout_device": "cuda", "rollout_kv_bytes": 1 << 30, "vllm_tensor_parallel": 2}
    found = pooled(RolloutSettings(engine="vllm", **both))
    assert (found.sleeps, found.open_bytes, found.itemsize) == (True, 1 << 30, 1.0)
