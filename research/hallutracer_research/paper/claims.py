"""The paper's claims against this run: each with its numbers, and a verdict by a written rule.

A claim is judged on each set by its rule, from the run's scores (``claim_differences``) or from the table cells that
the report shows (``claim_table_rules``, ``claim_geometry_rules``).  It is supported where it is on every set that can
test it, "mixed" where sets differ, not testable where none can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from hallutracer_research.evaluation.page.report_data import Claim, Verdict
from hallutracer_research.evaluation.set_result import SetResult
from hallutracer_research.evaluation.tables import Cell, Table
from hallutracer_research.paper.claim_differences import DIFFERENCE_RULES
from hallutracer_research.paper.claim_geometry_rules import GEOMETRY_RULES
from hallutracer_research.paper.claim_rules import Finding, NotTestable, Rows, Rule
from hallutracer_research.paper.claim_table_rules import TABLE_RULES
from service.errors import TrainingError

RULES: Final = (*DIFFERENCE_RULES, *TABLE_RULES, *GEOMETRY_RULES)


def claims(results: Sequence[SetResult], tables: Sequence[Table]) -> list[Claim]:
    """Every claim's verdict; ``tables``: the run's tables of ``paper.report``."""
    cells = cells_by_set(tables)

    def judge(rule: Rule, result: SetResult) -> Finding:
        try:
            return rule.judge(result, cells.get(result.title, {}))
        except (NotTestable, TrainingError) as error:
            return Finding("not testable", f"not testable: {error}")

    judged = []
    for rule in RULES:
        findings = [judge(rule, result) for result in results]
        evidence = [f"{result.title}: {each.text}" for result, each in zip(results, findings, strict=True)]
        verdict = together([finding.verdict for finding in findings])
        judged.append(Claim(rule.claim, evidence, verdict, rule.rule))
    return judged


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict from those of the sets; a set that cannot test a claim does not count where another can."""
    tested = {verdict for verdict in verdicts if verdict != "not testable"}
    if not tested:
        return "not testable"
    return tested.pop() if len(tested) == 1 else "mixed"


def cells_by_set(tables: Sequence[Table]) -> dict[str, Rows]:
    """set -> table name -> the set's row."""
    by_set: dict[str, dict[str, Mapping[str, Cell]]] = {}
    for table in tables:
        for row in table.rows:
            by_set.setdefault(str(row["set"]), {})[table.name] = row
    return dict(by_set)
