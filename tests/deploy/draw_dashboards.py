"""Draw the dashboards over real traffic, where there is no Grafana: python -m tests.deploy.draw_dashboards FOLDER

A service, a Prometheus that scrapes it, a minute of traffic; then each panel's queries as Grafana would send them, in
the panel's place.  Folded rows are left out, as Grafana opens a dashboard.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from tests.deploy import dashboards
from tests.deploy.live_service import Traffic, serving
from tests.deploy.prometheus_server import Prometheus, configuration, running

SECONDS = 60.0
COLUMN, LINE = 0.7, 0.36  # inches of one unit of the grid


def draw(board: Any, prometheus: Prometheus, began: float, ended: float) -> plt.Figure:
    """What is seen at once."""
    shown = [panel for panel in board["panels"] if panel["type"] != "row"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in shown)
    figure = plt.figure(figsize=(24 * COLUMN, height * LINE + 0.4))
    figure.suptitle(board["title"], x=0.01, ha="left")
    for panel in shown:
        x, y, w, h = (panel["gridPos"][name] for name in "xywh")
        inside = (x / 24 + 0.02, 1 - (y + h - 0.9) / height, w / 24 - 0.03, (h - 2.2) / height)
        axes = figure.add_axes((inside[0], inside[1] * 0.97, inside[2], inside[3] * 0.97))
        axes.set_title(panel["title"], fontsize=9, loc="left")
        _fill(axes, panel, prometheus, began, ended)
    return figure


def _fill(axes: plt.Axes, panel: Any, prometheus: Prometheus, began: float, ended: float) -> None:
    unit = panel["fieldConfig"]["defaults"].get("unit", "")
    factor = 100.0 if unit == "percentunit" else 1.0
    lines: dict[str, list[float]] = {}
    for target in panel.get("targets", []):
        query = dashboards.Query("", panel["title"], target["expr"], target["instant"])
        expression = query.filled(".*", ".*", ended - began)
        if query.instant:
            lines |= {key: [value] for key, value in prometheus.query(expression, ended).items()}
        else:
            found = prometheus.query_range(expression, began, ended, 1.0)
            lines |= {f"{target['legendFormat']} {key}": values for key, values in found.items()}
    if not lines or panel["type"] in ("stat", "table"):
        axes.axis("off")
        values = [f"{factor * one[-1]:.3g} {'%' if factor > 1 else unit}" for one in lines.values()]
        axes.text(0.5, 0.5, "\n".join(values[:4]) or "no data", ha="center", va="center", fontsize=16 if values else 9)
        return
    if panel["type"] == "bargauge":
        axes.bar(range(len(lines)), np.array([one[-1] for one in lines.values()]))
        return
    for key, values in lines.items():
        axes.plot(np.arange(len(values)), factor * np.array(values), linewidth=1, label=key[:60])
    axes.legend(fontsize=5, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, frameon=False)
    axes.tick_params(labelsize=6)
    axes.set_ylabel("%" if factor > 1 else unit, fontsize=6)


def main(folder: Path) -> None:
    """One picture for each dashboard."""
    with tempfile.TemporaryDirectory() as name, serving(Path(name) / "store") as url:
        config = configuration(Path(name) / "prometheus", url.removeprefix("http://"))
        with running(config, Path(name) / "tsdb") as prometheus:
            time.sleep(3)
            began, ended = Traffic(url).run(SECONDS)
            for path in dashboards.FILES:
                draw(dashboards.load(path), prometheus, began, ended).savefig(folder / f"{path.stem}.png", dpi=70)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
