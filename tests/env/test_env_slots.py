"""An env worker's slots are shared by weight: one tenant's many slow steps do not keep another waiting."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from common.bus.bus import Bus
from common.bus.streams import GROUP_ENV
from common.cancellation import running
from common.text.tokens import ChatTokenizer
from common.wire.messages import EnvSpec, GradeRequest, GradeResult
from common.worker.telemetry import About, Reporter
from common.worker.worker import Habits, Inbox, Worker
from env_service.environment import Step, Turn
from env_service.environments.catalogue import Catalogue
from env_service.handler import EnvHandler
from env_service.live.sessions import Sessions

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
SLOTS = 4


@dataclass
class Gated:
    """An environment whose steps end when the test says so; `spec.name` is the tenant."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    under_way: int = 0
    most: int = 0

    def get(self, spec: EnvSpec) -> "Gated":
        return self

    def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Any, list[Any]]:
        return None, []

    async def step(self, state: Any, turn: Turn) -> Step:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if turn.text == "slow":
                await self.gate.wait()
            return Step(state=None, messages=[], done=True, reward=1.0)
        finally:
            self.under_way -= 1


def asked(bus: Bus, tenant: str, number: int, text: str = "slow", weight: float = 1.0) -> tuple[str, GradeRequest]:
    request = GradeRequest(
        id=f"{tenant}-{number}",
        tenant=tenant,
        job=tenant,
        partition=0,
        env=EnvSpec("gated", {}),
        item={},
        output_text=text,
        reply_to=bus.cell.reply("test"),
        weight=weight,
    )
    return bus.cell.env, request


async def answers(bus: Bus, num: int) -> list[str]:
    """The tenants of the first answers."""
    found: list[str] = []
    cursor = "0"
    while len(found) < num:
        entries = await bus.follow(bus.cell.reply("test"), cursor, block_ms=100)
        for _, message in entries:
            assert isinstance(message, GradeResult) and message.reward == 1.0, message
            found.append(message.tenant)
        cursor = entries[-1][0] if entries else cursor
    return found[:num]


@asynccontextmanager
async def working(bus: Bus, environment: Gated) -> AsyncGenerator[None]:
    tokenizer = ChatTokenizer.load(TINY)
    handler = EnvHandler(
        cell=bus.cell,
        tokenizer=tokenizer,
        environments=cast("Catalogue", environment),
        sessions=Sessions("env-0"),
        slots=SLOTS,
    )
    reporter = Reporter("env-1", "env", "tiny", About(slots=SLOTS))
    worker = Worker(bus, handler, [Inbox(bus.cell.env, GROUP_ENV)], reporter, habits=Habits(ahead=16 * SLOTS))
    await bus.ensure_group(bus.cell.reply("test"), "alive")
    stop = asyncio.Event()
    async with running(worker.run(stop)):
        yield
        environment.gate.set()
        stop.set()


async def test_a_step_behind_a_hundred_slow_ones_of_another_tenant_is_done_while_they_run(bus: Bus) -> None:
    environment = Gated()
    await bus.publish([asked(bus, "many", n) for n in range(100)])
    await bus.publish([asked(bus, "one", 0, text="quick")])
    async with working(bus, environment):
        assert await answers(bus, 1) == ["one"]
        assert environment.most == SLOTS + 1, "a slot is kept for a tenant that holds none"
