"""True-False, HaluEval 2.0 and HELM (of MIND): statements with a label, and the prompt around them.

The label belongs to a statement inside the prompt, so a probe trained on these sets tells true text from false text,
not a good answer from a bad one.  The papers that use the sets give no template; this one is IRIS's zero-shot prompt.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hallutracer_research.data.files import Row, csv_table, json_document

TEMPLATE = (
    "Determine whether the given statement is TRUE or FALSE. The Final Answer must only be either 'TRUE.' or 'FALSE.' "
    "only.\n\nStatement: {statement}\nFinal Answer: "
)


class Statement(NamedTuple):
    """One statement as a data set lists it; ``factual`` is independent of the file's own polarity."""

    id: str
    text: str
    factual: bool
    group: str
    kind: str

    def row(self) -> Row:
        """The training row; label 1 is factual."""
        prompt = TEMPLATE.format(statement=self.text)
        return {"id": self.id, "prompt": prompt, "label": int(self.factual), "group": self.group, "kind": self.kind}


def unambiguous_rows(statements: Sequence[Statement]) -> tuple[list[Row], dict[str, int]]:
    """Training rows, and counts {read, contradictory, repeated} of the statements read and of those left out.

    A text that carries both labels within its group is left out (contradictory); repeats within a kind are kept once.
    """
    labels: dict[tuple[str, str], set[bool]] = defaultdict(set)
    for statement in statements:
        labels[statement.group, statement.text].add(statement.factual)
    kept: dict[tuple[str, str, str], Row] = {}
    counts = Counter(read=len(statements), contradictory=0, repeated=0)
    for statement in statements:
        key = (statement.kind, statement.group, statement.text)
        if len(labels[statement.group, statement.text]) > 1:
            counts["contradictory"] += 1
        elif key in kept:
            counts["repeated"] += 1
        else:
            kept[key] = statement.row()
    return list(kept.values()), dict(counts)


SUBJECTS = ("animals", "cities", "companies", "elements", "facts", "generated", "inventions")
TRUEFALSE_ROWS = 6_330

_SUBJECT = {
    "animals": re.compile(
        r"^(?:The |Human uses for (?:the )?)?(.*?) "
        r"(?:primarily|has|have|uses|use|is|isn't|are|eats|eat|can|lives|live|sleeps|spends|include|exhibits|builds|shares"
        r"|feeds|migrates|lacks)\b",
        re.IGNORECASE,
    ),
    "cities": re.compile(r"^(.*?) is a (?:name of|city in)"),
    "companies": re.compile(r"^(.*?) (?:engages|has|is|operates|provides|produces|acts|manages)\b"),
    "elements": re.compile(r"^(.*?) (?:is|has|appears|was|are|forms|reacts)\b"),
    "inventions": re.compile(r"^(.*?) (?:invented|lived)\b"),
}
_NO_USES = re.compile(r"^There are no specific human uses for (.*?)\.")


def subject(category: str, statement: str) -> str:
    """The entity that a statement is about, or the statement itself if it names none."""
    pattern = _SUBJECT.get(category)
    match = _NO_USES.match(statement) or (pattern.match(statement) if pattern else None)
    return (match.group(1) if match else statement).strip().casefold()


def read_truefalse(folder: Path, problems: list[str]) -> tuple[list[Row], dict[str, int]]:
    """Rows for the trainer and counts {read, contradictory, repeated}."""
    statements = []
    for category in SUBJECTS:
        name = f"{category}.csv"  # generated.csv starts with a byte-order mark
        for number, row in csv_table(folder, name, ("statement", "label"), problems):
            if row["label"] not in ("0", "1"):
                problems.append(f"{name} line {number}: label must be 0 or 1, not {row['label']!r}")
            text, group = row["statement"], f"{category}/{subject(category, row['statement'])}"
            statements.append(Statement(f"{category}-{number}", text, row["label"] == "1", group, category))
    return unambiguous_rows(statements)


DOMAINS = ("Bio-Medical", "Education", "Finance", "Open-Domain", "Science")
HALUEVAL2_ROWS = 3_793


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


MODELS = ("falcon40b", "gptj7b", "llamabase7b", "llamachat13b", "llamachat7b", "opt7b")
HELM_ROWS = 3_197

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
