"""The service and a Prometheus as plain processes (as in docker compose), then traffic, then a
picture.

    make tools                                    # once: Debian's prometheus, unpacked into .tools/
    python deploy/walkthrough.py --out risk.png   # four minutes; --seconds 60 for a short one

The questions are first well known to the demo model, then hardly known, then mixed.  The picture
shows decisions, the withheld share and the distribution of the risk, queried from Prometheus' HTTP
API.  ``--board FILE`` draws the first screen of a dashboard, too: the panels of its JSON, where
they stand, by their own queries.  It needs no Grafana, and is not Grafana's own picture."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import matplotlib
import numpy as np
from matplotlib.axes import Axes

from hallutracer_client import Client, Generate
from service.demo.questions import questions

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402 - after the backend is chosen

HERE = Path(__file__).parent
TOOLS = HERE.parent / ".tools" / "bin"
STEP = 2  # seconds between two scrapes, and two points of the picture
WINDOW = "20s"
PHASES = ("well known", "hardly known", "mixed")
SHOWN_UNITS = {"percentunit": "%", "none": "", "reqps": "/s"}  # of Grafana's names
DECISIONS = {"continue": "#0072b2", "abstain": "#d55e00"}


@contextmanager
def process(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child process, terminated at the end."""
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | environment)
    try:
        yield child
    finally:
        child.terminate()
        child.wait(60)


def wait_for(child: subprocess.Popen[bytes], log: Path, pattern: str, seconds: float = 120) -> str:
    """The pattern's first group, once the child has logged it.  Exits with the log on failure."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and child.poll() is None:
        if found := re.search(pattern, log.read_text(errors="replace")):
            return found.group(1)
        time.sleep(0.1)
    sys.exit(f"{log.name} has no line with {pattern!r}:\n{log.read_text(errors='replace')[-2000:]}")


def prometheus_config(folder: Path, address: str) -> Path:
    """The shipped configuration and rules, with this service's address and short intervals."""
    shutil.copytree(HERE / "prometheus", folder)
    path = folder / "prometheus.yml"
    text = path.read_text().replace("hallutracer:8765", address.removeprefix("http://"))
    text = re.sub(r"(scrape_interval|evaluation_interval): \w+", rf"\1: {STEP}s", text)
    path.write_text(re.sub(r"scrape_timeout: \w+", f"scrape_timeout: {STEP}s", text))
    return path


def send_questions(url: str, rows: list[list[str]], seconds: float, rate: float) -> Iterator[str]:
    """Send each phase's questions for its share of the time, at ``rate`` a second on average;
    yields phase names."""
    with Client(url) as client:
        for name, texts in zip(PHASES, rows, strict=True):
            yield name
            end = time.monotonic() + seconds / len(PHASES)
            for text in itertools.cycle(random.Random(name).sample(texts, len(texts))):
                if time.monotonic() >= end:
                    break
                client.score(prompt=text, generate=Generate(max_tokens=16))
                time.sleep(random.Random(text).expovariate(rate))


def ranges(
    url: str, query: str, start: float, end: float
) -> Iterator[tuple[dict[str, str], Any, Any]]:
    """Prometheus' answer to a range query: labels, seconds since ``start``, values."""
    parameters: dict[str, str | float] = {"query": query, "start": start, "end": end, "step": STEP}
    answer = httpx.get(f"{url}/api/v1/query_range", params=parameters, timeout=30).json()
    if answer["status"] != "success":
        sys.exit(f"Prometheus refuses {query!r}: {answer.get('error')}")
    for result in answer["data"]["result"]:
        points = np.array(result["values"], dtype=float)
        yield result["metric"], points[:, 0] - start, points[:, 1]


def series(
    url: str, query: str, start: float, end: float
) -> dict[tuple[str, ...], tuple[Any, Any]]:
    """The same by the values of the labels, in the order of their names."""
    return {_values_of(labels): (x, y) for labels, x, y in ranges(url, query, start, end)}


def _values_of(labels: dict[str, str]) -> tuple[str, ...]:
    return tuple(labels[name] for name in sorted(labels))


def draw(url: str, start: float, starts: list[float], end: float, path: Path) -> None:
    """Three panels over time: decisions a second, withheld share, distribution of the risk."""
    prompts = f"sum by (decision) (rate(hallutracer_prompts_total[{WINDOW}]))"
    share = (
        f'sum(rate(hallutracer_prompts_total{{decision!="continue"}}[{WINDOW}]))'
        f" / sum(rate(hallutracer_prompts_total[{WINDOW}]))"
    )
    buckets = series(url, f"sum by (le) (increase(hallutracer_risk_bucket[{WINDOW}]))", start, end)
    figure, axes = plt.subplots(3, 1, figsize=(9, 7.5), dpi=110, sharex=True, layout="constrained")
    for (decision,), (x, y) in sorted(series(url, prompts, start, end).items()):
        if decision in DECISIONS:
            axes[0].plot(x, y, color=DECISIONS[decision], label=decision)
    axes[0].set_ylabel("prompts / s")
    axes[0].legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for x, y in series(url, share, start, end).values():
        axes[1].plot(x, 100 * y, color=DECISIONS["abstain"])
    axes[1].set_ylabel("withheld, %")
    axes[1].set_ylim(0, 100)
    bounds = sorted((le for (le,) in buckets if le != "+Inf"), key=float)
    times = buckets[bounds[0],][0]
    counts = np.diff(np.stack([buckets[le,][1] for le in bounds]), axis=0, prepend=0)
    portion = counts / np.maximum(counts.sum(axis=0), 1e-9)
    mesh = axes[2].pcolormesh(
        times, np.arange(0.05, 1, 0.1), portion, cmap="Oranges", shading="nearest", vmin=0
    )
    figure.colorbar(mesh, ax=axes[2], label="share of prompts")
    axes[2].set_ylabel("risk")
    axes[2].set_xlabel("seconds")
    for axis in axes:
        for begin in starts[1:]:
            axis.axvline(begin, color="0.5", linewidth=0.8, linestyle=":")
        axis.spines[["top", "right"]].set_visible(False)
    for name, begin in zip(PHASES, starts, strict=True):
        axes[0].text(begin + 2, axes[0].get_ylim()[1], name, va="bottom", fontsize=9, color="0.3")
    axes[0].set_xlim(0, end - start)
    figure.savefig(path, metadata={"Software": None})


