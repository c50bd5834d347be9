"""From a finished evaluation to its files: report.html, report.md, results.json."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import StrictUndefined, Template

import service
from hallutracer_research.evaluation import figures
from hallutracer_research.evaluation.methods import METHODS, OURS, SHUFFLED
from hallutracer_research.evaluation.options import EvaluateOptions
from hallutracer_research.evaluation.page import (
    Claim,
    Figure,
    ReportData,
    Section,
    to_html,
    to_markdown,
)
from hallutracer_research.evaluation.results import SetResult, aurocs, pooled_ranks
from hallutracer_research.evaluation.run import EvaluationResult
from hallutracer_research.evaluation.scale import TIMES, beside_tables
from hallutracer_research.paper.ablations import MEAN, READOUT, depth_curve
from hallutracer_research.paper.claims import claims
from hallutracer_research.paper.diagnostics.classes import as_document
from hallutracer_research.paper.structure import READOUTS, TRAJECTORY, geometry_by_layer
from hallutracer_research.paper.tables import PUBLISHED, TableSpec, make_tables
from probes_store.local import atomic_write
from service.errors import TrainingError


def introduction(model: str, sets: Sequence[tuple[str, int]], options: EvaluateOptions) -> str:
    """Return paragraphs: what is measured, how to read it, what to compare with; ``sets``: names
    and rows."""
    listed = ", ".join(f"{name} ({rows:,} rows)" for name, rows in sets)
    text = Path(__file__).with_name("introduction.jinja").read_text(encoding="utf-8")
    template = Template(text, undefined=StrictUndefined)
    return str(template.render(model=model, listed=listed, options=options))


SECTIONS: Mapping[str, Mapping[str, TableSpec]] = {
    "Does the mean suffice?": MEAN,
    "Readout and heads": READOUT,
    "Level and shape": TRAJECTORY,
    "Geometry": READOUTS,
}
"""The paper suite's sections after the first, and their tables."""

FILES = ("report.html", "report.md", "results.json")
_PAPER = (
    "Tables named after the paper's carry its published numbers, folded under them: other models,"
    " other prompts, so a comparison of patterns and not of digits."
)


def write_report(evaluation: EvaluationResult, command: str) -> list[Path]:
    """Write all files into the run's folder.  Raises TrainingError where a figure cannot be
    computed."""
    data = report_data(evaluation, command)
    tables = [table for section in data.sections for table in section.tables]
    verdicts = []
    for claim in data.claims:
        verdicts.append(f"- **{claim.verdict}**: {claim.claim} Rule: {claim.rule}.")
        verdicts += [f"  - {evidence}" for evidence in claim.evidence]
    intro = f"# {data.title}\n\n" + "\n".join(verdicts)
    document = {
        "facts": data.facts,
        "claims": data.claims,
        "tables": {table.name: table.document() for table in tables},
    }
    text = json.dumps(as_document(document), indent=1, ensure_ascii=False) + "\n"
    paths = [evaluation.options.out / name for name in FILES]
    for path, content in zip(paths, (to_html(data), to_markdown(tables, intro), text), strict=True):
        atomic_write(path, content.encode())
    return paths


def report_data(evaluation: EvaluationResult, command: str) -> ReportData:
    """Return all sections; the main suite has the first only."""
    options, identity = evaluation.options, evaluation.identity
    results = evaluation.sets
    shape = identity.geometry
    tables = list(evaluation.tables)
    if options.beside:
        tables += beside_tables(identity.model, tables, evaluation.milliseconds, options.beside)
    detection = [figure for result in results for figure in _detection(result)]
    sections = [Section("Detection", _PAPER, tables, detection)]
    judged: list[Claim] = []
    if options.suite == "paper":
        drawings = {
            "Does the mean suffice?": [figures.depth_subsampling(depth_curve(results))],
            "Level and shape": [
                _named(figures.trajectories(result.trajectory(0), result.label), result)
                for result in results
            ],
            "Geometry": list(_geometry(results)),
        }
        sections += [
            Section(title, "", make_tables(specs.values(), results), drawings.get(title, ()))
            for title, specs in SECTIONS.items()
        ]
        judged = claims(results, [table for section in sections[1:] for table in section.tables])
    return ReportData(
        title=f"HalluTracer on {identity.model}",
        facts={
            "model": {
                "name": identity.model,
                **{name: getattr(identity, name) for name in ("revision", "architecture", "dtype")},
                "layers": shape.num_layers,
                "heads": shape.num_heads,
                "head_dim": shape.head_dim,
                "fingerprint": identity.fingerprint,
            },
            "protocol": {
                "seeds": options.seeds,
                "folds": options.folds,
                "inner folds": options.inner_folds,
                "splits": (
                    "stratified, group-disjoint; everything learned comes from the training side"
                ),
            },
            "versions": {
                "hallutracer": service.__version__,
                "python": platform.python_version(),
                "numpy": np.__version__,
                **{name: version(name) for name in ("torch", "scikit-learn")},
            },
            "command": command,
            TIMES: {title: round(value, 1) for title, value in evaluation.milliseconds.items()},
            "seconds, this run": round(evaluation.seconds),
        },
        claims=judged,
        sections=sections,
        published=PUBLISHED,
        introduction=introduction(
            identity.model, [(result.title, len(result.label)) for result in results], options
        ),
    )


def _detection(result: SetResult) -> list[Figure]:
    """Return AUROC against cost; ROC and precision-recall, and our reliability, from the first
    seed's test sides."""
    label, title = result.label, METHODS[OURS].title
    ranks, costs = {}, {}
    for name, scores in result.scores.items():
        ranks[METHODS[name].title] = pooled_ranks(len(label), scores)
        if name != SHUFFLED:  # no control
            costs[name] = result.costs[name], aurocs(label, scores)
    drawings = (
        figures.cost(costs),
        figures.roc_pr(label, ranks),
        figures.reliability(label, {title: result.calibrated}, result.group),
    )
    return [_named(figure, result) for figure in drawings]


def _geometry(results: Sequence[SetResult]) -> Iterator[Figure]:
    """Yield the figure of every set whose numbers are all defined; the table's notes say why for
    the others."""
    for result in results:
        try:
            cosines, energy, dim = geometry_by_layer(result)
        except TrainingError:
            continue
        if np.isfinite(energy).all():
            yield _named(figures.geometry(cosines, energy, dim), result)


def _named(figure: Figure, result: SetResult) -> Figure:
    """Return the figure with its set's name before caption and alternative text."""
    texts: Any = {name: f"{result.title}: {getattr(figure, name)}" for name in ("caption", "alt")}
    return replace(figure, **texts)


def command_line() -> str:
    """Return this process's command, quoted for a shell."""
    return shlex.join(["hallutracer", *sys.argv[1:]])
