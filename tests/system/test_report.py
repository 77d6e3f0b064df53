"""The demo's picture, from made data."""

import math
from pathlib import Path

import pytest

from examples.report import Busy, Curve, draw, write_report

PNG = b"\x89PNG\r\n\x1a\n"


def curve(tenant: str, label: str, num_steps: int = 30) -> Curve:
    rewards = [1 - 0.5 * math.exp(-step / 8) for step in range(num_steps)]
    return Curve(tenant=tenant, label=label, rewards=rewards, evals={0: 0.5, num_steps: 0.98})


def busy(worker: str, service: str, tenant: str, start_s: float) -> Busy:
    return Busy(worker, service, tenant, start_s, start_s + 0.5)


@pytest.mark.parametrize("curves", [[], [Curve(tenant="acme", label="add", rewards=[])]])
def test_a_report_without_data_is_a_picture_too(tmp_path: Path, curves: list[Curve]) -> None:
    write_report(tmp_path / "report.png", curves, [])
    assert (tmp_path / "report.png").read_bytes().startswith(PNG)


def test_each_job_has_a_panel_and_each_worker_a_row() -> None:
    figure = draw([curve("acme", "add"), curve("cobalt", "max")], [busy("w1", "trainer", "acme", 5.0)])
    *panels, timeline = figure.axes
    assert [panel.get_title(loc="left") for panel in panels] == ["acme · add", "cobalt · max"]
    assert [label.get_text() for label in timeline.get_yticklabels()] == ["trainer 1"]
