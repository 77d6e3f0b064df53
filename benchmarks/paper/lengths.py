"""An env worker that bounds each answer by a length drawn from the law of `_lengths.py`: `python -m benchmarks.paper.lengths`.

With a base model that does not end its turns, the bounds are the answers' lengths. Nothing but `max_tokens` of the turn requests
is changed: bus, engine and trainer take the path of any other job.
"""

from collections.abc import Callable
from dataclasses import replace

import msgspec

from benchmarks._lengths import answer_tokens
from common.bus.bus import Out
from common.wire.messages import Message, TurnRequest
from common.worker.service import BuiltService, Parts, run
from env_service.__main__ import build, pooled
from env_service.handler import EnvHandler
from env_service.settings import EnvSettings


def bounded(message: Message) -> Message:
    """Turn requests with their answer's length as limit; everything else as it was."""
    if not isinstance(message, TurnRequest):
        return message
    sampling = msgspec.structs.replace(message.sampling, max_tokens=answer_tokens(message.trajectory))
    return msgspec.structs.replace(message, sampling=sampling)


class Bounded(EnvHandler):
    """The env service's handler, and the law."""

    def __init__(self, inner: EnvHandler) -> None:
        """Takes the place of `inner`."""
        vars(self).update(vars(inner))

    async def __call__(self, message: Message, beat: Callable[[], None]) -> list[Out]:
        return [(stream, bounded(out)) for stream, out in await super().__call__(message, beat)]


async def build_bounded(settings: EnvSettings, parts: Parts) -> BuiltService:
    service = await build(settings, parts)
    assert isinstance(service.handler, EnvHandler)
    return replace(service, handler=Bounded(service.handler))


if __name__ == "__main__":
    run("env", EnvSettings, build_bounded, pooled)
