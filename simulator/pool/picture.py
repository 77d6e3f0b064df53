"""Draws who used which device: a row for each pool worker, a colour for each base."""

# pyright: reportUnknownMemberType=false
# (matplotlib's keyword arguments have no types)

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from simulator.pool.places import WorkerSlice

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""Okabe and Ito's colours, which colour-blind people can tell apart. More bases share them."""
SWITCH = "#22262B"
LANE_SHARE = 0.8
MAX_NAMED = 16
"""Bases that the legend names."""


def draw_slices(slices: Sequence[WorkerSlice], until_s: float, path: Path) -> None:
    """An SVG or PNG, by the file's name, of the time before `until_s`. Openings are dark."""
    shown = [each for each in slices if each.start_s < until_s]
    workers = sorted({each.worker for each in shown}, key=lambda name: (len(name), name))
    bases = list(dict.fromkeys(each.base for each in shown))
    colours = {base: PALETTE[number % len(PALETTE)] for number, base in enumerate(bases)}
    figure = Figure(figsize=(12, 1.2 + 0.3 * len(workers)), layout="constrained")
    axes = figure.add_subplot()
    for row, worker in enumerate(workers):
        own = [each for each in shown if each.worker == worker]
        lane = (row - LANE_SHARE / 2, LANE_SHARE)
        opening = [(each.start_s / 3600, (each.open_s - each.start_s) / 3600) for each in own]
        opened = [(each.open_s / 3600, (each.end_s - each.open_s) / 3600) for each in own]
        axes.broken_barh(opening, lane, facecolors=SWITCH)
        axes.broken_barh(opened, lane, facecolors=[colours[each.base] for each in own])
    axes.set_yticks(range(len(workers)), workers)
    axes.set(xlabel="hours", xlim=(0, until_s / 3600), ylim=(len(workers) - 0.5, -0.5))
    named = [Patch(color=colours[base], label=base) for base in bases[:MAX_NAMED]]
    figure.legend(handles=[Patch(color=SWITCH, label="switch"), *named], loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=150, facecolor="white")
