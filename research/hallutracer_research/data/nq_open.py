"""NQ-Open (Lee et al. 2019): questions that people typed into a search engine, CC BY-SA 3.0.

3,610 of the development set and 1,800 of EfficientQA's.  The questions are lower case without a question mark; a
capital and the mark are added.  Group = the question's words; kind = the file.
"""

from __future__ import annotations

from pathlib import Path

from hallutracer_research.data.files import Row, json_lines
from hallutracer_research.data.questions import BRIEFLY, question_group
from service.data.judges import normalise

FILES = {"dev": "NQ-open.dev.jsonl", "efficientqa": "NQ-open.efficientqa.dev.1.1.jsonl"}
ROWS = 5_410


def read_nq_open(folder: Path, problems: list[str]) -> tuple[list[Row], dict[str, int]]:
    """Rows (id, prompt, answers, group, kind) for generated labels, and counts {read, repeated, without a word}.

    An accepted answer without a word, such as "*", is dropped: no judge could find it in an answer.
    """
    rows, seen, counts = [], set(), {"read": 0, "left out: repeated": 0, "left out: no answer with a word": 0}
    for kind, name in FILES.items():
        for number, value in json_lines(folder, name, problems):
            question, answers = value.get("question"), value.get("answer")
            if (
                not isinstance(question, str)
                or not question.strip()
                or not isinstance(answers, list)
                or not answers
                or not all(isinstance(answer, str) and answer.strip() for answer in answers)
            ):
                problems.append(f"{name} line {number}: 'question' and a list 'answer' of texts are needed")
                continue
            counts["read"] += 1
            if (group := question_group(question)) in seen:
                counts["left out: repeated"] += 1
                continue
            seen.add(group)
            accepted = [answer.strip() for answer in answers if normalise(answer)]
            if not accepted:
                counts["left out: no answer with a word"] += 1
                continue
            asked = question.strip().rstrip("?").strip()
            rows.append(
                {
                    "id": f"nq-open-{kind}-{number}",
                    "prompt": f"{asked[:1].upper()}{asked[1:]}?{BRIEFLY}",
                    "answers": list(dict.fromkeys(accepted)),
                    "group": group,
                    "kind": kind,
                }
            )
    return rows, counts
