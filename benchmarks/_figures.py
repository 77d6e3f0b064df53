"""One way to draw: panels in a grid, one style of axes, one set of colours."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

BLUE, ORANGE, GREEN, PINK, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"
"""Okabe and Ito's colours, which colour-blind people can tell apart."""
GREY, LIGHT, INK = "#8A8F98", "#E3E5E8", "#22262B"
DPI = 130


def panels(
    rows: int, columns: int, *, size: tuple[float, float] = (4.2, 2.8), title: str = ""
) -> tuple[Figure, list[Axes]]:
    """Row by row. `size`: inches of each panel."""
    layout = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08)
    figure = Figure(figsize=(size[0] * columns, 0.3 + size[1] * rows), layout=layout)
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure, [figure.add_subplot(rows, columns, place + 1) for place in range(rows * columns)]


def style(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=8, colors=INK)
    axes.grid(color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)


def legend(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=8)


def save(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Writes FOLDER/NAME.png of each."""
    files = [folder / f"{name}.png" for name in figures]
    for file, figure in zip(files, figures.values(), strict=True):
        figure.savefig(file, dpi=DPI, facecolor="white")
    return files
