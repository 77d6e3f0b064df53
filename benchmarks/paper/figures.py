"""The pictures, in the form of the figures 1, 3, 4, 6 and 7 of MARLaaS (arXiv 2605.08527)."""

# pyright: reportUnknownMemberType=false
# (matplotlib's keyword arguments have no types)

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogFormatter

from benchmarks.paper.results import Measured
from benchmarks.paper.table import Found

COLOURS = {
    "sequential": "#8A8F98",
    "synchronous": "#E69F00",
    "naive": "#CC79A7",
    "marlaas": "#0072B2",
    "bounded": "#009E73",
}
PHASES = {"rollout": "#0072B2", "env": "#E69F00", "trainer": "#009E73"}
"""Okabe and Ito's colours, which colour-blind people can tell apart."""
TIMELINE_JOBS = 3
Figures = dict[str, Figure]
Value = Callable[[Measured], float]


class Plain(LogFormatter):
    """0.4 and 4 instead of powers of ten."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def write(runs: Sequence[Measured], folder: Path) -> list[Path]:
    paths: list[Path] = []
    for name, figure in draw(Found(runs)).items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=130, facecolor="white")
    return paths


def draw(found: Found) -> Figures:
    """Those for which there are runs."""
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
    figure, panels = _panels(1, len(shown), "Reward of each job's steps, single-turn")
    for axes, run in zip(panels[0], shown, strict=True):
        for job in run.jobs:
            axes.plot(job.versions_s[1:], job.rewards, color=COLOURS[run.policy], alpha=0.6, linewidth=1)
        _style(axes, f"{run.policy}, {run.n} jobs{_mark(run)}", "seconds", "reward")
        axes.set(xlim=(0, max(other.makespan_s for other in shown)), ylim=(0, 1))
    return figure


def timeline(found: Found) -> Figure | None:
    """Who worked for the first jobs of an agentic run, when."""
    candidates = [run for key, run in found.runs.items() if key[:2] == ("agentic", "marlaas") and run.stretches]
    if not candidates:
        return None
    run = max(candidates, key=lambda run: run.n)
    num = min(run.n, TIMELINE_JOBS)
    figure, panels = _panels(1, 1, "", width=11.0)
    axes = panels[0][0]
    for place, phase in enumerate(PHASES):
        for job in range(num):
            bars = [(s.start_s, s.end_s - s.start_s) for s in run.stretches if (s.job, s.phase) == (job, phase)]
            axes.broken_barh(bars, (job - 0.4 + 0.27 * place, 0.25), color=PHASES[phase], linewidth=0)
    axes.set_yticks(range(num), [f"job {job}" for job in range(num)])
    _style(axes, f"agentic, {num} of the {run.n} jobs that were submitted at once, {run.policy}", "seconds", "")
    axes.set(ylim=(num - 0.4, -0.6), xlim=(0, run.makespan_s))
    axes.legend(
        handles=[Patch(color=c, label=p) for p, c in PHASES.items()],
        fontsize=8,
        ncols=3,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        frameon=False,
    )
    return figure


def breakdown(found: Found) -> Figure | None:
    """A step's tokens, and the seconds that it takes of each stage, one job alone."""
    single = [found.get(workload, "marlaas", 1) for workload in found.workloads]
    shown = [run for run in single if run is not None]
    if not shown:
        return None
    figure, panels = _panels(1, 2, "One job alone: what a step takes")
    names = [run.workload for run in shown]
    sampled = [run.jobs[0].written / run.steps for run in shown]
    prompts = [run.jobs[0].tokens / run.steps - own for run, own in zip(shown, sampled, strict=True)]
    panels[0][0].barh(names, sampled, color="#0072B2", label="sampled")
    panels[0][0].barh(names, prompts, left=sampled, color="#56B4E9", label="prompts and tools")
    _style(panels[0][0], "tokens", "trained tokens a step", "")
    left = [0.0] * len(shown)
    for phase, colour in PHASES.items():
        field = {"rollout": "rollout_s", "env": "env_s", "trainer": "train_s"}[phase]
        seconds = [getattr(run.jobs[0], field) / run.steps for run in shown]
        panels[0][1].barh(names, seconds, left=left, color=colour, label=phase)
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    waits = [max(0.0, run.tpts_s.mean - used) for run, used in zip(shown, left, strict=True)]
    panels[0][1].barh(names, waits, left=left, color="#E3E5E8", label="waiting for tools, messages or a core")
    _style(panels[0][1], "time", "seconds a step", "")
    for axes in panels[0]:
        axes.legend(fontsize=8)
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
    """A row a workload, a panel a value, a line a policy; sums are hollow."""
    if not found.runs:
        return None
    figure, panels = _panels(len(found.workloads), len(values), "")
    for row, workload in zip(panels, found.workloads, strict=True):
        for axes, (title, unit, value) in zip(row, values, strict=True):
            for policy, colour in COLOURS.items():
                runs = [run for (w, p, _), run in found.runs.items() if (w, p) == (workload, policy)]
                _line(axes, runs, value, colour, policy)
            _style(axes, f"{workload}: {title}", "jobs", unit)
            _doubling(axes, [run.n for run in found.runs.values()])
            if title.startswith("T"):
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(Plain())
                axes.yaxis.set_minor_formatter(Plain())
    handles, _ = panels[0][0].get_legend_handles_labels()
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


def _panels(rows: int, columns: int, title: str, *, width: float = 4.2) -> tuple[Figure, list[list[Axes]]]:
    layout = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08)
    figure = Figure(figsize=(width * columns, 0.3 + 2.8 * rows), layout=layout)
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold")
    grid = figure.add_gridspec(rows, columns)
    return figure, [[figure.add_subplot(grid[row, column]) for column in range(columns)] for row in range(rows)]


def _style(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=8)
    axes.grid(color="#E3E5E8", linewidth=0.8)
    axes.set_axisbelow(True)


def _mark(run: Measured) -> str:
    return ", sum of measured runs" if run.kind == "summed" else ""
