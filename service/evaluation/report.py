"""From a finished evaluation to what people read: report.html, report.md, results.json.  Fits nothing."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import service
from probes_store.durable import atomic_write
from service.evaluation.main_table import pooled_ranks
from service.evaluation.options import OURS
from service.evaluation.page import figures
from service.evaluation.page.html import to_html
from service.evaluation.page.markdown import to_markdown
from service.evaluation.page.report_data import Claim, Figure, ReportData, Section
from service.evaluation.run import Result
from service.evaluation.set_run import SetRun
from service.evaluation.tables import Table
from service.fitting.calibration import fit_classifier
from service.paper import ablations, structure
from service.paper.claims import claims

FILES = ("report.html", "report.md", "results.json")
_PAPER = (
    "Tables named after the paper's carry its published numbers, folded under them: other models, other prompts, so a "
    "comparison of patterns and not of digits."
)


def write_report(result: Result, command: str) -> list[Path]:
    """Write all files into the run's folder.  Raises TrainingError where a table cannot be computed."""
    data = report_data(result, command)
    tables = [table for section in data.sections for table in section.tables]
    out = result.options.out
    intro = f"# {data.title}\n\n" + "\n".join(f"- **{one.verdict}**: {one.claim} {one.evidence}" for one in data.claims)
    atomic_write(out / "report.html", to_html(data).encode())
    atomic_write(out / "report.md", to_markdown(tables, intro).encode())
    document = {
        "facts": data.facts,
        "claims": [asdict(one) for one in data.claims],
        "tables": {table.name: table.document() for table in tables},
    }
    text = json.dumps(_plain(document), indent=1, ensure_ascii=False) + "\n"
    atomic_write(out / "results.json", text.encode())
    return [out / name for name in FILES]


def report_data(result: Result, command: str) -> ReportData:
    """All sections; the main suite has the first only."""
    runs = result.runs
    main = [result.main] + ([result.subsets] if result.subsets is not None else [])
    sections = [
        Section("Detection", _PAPER, main, [figure for run in runs for figure in _detection(run, result.titles)])
    ]
    found: list[Claim] = []
    if result.options.suite == "paper":
        mean, readout = _tables(runs, ablations.MEAN), _tables(runs, ablations.READOUT)
        level, shape = _tables(runs, structure.TRAJECTORY), _tables(runs, structure.READOUTS)
        found = claims(runs, [*mean, *readout, *level, *shape])
        sections += [
            Section("Does the mean suffice?", "", mean, _depth(runs)),
            Section("Readout and heads", "", readout),
            Section("Level and shape", "", level, [_levels(run) for run in runs]),
            Section("Geometry", "", shape, structure.geometry_figures(runs)),
        ]
    identity = result.identity
    return ReportData(
        title=f"HalluTracer on {identity.model}",
        facts={
            "model": {"name": identity.model, "revision": identity.revision, "architecture": identity.architecture,
                      "dtype": identity.dtype, "layers": identity.geometry.num_layers,
                      "heads": identity.geometry.num_heads, "head_dim": identity.geometry.head_dim,
                      "fingerprint": identity.fingerprint},
            "protocol": {"seeds": result.options.seeds, "folds": result.options.folds,
                         "inner folds": result.options.inner_folds,
                         "splits": "stratified, group-disjoint; everything learned comes from the training side"},
            "versions": {"hallutracer": service.__version__, "python": platform.python_version(),
                         "numpy": np.__version__, "torch": version("torch"), "scikit-learn": version("scikit-learn")},
            "command": command,
            "seconds, this run": round(result.seconds),
        },
        claims=found,
        sections=sections,
    )  # fmt: skip


def _tables(runs: tuple[SetRun, ...], makers: Any) -> list[Table]:
    return [table for make in makers for table in make(runs)]


def _detection(run: SetRun, titles: Mapping[str, str]) -> list[Figure]:
    """ROC and precision-recall of all methods, and our reliability, from the first seed's test sides."""
    label = run.label
    seed0 = {name: [one for one in found if one.seed == 0] for name, found in run.runs.items()}
    ranks = {titles[name]: pooled_ranks(len(label), found) for name, found in seed0.items()}
    calibrated = np.full(len(label), np.nan)
    for split in run.folds(0):
        inside = split.train_trajectory.mean(axis=1)[:, None]
        classifier = fit_classifier(inside, label[split.train])
        calibrated[split.test] = classifier.risk(split.test_trajectory.mean(axis=1)[:, None])
    return [
        _named(figures.roc_pr(label, ranks), run),
        _named(figures.reliability(label, {titles[OURS]: calibrated}), run),
    ]


def _depth(runs: tuple[SetRun, ...]) -> list[Figure]:
    return [figures.depth_subsampling(ablations.depth_curve(runs))]


def _levels(run: SetRun) -> Figure:
    return _named(figures.trajectories(run.trajectory(0), run.label), run)


def _named(figure: Figure, run: SetRun) -> Figure:
    """The same, said of which set."""
    return Figure(figure.name, f"{run.title}: {figure.caption}", f"{run.title}: {figure.alt}", figure.svg)


def command_line() -> str:
    """As it was typed."""
    import shlex

    return shlex.join(["hallutracer", *sys.argv[1:]])


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's; a NaN would be no JSON."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
