"""Live environments: sessions that stay with an env worker, and what becomes of them when they are lost."""

import asyncio
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.cancellation import running
from common.tasks.environments import validate_environment
from common.wire.codec import decode, encode
from common.wire.messages import Cancel, EnvSpec, Failure, Message, Start, TurnRequest, TurnResult
from env_service.environments.catalogue import Catalogue
from env_service.environments.openenv_server import Servers
from env_service.graders.endpoint import Endpoints
from env_service.graders.runner import GraderRunner
from env_service.graders.text import TextComparer
from env_service.handler import EnvHandler
from env_service.live.sessions import Sessions
from env_service.sandbox.sandbox import Sandbox
from tests.common.test_worker import until
from tests.env.test_env_handler import CELL, TINY, TOKENIZER, result_of, start_of
from tests.support.live_environments import Adding, install

pytestmark = [pytest.mark.usefixtures("installed")]
ITEM = {"number": 5}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install(tmp_path / "installed"))


@pytest.fixture
def story(tmp_path: Path) -> Path:
    return tmp_path / "story"


class EnvWorker:
    """An env worker's handler with its sessions, and messages over the wire and back."""

    def __init__(self, name: str, *, openenv: Servers | None = None, **options: Any) -> None:
        sandbox = Sandbox()
        graders = GraderRunner(sandbox=sandbox, endpoints=Endpoints(""), text_comparer=TextComparer(), timeout_s=20.0)
        self.sessions = Sessions(name, **options)
        self.environments = Catalogue(graders=graders, sandbox=sandbox, base_dir=TINY, openenv=openenv)
        self.handler = EnvHandler(
            cell=CELL,
            tokenizer=TOKENIZER,
            environments=self.environments,
            step_timeout_s=options.get("limit_s", 900.0),
            sessions=self.sessions,
        )

    async def handle(self, message: Message) -> list[tuple[str, Any]]:
        out = await self.handler(decode(encode(message)), lambda: None)
        return [(stream, decode(encode(each))) for stream, each in out]

    async def first(self, start: Start) -> TurnRequest:
        [(stream, request)] = await self.handle(start)
        assert (stream, request.session) == (CELL.rollout, request.session), request
        return request

    async def turn(self, request: TurnRequest, text: str, **changes: Any) -> Any:
        [(_, out)] = await self.handle(result_of(request, f"{text}<|end|>", **changes))
        return out


def live_start(name: str = "adding", *, samples: tuple[int, ...] = (5,), **changes: Any) -> Start:
    args = changes.pop("args", {})
    return start_of(name, args, samples=samples, **{"item": ITEM, **changes})


def told(story: Path) -> list[str]:
    """The events, without the process."""
    return [line.split()[1] for line in story.read_text().splitlines()] if story.exists() else []


async def test_one_session_answers_all_turns_of_a_trajectory(story: Path) -> None:
    worker = EnvWorker("a")
    request = await worker.first(live_start(args={"story": str(story)}))
    for text in ("10", "20"):
        assert CELL.holder(request.session) == CELL.env_worker("a")
        request = await worker.turn(request, text)
    assert TOKENIZER.decode(request.tokens.numpy().tolist()).count("max") == 3
    scored = await worker.turn(request, "30")
    assert (scored.reward, scored.failure, scored.num_turns) == (0.65, None, 3)
    await until(lambda: told(story) == ["open", "step", "step", "step", "close"])
    assert len(worker.sessions) == 0


async def test_each_sample_of_a_group_is_begun_alone_and_with_the_same_seed(story: Path) -> None:
    worker = EnvWorker("a")
    begun = await worker.handle(live_start(args={"story": str(story)}, samples=(0, 1, 2)))
    assert [(stream, start.samples) for stream, start in begun] == [(CELL.env, (n,)) for n in range(3)]
    requests = [await worker.first(start) for _, start in begun]
    assert [start.id for _, start in begun] == [request.id for request in requests]
    assert len({request.session for request in requests}) == 3
    await worker.first(live_start(args={"story": str(story)}, group=1, samples=(0,)))
    *seeds, another = [line.split()[3] for line in story.read_text().splitlines()]
    assert len(seeds) == 3 and len({*seeds}) == 1 and another not in seeds


