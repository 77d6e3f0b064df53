"""Live tables, one line a job, one line a worker; and events, one line each."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from marlaas_client.cli.output import cells, clock, console, cut, status, table, visible, width_of
from marlaas_client.cli.progress import JobProgress, sparkline
from marlaas_client.records import Record

SHOWN_METRICS = (
    "step",
    "reward_mean",
    "eval_reward_mean",
    "eval_loss",
    "loss",
    "kl",
    "grad_norm",
    "step_tokens",
    "staleness",
)
CURVE_WIDTHS = (8, 20)
GAP = 2
"""Characters between two columns."""
MAX_MESSAGE = 400
"""Characters of an event that are shown; `--json` gives all."""
BUSY_WIDTH = 8
MAX_TENANTS = 6


def jobs_view(jobs: Iterable[JobProgress], now: float) -> RenderableType:
    """Leaves out columns for which the terminal is too narrow: first the curve. `now`: of the same clock as in `Progress.add`."""
    rows = list(jobs)
    least, most = CURVE_WIDTHS
    room = console.width - width_of(_jobs_table(rows, now)) - GAP
    return _jobs_table(rows, now, curve=min(most, room) if room >= least else 0, rate=room >= -GAP)


def _jobs_table(jobs: Iterable[JobProgress], now: float, *, curve: int = 0, rate: bool = True) -> Table:
    """`curve`: its width; 0: none."""
    some = (["curve"] if curve else []) + (["tokens/s"] if rate else [])
    shown = table("job", "status", "step", "reward", *some, "eval", right=["step", "reward", "tokens/s"])
    for job in jobs:
        optional = ([sparkline(job.rewards, curve)] if curve else []) + ([_rate(job, now)] if rate else [])
        row = cells(_steps(job), _reward(job.reward), *optional, evals(job))
        shown.add_row(*cells(name(job)), status(job.status), *row)
    return shown


def workers_view(workers: Iterable[Record]) -> Table:
    shown = table("worker", "state", "busy", "works for")
    places: dict[str, list[Record]] = {}
    for worker in sorted(workers, key=lambda w: (str(w["service"]), _place(w))):
        places.setdefault(_place(worker), []).append(worker)
    for place, found in places.items():
        first = max(found, key=_activity)
        row = cells(_state(first), busy_bar(first.get("busy") or 0.0), _work(first))
        pid = place.rsplit("-", 2)[1] if first.get("pool") else first["pid"]
        shown.add_row(*cells(f"{first['service']} {pid}{_bases(found)}"), *row)
    return shown


def _place(worker: Record) -> str:
    """The id of the worker, `service-host-pid-…`, or of the one that serves several base models in turn."""
    return str((worker.get("pool") or {}).get("worker") or worker["id"])


def _activity(worker: Record) -> int:
    """The larger, the nearer to its turn."""
    if worker["state"] not in ("closed", "starting"):
        return -3 if worker["state"] == "refused" else 0
    return -1 if worker["pool"] and worker["pool"]["tier"] == "device" else -2


def _bases(found: list[Record]) -> str:
    """`: tiny ▸ b, wide`: the open base model, then the others, those whose process runs first; empty for one that serves one alone."""
    if not found[0].get("pool"):
        return ""
    # A base model whose process starts has two reports, the place's own and the process's.
    of_bases = {str(each["base_model"]): each for each in sorted(found, key=_activity)}
    names = {0: list[str](), -1: list[str](), -2: list[str](), -3: list[str]()}
    for base, worker in sorted(of_bases.items()):
        names[_activity(worker)].append(f"{base} (refused)" if worker["state"] == "refused" else base)
    closed = ", ".join(names[-1] + names[-2] + names[-3])
    return ": " + " ".join(filter(None, [", ".join(names[0]), closed and f"▸ {closed}"]))


def wanted_lines(wanted: Mapping[str, Record]) -> list[str]:
    """`q: 97 turns want 2 rollout workers (1:4), 3 are there; rollout-… retires`, by base model."""
    lines = list[str]()
    for base, one in wanted.items():
        bounds = f" ({one['bounds']})" if one["bounds"] else ""
        told = f"{base}: {one['turns']} turns want {one['workers']} rollout workers{bounds}, {one['live']} are there"
        lines.append(told + (f"; {one['retires']} retires" if one["retires"] else ""))
    return lines


def live_view(jobs: Iterable[JobProgress], workers: Iterable[Record], now: float) -> RenderableType:
    """Below the jobs their newest warnings, and the workers as long as a job runs and they are told."""
    shown = list(jobs)
    workers = [] if all(job.has_ended for job in shown) else list(workers)
    warnings = [Text(visible(warning_line(job, job.warning)), "yellow") for job in shown if job.warning]
    return Group(jobs_view(shown, now), *warnings, *([workers_view(workers)] if workers else []))


def plain_line(job: JobProgress, now: float) -> str:
    """The row of the table as one plain line, for a pipe."""
    figure = (
        f"loss {job.loss:.4f}"
        if job.reward is None and job.loss is not None
        else f"reward {_reward(job.reward) or '-'}"
    )
    rate = "" if job.has_ended else f", {_rate(job, now)} tokens/s"
    return f"{name(job)}: {job.status}, step {_steps(job)}, {figure}{rate}"


def warning_line(job: JobProgress, warning: Record) -> str:
    """`acme/add: 12:30:05  warn: …`"""
    return f"{name(job)}: {event_line(warning)}"


def event_line(event: Mapping[str, Any]) -> str:
    """`12:30:05  step 3  reward_mean 0.61 …`, or the event's message; both if it warns."""
    values: dict[str, Any] = event.get("data") or {}
    figures = [f"{name} {_short(values[name])}" for name in SHOWN_METRICS if values.get(name) is not None]
    shown = figures if event.get("type") == "metrics" else []
    level, message = event.get("level", "info"), cut(event["message"], MAX_MESSAGE)
    if level == "info":
        return f"{clock(event['created_at'])}  {'  '.join(shown) or message}"
    return "  ".join([clock(event["created_at"]), f"{level}: {message}", *shown])