def filled(expression: str) -> str:
    """A panel's query as Grafana would send it: all jobs, and the picture's window."""
    words = {"$__rate_interval": WINDOW, "$__range": WINDOW, "[5m]": f"[{WINDOW}]"}
    for name, value in words.items():
        expression = expression.replace(name, value)
    return re.sub(r"\$\w+", ".*", expression)


def named(legend: str, labels: dict[str, str]) -> str:
    """A line's name; there is one job, so its name is left out."""
    return re.sub(
        r"\{\{(\w+)\}\}",
        lambda match: labels.get(match[1], ""),
        legend.replace(" ({{job}} {{namespace}})", ""),
    )


def draw_panel(axes: Axes, panel: dict[str, Any], url: str, start: float, end: float) -> None:
    """A number, or lines over time, by the panel's own queries."""
    unit = panel["fieldConfig"]["defaults"].get("unit", "")
    percent = unit == "percentunit"
    axes.set_title(panel["title"], fontsize=9, loc="left")
    lines = [
        (named(target["legendFormat"], labels), x, 100 * y if percent else y)
        for target in panel["targets"]
        for labels, x, y in ranges(url, filled(target["expr"]), start, end)
    ]
    if panel["type"] == "stat":
        axes.set(xticks=[], yticks=[])
        value = f"{lines[0][2][-1]:.3g} {SHOWN_UNITS.get(unit, unit)}" if lines else "no data"
        axes.text(0.05, 0.3, value, fontsize=15, transform=axes.transAxes)
        return
    for name, x, y in lines:
        axes.plot(x, y, label=name)
    axes.set_ylabel(SHOWN_UNITS.get(unit, unit), fontsize=8)
    axes.tick_params(labelsize=7)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if lines:
        axes.legend(frameon=False, fontsize=7)
    else:
        axes.text(0.5, 0.5, "no data", ha="center", transform=axes.transAxes, fontsize=8)


def draw_board(url: str, start: float, end: float, board: Path, path: Path) -> None:
    """The dashboard's panels above its first folded row, where its grid has them."""
    panels = itertools.takewhile(
        lambda panel: panel["type"] != "row", json.loads(board.read_text())["panels"]
    )
    shown = list(panels)
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in shown)
    figure = plt.figure(figsize=(12, 0.36 * height), dpi=100)
    for panel in shown:
        at = panel["gridPos"]
        left, bottom = (at["x"] + 0.9) / 24, 1 - (at["y"] + at["h"] - 0.9) / height
        axes = figure.add_axes((left, bottom, (at["w"] - 1.2) / 24, (at["h"] - 2) / height))
        draw_panel(axes, panel, url, start, end)
    figure.savefig(path, metadata={"Software": None})


def main() -> None:
    """Parse the options, start both processes, send questions, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("risk_rates.png"), help="where the picture goes"
    )
    parser.add_argument("--seconds", type=float, default=240, help="how long to send traffic")
    parser.add_argument("--rate", type=float, default=10, help="questions a second")
    parser.add_argument(
        "--board", type=Path, help="a dashboard, drawn beside the picture as dashboard_NAME.png"
    )
    options = parser.parse_args()
    prometheus = shutil.which("prometheus") or shutil.which("prometheus", path=str(TOOLS))
    if prometheus is None:
        sys.exit("prometheus is neither on PATH nor in .tools/bin; run: make tools")
    rows = questions("test")
    known = [row["prompt"] for row in rows if row["exposures"] >= 16]
    hardly = [row["prompt"] for row in rows if row["exposures"] <= 2]
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        log = work / "service.log"
        serve = ["serve", "--model", "demo", "--policy", "gate", "--port", "0"]
        command = [sys.executable, "-m", "service.cli", *serve]
        with process(command, log, PYTHONUNBUFFERED="1", HALLUTRACER_STORE=str(work)) as service:
            address = wait_for(service, log, r"listening on (http://\S+),")
            wait_for(service, log, r"(API reference)")
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                url = f"http://127.0.0.1:{free.getsockname()[1]}"
            config, seen = prometheus_config(work / "prometheus", address), work / "prometheus.log"
            command = [
                prometheus,
                f"--config.file={config}",
                f"--storage.tsdb.path={work / 'data'}",
            ]
            with process(
                [*command, f"--web.listen-address={url.removeprefix('http://')}"], seen
            ) as scraper:
                wait_for(scraper, seen, r"(Server is ready)")
                print(f"service {address}   Prometheus {url}", flush=True)
                time.sleep(2 * STEP)
                start, starts = time.time(), []
                for name in send_questions(
                    address, [known, hardly, known + hardly], options.seconds, options.rate
                ):
                    starts.append(time.time() - start)
                    print(f"{starts[-1]:5.0f} s  questions: {name}", flush=True)
                end = time.time()
                time.sleep(2 * STEP)
                draw(url, start, starts, end, options.out)
                if options.board is not None:
                    target = options.out.with_name(f"dashboard_{options.board.stem}.png")
                    draw_board(url, start, end, options.board, target)
    print(f"drawn from Prometheus' API: {options.out}")


if __name__ == "__main__":
    main()
