"""Tests who gets what begins like a request that was answered, and which worker is a job's home."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.bus.bus import Bus
from common.bus.streams import GROUP_ROLLOUT
from common.wire.messages import BASE, EMPTY_F32, AdapterRef, Sampling, Start, TurnResult, Usage, i32
from manager_service.http.sampling.choices import FIRST_TOKENS, Choice, InferenceRequest, LastWorkers, choices_of
from manager_service.http.sampling.inference import Inference
from manager_service.owner.jobs.changes import Changes
from manager_service.owner.jobs.orders import give_homes, home_of
from manager_service.records.cluster import BaseTurn
from manager_service.records.tenants import TenantRecord
from tests.common.test_bus import start

TENANT = TenantRecord(id="acme", created_at=0)
SYSTEM = list(range(FIRST_TOKENS))
WORKERS = [f"rollout-{n}" for n in range(6)]


def choice(
    prompt: list[int], *, bulk: bool = False, adapter: AdapterRef = BASE, tenant: TenantRecord = TENANT
) -> Choice:
    of: Any = {"tenant": tenant, "adapter": adapter, "num_choices": 1, "seed": 0, "stream": False, "bulk": bulk}
    return choices_of("chat-1", InferenceRequest(prompts=[prompt], sampling=[Sampling()], **of), "reply")[0]


def answered(workers: LastWorkers, asked: Choice, worker: str, answer: Sequence[int] = ()) -> None:
    request = asked.request
    more: Any = {
        "tokens": i32(answer),
        "logprobs": EMPTY_F32,
        "stop_reason": "stop",
        "usage": Usage(),
        "worker": worker,
    }
    asked.result = TurnResult(**request.about(), id=request.id, request=request, adapter=request.adapter, **more)
    workers.end(asked)


def test_what_begins_alike_goes_to_the_worker_that_answered_last() -> None:
    workers = LastWorkers()
    for worker in ("a", "b"):
        answered(workers, choice([*SYSTEM, 1]), worker)
    found = [choice([*SYSTEM, 2, 3]), choice(SYSTEM[1:]), choice([*SYSTEM, 1], adapter=AdapterRef("acme", "job", 1))]
    found.append(choice([*SYSTEM, 2], tenant=TenantRecord(id="bluebird", created_at=0)))
    for each in found:
        workers.address(each, 4)
    assert [each.worker for each in found] == ["b", "", "", ""]


def test_a_short_conversation_goes_on_where_it_was_answered_though_others_begin_alike() -> None:
    workers, begun = LastWorkers(), {name: [*SYSTEM[:30], *[ord(name)] * 10] for name in "ab"}
    for name, prompt in begun.items():
        answered(workers, choice(prompt), name, range(20))
    for name, prompt in begun.items():
        following = choice([*prompt, *range(18), 7, 8, 9])  # the answer's text gives other tokens at its end
        workers.address(following, 4)
        assert following.worker == name
    fresh = choice([*SYSTEM[:30], *range(50)])
    workers.address(fresh, 4)
    assert fresh.worker == "b", "what else begins like both goes to who was the last"


def test_no_worker_gets_more_than_its_part_of_an_application() -> None:
    workers = LastWorkers()
    answered(workers, choice(SYSTEM), "a")
    crowd = [choice([*SYSTEM, n]) for n in range(40)]
    for each in crowd:
        workers.address(each, 4)
    assert [each.worker for each in crowd] == ["a"] * 2 + [""] * 38
    # When one of them is over, then there is room for another; what is asked for again goes to all
    answered(workers, crowd[0], "a")
    workers.address(crowd[2], 4)
    assert crowd[2].worker == "a"
    crowd[2].request = msgspec.structs.replace(crowd[2].request, epoch=1)
    workers.address(crowd[2], 4)
    assert crowd[2].worker == ""


@pytest.mark.parametrize("bulk", [False, True])
async def test_a_request_is_found_wherever_it_was_passed_on_to(bus: Bus, bulk: bool) -> None:
    slots: Any = {"chat": 1}.get
    options: Any = {"silence_s": 1.0, "timeout_s": 1.0, "slots": slots, "most_for_chat": 0.5}
    inference: Any = Inference(bus, "api", **options, num_workers=lambda: 1, turn=lambda: BaseTurn("open"))
    cell = bus.cell
    own, all_of = (
        (cell.rollout_worker("a"), cell.rollout) if bulk else (cell.rollout_chat_worker("a"), cell.rollout_chat)
    )
    answered(inference._last, choice(SYSTEM, bulk=bulk), "a")
    # Given a worker that is not there any more, then the request goes to all
    asked = choice(SYSTEM, bulk=bulk)
    await inference._publish([asked])
    assert (asked.stream, asked.worker, await bus.client.xlen(all_of)) == (all_of, "", 1)
    assert not await bus.client.exists(own)
    # and to one that is
    await bus.client.xgroup_create(own, GROUP_ROLLOUT, mkstream=True)
    asked = choice(SYSTEM, bulk=bulk)
    await inference._publish([asked])
    assert (asked.stream, await bus.client.xlen(own)) == (own, 1) and await inference._is_cared_for(asked)
    # When that one passes it on, then it is looked for there
    await bus.client.delete(own)
    assert not await inference._is_cared_for(asked)
    found: Any = await bus.client.xrange(all_of)
    entry = found[0][0]
    await bus.client.set(cell.moved(own, asked.entry), f"{all_of} {entry.decode()}")
    assert await inference._is_cared_for(asked)
    assert (asked.stream, asked.entry) == (all_of, entry.decode())


# ---- homes -----------------------------------------------------------------------------------------------------------


@given(st.sets(st.sampled_from(WORKERS), min_size=2), st.integers(0, 99))
def test_a_worker_that_leaves_moves_its_own_jobs_alone(workers: set[str], job: int) -> None:
    home = home_of(f"job-{job}", workers)
    for gone in workers - {home}:
        assert home_of(f"job-{job}", workers - {gone}) == home


def test_jobs_have_homes_only_where_adapters_places_are_scarce() -> None:
    def homes(lora_slots: dict[str, int], num_jobs: int) -> set[str]:
        changes = Changes(published=[("env", start(n)) for n in range(4)])
        give_homes([changes], lora_slots, num_jobs=num_jobs)
        return {message.home for _, message in changes.published if isinstance(message, Start)}

    limited = dict.fromkeys(WORKERS, 8)
    assert homes({}, 100) == homes(limited, 8) == {""}
    assert homes(limited, 9) == {home_of("job", WORKERS)}
    spread = [home_of(f"job-{n}", WORKERS) for n in range(600)]
    assert all(60 < spread.count(worker) < 140 for worker in WORKERS)
