"""A rollout worker that notes when the first token of each job was sampled: `python -m benchmarks.paper.first_tokens`.

It listens to the engine as a stream of tokens does, in the turns that a job begins before one of them has a token. The times stand among
the counters of its reports. Workers of the product note nothing.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from common.messages import TurnRequest
from common.service import BuiltService, Parts, run
from rollout_service.__main__ import build
from rollout_service.engine import Generated
from rollout_service.handler import RolloutHandler
from rollout_service.settings import RolloutSettings

COUNTER = "first_token_s/"
"""Beginning of a counter's name; the job is the rest. Its value: seconds since 1970."""


class NotingHandler(RolloutHandler):
    """The rollout service's handler, and `noted`: when each job's first token had been sampled, in seconds since 1970."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.noted: dict[str, float] = {}

    def counters(self) -> dict[str, float]:
        return {COUNTER + job: at_s for job, at_s in self.noted.items()}

    async def _generate(self, request: TurnRequest, beat: Callable[[], None]) -> Generated:
        if request.stream or request.job in self.noted:
            return await super()._generate(request, beat)

        def note(*_: object) -> None:
            self.noted.setdefault(request.job, time.time())

        generated = await self._engine.generate(request, on_token=note, beat=beat)
        note()  # a turn of one token ends with it
        return generated


def told(counters: Mapping[str, float]) -> dict[str, float]:
    """The times that a worker's counters tell, by job."""
    return {name.removeprefix(COUNTER): at_s for name, at_s in counters.items() if name.startswith(COUNTER)}


async def build_noting(settings: RolloutSettings, parts: Parts) -> BuiltService:
    service = await build(settings, parts, NotingHandler)
    handler, counters = service.handler, service.about.counters
    assert isinstance(handler, NotingHandler)
    about = replace(service.about, counters=lambda: counters() | handler.counters())
    return replace(service, about=about)


if __name__ == "__main__":
    run("rollout", RolloutSettings, build_noting)
