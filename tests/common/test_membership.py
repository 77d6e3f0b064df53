"""A worker may join a cell if it computes the same bits as those that its jobs began with."""

import asyncio

import pytest

from common.bus.bus import Bus
from common.worker.membership import JoinRefused, Membership


def member(
    bus: Bus, service: str = "rollout", bits: str = "aaa", *, deterministic: bool = True, digest: str = ""
) -> Membership:
    return Membership(
        bus,
        service,
        deterministic=deterministic,
        fingerprint=bits if deterministic else "",
        fingerprints={},
        digest=digest,
    )


async def all_are_gone(bus: Bus) -> None:
    """Forgets the workers that live, as if none had been heard for longer than a hold."""
    await bus.client.delete(bus.cell.bits_live)


async def test_the_first_worker_of_a_service_sets_its_fingerprint_and_others_must_agree(bus: Bus) -> None:
    await member(bus).join()
    await member(bus).join()
    await member(bus, "trainer", "bbb").join()
    with pytest.raises(JoinRefused, match="fingerprint of rollout: ccc instead of aaa"):
        await member(bus, bits="ccc").join()


async def test_a_worker_learns_the_fingerprints_of_all_services(bus: Bus) -> None:
    found: dict[str, str] = {}
    await member(bus).join()
    await Membership(
        bus, "trainer", deterministic=True, fingerprint="bbb", fingerprints=found, digest="texts-one"
    ).join()
    assert found == {"rollout": "aaa", "trainer": "bbb"}


@pytest.mark.parametrize("first", [True, False])
async def test_workers_of_the_two_modes_do_not_mix_in_any_service(bus: Bus, first: bool) -> None:
    await member(bus, deterministic=first).join()
    advice = "unset MARLAAS_DETERMINISTIC" if not first else "set MARLAAS_DETERMINISTIC=1"
    with pytest.raises(JoinRefused, match=advice):
        await member(bus, "env", deterministic=not first).join()


async def test_default_mode_asks_for_no_bits(bus: Bus) -> None:
    await member(bus, bits="aaa", deterministic=False).join()
    await member(bus, bits="bbb", deterministic=False).join()


@pytest.mark.parametrize("deterministic", [True, False])
async def test_workers_of_another_base_model_do_not_join_in_either_mode(bus: Bus, deterministic: bool) -> None:
    await member(bus, "env", digest="texts", deterministic=deterministic).join()
    await member(bus, digest="texts-one", deterministic=deterministic).join()
    await member(bus, "env", digest="texts", deterministic=deterministic).join()
    for digest in ("texts-two", "other-one", "other"):
        with pytest.raises(JoinRefused, match=f"digest {digest} instead of texts-one"):
            await member(bus, "trainer", digest=digest, deterministic=deterministic).join()
    # When all are gone and no job is unfinished, the name may mean another
    await all_are_gone(bus)
    await member(bus, "trainer", digest="texts-two", deterministic=deterministic).join()


async def test_bits_stand_until_their_workers_are_gone_and_their_jobs_have_ended(bus: Bus) -> None:
    await member(bus).join()
    await bus.client.sadd(bus.cell.begun, "job-a")
    # Given an unfinished job, nobody else may go on with it, even when all workers are gone
    await all_are_gone(bus)
    with pytest.raises(JoinRefused):
        await member(bus, bits="ccc").join()
    with pytest.raises(JoinRefused):
        await member(bus, deterministic=False).join()
    # When the job has ended, but a worker lives, the bits still stand
    await member(bus).join()
    await bus.client.delete(bus.cell.begun)
    with pytest.raises(JoinRefused):
        await member(bus, bits="ccc").join()
    # Then, once it is gone too, the next worker sets them anew
    await all_are_gone(bus)
    await member(bus, deterministic=False).join()


async def test_a_worker_that_was_not_heard_and_finds_other_bits_stops(bus: Bus) -> None:
    frozen, stop = member(bus), asyncio.Event()
    await frozen.join()
    await all_are_gone(bus)
    await member(bus, bits="ccc").join()
    keeping = asyncio.create_task(frozen.keep(stop))
    await asyncio.wait_for(stop.wait(), 60)
    keeping.cancel()


async def test_a_refused_worker_waits_and_says_why(bus: Bus) -> None:
    await member(bus).join()
    told, said = asyncio.Event(), list[str]()

    async def tell(reason: str) -> None:
        said.append(reason)
        told.set()

    waiting = asyncio.create_task(member(bus, bits="ccc").wait_to_join(tell))
    await asyncio.wait_for(told.wait(), 60)
    assert not waiting.done() and "cancel the unfinished jobs" in said[0]
    await all_are_gone(bus)
    await asyncio.wait_for(waiting, 60)
