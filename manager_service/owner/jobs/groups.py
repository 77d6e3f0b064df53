"""Picks the groups of the next batch. Pure functions of a job's window of groups.

A batch is the first `batch_size` usable groups in group order, never in order of arrival, so that a
step's rows do not depend on which worker was fast.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from common.wire.messages import MAX_REWARD, Failure, Rows, ScoredTrajectory, f32, i32, u8
from common.wire.transcript import joined

MIN_USABLE = 2
"""Trajectories without a failure that a group needs for an advantage; one is enough where groups have one."""


class Scored(msgspec.Struct, frozen=True, gc=False):
    """A result. Python's garbage collector skips it, because an owner may hold a hundred thousand."""

    entry: str  # of the inbox; stays pending until the batch is published
    message: ScoredTrajectory


@dataclass(slots=True)
class Group:
    """The trajectories of one item, all of one version."""

    version: int
    waiting: dict[int, int] = field(default_factory=dict)  # sample -> attempt that may settle it
    scored: dict[int, Scored] = field(default_factory=dict)  # sample -> result; a failed sample is in neither

    @property
    def decided(self) -> bool:
        return not self.waiting

    @property
    def all_equal(self) -> bool:
        """True if every reward is the same, so that there is no advantage."""
        return len({scored.message.reward for scored in self.scored.values()}) <= 1

    @property
    def tokens_used(self) -> int:
        """Tokens with which its results were prefilled and sampled, over all of their turns."""
        used = [scored.message.usage for scored in self.scored.values()]
        return sum(usage.prompt_tokens + usage.sampled_tokens for usage in used)

    def rows(self) -> list[Scored]:
        """Results in order of their sample."""
        return [self.scored[sample] for sample in sorted(self.scored)]


def num_tokens(groups: Iterable[Group]) -> int:
    """Tokens of all rows of these groups, prompts included."""
    return sum(len(scored.message.transcript) for group in groups for scored in group.scored.values())


def next_batch(groups: Mapping[int, Group], *, window: int, end: int, batch_size: int) -> list[int] | None:
    """Numbers of the first `batch_size` groups that were not dropped; None if one of them is undecided.

    `groups`: without the dropped ones. `end`: one past the last group issued.
    """
    batch: list[int] = []
    for number in range(window, end):
        group = groups.get(number)
        if group is None:
            continue
        if not group.decided:
            return None
        batch.append(number)
        if len(batch) == batch_size:
            return batch
    return None


def pack(groups: list[tuple[int, Group]]) -> Rows:
    """The batch as rows, sorted by (group, sample)."""
    numbered = [(number, scored.message) for number, group in sorted(groups) for scored in group.rows()]
    messages = [message for _, message in numbered]
    return Rows(
        transcript=joined(m.transcript for m in messages),
        lengths=i32([len(m.transcript) for m in messages]),
        groups=i32([number for number, _ in numbered]),
        samples=i32([m.trajectory.sample for m in messages]),
        rewards=f32([m.reward for m in messages]),
        versions=i32([m.adapter.version for m in messages]),
        truncated=u8([m.stop_reason in ("length", "context") for m in messages]),
    )


def sound(message: ScoredTrajectory) -> ScoredTrajectory:
    """The result, as a failure if it must not be trained on."""
    if message.failure is not None or _is_sound(message):
        return message
    broken = Failure("grader", f"reward {message.reward} or a log-prob is not a finite number of sensible size")
    return msgspec.structs.replace(message, failure=broken, reward=None)


def _is_sound(message: ScoredTrajectory) -> bool:
    """May a result be trained on? Reward and log-probs are finite, and the model wrote something."""
    if message.reward is None or not abs(message.reward) <= MAX_REWARD:  # not a number compares false
        return False
    written = message.transcript.of_written()
    return len(written) > 0 and np.count_nonzero(np.isfinite(written)) == len(written)