def name(job: JobProgress) -> str:
    """`acme/add`, or the job's id."""
    return f"{job.tenant}/{job.label}" if job.label and job.tenant else job.label or job.job


def evals(job: JobProgress) -> str:
    """`0.52 → 0.97`"""
    if job.eval_before is None:
        return ""
    after = f" → {job.eval_after:.2f}" if job.eval_after is not None else ""
    return f"{job.eval_before:.2f}{after}"


def busy_bar(share: float) -> str:
    """`███░░░░░  38 %`"""
    full = round(share * BUSY_WIDTH)
    return f"{'█' * full}{'░' * (BUSY_WIDTH - full)} {share:4.0%}"


def _state(worker: Record) -> str:
    """`busy` also for a worker that paused just when it told its state."""
    return "busy" if worker["state"] == "idle" and (worker.get("busy") or 0.0) >= 0.01 else str(worker["state"])


def _work(worker: Record) -> str:
    """`acme, bluebird`: the tenants that it worked for in the last second; of one that does not work yet, how far it is, or why not."""
    if worker["state"] in ("starting", "refused"):
        return str(worker.get("reason") or "")
    work: list[Record] = worker.get("working_for") or []
    tenants = sorted({str(one["tenant"]) for one in work})
    more = f" and {len(tenants) - MAX_TENANTS} more" if len(tenants) > MAX_TENANTS else ""
    return ", ".join(tenants[:MAX_TENANTS]) + more


def _steps(job: JobProgress) -> str:
    return f"{job.step}/{job.num_steps}" if job.num_steps else str(job.step)


def _reward(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _rate(job: JobProgress, now: float) -> str:
    return "" if job.has_ended else f"{job.tokens_per_s(now):,.0f}"
