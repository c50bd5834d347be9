"""The paper's claims against this run: each with its numbers, and a verdict by a rule that is written down.

A claim is judged on each set by its rule (``claim_rules``) from the same table cells that the report shows.  It is
supported where it is on every set that can test it, "mixed" where sets differ, not testable where none can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from service.errors import TrainingError
from service.evaluation.page.report_data import Claim, Verdict
from service.evaluation.set_run import SetRun
from service.evaluation.tables import Cell, Table
from service.paper.ablations import MEAN, READOUT
from service.paper.claim_rules import RULES, Finding, NotTestable, Rows
from service.paper.claim_table_rules import TABLE_RULES
from service.paper.structure import READOUTS, TRAJECTORY


def paper_tables(runs: Sequence[SetRun]) -> list[Table]:
    """Every ablation and structure table, in the order of the report."""
    return [table for make in (*MEAN, *READOUT, *TRAJECTORY, *READOUTS) for table in make(runs)]


def claims(runs: Sequence[SetRun], tables: Sequence[Table] | None = None) -> list[Claim]:
    """Every claim's verdict.  ``tables``: those of ``paper_tables``, where they are there already."""
    cells = cells_by_set(paper_tables(runs) if tables is None else tables)
    found = []
    for rule in (*RULES, *TABLE_RULES):
        findings: list[Finding] = []
        for run in runs:
            try:
                findings.append(rule.judge(run, cells.get(run.title, {})))
            except (NotTestable, TrainingError) as error:
                findings.append(Finding("not testable", f"not testable: {error}"))
        said = "; ".join(f"{run.title}: {finding.text}" for run, finding in zip(runs, findings, strict=True))
        found.append(Claim(rule.claim, f"{said}. Rule: {rule.rule}", together([one.verdict for one in findings])))
    return found


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict from those of the sets; sets that cannot test a claim have no say where another can."""
    tested = {verdict for verdict in verdicts if verdict != "not testable"}
    if not tested:
        return "not testable"
    return tested.pop() if len(tested) == 1 else "mixed"


def cells_by_set(tables: Sequence[Table]) -> dict[str, Rows]:
    """set -> table name -> the set's row."""
    found: dict[str, dict[str, Mapping[str, Cell]]] = {}
    for table in tables:
        for row in table.rows:
            found.setdefault(str(row["set"]), {})[table.name] = row
    return dict(found)
