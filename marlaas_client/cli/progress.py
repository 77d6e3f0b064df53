"""Gathers the progress of a running job from its events; no HTTP and no drawing."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from marlaas_client.records import FINAL, Record

BARS = "▁▂▃▄▅▆▇█"
RATE_WINDOW_S = 15.0


@dataclass(slots=True)
class JobProgress:
    """One job. `add` its events in order, `update` with its record."""

    job: str
    tenant: str = ""
    label: str = ""
    """Its name for people: its suffix, or a skill."""
    num_steps: int | None = None
    status: str = "queued"
    error: str = ""
    step: int = 0
    rewards: list[float] = field(default_factory=list[float])
    """reward_mean of each step."""
    loss: float | None = None
    """The loss of the newest step."""
    evals: dict[int, float] = field(default_factory=dict[int, float])
    """version -> eval_reward_mean."""
    warning: Record | None = None
    """The newest event that warns."""
    tuned_model: str | None = None
    created_at: float | None = None
    finished_at: float | None = None
    _since: float | None = None
    """Time of the first metrics."""
    _arrivals: deque[tuple[float, float]] = field(default_factory=deque[tuple[float, float]])
    """(time, trained tokens) of the newest steps."""

    @property
    def has_ended(self) -> bool:
        return self.status in FINAL

    @property
    def reward(self) -> float | None:
        return self.rewards[-1] if self.rewards else None

    @property
    def eval_before(self) -> float | None:
        return self.evals.get(0)

    @property
    def eval_after(self) -> float | None:
        """The reward of the newest version; None while only version 0 was evaluated."""
        newest = max(self.evals, default=0)
        return self.evals[newest] if newest else None

    @property
    def seconds(self) -> float | None:
        """Time from creation to end."""
        if self.created_at is None or self.finished_at is None:
            return None
        return self.finished_at - self.created_at

    def update(self, record: Record) -> None:
        """Takes the answer of `GET /v1/fine_tuning/jobs/{id}`."""
        self.status = record["status"]
        error: Record = record.get("error") or {}
        self.error = str(error.get("message", ""))
        self.tenant = self.tenant or str(record.get("organization_id") or "")
        self.label = self.label or str(record.get("user_provided_suffix") or "")
        self.tuned_model = record.get("fine_tuned_model")
        self.created_at, self.finished_at = record["created_at"], record.get("finished_at")
        self.num_steps = record.get("num_steps") or self.num_steps

    def add(self, event: Record, *, now: float) -> None:
        """`now`: seconds of a monotonic clock, for the rate."""
        if event.get("level") == "warn":
            self.warning = event
        data: dict[str, Any] = event.get("data") or {}
        if event.get("type") != "metrics" or not data:
            return
        self._since = now if self._since is None else self._since
        if (reward := data.get("eval_reward_mean")) is not None:
            self.evals[int(data.get("version") or 0)] = reward
        if "reward_mean" in data:  # null after a step with nothing to learn from
            self.step, self.loss = int(data["step"]), data.get("loss")
            self.rewards += [] if data["reward_mean"] is None else [data["reward_mean"]]
            self._arrivals.append((now, float(data.get("step_tokens") or 0)))

    def tokens_per_s(self, now: float) -> float:
        """Trained tokens over the last seconds."""
        while self._arrivals and self._arrivals[0][0] < now - RATE_WINDOW_S:
            self._arrivals.popleft()
        if self.has_ended or not self._arrivals or self._since is None:
            return 0.0
        return sum(tokens for _, tokens in self._arrivals) / min(RATE_WINDOW_S, max(1.0, now - self._since))


def sparkline(values: Iterable[float], width: int = 20) -> str:
    """A curve of rewards from 0 to 1, one character each; longer ones are averaged down to `width`."""
    means = shortened(list(values), width)
    return "".join(BARS[min(len(BARS) - 1, max(0, int(value * len(BARS))))] for value in means)


def shortened(values: list[float], width: int) -> list[float]:
    """At most `width` values, each the mean of its share."""
    n = len(values)
    if n <= width:
        return values
    parts = [values[i * n // width : (i + 1) * n // width] for i in range(width)]
    return [sum(part) / len(part) for part in parts]
