"""An env worker that bounds each answer by a length drawn from a heavy-tailed law: `python -m benchmarks.paper.lengths`.

With a base model that does not end its turns, the bounds are the answers' lengths. Nothing but `max_tokens` of the turn requests
is changed: bus, engine and trainer take the path of any other job. A length is a function of seed, group and sample.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

import msgspec

from common import rng
from common.bus import Out
from common.messages import Failure, Message, TrajectoryRef, TurnRequest
from common.service import BuiltService, Parts, run
from env_service.__main__ import build
from env_service.handler import EnvHandler
from env_service.settings import EnvSettings

MEDIAN = 16
SIGMA = math.log(10) / NormalDist().inv_cdf(0.99)
"""The 99th percentile is ten times the median."""
LONGEST = 40 * MEDIAN


def answer_tokens(ref: TrajectoryRef) -> int:
    uniform = float(rng.uniform(ref.seed, "length", ref.group, ref.sample))
    tokens = MEDIAN * math.exp(SIGMA * NormalDist().inv_cdf(min(max(uniform, 1e-9), 1 - 1e-9)))
    return min(max(1, round(tokens)), LONGEST)


def bounded(message: Message) -> Message:
    """Turn requests with their answer's length as limit; everything else as it was."""
    if not isinstance(message, TurnRequest):
        return message
    sampling = msgspec.structs.replace(message.sampling, max_tokens=answer_tokens(message.trajectory))
    return msgspec.structs.replace(message, sampling=sampling)


@dataclass(frozen=True, slots=True)
class Bounded:
    """The env service's handler, and the law."""

    inner: EnvHandler

    async def __call__(self, message: Message, beat: Callable[[], None]) -> list[Out]:
        return [(stream, bounded(out)) for stream, out in await self.inner(message, beat)]

    def park(self, message: Message) -> list[Out]:
        return self.inner.park(message)

    def drop(self, message: Message) -> list[Out]:
        return self.inner.drop(message)

    def hand_back(self, message: Message) -> list[Out] | None:
        return self.inner.hand_back(message)

    def failed(self, message: Message, failure: Failure) -> list[Out]:
        return self.inner.failed(message, failure)


async def build_bounded(settings: EnvSettings, parts: Parts) -> BuiltService:
    service = await build(settings, parts)
    assert isinstance(service.handler, EnvHandler)
    return replace(service, handler=Bounded(service.handler))


if __name__ == "__main__":
    run("env", EnvSettings, build_bounded)
