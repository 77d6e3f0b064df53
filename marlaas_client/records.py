"""Objects of the API as its JSON has them, with the fields that clients read; docs/api.md says more of each."""

from typing import Any, Literal, TypedDict

Record = dict[str, Any]
"""Any object of the API."""

Status = Literal["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"]
FINAL = frozenset({"succeeded", "failed", "cancelled"})


class Error(TypedDict):
    code: str
    message: str
    param: str | None


class Job(TypedDict):
    id: str
    created_at: int
    finished_at: int | None
    model: str
    fine_tuned_model: str | None
    """For chat; `@<version>` behind it names one version."""
    status: Status
    error: Error | None
    version: int
    """The newest; -1 before the first."""
    num_steps: int
    last_reward: float | None
    first_eval_reward: float | None
    last_eval_reward: float | None
    best_version: int | None


class Event(TypedDict):
    id: str
    created_at: int
    level: Literal["info", "warn", "error"]
    type: Literal["message", "metrics"]
    message: str
    data: Record
    """The figures of a step or of an evaluation."""


class Sample(TypedDict):
    step: int
    """The step that trained on it; of an evaluation the version that it measures."""
    version: int
    item: int | None
    """The place of an evaluation's item in the held-out file."""
    kept: Literal["first", "best", "worst", "failed", "evaluation"]
    group: int
    sample: int
    prompt: str
    text: str
    reward: float | None
    stop_reason: str
    reward_parts: dict[str, float]
    verdicts: list[dict[str, str]]
    """Questions to graders' models: `grader`, `prompt` and `reply`."""
    failure: Record | None
    turns: list[dict[str, str]]
    """`by` whom (`prompt`, `model`, `environment`), and the `text`; empty where tokens are not kept."""
    written: Record | None
    """Tokens, their log-probs, and how many are not kept (`num_dropped`)."""


class Ledger(TypedDict):
    """issued = trained + filtered + stale + failed + cancelled + in_flight."""

    issued: int
    trained: int
    filtered: int
    stale: int
    failed: int
    cancelled: int
    in_flight: int
