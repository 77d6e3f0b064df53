"""Draws the picture at the end of the demo: reward curves, and who used which worker when. Pure functions over API data."""

# pyright: reportUnknownMemberType=false
# (matplotlib's keyword arguments have no types)

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # matplotlib takes a second, and is needed at the end
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Okabe and Ito's colours, which colour-blind people can tell apart."""
GREY = "#8A8F98"
INK = "#22262B"
COLUMNS = 3
PANEL_INCHES = (3.7, 2.1)
SMOOTH = 5
"""Steps over which a reward curve is averaged."""
LANE_SHARE = 0.8
"""Share of the height of a worker's row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One job."""

    tenant: str
    label: str
    rewards: Sequence[float]
    """reward_mean of steps 1, 2, …"""
    evals: dict[int, float] = field(default_factory=dict[int, float])
    """version -> eval_reward_mean; version 0 is before the first step."""


@dataclass(frozen=True, slots=True)
class Busy:
    """A stretch of time in which a worker worked for a tenant. Seconds since 1970."""

    worker: str
    service: str
    tenant: str
    start_s: float
    end_s: float


def write_report(path: Path, curves: Sequence[Curve], busy: Sequence[Busy]) -> None:
    """A PNG; works with no curve, and with no busy stretch, too."""
    draw(curves, busy).savefig(path, dpi=150, facecolor="white")


def draw(curves: Sequence[Curve], busy: Sequence[Busy]) -> "Figure":
    """Reward curves above, one panel a job; the workers' timeline below."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    colours = tenant_colours([*(curve.tenant for curve in curves), *(stretch.tenant for stretch in busy)])
    num_columns = max(1, min(COLUMNS, len(curves)))
    num_rows = max(1, -(-len(curves) // num_columns))
    timeline_inches = 1.8 + 0.55 * len({stretch.worker for stretch in busy})
    width, height = COLUMNS * PANEL_INCHES[0], num_rows * PANEL_INCHES[1] + timeline_inches
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08))
    ratios = [PANEL_INCHES[1]] * num_rows + [timeline_inches]
    grid = figure.add_gridspec(num_rows + 1, num_columns, height_ratios=ratios)
    for index, curve in enumerate(curves):
        panel = figure.add_subplot(grid[index // num_columns, index % num_columns])
        draw_curve(panel, curve, colours[curve.tenant], is_first=index == 0)
    draw_timeline(figure.add_subplot(grid[num_rows, :]), busy, colours)
    return figure


def draw_curve(axes: "Axes", curve: Curve, colour: str, *, is_first: bool = False) -> None:
    """Each step's reward faintly, its running mean boldly, evaluations as diamonds. The first panel has the legend."""
    steps = range(1, len(curve.rewards) + 1)
    axes.plot(steps, curve.rewards, color=colour, alpha=0.35, linewidth=1, label="each step")
    axes.plot(steps, running_mean(curve.rewards, SMOOTH), color=colour, linewidth=2.2, label=f"mean of {SMOOTH} steps")
    if curve.evals:
        _draw_evals(axes, curve.evals)
    _style(axes, title=f"{curve.tenant} · {curve.label}", colour=colour)
    axes.set(ylim=(0, 1.03), xlim=(0, max(1, len(curve.rewards))), xlabel="step", ylabel="reward")
    if is_first:
        axes.legend(loc="lower right", fontsize=8, frameon=False)


def _draw_evals(axes: "Axes", evals: dict[int, float]) -> None:
    """A diamond each; the first and the last say their value."""
    versions = sorted(evals)
    rewards = [evals[version] for version in versions]
    axes.plot(versions, rewards, "D", color=INK, markersize=6, label="held-out items", clip_on=False)
    for version in {versions[0], versions[-1]}:
        below = evals[version] > 0.15
        axes.annotate(
            f"{evals[version]:.2f}", (version, evals[version]), (6 if version == 0 else 0, -7 if below else 7),
            textcoords="offset points", ha="left" if version == 0 else "right", va="top" if below else "bottom",
            fontsize=9, color=INK,
        )  # fmt: skip


def draw_timeline(axes: "Axes", busy: Sequence[Busy], colours: dict[str, str]) -> None:
    """A row for each worker, and in it a lane for each tenant, for a worker serves several at once."""
    from matplotlib.patches import Patch

    _style(axes, title="Who used which worker when", colour=INK)
    tenants = [tenant for tenant in colours if any(stretch.tenant == tenant for stretch in busy)]
    rows = worker_rows(busy)
    start_s = min((stretch.start_s for stretch in busy), default=0.0)
    total_s = max((stretch.end_s for stretch in busy), default=1.0) - start_s
    lane = LANE_SHARE / max(1, len(tenants))
    for row, worker in enumerate(rows):
        for number, tenant in enumerate(tenants):
            mine = [s for s in busy if s.worker == worker and s.tenant == tenant]
            bars = [(a - start_s, b - a) for a, b in merged(mine, gap_s=total_s / 1500)]
            axes.broken_barh(bars, (row - LANE_SHARE / 2 + number * lane, lane), color=colours[tenant], linewidth=0)
    axes.set_yticks(range(len(rows)), list(rows.values()))
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, total_s), xlabel="seconds")
    handles = [Patch(color=colours[tenant], label=tenant) for tenant in tenants]
    if handles:
        axes.legend(
            handles=handles, ncols=len(handles), loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=9
        )


def tenant_colours(tenants: Iterable[str]) -> dict[str, str]:
    """Colours in order of appearance; beyond the palette all are grey."""
    names = list(dict.fromkeys(tenants))
    return {name: PALETTE[i] if i < len(PALETTE) else GREY for i, name in enumerate(names)}


def worker_rows(busy: Iterable[Busy]) -> dict[str, str]:
    """worker -> what its row is called (`rollout 1`), in the order in which work flows through the services."""
    order = {"rollout": 0, "env": 1, "trainer": 2}
    found = sorted({(order.get(s.service, 3), s.service, s.worker) for s in busy})
    counts: dict[str, int] = defaultdict(int)
    rows: dict[str, str] = {}
    for _, service, worker in found:
        counts[service] += 1
        rows[worker] = f"{service} {counts[service]}"
    return rows


def merged(stretches: Iterable[Busy], gap_s: float) -> list[tuple[float, float]]:
    """(start, end) of the union, with gaps up to `gap_s` closed, which nobody could see."""
    result: list[tuple[float, float]] = []
    for start_s, end_s in sorted((stretch.start_s, stretch.end_s) for stretch in stretches):
        if result and start_s <= result[-1][1] + gap_s:
            result[-1] = (result[-1][0], max(result[-1][1], end_s))
        else:
            result.append((start_s, end_s))
    return result


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and the `width - 1` before it, as far as there are."""
    windows = (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _style(axes: "Axes", *, title: str, colour: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=colour)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, colors=INK)
    axes.grid(axis="x" if colour == INK else "y", color="#E3E5E8", linewidth=0.8)
    axes.set_axisbelow(True)
