"""Parts of the handler's messages: pure functions of the messages that it was given."""

from collections.abc import Sequence
from typing import Any

import msgspec

from common import rng
from common.errors import InvalidInput
from common.wire.messages import Start, TrajectoryRef, TurnRequest, Usage, turn_id
from common.wire.transcript import shown
from env_service.environment import Environment, LiveEnvironment


def alone(start: Start) -> list[Start]:
    """A Start for each sample. Their ids name their trajectories, where the group's own stands for all of them."""
    version = start.adapter.version
    ids = {sample: turn_id(start.job, _ref(start, sample), version, 0) for sample in start.samples}
    return [msgspec.structs.replace(start, id=ids[sample], samples=(sample,)) for sample in start.samples]


def _ref(start: Start, sample: int) -> TrajectoryRef:
    return TrajectoryRef(start.purpose, start.seed, start.group, sample, start.attempt)


def first_requests(start: Start, tokens: Sequence[int], context: bytes, usage: Usage) -> list[TurnRequest]:
    """One for each sample of the group."""
    prompt = shown(tokens)
    return [
        TurnRequest(
            **start.about(),
            id=turn_id(start.job, ref, start.adapter.version, 0),
            adapter=start.adapter,
            untrained=start.untrained,
            trajectory=ref,
            turn=0,
            transcript=prompt,
            sampling=start.sampling,
            context=context,
            usage=usage,
        )
        for ref in (_ref(start, sample) for sample in start.samples)
    ]


def seed_of(of: Start | TrajectoryRef, purpose: str) -> int:
    """A function of the job's seed and the group alone. Both kinds of evaluation see the same."""
    split = "train" if of.purpose == "train" else "held_out"
    return int(rng.bits(of.seed, f"{purpose}/{split}", of.group))


def made_item(environment: Environment | LiveEnvironment, start: Start) -> dict[str, Any]:
    make_item = getattr(environment, "make_item", None)
    if make_item is None:
        raise InvalidInput(f"the environment {start.env.name} does not make items: the job needs a training file")
    return make_item(seed_of(start, "item"), start.purpose != "train")
