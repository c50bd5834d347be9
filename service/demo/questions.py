"""Questions for the demonstration model, by split."""

from __future__ import annotations

import random
from typing import Any

from service.demo.forms import FORMS, SHARED, ask
from service.demo.world import Fact, build_world, uniform

# Questions per fact: a city's country is the showcase; small kinds are asked in several forms.
FORMS_ASKED = {"city_country": 1.0, "city_continent": 0.2, "city_region": 0.4, "country_continent": 1.0}
FORMS_ASKED_OTHERWISE = 2.0


def _asked(fact: Fact) -> int:
    mean = FORMS_ASKED.get(fact.kind, FORMS_ASKED_OTHERWISE)
    return int(mean + uniform("asked", fact.key))


def questions(split: str) -> list[dict[str, Any]]:
    """Rows of one split ("train", "dev", "test"), always the same ones in the same order.

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
        # Natural forms twice: half of the questions are what a user would type.
        forms = [f for f in FORMS[fact.kind] for _ in range(1 if f.name in SHARED else 2)]
        rng.shuffle(forms)
        for form in list(dict.fromkeys(forms))[: _asked(fact)]:
            rows.append(
                {
                    "id": f"{fact.key}:{form.name}",
                    "prompt": ask(form, fact.kind, fact.subject),
                    "answers": list(fact.answers),
                    "group": fact.group,
                    "kind": fact.kind,
                    "exposures": fact.exposures,
                    "template": form.name,
                    "in_refusals": fact.in_refusals,
                }
            )
    return rows
