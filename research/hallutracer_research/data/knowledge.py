"""The knowledge questions of "No Answer Needed" (arXiv 2509.10625): four templates, each over a
list of facts, asked of the model.  Group = the question's words, as in the other sets of
questions."""

from __future__ import annotations

import re

from pydantic import RootModel

from hallutracer_research.data.files import BRIEFLY, Rows, SetFiles, Text, question_group
from hallutracer_research.documents import Row, table_beside
from service.data.judges import contains, normalise

KINDS = ("cities_10k", "math_operations_6k", "medals_9k", "notable_people")
CITIES, ARITHMETIC, MEDALS, _ = KINDS
# in the folder of each kind; the names of countries in two of them
TABLE, NAMES = "main/main.csv", "eval_map.json"
COLUMNS = ("question", "correct_answer")

_OTHER_WORDS, _COUNTRIES = table_beside(__file__, "country_names.toml").values()


class _Names(RootModel[dict[str, list[Text]]]):
    """The names of a country that the set accepts, by the one in its table."""


def read_knowledge(files: SetFiles) -> Rows:
    """Return rows (id, prompt, answers, group, kind) for generated labels; counts {read, repeated,
    answer in question}. A question that is repeated with another answer (a shared gold medal)
    accepts both.  One that holds its own answer ("What is 8 minus 4?") is left out: an answer that
    repeats the question would be judged right."""
    rows: dict[str, Row] = {}
    counts = {"read": 0, "left out: repeated": 0, "left out: the answer stands in the question": 0}
    for kind in KINDS:
        names = _names(files, f"{kind}/{NAMES}") if kind in (CITIES, MEDALS) else {}
        for number, row in files.csv_table(f"{kind}/{TABLE}", COLUMNS):
            question, answer = (" ".join(row[column].split()) for column in COLUMNS)
            if not (question and normalise(answer)):
                files.problems.append(
                    f"{kind}/{TABLE} line {number}: a question and an answer are needed"
                )
                continue
            counts["read"] += 1
            accepted = spellings(answer) if kind == ARITHMETIC else [answer, *names.get(answer, ())]
            group = question_group(question)
            if contains("", question, accepted):
                counts["left out: the answer stands in the question"] += 1
            elif group in rows:
                counts["left out: repeated"] += 1
                rows[group]["answers"] = list(dict.fromkeys([*rows[group]["answers"], *accepted]))
            else:
                rows[group] = {
                    "id": f"knowledge-{kind}-{number}",
                    "prompt": f"{question}{BRIEFLY}",
                    "answers": list(dict.fromkeys(accepted)),
                    "group": group,
                    "kind": kind,
                }
    return list(rows.values()), counts


def spellings(number: str) -> list[str]:
    """Return how a model may write a whole number.  The judge ``contains`` takes whole words (997
    is not in 1997) and reads "116,814" as one, but neither "116 814", as LaTeX's "116{,}814"
    becomes, nor "2.0" or "minus 5".  Words such as "two" are no spelling here: "the two numbers"
    would be an answer."""
    if not re.fullmatch(r"-?\d+", number):
        return [number]
    digits = number.removeprefix("-")
    signs = ("",) if digits == number else ("-", "minus ", "negative ")
    grouped = f"{int(digits):,}".replace(",", " ")
    return list(
        dict.fromkeys(
            f"{sign}{written}" for sign in signs for written in (digits, grouped, f"{digits}.0")
        )
    )


def _names(files: SetFiles, name: str) -> dict[str, list[str]]:
    listed = files.checked(_Names, files.json_document(name, dict), name)
    names = {}
    for country, accepted in (listed.root if listed is not None else {}).items():
        every = (*accepted, *_COUNTRIES.get(country, ()))
        names[country] = [spelling for spelling in every if spelling not in _OTHER_WORDS]
    return names
