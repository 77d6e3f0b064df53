"""Names and reads the counters of `usage:<tenant>`, and lists those that quotas count."""

import time
from collections.abc import Sequence

from common.wire.messages import Usage

INFERENCE, ARCHIVED = "-", "archived"
"""Stand for the job in counters of completions, which have none, and of all archived jobs together."""
USAGE_COUNTERS = (*Usage.__struct_fields__, "wasted_tokens")
"""Counters of a job in `usage:<tenant>`."""
QUOTA_COUNTERS = frozenset({"prompt_tokens", "sampled_tokens", "trained_tokens"})
"""Counters of `Usage` that count towards a tenant's daily quota."""

ROLLOUT_COUNTERS = ("prompt_tokens", "sampled_tokens")
"""The counters of what rollout workers computed."""
KEEP_HOURS_S = 35 * 86_400
"""Seconds that a tenant's usage of an hour is kept."""


def usage_fields(job: str) -> list[str]:
    """The fields of `usage:<tenant>` with a job's counters."""
    return [f"{job}/{counter}" for counter in USAGE_COUNTERS]


def usage_of(amounts: Sequence[bytes | None]) -> dict[str, float]:
    """Counter -> amount, for the values of `usage_fields` that are there."""
    counters = zip(USAGE_COUNTERS, amounts, strict=True)
    return {name: float(amount) for name, amount in counters if amount is not None}


def day_field(now: float) -> str:
    """The field of `usage:<tenant>` in which a moment's day counts, UTC: `day/20261122`."""
    return time.strftime("day/%Y%m%d", time.gmtime(now))


def hour_of(seconds: float) -> str:
    """The hour of a moment, UTC: `2026112207`."""
    return time.strftime("%Y%m%d%H", time.gmtime(seconds))