async def test_a_lost_session_is_replayed_by_whoever_gets_the_next_turn(story: Path) -> None:
    first, second = EnvWorker("a"), EnvWorker("b")
    request = await first.first(live_start(args={"story": str(story)}))
    request = await first.turn(request, "10")
    shown = request.tokens
    # When another worker gets the second turn
    request = await second.turn(request, "20")
    assert told(story) == ["open", "step", "open", "step", "step"]
    # Then it has the session, with all that happened before
    assert CELL.holder(request.session) == CELL.env_worker("b")
    assert request.tokens.numpy()[: len(shown)].tolist() == shown.numpy().tolist()
    scored = await second.turn(request, "30")
    assert (scored.reward, scored.failure) == (0.65, None)
    assert second.handler.counters()["replays"] == 1


async def test_a_session_that_was_lost_is_never_gone_on_with(story: Path) -> None:
    first, second = EnvWorker("a"), EnvWorker("b")
    stale = await first.first(live_start(args={"story": str(story)}))
    moved = await second.turn(stale, "10")
    # When the trajectory comes back to the first worker, which still holds a session that saw none of its turns
    again = await first.turn(moved, "20")
    # Then that worker opens a new one
    assert again.session != stale.session
    scored = await first.turn(again, "30")
    assert scored.reward == 0.65


async def test_a_worker_that_others_took_for_gone_closes_its_sessions(story: Path) -> None:
    worker = EnvWorker("a")
    request = await worker.first(live_start(args={"story": str(story)}))
    worker.sessions.missed()
    await until(lambda: told(story) == ["open", "close"])
    assert (await worker.turn(request, "10")).turn == 1, "its turn may come here, and is replayed"


@pytest.mark.parametrize("missed", [True, False])
async def test_a_worker_that_came_late_goes_on_once_it_knows_whether_others_have_its_turns(
    story: Path, missed: bool
) -> None:
    worker = EnvWorker("a")
    request = await worker.first(live_start(args={"story": str(story)}))
    worker.sessions.trusted_until(0)
    turn = asyncio.create_task(worker.turn(request, "10"))
    while not worker.sessions._trusted._waiters:  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue]
        await asyncio.sleep(0)
    assert told(story) == ["open"]
    # When it is told
    if missed:
        worker.sessions.missed()
    worker.sessions.trusted_until(math.inf)
    # Then the trajectory goes on in its session, or in a new one
    assert ((await turn).session != request.session) == missed
    wanted = ["close", "open", "open", "step"] if missed else ["open", "step"]
    await until(lambda: sorted(told(story)) == wanted)


async def test_a_replay_that_shows_something_else_masks_the_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = EnvWorker("a"), EnvWorker("b")
    request = await first.first(live_start())
    request = await first.turn(request, "10")
    monkeypatch.setattr(Adding, "shown", lambda self, total: f"{total + 1}")  # pyright: ignore[reportUnknownLambdaType,reportUnknownArgumentType]
    scored = await second.turn(request, "20")
    lost = "the trajectory's session was lost, and its replay failed: "
    what = "the environment now shows the model something else before turn 2"
    assert (scored.reward, scored.failure) == (None, Failure("infrastructure", lost + what))
    await until(lambda: len(second.sessions) == 0)


async def test_an_error_of_a_session_masks_the_trajectory_and_closes_it(story: Path) -> None:
    worker = EnvWorker("a")
    request = await worker.first(live_start(args={"story": str(story)}))
    scored = await worker.turn(request, "0")
    assert scored.failure.kind == "environment"
    assert scored.failure.reason.startswith("RuntimeError: nothing to add (live_environments.py:")
    await until(lambda: told(story) == ["open", "close"])


async def test_a_session_that_takes_too_long_masks_the_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hangs(self: Adding, item: dict[str, Any], seed: int) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(Adding, "open", hangs)
    [(_, scored)] = await EnvWorker("a", limit_s=0.1).handle(live_start())
    assert scored.failure == Failure("infrastructure", "the environment took longer than 0.1 seconds")


