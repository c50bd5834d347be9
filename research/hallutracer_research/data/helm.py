"""HELM of MIND (Su et al. 2024): 3,197 sentences that six models wrote after the opening of a Wikipedia article.

Not Stanford's HELM.  Label 1 in the files means *hallucinated*, the opposite of True-False.  Labels and passages come
from MIND's ``data/<model>/data.json``.  The statement is IRIS's ``{title}: {sentence}``, derived from MIND's file; the
title ends at the prompt's first full stop ("U" of "U.S. Route 491").  If IRIS's tables ``statements/<model>.csv`` are
present, each of their rows must equal the sentence at its place, with the same label.

Group = passage, over all six models, because the same passage occurs up to six times.  A statement repeated by one
model is kept once; a passage's statement with both labels is left out.  Both are counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hallutracer_research.data.files import Row, csv_table, json_document
from hallutracer_research.data.statements import Statement, unambiguous_rows

MODELS = ("falcon40b", "gptj7b", "llamabase7b", "llamachat13b", "llamachat7b", "opt7b")
ROWS = 3_197

_OPENING = "This is a Wikipedia passage about "


def read_helm(folder: Path, problems: list[str]) -> tuple[list[Row], dict[str, int]]:
    """Rows for the trainer and counts {read, contradictory, repeated}; ``folder`` is MIND's ``helm``."""
    statements = []
    for model in MODELS:
        own = _sentences(folder, model, problems)
        for table in (f"statements/{model}.csv", f"helm_data/{model}.csv"):
            if own and (folder / table).is_file():
                problems += _disagreements(folder, table, own)
        statements += own
    return unambiguous_rows(statements)


def _sentences(folder: Path, model: str, problems: list[str]) -> list[Statement]:
    """One model's sentences, in the file's order."""
    name = f"data/{model}/data.json"
    statements: list[Statement] = []
    for passage, value in json_document(folder, name, dict, problems).items():
        prompt, sentences = (value.get("prompt"), value.get("sentences")) if isinstance(value, dict) else (None, None)
        if not isinstance(prompt, str) or not prompt.startswith(_OPENING) or not isinstance(sentences, list):
            problems.append(f"{name} passage {passage}: 'sentences' and a 'prompt' that begins {_OPENING!r} are needed")
            continue
        title = prompt.removeprefix(_OPENING).split(".")[0]
        for place, sentence in enumerate(sentences, 1):
            if not _is_sentence(sentence):
                problems.append(f"{name} passage {passage} sentence {place}: a text and a label 0 or 1 are needed")
                continue
            identifier, text = f"{model}-{len(statements)}", f"{title}: {sentence['sentence']}"
            statements.append(Statement(identifier, text, sentence["label"] == 0, f"passage/{passage}", model))
    return statements


def _is_sentence(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("sentence"), str)
        and type(value.get("label")) is int
        and value["label"] in (0, 1)
    )


def _disagreements(folder: Path, name: str, statements: list[Statement]) -> list[str]:
    """The first row in which one of IRIS's tables differs from MIND's sentences."""
    problems: list[str] = []
    table = csv_table(folder, name, ("statement", "label"), problems)
    if problems:
        return problems
    cure = "the two files are of different versions: remove this table, or download both again"
    for (number, row), statement in zip(table, statements, strict=False):
        if (row["statement"], row["label"]) != (statement.text, str(1 - statement.factual)):
            return [f"{name} line {number}: differs from the sentence of {statement.group} in data.json; {cure}"]
    if len(table) != len(statements):
        return [f"{name}: {len(table)} rows, but data.json has {len(statements)} sentences; {cure}"]
    return []
