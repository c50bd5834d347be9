"""Questions for the demonstration model, by split."""

from __future__ import annotations

import random
from typing import Any

from service.demo.forms import FORMS, SHARED, question_text
from service.demo.passages import sentence
from service.demo.world import Fact, build_world, uniform

# Mean number of questions per fact; rare kinds are asked in several forms.
QUESTIONS_PER_FACT = {"city_country": 1.0, "city_continent": 0.2, "city_region": 0.4, "country_continent": 1.0}
QUESTIONS_PER_OTHER_FACT = 2.0


def _count(fact: Fact) -> int:
    mean = QUESTIONS_PER_FACT.get(fact.kind, QUESTIONS_PER_OTHER_FACT)
    return int(mean + uniform("asked", fact.key))


def questions(split: str) -> list[dict[str, Any]]:
    """Rows of one split ("train", "dev", "test"), deterministic.

    `prompt` is the user's turn. About a tenth of the rows are in forms no training document uses. `exposures` counts
    the training documents that state the fact; it is the same for every training seed.
    """
    if split not in ("train", "dev", "test"):
        raise ValueError(f"no split {split!r}: train, dev or test")
    rows: list[dict[str, Any]] = []
    for fact in build_world().facts:
        if fact.split != split:
            continue
        rng = random.Random(f"questions {fact.key}")
        # Natural forms count twice: about half of the questions are phrased as users would.
        forms = [f for f in FORMS[fact.kind] for _ in range(1 if f.name in SHARED else 2)]
        rng.shuffle(forms)
        for form in list(dict.fromkeys(forms))[: _count(fact)]:
            rows.append(
                {
                    "id": f"{fact.key}:{form.name}",
                    "prompt": question_text(form, fact.kind, fact.subject),
                    "answers": list(fact.answers),
                    "group": fact.group,
                    "kind": fact.kind,
                    "exposures": fact.exposures,
                    "template": form.name,
                    "in_refusals": fact.in_refusals,
                    "statement": sentence(fact, fact.answers[0]),
                }
            )
    return rows
