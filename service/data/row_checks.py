"""What one training row must have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from service.data.options import Labels
from service.data.rows import check_id, check_prompt, check_text


def check_row(value: dict[str, Any], labels: Labels) -> Iterator[str]:
    """Problems of one object; ``labels`` says which of ``label`` and ``answers`` it must have."""
    yield from check_id(value)
    yield from check_text(value, "group", required=False)
    yield from check_prompt(value)
    applies = value.get("applies", True)
    if not isinstance(applies, bool):
        yield f"'applies' must be true or false, found {json.dumps(applies)[:60]}"
    elif not applies:
        for key in ("label", "answers"):
            if key in value:
                yield f'has {key!r} and "applies": false: what asks for no fact has no right answer, remove one'
    else:
        yield from _check_label(value) if labels == "given" else _check_answers(value)


def _check_label(value: dict[str, Any]) -> Iterator[str]:
    if "label" not in value:
        cure = " (there are 'answers': generate the labels, --labels generate)" if "answers" in value else ""
        yield f"'label' is missing{cure}"
    elif type(value["label"]) is not int or value["label"] not in (0, 1):
        yield f"'label' must be the number 1 (factual) or 0 (hallucinated), found {json.dumps(value['label'])[:60]}"


def _check_answers(value: dict[str, Any]) -> Iterator[str]:
    answers = value.get("answers")
    if "answers" not in value:
        cure = " (there is a 'label': use the given labels, --labels given)" if "label" in value else ""
        yield f"'answers' is missing{cure}"
    elif not isinstance(answers, list) or not answers:
        yield "'answers' must be a non-empty list of strings"
    elif not all(isinstance(answer, str) and answer.strip() for answer in answers):
        yield "'answers' must hold non-empty strings only"
    elif any("\ud800" <= char <= "\udfff" for answer in answers for char in answer):
        yield "'answers' has half of a surrogate pair (\\ud800 to \\udfff): it is not text"
