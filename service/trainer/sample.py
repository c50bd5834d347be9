"""Questions that a bundle carries to show what its risk is worth: drawn before any risk is known, never fitted on."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from service.data.judges import normalise
from service.data.training_rows import Dataset, Row, missing_groups
from service.judging.sample import MOST_TOKENS, Sample, SampleQuestion
from service.trainer.options import Console, TrainOptions

KEPT = 48  # questions
FEWEST = 8  # questions; fewer would show nothing
SHARE = 0.05  # of the training rows that may leave for it
JUDGES = ("contains", "exact")  # what a service compares answers with: no endpoint, no pattern
LONGEST = 400  # characters of a question that a table can show


def draw_sample(
    options: TrainOptions, dataset: Dataset, test: Dataset | None, console: Console
) -> tuple[Dataset, Sample | None]:
    """The rows that are left to train on, and the sample: of the held-out rows, else of rows that leave training.

    Rows leave by groups, kinds in turn, and where every class keeps the groups that the folds need.
    """
    judge = options.judge_name if options.answers == "generate" else "contains"
    if not options.keep_sample or judge not in JUDGES or options.answer_pattern:
        return dataset, None
    source = dataset if test is None else test
    draw = random.Random(options.shuffles[0])
    places = _kinds_in_turn(source, draw)
    if test is None:
        places = _within_share(dataset, places)
    places = places[:KEPT]
    if len(places) < FEWEST:
        return dataset, None
    if test is None:
        left = without(dataset, places)
        if options.answers == "given" and missing_groups(left, options.folds):
            return dataset, None
        console.print(
            f"{len(places)} questions are left out of training and kept in the bundle for `hallutracer try` "
            f"({len(dataset) - len(left)} rows; --no-sample)"
        )
        dataset = left
    rows = [source.rows[place] for place in places]
    length = min(options.answer_tokens, MOST_TOKENS)
    questions = tuple(SampleQuestion(_asked(row), row.answers, row.strata.get("kind", "")) for row in rows)
    return dataset, Sample(source.origin.path.name, judge, options.abstains.pattern, length, questions)


def without(dataset: Dataset, places: Sequence[int]) -> Dataset:
    """The dataset less the groups of these rows."""
    return dataset.part(np.flatnonzero(~np.isin(dataset.groups, dataset.groups[np.asarray(places)])).tolist())


def _kinds_in_turn(source: Dataset, draw: random.Random) -> list[int]:
    """Rows in a drawn order, each of another group: the first of each kind, the second of each, ..."""
    order = [place for place, row in enumerate(source.rows) if _fits(row)]
    draw.shuffle(order)
    seen: set[int] = set()
    by_kind: dict[str, list[int]] = defaultdict(list)
    for place in order:
        if (group := int(source.groups[place])) not in seen:
            seen.add(group)
            by_kind[source.rows[place].strata.get("kind", "")].append(place)
    turns = [(turn, number, place) for number, own in enumerate(by_kind.values()) for turn, place in enumerate(own)]
    return [place for _, _, place in sorted(turns)]


def _within_share(dataset: Dataset, places: Sequence[int]) -> list[int]:
    """Those of ``places``, in turn, whose groups together have at most ``SHARE`` of the rows."""
    sizes = np.bincount(dataset.groups)
    room = int(SHARE * len(dataset))
    found: list[int] = []
    for place in places:
        if sizes[dataset.groups[place]] <= room:
            room -= int(sizes[dataset.groups[place]])
            found.append(place)
    return found


def _fits(row: Row) -> bool:
    """A question by itself, with answers that can be compared."""
    alone = row.prompt is not None or [message["role"] for message in row.messages or ()] == ["user"]
    return (
        row.applies and alone and len(_asked(row)) <= LONGEST and bool(row.answers) and all(map(normalise, row.answers))
    )


def _asked(row: Row) -> str:
    return row.texts[0]
