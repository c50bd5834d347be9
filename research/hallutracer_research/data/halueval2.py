"""HaluEval 2.0 (Li et al. 2024), human annotations: 3,793 statements of 976 queries in five JSON files.

``human_judge`` "true" is factual.  Group = (domain, query id): all statements of one query stay in one fold.  Queries
without a judgement (24 of the published files) are left out and counted.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hallutracer_research.data.files import Row, json_document
from hallutracer_research.data.statements import Statement

DOMAINS = ("Bio-Medical", "Education", "Finance", "Open-Domain", "Science")
ROWS = 3_793


def read_halueval2(folder: Path, problems: list[str]) -> tuple[list[Row], dict[str, int]]:
    """Rows for the trainer and counts {read, unjudged}; ``folder`` is the set's ``annotation/human_annotation``."""
    rows, counts = [], Counter[str]()
    for domain in DOMAINS:
        name = f"{domain}.json"
        for place, query in enumerate(json_document(folder, name, list, problems), 1):
            if not isinstance(query, dict) or "id" not in query:
                problems.append(f"{name} query {place}: an object with an 'id' is expected")
                continue
            facts, judgements = query.get("chatgpt_fact"), query.get("human_judge")
            if not isinstance(facts, list) or not isinstance(judgements, list):
                problems.append(f"{name} query {place}: 'chatgpt_fact' and 'human_judge' must be lists")
                continue
            if not judgements:
                counts["unjudged"] += 1
                continue
            if len(facts) != len(judgements) or any(one not in ("true", "false") for one in judgements):
                problems.append(f"{name} query {place}: one 'true' or 'false' is needed for each statement")
                continue
            if not all(isinstance(fact, str) and fact.strip() for fact in facts):
                problems.append(f"{name} query {place}: 'chatgpt_fact' must hold non-empty strings only")
                continue
            for number, (text, judgement) in enumerate(zip(facts, judgements, strict=True)):
                counts["read"] += 1
                identifier, group = f"{domain}-{query['id']}-{number}", f"{domain}/{query['id']}"
                rows.append(Statement(identifier, text, judgement == "true", group, domain).row())
    return rows, {name: counts[name] for name in ("read", "unjudged")}
