"""Draws the figures as PNG. Blue means alone, orange among others."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks._figures import BLUE, GREEN, INK, ORANGE, legend, panels, save, style
from benchmarks.isolation import findings
from benchmarks.isolation.findings import Compared, Pair
from benchmarks.isolation.runs import JobRun, Mode, Sharing
from benchmarks.isolation.statistics import Mean

COLOURS: dict[Sharing, str] = {"alone": BLUE, "among": ORANGE}
COLUMNS = 4

DIVERGENCE = (
    ("sampling_gap", "sampling_gap\nmean |log r| a token"),
    ("sampling_kl", "sampling_kl\nKL(sampling, trained) a token"),
    ("ess_share", "1 − ess_share\nlost effective sample size"),
    ("clip_fraction", "clip_fraction\nof trained tokens"),
)
"""Metric, and what its panel is called."""


def draw_all(folder: Path, mode: Mode, found: Sequence[Pair], num_jobs: int) -> list[Path]:
    """Draws a mode's pairs as FOLDER/MODE_NAME.png."""
    labels: dict[Sharing, str] = {"alone": "alone", "among": f"among {num_jobs}"}
    drawn = {
        "reward_curves": by_job(found, labels, draw_curves),
        "final_reward": forest(findings.compared_by_job(found, findings.REWARD), findings.compared_pooled(found)),
        "divergence": divergence(found, labels),
        "reward_histograms": by_job(found, labels, draw_histograms),
    }
    return save({f"{mode}_{name}": figure for name, figure in drawn.items()}, folder)


Draw = Callable[[Axes, Sequence[Pair], dict[Sharing, str]], None]


def by_job(found: Sequence[Pair], labels: dict[Sharing, str], draw: Draw) -> Figure:
    """A panel a job."""
    jobs = findings.by_job(found)
    columns = min(COLUMNS, max(1, len(jobs)))
    figure, grid = panels(max(1, -(-len(jobs) // columns)), columns, size=(3.4, 2.6))
    for axes in grid[len(jobs) :]:
        axes.remove()
    for axes, (name, own) in zip(grid, jobs.items(), strict=False):
        style(axes, name)
        draw(axes, own, labels)
    legend(grid[0])
    return figure


def draw_curves(axes: Axes, own: Sequence[Pair], labels: dict[Sharing, str]) -> None:
    for sharing, label in labels.items():
        band(axes, findings.curve(sides(own, sharing), "reward_mean"), sharing, label)
    axes.set(ylim=(0, 1.02), xlabel="step", ylabel="reward")


def draw_histograms(axes: Axes, own: Sequence[Pair], labels: dict[Sharing, str]) -> None:
    edges = np.linspace(0, 1, findings.BINS + 1)
    for sharing, label in labels.items():
        shares = findings.mean_histogram(sides(own, sharing))
        colour, alone = COLOURS[sharing], sharing == "alone"
        axes.stairs(
            shares,
            edges,
            fill=alone,
            color=colour,
            alpha=0.35 if alone else 1.0,
            linewidth=0 if alone else 2,
            label=label,
        )
    distance, p = findings.histogram_distance(own)
    axes.set_title(f"distance {distance:.3f}, p = {p:.2f}", loc="right", fontsize=8, color=INK)
    axes.set(xlabel="reward", ylabel="share", ylim=(0, 1))


def divergence(found: Sequence[Pair], labels: dict[Sharing, str]) -> Figure:
    """Means over jobs and seeds."""
    figure, grid = panels(1, len(DIVERGENCE), size=(3.4, 2.6))
    for axes, (metric, title) in zip(grid, DIVERGENCE, strict=True):
        style(axes, title, "step")
        for sharing, label in labels.items():
            means = findings.curve(sides(found, sharing), metric)
            if metric == "ess_share":
                means = [Mean(1 - mean.value, mean.half) for mean in means]
            band(axes, means, sharing, label)
        axes.set_ylim(bottom=0)
    legend(grid[0])
    return figure


def forest(by_job: Sequence[Compared], pooled: Sequence[Compared]) -> Figure:
    """Differences in final reward with their intervals, the margin shaded; the last line is over all pairs."""
    total = next((row for row in pooled if row.label == findings.REWARD.label), None)
    rows = [*by_job, *([] if total is None else [total])]
    figure, (axes,) = panels(1, 1, size=(6.4, 0.42 * len(rows) + 1.1))
    shaded = f"shaded: within ± {findings.MARGIN:g}, counted as equal"
    style(axes, "Final reward, among − alone: mean and 95 % interval", shaded)
    axes.axvspan(-findings.MARGIN, findings.MARGIN, color=GREEN, alpha=0.12, linewidth=0)
    axes.axvline(0, color=INK, linewidth=0.8)
    for place, row in enumerate(rows):
        last = row is total
        half = 0 if np.isnan(row.difference.half) else row.difference.half
        colour = INK if last else COLOURS["among"]
        axes.errorbar(row.difference.value, place, xerr=half, fmt="D" if last else "o", color=colour, capsize=3)
    names = ["all pairs" if row is total else row.label for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    return figure


def band(axes: Axes, means: Sequence[Mean], sharing: Sharing, label: str) -> None:
    """A line and its confidence band."""
    steps = np.arange(1, len(means) + 1)
    dashes = "-" if sharing == "alone" else "--"
    axes.plot(steps, [mean.value for mean in means], dashes, color=COLOURS[sharing], linewidth=1.6, label=label)
    low, high = [mean.low for mean in means], [mean.high for mean in means]
    axes.fill_between(steps, low, high, color=COLOURS[sharing], alpha=0.2, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def sides(own: Sequence[Pair], sharing: Sharing) -> list[JobRun]:
    return [findings.side(pair, sharing) for pair in own]
