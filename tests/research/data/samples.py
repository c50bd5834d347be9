"""Small made samples of the sets, in the published file formats.  None of their rows is of a
set."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hallutracer_research.data import bfcl, knowledge, question_sets, statement_sets
from hallutracer_research.data.files import SetFiles
from hallutracer_research.data.registry import read_set
from service.errors import DataError

read = partial(read_set, allow_other_counts=True)  # made samples are smaller than what is published


def damage(name: str, folder: Path) -> list[str]:
    """The places of the problems that a set's reader finds in a folder."""
    with pytest.raises(DataError) as caught:
        read(name, folder)
    return [problem.split(":")[0] for problem in caught.value.problems]


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "\n".join(json.dumps(row) for row in rows), encoding="utf-8"
    )  # no newline at the end, as published
    return path


def write_table(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_truefalse(folder: Path, **tables: str) -> Path:
    for category in statement_sets.SUBJECTS:
        body = tables.get(
            category, f"A plain {category} statement.,1\nAn odd {category} statement.,0\n"
        )
        (folder / f"{category}.csv").write_text("statement,label\n" + body, encoding="utf-8-sig")
    return folder


def write_halueval2(folder: Path, **tables: Any) -> Path:
    default = [
        {
            "id": 1,
            "user_query": "q",
            "chatgpt_response": "r",
            "chatgpt_fact": ["f", "g"],
            "human_judge": ["true", "false"],
        }
    ]
    for domain in statement_sets.DOMAINS:
        (folder / f"{domain}.json").write_text(json.dumps(tables.get(domain, default)))
    return folder


QUESTIONS = (
    (
        "Adversarial",
        "Toys",
        "Can a kite fly without wind?",
        "No, it needs wind",
        "No, it needs wind; It cannot fly",
        "Yes, it always flies; Yes, a kite has an engine",
    ),
    (
        "Non-Adversarial",
        "Tools",
        "What is a hammer for? ",
        "Driving nails",
        "Driving nails; Pulling nails out; ",
        "Cutting bread",
    ),
)


def write_truthfulqa(folder: Path) -> Path:
    columns = (
        "Type",
        "Category",
        "Question",
        "Best Answer",
        "Correct Answers",
        "Incorrect Answers",
    )
    rows = [
        dict(zip(columns, question, strict=True)) | {"Source": "made"} for question in QUESTIONS
    ]
    write_table(folder / question_sets.TABLE, rows)
    tasks = []
    for row in reversed(rows):  # in another order than the table, as published
        targets = dict.fromkeys(row["Correct Answers"].rstrip("; ").split("; "), 1)
        targets |= dict.fromkeys(row["Incorrect Answers"].split("; "), 0)
        tasks.append(
            {"question": row["Question"].strip(), "mc1_targets": {}, "mc2_targets": targets}
        )
    (folder / question_sets.TASK).write_text(json.dumps(tasks))
    return folder


def passage(
    *labels: int, title: str = "Kites", first: str = "", texts: Sequence[str] = ()
) -> dict[str, Any]:
    texts = texts or [f"{first}Sentence {place}." for place in range(len(labels))]
    sentences = [
        {"sentence": text, "label": label} for text, label in zip(texts, labels, strict=True)
    ]
    return {"prompt": f"{statement_sets._OPENING}{title}. A kite is a toy.", "sentences": sentences}


def write_helm(folder: Path, **models: dict[str, Any]) -> Path:
    for model in statement_sets.MODELS:
        passages = models.get(model, {"7": passage(1, 0, first=f"{model} wrote ")})
        write_lines(folder / "data" / model / "data.json", [passages])
    return folder


def write_iris_tables(folder: Path) -> None:
    """The tables that belong to what ``write_helm`` wrote."""
    for model in statement_sets.MODELS:
        sentences = statement_sets._sentences(SetFiles(folder), model)
        rows = [{"statement": one.text, "label": str(1 - one.factual)} for one in sentences]
        write_table(folder / "statements" / f"{model}.csv", rows)


def function(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": key} for key, kind in types.items()}
    parameters = {"type": "dict", "properties": properties, "required": list(types)[:1]}
    return {"name": name, "description": f"Does {name}.", "parameters": parameters}


def bfcl_row(identifier: str, *functions: dict[str, Any], text: str = "Do it.") -> dict[str, Any]:
    return {
        "id": identifier,
        "question": [[{"role": "user", "content": text}]],
        "function": list(functions),
    }


def write_bfcl(folder: Path, **files: list[Any]) -> Path:
    """Two rows a file; ``files`` replaces rows (``simple_python=...``) or gold answers
    (``gold_simple_python=...``)."""
    area = function("area", base="integer", unit="string")
    for kind in bfcl.KINDS:
        identifiers = [
            f"{kind}_{n}-{n}-0" if kind.startswith("live_") else f"{kind}_{n}" for n in range(2)
        ]
        if kind == "web_search":
            rows: list[Any] = [bfcl_row(name, text=f"Who made {name}?") for name in identifiers]
        elif kind == "memory":
            rows = [
                bfcl_row(name, text=f"{name}: my name?") | {"scenario": "shop"}
                for name in identifiers
            ]
        else:
            rows = [bfcl_row(name, area, text=f"{name}: area of base 3") for name in identifiers]
        write_lines(folder / f"BFCL_v4_{kind}.json", files.get(kind, rows))
        truth: list[Any] = (
            ["Ada"] if kind in bfcl.TEXTS else [{"area": {"base": [3], "unit": ["cm", ""]}}]
        )
        gold = [{"id": name, "ground_truth": truth} for name in identifiers]
        if kind in bfcl.CALLS or kind in bfcl.TEXTS:
            write_lines(
                folder / "possible_answer" / f"BFCL_v4_{kind}.json", files.get(f"gold_{kind}", gold)
            )
    write_lines(
        folder / f"BFCL_v4_{bfcl.SIMULATED}.json",
        [{"id": "multi_turn_base_0", "question": [[], []]}],
    )
    talk = {
        "topic": "Names",
        "question": [[{"role": "user", "content": "My name is Ada."}]],
        "scenario": "shop",
    }
    write_lines(folder / "memory_prereq_conversation" / "memory_shop.json", [talk])
    return folder


TRIVIA = """
#Q What pulls a sledge on {category}?\r
\r
Name one.
^ A big dog
A A small cat
B A big dog
C A fish
D Two birds

#Q A kite of {category} needs wind.
^ True
A True
B False

"""


def write_opentriviaqa(folder: Path, **files: str | bytes) -> Path:
    for category in question_sets.CATEGORIES:
        content = files.get(category.replace("-", "_"), TRIVIA.replace("{category}", category))
        (folder / category).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def write_nq_open(folder: Path, dev: Sequence[Any] = ()) -> Path:
    first = [{"question": "who flew the first kite", "answer": ["Ann Nobody", "Nobody"]}]
    for kind, rows in (
        ("dev", dev or first),
        ("efficientqa", [{"question": "where is the kite now", "answer": ["up"]}]),
    ):
        write_lines(folder / question_sets.FILES[kind], rows)
    return folder


KNOWLEDGE = {
    "cities_10k": "In which country is the city of  Kiteville located?,Kiteland\n",
    "math_operations_6k": "What is 3 minus 1003?,-1000\n",
    "medals_9k": "Which country won gold in Kites in 1899?,Kiteland\n",
    "notable_people": "What year was Ann Nobody (pilot from Kiteland) born?,1899\n",
}


def write_knowledge(folder: Path, names: Any = None, **tables: str) -> Path:
    """``tables`` replaces what a kind's table has; ``names`` what countries are called."""
    for kind, body in (KNOWLEDGE | tables).items():
        table = folder / kind / knowledge.TABLE
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text("question,correct_answer\n" + body, encoding="utf-8")
    for kind in (knowledge.CITIES, knowledge.MEDALS):
        countries = (
            {"Kiteland": ["Kiteland", "Republic of Kites", "AS"]} if names is None else names
        )
        (folder / kind / knowledge.NAMES).write_text(json.dumps(countries), encoding="utf-8")
    return folder


WRITERS: dict[str, Callable[..., Path]] = {
    "truthfulqa": write_truthfulqa,
    "truthfulqa-reference": write_truthfulqa,
    "truefalse": write_truefalse,
    "halueval2": write_halueval2,
    "helm": write_helm,
    "bfcl": write_bfcl,
    "bfcl-answerable": write_bfcl,
    "opentriviaqa": write_opentriviaqa,
    "opentriviaqa-choice": write_opentriviaqa,
    "nq-open": write_nq_open,
    "knowledge": write_knowledge,
}


def read_made(name: str, folder: Path, **changes: Any) -> Any:
    """The rows and counts of a made sample of a set, with some of the writer's arguments."""
    return read(name, WRITERS[name](folder, **changes))
