"""Draws the pictures in the form of the figures 1, 3, 4, 6 and 7 of MARLaaS (arXiv 2605.08527)."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogFormatter

from benchmarks._figures import BLUE, GREEN, GREY, LIGHT, ORANGE, PINK, SKY, legend, panels, save, style
from benchmarks.paper.results import Measured
from benchmarks.paper.table import Found

COLOURS = {"sequential": GREY, "synchronous": ORANGE, "naive": PINK, "marlaas": BLUE, "bounded": GREEN}
PHASES = {"rollout": BLUE, "env": ORANGE, "trainer": GREEN}
TIMELINE_JOBS = 3
Figures = dict[str, Figure]
Value = Callable[[Measured], float]


class Plain(LogFormatter):
    """0.4 and 4 instead of powers of ten."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def write(runs: Sequence[Measured], folder: Path) -> list[Path]:
    return save(draw(Found(runs)), folder)


def draw(found: Found) -> Figures:
    """Figures for which there are runs."""
    figures = {
        "figure-1-rewards": rewards(found),
        "figure-3-timeline": timeline(found),
        "figure-4-breakdown": breakdown(found),
        "figure-6-sweep": sweep(found, SWEEP),
        "figure-7-latency": sweep(found, LATENCY),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def rewards(found: Found) -> Figure | None:
    """Each job's reward over time, under `marlaas` and one job after another."""
    sizes = [n for w, p, n in found.runs if (w, p) == ("single", "marlaas") and found.get(w, "sequential", n)]
    pairs = [found.get("single", policy, max(sizes, default=0)) for policy in ("marlaas", "sequential")]
    shown = [run for run in pairs if run is not None]
    if not shown:
        return None
    figure, grid = panels(1, len(shown), title="Reward of each job's steps, single-turn")
    for axes, run in zip(grid, shown, strict=True):
        for job in run.jobs:
            axes.plot(job.versions_s[1:], job.rewards, color=COLOURS[run.policy], alpha=0.6, linewidth=1)
        style(axes, f"{run.policy}, {run.n} jobs{_mark(run)}", "seconds", "reward")
        axes.set(xlim=(0, max(other.makespan_s for other in shown)), ylim=(0, 1))
    return figure


def timeline(found: Found) -> Figure | None:
    """Timeline of the work for the first jobs of an agentic run."""
    candidates = [run for key, run in found.runs.items() if key[:2] == ("agentic", "marlaas") and run.stretches]
    if not candidates:
        return None
    run = max(candidates, key=lambda run: run.n)
    num = min(run.n, TIMELINE_JOBS)
    figure, (axes,) = panels(1, 1, size=(11.0, 2.8))
    for place, phase in enumerate(PHASES):
        for job in range(num):
            bars = [(s.start_s, s.end_s - s.start_s) for s in run.stretches if (s.job, s.phase) == (job, phase)]
            axes.broken_barh(bars, (job - 0.4 + 0.27 * place, 0.25), color=PHASES[phase], linewidth=0)
    axes.set_yticks(range(num), [f"job {job}" for job in range(num)])
    style(axes, f"agentic, {num} of the {run.n} jobs that were submitted at once, {run.policy}", "seconds", "")
    axes.set(ylim=(num - 0.4, -0.6), xlim=(0, run.makespan_s))
    patches = [Patch(color=colour, label=phase) for phase, colour in PHASES.items()]
    axes.legend(handles=patches, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def breakdown(found: Found) -> Figure | None:
    """A step's tokens, and the seconds that it takes of each stage, one job alone."""
    single = [found.get(workload, "marlaas", 1) for workload in found.workloads]
    shown = [run for run in single if run is not None]
    if not shown:
        return None
    figure, (tokens, time) = panels(1, 2, title="One job alone: what a step takes")
    names = [run.workload for run in shown]
    sampled = [run.jobs[0].written / run.steps for run in shown]
    prompts = [run.jobs[0].tokens / run.steps - own for run, own in zip(shown, sampled, strict=True)]
    tokens.barh(names, sampled, color=BLUE, label="sampled")
    tokens.barh(names, prompts, left=sampled, color=SKY, label="prompts and tools")
    style(tokens, "tokens", "trained tokens a step", "")
    left = [0.0] * len(shown)
    for phase, colour in PHASES.items():
        field = {"rollout": "rollout_s", "env": "env_s", "trainer": "train_s"}[phase]
        seconds = [getattr(run.jobs[0], field) / run.steps for run in shown]
        time.barh(names, seconds, left=left, color=colour, label=phase)
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    waits = [max(0.0, run.tpts_s.mean - used) for run, used in zip(shown, left, strict=True)]
    time.barh(names, waits, left=left, color=LIGHT, label="waiting for tools, messages or a core")
    style(time, "time", "seconds a step", "")
    legend(tokens)
    legend(time)
    return figure


SWEEP: Sequence[tuple[str, str, Value]] = (
    ("useful share of the engines", "%", lambda run: 100 * run.useful),
    ("throughput", "trained tokens/s", lambda run: run.tokens_per_s),
    ("idle share of the engines", "%", lambda run: 100 * run.idle),
)
LATENCY: Sequence[tuple[str, str, Value]] = (
    ("TTFS: submission to first work, mean", "seconds", lambda run: run.ttfs_s.mean),
    ("TPTS: version to version, mean", "seconds", lambda run: run.tpts_s.mean),
)


def sweep(found: Found, values: Sequence[tuple[str, str, Value]]) -> Figure | None:
    """Panels with a row for each workload and a column for each value; a policy is a line, sums are hollow."""
    if not found.runs:
        return None
    figure, grid = panels(len(found.workloads), len(values))
    for axes, (workload, (title, unit, value)) in zip(grid, product(found.workloads, values), strict=True):
        for policy, colour in COLOURS.items():
            runs = [run for (w, p, _), run in found.runs.items() if (w, p) == (workload, policy)]
            _line(axes, runs, value, colour, policy)
        style(axes, f"{workload}: {title}", "jobs", unit)
        _doubling(axes, [run.n for run in found.runs.values()])
        if title.startswith("T"):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(Plain())
            axes.yaxis.set_minor_formatter(Plain())
    handles, _ = grid[0].get_legend_handles_labels()
    if any(run.kind == "summed" for run in found.runs.values()):
        grey = COLOURS["sequential"]
        handles.append(Line2D([], [], color=grey, marker="o", markerfacecolor="white", label="sum of measured runs"))
    figure.legend(handles=handles, fontsize=8, ncols=len(handles), loc="outside upper center", frameon=False)
    return figure


def _line(axes: Axes, runs: Sequence[Measured], value: Value, colour: str, label: str) -> None:
    if not runs:
        return
    axes.plot([run.n for run in runs], [value(run) for run in runs], color=colour, linewidth=1.5, label=label)
    for run in runs:
        inside = "white" if run.kind == "summed" else colour
        axes.plot([run.n], [value(run)], "o", color=colour, markerfacecolor=inside, markersize=5)


def _doubling(axes: Axes, numbers: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    ticks = sorted(set(numbers))
    axes.set_xticks(ticks, [str(n) for n in ticks])


def _mark(run: Measured) -> str:
    return ", sum of measured runs" if run.kind == "summed" else ""
