"""Chooses the trajectories that a job's owner can read, and what is kept of each."""

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any, cast

import msgspec
import numpy as np

from common.tasks.advantages import ADVANTAGES, group_advantages
from common.wire.messages import JobLoss, ScoredTrajectory
from manager_service.owner.jobs.groups import Group, Scored
from manager_service.records.sample_records import KeptAs, SampleRecord, Written

MAX_TEXT = 4000
"""Characters that are kept of a text."""
MAX_TOKENS = 2048
"""Tokens that are kept of a trajectory, from its beginning."""
DECIMALS = 3
"""Decimals of a log-prob, in nats, and of an advantage."""
ChosenSample = tuple[int, int, Scored, KeptAs]
"""A trajectory with the number of its group, its place in it, and why it is kept."""


def chosen(batch: Sequence[tuple[int, Group]], *, groups: int, others: int) -> list[ChosenSample]:
    """All of the first `groups` groups, then `others` of the largest and as many of the smallest reward among the rest.

    Sorted by group and sample, none twice; of equal rewards the first.
    """
    rows = [(number, place, scored) for number, group in batch for place, scored in enumerate(group.rows())]
    first = {number for number, _ in batch[:groups]}
    rest = [row for row in rows if row[0] not in first]
    kept: dict[tuple[int, int], KeptAs] = {row[:2]: "first" for row in rows if row[0] in first}
    kept |= {row[:2]: "worst" for row in heapq.nsmallest(others, rest, key=_reward)}
    kept |= {row[:2]: "best" for row in heapq.nlargest(others, rest, key=_reward)}
    return [(*row, kept[row[:2]]) for row in rows if row[:2] in kept]


def advantages(batch: Sequence[tuple[int, Group]], loss: JobLoss) -> dict[int, list[float]]:
    """Advantages of each group's rows, by group number, without failed trajectories."""
    rewards = {number: [scored.message.reward or 0.0 for scored in group.rows()] for number, group in batch}
    return {number: group_advantages(np.array(row), ADVANTAGES[loss]).tolist() for number, row in rewards.items()}


def _reward(row: tuple[int, int, Scored]) -> float:
    return row[2].message.reward or 0.0


def record_of(
    message: ScoredTrajectory,
    item: dict[str, Any] | None,
    kept: KeptAs,
    *,
    whole: bool = True,
    advantage: float | None = None,
    supervised: bool = False,
) -> SampleRecord:
    """`whole`: token by token too. `advantage`: for learning. `supervised`: neither sampled nor rewarded."""
    written = written_of(message) if whole else None
    if supervised and written is not None:
        written = msgspec.structs.replace(written, logprobs=[])
    return SampleRecord(
        version=message.adapter.version,
        group=message.trajectory.group,
        sample=message.trajectory.sample,
        text=message.output_text[:MAX_TEXT],
        reward=None if supervised else message.reward,
        stop_reason=message.stop_reason,
        prompt=prompt_of(item),
        reward_parts=message.reward_parts,
        verdicts=message.verdicts,
        failure=message.failure,
        written=written,
        kept=kept,
        advantage=None if advantage is None or supervised else round(advantage, DECIMALS),
    )


def prompt_of(item: Mapping[str, Any] | None) -> str:
    """The text of the last message that is not the assistant's, or of an example's prompt; else empty."""
    item = item or {}
    prompt = item["messages"] if "messages" in item else item.get("prompt")
    if isinstance(prompt, str):
        return prompt[:MAX_TEXT]
    rows = cast(list[Any], prompt) if isinstance(prompt, list) else []
    messages = [cast(Mapping[str, Any], row) for row in rows if isinstance(row, Mapping)]
    contents = [message.get("content") for message in messages if message.get("role") != "assistant"]
    return contents[-1][:MAX_TEXT] if contents and isinstance(contents[-1], str) else ""


def written_of(message: ScoredTrajectory) -> Written | None:
    """None if the trajectory failed before anything was written."""
    total, kept = len(message.transcript), message.transcript.first(MAX_TOKENS)
    if total == 0:
        return None
    edges = [0, *kept.edges, len(kept)]
    if edges[-2] == len(kept):
        edges.pop()  # the model wrote the end
    lengths = [end - begin for begin, end in pairwise(edges)]
    logprobs = [round(value, DECIMALS) if isfinite(value) else 0.0 for value in kept.of_written().tolist()]
    return Written(kept.tokens.numpy().tolist(), lengths, logprobs, total - len(kept))
