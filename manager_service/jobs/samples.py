"""Makes of a trajectory what is kept for its job's owner to read."""

from typing import Any

import numpy as np

from common.messages import ScoredTrajectory
from manager_service.records import SampleRecord, Written

MAX_TEXT = 4000
"""Characters that are kept of a text."""
MAX_TOKENS = 2048
"""Tokens that are kept of a trajectory, from its beginning."""
DECIMALS = 3
"""Of a log-prob, in nats."""


def record_of(message: ScoredTrajectory, item: dict[str, Any] | None, *, whole: bool) -> SampleRecord:
    """`whole`: token by token too."""
    return SampleRecord(
        version=message.adapter.version,
        group=message.trajectory.group,
        sample=message.trajectory.sample,
        text=message.output_text[:MAX_TEXT],
        reward=message.reward,
        stop_reason=message.stop_reason,
        prompt=prompt_of(item),
        reward_parts=message.reward_parts,
        failure=message.failure,
        written=written_of(message) if whole else None,
    )


def prompt_of(item: dict[str, Any] | None) -> str:
    """The text of an item's last message."""
    messages = (item or {}).get("messages") or []
    content = messages[-1].get("content") if messages else ""
    return content[:MAX_TEXT] if isinstance(content, str) else ""


def written_of(message: ScoredTrajectory) -> Written | None:
    """None if the trajectory failed before anything was written, or does not fit together."""
    total = len(message.tokens)
    if total == 0 or not len(message.logprobs) == len(message.written) == total:
        return None
    tokens, written = message.tokens.numpy()[:MAX_TOKENS], message.written.numpy()[:MAX_TOKENS]
    logprobs = np.nan_to_num(message.logprobs.numpy()[:MAX_TOKENS][written > 0].astype(np.float64))
    ends = [*(np.flatnonzero(np.diff(written)) + 1).tolist(), len(tokens)]
    lengths = np.diff([0, *ends]).tolist()
    if written[0]:
        lengths = [0, *lengths]  # no prompt
    dropped = total - len(tokens)
    return Written(tokens.tolist(), lengths, np.round(logprobs, DECIMALS).tolist(), dropped)
