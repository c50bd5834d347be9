"""True-False, HaluEval 2.0 and HELM (of MIND): statements with a label, and the prompt around
them.  The label belongs to a statement inside the prompt, so a probe trained on these sets tells
true text from false text, not a good answer from a bad one.  The papers that use the sets give no
template; this one is IRIS's zero-shot prompt."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, StringConstraints

from hallutracer_research.data.files import Label, Rows, SetFiles, Text
from hallutracer_research.documents import Row, table_beside

TEMPLATE = (
    "Determine whether the given statement is TRUE or FALSE. The Final Answer must only be either"
    " 'TRUE.' or 'FALSE.' only.\n\nStatement: {statement}\nFinal Answer: "
)


class Statement(NamedTuple):
    """One statement as a data set lists it; ``factual`` is independent of the file's own
    polarity."""

    id: str
    text: str
    factual: bool
    group: str
    kind: str

    def row(self) -> Row:
        """Return the training row; label 1 is factual."""
        prompt = TEMPLATE.format(statement=self.text)
        return {
            "id": self.id,
            "prompt": prompt,
            "label": int(self.factual),
            "group": self.group,
            "kind": self.kind,
        }


def unambiguous_rows(statements: Sequence[Statement]) -> Rows:
    """Return training rows, and counts {read, contradictory, repeated} of the statements read and
    of those left out.  A text that carries both labels within its group is left out
    (contradictory); repeats within a kind are kept once."""
    labels: dict[tuple[str, str], set[bool]] = defaultdict(set)
    for statement in statements:
        labels[statement.group, statement.text].add(statement.factual)
    rows: dict[tuple[str, str, str], Row] = {}
    counts = Counter(read=len(statements), contradictory=0, repeated=0)
    for statement in statements:
        key = (statement.kind, statement.group, statement.text)
        if len(labels[statement.group, statement.text]) > 1:
            counts["contradictory"] += 1
        elif key in rows:
            counts["repeated"] += 1
        else:
            rows[key] = statement.row()
    return list(rows.values()), dict(counts)


SUBJECTS = table_beside(__file__, "subjects.toml")
"""The files of True-False, and what finds the subject of a statement; "" where nothing does."""
_NO_USES = re.compile(r"There are no specific human uses for (.*?)\.")


def subject(category: str, statement: str) -> str:
    """Return the entity that a statement is about, or the statement itself if it names none."""
    match = _NO_USES.match(statement) or re.match(SUBJECTS[category], statement)
    return (match[1] if match and match.re.groups else statement).strip().casefold()


def read_truefalse(files: SetFiles) -> Rows:
    """Return rows for the trainer and counts {read, contradictory, repeated}."""
    statements = []
    for category in SUBJECTS:
        name = f"{category}.csv"  # generated.csv starts with a byte-order mark
        for number, row in files.csv_table(name, ("statement", "label")):
            if row["label"] not in ("0", "1"):
                files.problems.append(
                    f"{name} line {number}: label must be 0 or 1, not {row['label']!r}"
                )
            text, group = row["statement"], f"{category}/{subject(category, row['statement'])}"
            statements.append(
                Statement(f"{category}-{number}", text, row["label"] == "1", group, category)
            )
    return unambiguous_rows(statements)


DOMAINS = ("Bio-Medical", "Education", "Finance", "Open-Domain", "Science")


class _Query(BaseModel):
    id: Any
    chatgpt_fact: list[Any]
    human_judge: list[Any]


class _Judged(BaseModel):
    chatgpt_fact: list[Text]
    human_judge: list[Literal["true", "false"]]


def read_halueval2(files: SetFiles) -> Rows:
    """Return rows for the trainer and counts {read, unjudged}; ``folder`` is
    ``annotation/human_annotation``."""
    rows, counts = [], Counter(read=0, unjudged=0)
    for domain in DOMAINS:
        name = f"{domain}.json"
        for number, value in enumerate(files.json_document(name, list), 1):
            where = f"{name} query {number}"
            if (query := files.checked(_Query, value, where)) is None:
                continue
            if not query.human_judge:
                counts["unjudged"] += 1
                continue
            if (judged := files.checked(_Judged, value, where)) is None:
                continue
            if len(judged.chatgpt_fact) != len(judged.human_judge):
                files.problems.append(
                    f"{where}: one 'true' or 'false' is needed for each statement"
                )
                continue
            counts["read"] += len(judged.chatgpt_fact)
            group = f"{domain}/{query.id}"
            for number, (text, verdict) in enumerate(
                zip(judged.chatgpt_fact, judged.human_judge, strict=True)
            ):
                rows.append(
                    Statement(
                        f"{domain}-{query.id}-{number}", text, verdict == "true", group, domain
                    ).row()
                )
    return rows, dict(counts)


MODELS = ("falcon40b", "gptj7b", "llamabase7b", "llamachat13b", "llamachat7b", "opt7b")
_OPENING = "This is a Wikipedia passage about "


class _Passage(BaseModel):
    prompt: Annotated[str, StringConstraints(pattern=f"^{_OPENING}")]
    sentences: list[Any]


class _Sentence(BaseModel):
    sentence: str
    label: Label


def read_helm(files: SetFiles) -> Rows:
    """Return rows for the trainer and counts {read, contradictory, repeated}; ``folder`` is MIND's
    ``helm``."""
    statements = []
    for model in MODELS:
        of_model = _sentences(files, model)
        for table in (f"statements/{model}.csv", f"helm_data/{model}.csv"):
            if of_model and (files.folder / table).is_file():
                _compare(files, table, of_model)
        statements += of_model
    return unambiguous_rows(statements)


def _sentences(files: SetFiles, model: str) -> list[Statement]:
    """Return one model's sentences, in the file's order."""
    name = f"data/{model}/data.json"
    statements: list[Statement] = []
    for number, value in files.json_document(name, dict).items():
        where = f"{name} passage {number}"
        if (passage := files.checked(_Passage, value, where)) is None:
            continue
        title = passage.prompt.removeprefix(_OPENING).split(".")[0]
        for position, entry in enumerate(passage.sentences, 1):
            sentence = files.checked(_Sentence, entry, f"{where} sentence {position}")
            if sentence is not None:
                identifier, text = f"{model}-{len(statements)}", f"{title}: {sentence.sentence}"
                statements.append(
                    Statement(identifier, text, sentence.label == 0, f"passage/{number}", model)
                )
    return statements


def _compare(files: SetFiles, name: str, statements: list[Statement]) -> None:
    """Add as a problem the first row in which one of IRIS's tables differs from MIND's
    sentences."""
    before = len(files.problems)
    table = files.csv_table(name, ("statement", "label"))
    if len(files.problems) > before:
        return
    cure = "the two files are of different versions: remove this table, or download both again"
    for (number, row), statement in zip(table, statements, strict=False):
        if (row["statement"], row["label"]) != (statement.text, str(1 - statement.factual)):
            files.problems.append(
                f"{name} line {number}: differs from the sentence of {statement.group} in"
                f" data.json; {cure}"
            )
            return
    if len(table) != len(statements):
        files.problems.append(
            f"{name}: {len(table)} rows, but data.json has {len(statements)} sentences; {cure}"
        )