async def test_a_session_that_has_not_ended_with_the_last_turn_is_ended() -> None:
    worker = EnvWorker("a")
    scored = await worker.turn(await worker.first(live_start(max_turns=1)), "10")
    assert (scored.reward, scored.reward_parts, scored.stop_reason) == (-0.15, {"cut": 1.0}, "max_turns")


async def test_a_session_whose_reply_does_not_fit_is_ended_without_a_second_step(story: Path) -> None:
    worker = EnvWorker("a")
    start = live_start(args={"story": str(story)})
    request = await worker.first(start)
    narrow = msgspec.structs.replace(request.sampling, max_context=len(request.tokens) + 4)
    scored = await worker.turn(msgspec.structs.replace(request, sampling=narrow), "10")
    assert (scored.reward, scored.stop_reason) == (-0.15, "context")
    await until(lambda: told(story) == ["open", "step", "close"])


async def test_a_cancelled_or_paused_job_has_no_sessions_left(story: Path) -> None:
    worker = EnvWorker("a")
    await worker.first(live_start(args={"story": str(story)}))
    await worker.first(live_start(args={"story": str(story)}, job="other"))
    cancel = Cancel(id="c", tenant="acme", job="job1", partition=3, epoch=1)
    worker.handler.voided(cancel)
    assert len(worker.sessions) == 2, "the job's messages are of a later epoch"
    worker.handler.voided(msgspec.structs.replace(cancel, epoch=2, park=True))
    await until(lambda: told(story) == ["open", "open", "close"])
    assert len(worker.sessions) == 1


async def test_a_result_that_came_too_late_takes_its_session_with_it(story: Path) -> None:
    worker = EnvWorker("a")
    request = await worker.first(live_start(args={"story": str(story)}))
    worker.handler.unpublished([(CELL.rollout, request)])
    await until(lambda: told(story) == ["open", "close"])


async def test_a_session_for_which_no_turn_comes_is_closed(story: Path) -> None:
    worker = EnvWorker("a", idle_s=0.05)
    await worker.first(live_start(args={"story": str(story)}))
    async with running(worker.sessions.close_idle()):
        await until(lambda: told(story) == ["open", "close"])


async def test_a_worker_that_ends_closes_its_sessions(story: Path) -> None:
    worker = EnvWorker("a")
    await worker.first(live_start(args={"story": str(story)}))
    await worker.sessions.close()
    assert told(story) == ["open", "close"]


async def test_places_are_bounded_and_one_is_kept_for_a_tenant_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("env_service.handler.PUT_BACK_S", 0.05)
    worker = EnvWorker("a", num=2)
    held = [await worker.first(live_start(samples=(n,))) for n in range(2)]
    # When there is no place for a third trajectory, it goes back for another worker
    [(stream, message)] = await worker.handle(live_start(samples=(2,)))
    assert (stream, isinstance(message, Start)) == (CELL.env, True)
    # And another tenant's begins
    await worker.first(live_start(tenant="other"))
    assert len(worker.sessions) == 3
    # And one that ends makes room
    await worker.turn(held[0], "0")
    await until(lambda: len(worker.sessions) == 2)


async def test_a_turn_that_waits_for_a_slot_stays_with_the_worker_that_has_its_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("env_service.handler.PUT_BACK_S", 0.05)
    worker = EnvWorker("a")
    request = await worker.first(live_start())
    slots = worker.handler._slots  # pyright: ignore[reportPrivateUsage]
    taken = [await slots.take("acme", 1.0) for _ in range(64)]
    [(stream, message)] = await worker.handle(result_of(request, "10<|end|>"))
    assert (stream, isinstance(message, TurnResult)) == (CELL.env_worker("a"), True)
    slots.end(taken[0])
    assert (await worker.turn(request, "10")).session == request.session


def test_a_live_environment_is_checked_when_the_job_is_created() -> None:
    validate_environment(EnvSpec("adding", {"turns": 2}))
    with pytest.raises(Exception, match="unknown field 'turn'"):
        validate_environment(EnvSpec("adding", {"turn": 2}))
