"""The figures, as PNG. Blue is alone, orange among others, everywhere."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.isolation import findings
from benchmarks.isolation.findings import Compared, Pair
from benchmarks.isolation.runs import JobRun, Mode, Sharing
from benchmarks.isolation.statistics import Mean

COLOURS: dict[Sharing, str] = {"alone": "#0072B2", "among": "#E69F00"}
INK = "#22262B"
COLUMNS = 4
DPI = 130

DIVERGENCE = (
    ("sampling_gap", "sampling_gap\nmean |log r| a token"),
    ("sampling_kl", "sampling_kl\nKL(sampling, trained) a token"),
    ("ess_share", "1 − ess_share\nlost effective sample size"),
    ("clip_fraction", "clip_fraction\nof trained tokens"),
)
"""Metric, and what its panel is called."""


def draw_all(folder: Path, mode: Mode, found: Sequence[Pair], num_jobs: int) -> list[Path]:
    """Of a mode's pairs, as FOLDER/MODE_NAME.png."""
    labels: dict[Sharing, str] = {"alone": "alone", "among": f"among {num_jobs}"}
    drawn = {
        "reward_curves": panels(found, labels, draw_curves),
        "final_reward": forest(findings.compared_by_job(found, findings.REWARD), findings.compared_pooled(found)),
        "divergence": divergence(found, labels),
        "reward_histograms": panels(found, labels, draw_histograms),
    }
    files = [folder / f"{mode}_{name}.png" for name in drawn]
    for file, figure in zip(files, drawn.values(), strict=True):
        figure.savefig(file, dpi=DPI, facecolor="white")
    return files


Draw = Callable[[Axes, Sequence[Pair], dict[Sharing, str]], None]


def panels(found: Sequence[Pair], labels: dict[Sharing, str], draw: Draw) -> Figure:
    """One a job."""
    jobs = findings.by_job(found)
    columns = min(COLUMNS, max(1, len(jobs)))
    rows = max(1, -(-len(jobs) // columns))
    figure = Figure(figsize=(3.4 * columns, 2.6 * rows + 0.3), layout="constrained")
    for place, (name, own) in enumerate(jobs.items()):
        axes = figure.add_subplot(rows, columns, place + 1)
        style(axes, name)
        draw(axes, own, labels)
        if place == 0:
            axes.legend(frameon=False, fontsize=8)
    return figure


def draw_curves(axes: Axes, own: Sequence[Pair], labels: dict[Sharing, str]) -> None:
    for sharing, label in labels.items():
        band(axes, findings.curve(sides(own, sharing), "reward_mean"), sharing, label)
    axes.set(ylim=(0, 1.02), xlabel="step", ylabel="reward")


def draw_histograms(axes: Axes, own: Sequence[Pair], labels: dict[Sharing, str]) -> None:
    edges = np.linspace(0, 1, findings.BINS + 1)
    for sharing, label in labels.items():
        shares = findings.mean_histogram(sides(own, sharing))
        hatch: dict[str, Any] = {"fill": False, "edgecolor": COLOURS[sharing], "linewidth": 2}
        solid: dict[str, Any] = {"color": COLOURS[sharing], "alpha": 0.35}
        axes.stairs(shares, edges, label=label, **(solid | {"fill": True} if sharing == "alone" else hatch))
    distance, p = findings.histogram_distance(own)
    axes.set_title(f"distance {distance:.3f}, p = {p:.2f}", loc="right", fontsize=8, color=INK)
    axes.set(xlabel="reward", ylabel="share", ylim=(0, 1))


def divergence(found: Sequence[Pair], labels: dict[Sharing, str]) -> Figure:
    """Means over jobs and seeds."""
    figure = Figure(figsize=(3.4 * len(DIVERGENCE), 2.9), layout="constrained")
    for place, (metric, title) in enumerate(DIVERGENCE):
        axes = figure.add_subplot(1, len(DIVERGENCE), place + 1)
        style(axes, title)
        for sharing, label in labels.items():
            means = findings.curve(sides(found, sharing), metric)
            if metric == "ess_share":
                means = [Mean(1 - mean.value, mean.half) for mean in means]
            band(axes, means, sharing, label)
        axes.set(xlabel="step")
        axes.set_ylim(bottom=0)
        if place == 0:
            axes.legend(frameon=False, fontsize=8)
    return figure


def forest(by_job: Sequence[Compared], pooled: Sequence[Compared]) -> Figure:
    """Differences in final reward with their intervals, the margin shaded; the last line is over all pairs."""
    total = next((row for row in pooled if row.label == findings.REWARD.label), None)
    rows = [*by_job, *([] if total is None else [total])]
    figure = Figure(figsize=(6.4, 0.42 * len(rows) + 1.4), layout="constrained")
    axes = figure.add_subplot()
    style(axes, "Final reward, among − alone: mean and 95 % interval")
    axes.axvspan(-findings.MARGIN, findings.MARGIN, color="#009E73", alpha=0.12, linewidth=0)
    axes.axvline(0, color=INK, linewidth=0.8)
    for place, row in enumerate(rows):
        last = row is total
        half = 0 if np.isnan(row.difference.half) else row.difference.half
        colour = INK if last else COLOURS["among"]
        axes.errorbar(row.difference.value, place, xerr=half, fmt="D" if last else "o", color=colour, capsize=3)
    names = ["all pairs" if row is total else row.label for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"shaded: within ± {findings.MARGIN:g}, counted as equal")
    return figure


def band(axes: Axes, means: Sequence[Mean], sharing: Sharing, label: str) -> None:
    """A line and its confidence band."""
    steps = np.arange(1, len(means) + 1)
    style = "-" if sharing == "alone" else "--"
    axes.plot(steps, [mean.value for mean in means], style, color=COLOURS[sharing], linewidth=1.6, label=label)
    low, high = [mean.low for mean in means], [mean.high for mean in means]
    axes.fill_between(steps, low, high, color=COLOURS[sharing], alpha=0.2, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def sides(own: Sequence[Pair], sharing: Sharing) -> list[JobRun]:
    return [findings.side(pair, sharing) for pair in own]


def style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=INK)
    axes.grid(color="#E3E5E8", linewidth=0.7)
    axes.set_axisbelow(True)
