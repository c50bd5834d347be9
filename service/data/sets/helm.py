"""HELM of MIND (Su et al. 2024): 3,197 sentences that six models wrote after the opening of a Wikipedia article.

Not Stanford's HELM.  Here label 1 is *hallucinated*, the opposite of True-False.  Labels and passages are MIND's
``data/<model>/data.json``; the statement is IRIS's ``{title}: {sentence}``, whose title ends at the prompt's first full
stop ("U" of "U.S. Route 491"), so it follows from MIND's file.  Where IRIS's tables ``statements/<model>.csv`` lie
beside it, every row of theirs must be the sentence at the same place, with the same label.

Group = passage, over all six models: the same passage returns up to six times.  A statement repeated by one model is
kept once; one passage's statement with both labels is left out.  Both are counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from service.data.sets.files import Row, csv_table, json_document
from service.data.sets.statements import statement_row
from service.errors import DataError

MODELS = ("falcon40b", "gptj7b", "llamabase7b", "llamachat13b", "llamachat7b", "opt7b")
ROWS = 3_197

_OPENING = "This is a Wikipedia passage about "


def read_helm(folder: Path) -> tuple[list[Row], dict[str, int]]:
    """Rows for the trainer and counts {read, contradictory, repeated}; ``folder`` is MIND's ``helm``.

    Raises:
        DataError: a file is missing, a sentence is not what the set has, or the two sources disagree.
    """
    problems: list[str] = []
    sentences = {model: _sentences(folder, model, problems) for model in MODELS}
    for model, own in sentences.items():
        for table in (f"statements/{model}.csv", f"helm_data/{model}.csv"):
            if own and (folder / table).is_file():
                problems += _disagreements(folder, table, own)
    if problems:
        raise DataError(str(folder), problems)
    labels: dict[tuple[str, str], set[int]] = defaultdict(set)
    for own in sentences.values():
        for passage, statement, label in own:
            labels[passage, statement].add(label)
    rows, counts = [], Counter[str]()
    for model, own in sentences.items():
        seen: set[tuple[str, str]] = set()
        for number, (passage, statement, label) in enumerate(own):
            counts["read"] += 1
            if len(labels[passage, statement]) > 1:
                counts["contradictory"] += 1
            elif (passage, statement) in seen:
                counts["repeated"] += 1
            else:
                seen.add((passage, statement))
                factual = label == 0
                rows.append(statement_row(f"{model}-{number}", statement, factual, f"passage/{passage}", model))
    return rows, {name: counts[name] for name in ("read", "contradictory", "repeated")}


def _sentences(folder: Path, model: str, problems: list[str]) -> list[tuple[str, str, int]]:
    """Passage, statement and label of one model's sentences, in the file's order."""
    name = f"data/{model}/data.json"
    found = []
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
            found.append((passage, f"{title}: {sentence['sentence']}", sentence["label"]))
    return found


def _is_sentence(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("sentence"), str)
        and type(value.get("label")) is int
        and value["label"] in (0, 1)
    )


def _disagreements(folder: Path, name: str, own: list[tuple[str, str, int]]) -> list[str]:
    """Where a table of IRIS is not the sentences of MIND, row by row; the first difference only."""
    problems: list[str] = []
    table = csv_table(folder, name, ("statement", "label"), problems)
    if problems:
        return problems
    cure = "the two files are not of one version: leave this table out, or download both again"
    for (number, row), (passage, statement, label) in zip(table, own, strict=False):
        if (row["statement"], row["label"]) != (statement, str(label)):
            return [f"{name} line {number}: not the sentence of passage {passage} in data.json at this place; {cure}"]
    if len(table) != len(own):
        return [f"{name}: {len(table)} rows, but data.json has {len(own)} sentences; {cure}"]
    return []
