"""Convoys: how a base model is divided, who loads what, and who serves with whom."""

import asyncio
import contextlib
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.bus.bus import Bus
from common.cancellation import running
from common.models.stages import divided
from common.models.weight_files import StoredTensor, stored_tensors
from common.peers import base_fetch
from common.peers.base_fetch import BaseFetch
from common.peers.chain import Relay
from common.peers.convoys import READY, WHOLE, Convoy
from common.peers.folder import NodeFolder
from common.peers.holders import Holders
from common.settings import TINY
from common.store.parts import stored_file
from tests.common.test_bases import SIZE, WEIGHTS, Store, content, pushed
from tests.common.test_worker import until

FILE = stored_file((TINY / WEIGHTS).read_bytes(), in_parts=True)


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(0, 200), st.integers(1, 8))
def test_stages_have_all_layers_in_order_and_about_as_many_bytes(layers: list[int], rest: int, num: int) -> None:
    named = [(f"model.layers.{number}.w", size) for number, size in enumerate(layers)]
    tensors = [StoredTensor(0, size, name, "F32", [1]) for name, size in [*named, ("model.embed_tokens.weight", rest)]]
    stages = divided(tensors, num)
    assert [layer for stage in stages for layer in stage.layers] == list(range(len(layers)))
    share, largest = (sum(layers) + rest) / num, max(layers, default=0)
    assert all(sum(layers[layer] for layer in stage.layers) <= share + largest for stage in stages[1:])


def test_each_stage_needs_the_parts_of_its_tensors_and_all_are_whole_together() -> None:
    with (TINY / WEIGHTS).open("rb") as file:
        tensors = stored_tensors(file)
    for num in (1, 2, 4):
        parts = [stage.parts_of(FILE, tensors) for stage in divided(tensors, num)]
        assert sorted({*itertools.chain(*parts)}) == list(range(len(FILE.parts)))
        assert max(map(len, parts)) <= len(FILE.parts) / num + 3  # the header's, and those at both ends


@pytest.mark.asyncio
async def test_neighbouring_places_are_a_convoy_and_a_free_one_is_taken_first(bus: Bus) -> None:
    convoys = [Convoy(bus, f"w{number}", f"h:{number}", 2) for number in range(4)]
    async with contextlib.AsyncExitStack() as stack:
        for each in convoys[:3]:
            await stack.enter_async_context(each.taken_part())
            await each.enter()
            each.state = READY
        assert [each.place for each in convoys[:3]] == [0, 1, 2]
        await until(lambda: convoys[0].is_formed)
        assert [each.address for each in convoys[0].loaders] == ["h:0", "h:1"] and not convoys[2].is_formed
        convoys[1].state = WHOLE
        await until(lambda: convoys[0].whole == "w1")
        assert not convoys[0].is_formed and not convoys[2].whole
        assert await convoys[3].enter() == 1
        assert convoys[3].place == 3 and await convoys[3].enter() == 1  # a fetch that goes on keeps its place


@pytest.mark.asyncio
async def test_loaders_begin_with_different_stages_and_the_store_is_read_once(tmp_path: Path, bus: Bus) -> None:
    store = Store()
    where, _ = await pushed(store)
    relays, convoys = list[Relay](), list[Convoy]()

    async def load(name: str) -> Path:
        relay = Relay(store, NodeFolder(tmp_path / name / "files", 0), Holders(bus, name, store_places=1))
        await relay.open("127.0.0.1", 0)
        relays.append(relay)
        convoys.append(Convoy(bus, name, relay.holders.address, 3))
        relay.convoy = convoys[-1]
        fetch = BaseFetch(store, tmp_path / name, where, with_weights=True, relay=relay)
        await stack.enter_async_context(running(relay.run()))
        async with convoys[-1].taken_part():
            found = await fetch.run()
            done.append(name)
            while len(done) < 3:
                await asyncio.sleep(0.01)
        return found

    done = list[str]()
    async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
        found = await asyncio.gather(*(load(name) for name in "abc"))
        found.append(await load("d"))  # from the others, which are whole: from each the stage that it began with
        for relay in relays:
            await relay.close()
    assert all(content(folder) == content(TINY) for folder in found)
    assert sorted(convoy.place for convoy in convoys) == [0, 0, 1, 2] and all(c.began.is_set() for c in convoys)
    # each part once, but for those that two stages share
    assert SIZE <= sum(each.counters()["store_bytes"] for each in relays[:3]) < 1.2 * SIZE
    assert relays[3].counters()["store_bytes"] == 0
    assert await bus.client.keys(bus.cell.convoy("*")) == []


@pytest.mark.asyncio
async def test_layers_in_a_small_file_belong_to_stages_too(
    tmp_path: Path, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_fetch, "PARTED_BYTES", SIZE)  # so that nothing of it comes in parts
    store = Store()
    where, _ = await pushed(store)
    relay = Relay(store, NodeFolder(tmp_path / "files", 0), Holders(bus, "a", store_places=1))
    relay.convoy = convoy = Convoy(bus, "a", "h:1", 2)
    await BaseFetch(store, tmp_path, where, with_weights=True, relay=relay).run()
    with (TINY / WEIGHTS).open("rb") as file:
        assert convoy.stages == divided(stored_tensors(file), 2) and convoy.stages[1].layers
