"""TruthfulQA (Lin, Hilton & Evans 2022), the version of 817 questions in 38 categories, in two readings.

``read_truthfulqa``: the question is the prompt and the label judges the read model's own answer.  The paper's
numbers suggest this reading: the positive rate implied by its (AUROC, AUPRC) pairs differs between models.
``answers`` holds the correct answers ('I have no comment' is truthful by the authors' rule) and the incorrect ones
(service/data/judges.py); the set's own offline judge is ``similarity``.

``read_truthfulqa_reference``: the 6,204 reference answers with their labels, as ITI reads them ("Q: ... A: ...", last
token).  It needs no model answers, but the state stands *after* an answer: not a reading before decoding.

Group = the question, with the same name in both readings, so that one can be held out of the other.  Kind = category.
The benchmark carries a canary: never train a language model on it.
"""

from __future__ import annotations

from pathlib import Path

from hallutracer_research.data.files import Row, csv_table, json_document
from service.data import judges as references

TABLE, TASK = "TruthfulQA.csv", "mc_task.json"
ROWS = 817
REFERENCE_ROWS = 6_204
NO_COMMENT = "I have no comment."

_COLUMNS = ("Type", "Category", "Question", "Best Answer", "Correct Answers", "Incorrect Answers")


def read_truthfulqa(folder: Path, problems: list[str]) -> tuple[list[Row], dict[str, int]]:
    """Rows (id, prompt, answers, group, kind, type) for generated labels, and counts {read, correct, incorrect}."""
    rows, counts = [], {"read": 0, "correct": 0, "incorrect": 0}
    for place, (number, row) in enumerate(csv_table(folder, TABLE, _COLUMNS, problems)):
        question = row["Question"].strip()
        correct = _listed(row["Correct Answers"])
        false = _listed(row["Incorrect Answers"])
        if not (question and correct and false):
            problems.append(f"{TABLE} line {number}: a question, correct and incorrect answers are needed")
            continue
        counts["read"] += 1
        counts["correct"] += len(correct)
        counts["incorrect"] += len(false)
        accepted = list(dict.fromkeys([row["Best Answer"].strip() or correct[0], *correct, NO_COMMENT]))
        rows.append(
            {
                "id": f"truthfulqa-{place}",
                "prompt": question,
                "answers": [*accepted, *map(references.incorrect, dict.fromkeys(false))],
                "group": _group(question),
                "kind": row["Category"].strip(),
                "type": row["Type"].strip(),
            }
        )
    return rows, counts


def read_truthfulqa_reference(folder: Path, problems: list[str]) -> tuple[list[Row], dict[str, int]]:
    """Rows (id, prompt, label, group, kind) of every answer in ``mc2_targets``, and counts {read, questions}.

    The categories are the table's, joined on the question: the two files are in different orders.
    """
    categories = {
        row["Question"].strip(): row["Category"].strip() for _, row in csv_table(folder, TABLE, _COLUMNS, problems)
    }
    task = TASK if (folder / TASK).is_file() else f"data/{TASK}"
    rows = []
    questions = json_document(folder, task, list, problems)
    for place, value in enumerate(questions):
        question = value.get("question") if isinstance(value, dict) else None
        targets = value.get("mc2_targets") if isinstance(value, dict) else None
        if not isinstance(question, str) or not isinstance(targets, dict) or not _are_labels(targets):
            problems.append(f"{task} question {place + 1}: 'question' and 'mc2_targets' with labels 0 or 1 are needed")
            continue
        question = question.strip()
        if categories and question not in categories:
            problems.append(f"{task} question {place + 1}: {question!r} is not in {TABLE}: take both of one version")
            continue
        for number, (answer, label) in enumerate(targets.items()):
            rows.append(
                {
                    "id": f"truthfulqa-reference-{place}-{number}",
                    "prompt": f"Q: {question} A: {answer.strip()}",
                    "label": label,
                    "group": _group(question),
                    "kind": categories.get(question, ""),
                }
            )
    return rows, {"read": len(rows), "questions": len(questions)}


def _listed(text: str) -> list[str]:
    """The semicolon-separated answers of a cell."""
    return [part.strip() for part in text.split(";") if part.strip()]


def _group(question: str) -> str:
    return f"truthfulqa/{question}"


def _are_labels(targets: dict[str, object]) -> bool:
    return all(type(label) is int and label in (0, 1) for label in targets.values())
