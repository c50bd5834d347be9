"""Kinds for rows that name none: clusters of their questions' words.

Rows of one's own traffic rarely say what kind of question they are.  Figures within a kind, and
whether a bundle pays for some kinds, need to know it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from sklearn.feature_extraction.text import TfidfVectorizer

from service.data.near_duplicates import content_of
from service.data.training_rows import Dataset, Row
from service.fitting.solver import one_numpy_thread

LEAST_ROWS = 200
ROWS_EACH, MOST_CLUSTERS = 100, 12  # on average; a kind of 100 rows is judged by itself
MOST_WORDS = 5000  # of all rows, the most frequent
WORDS_IN_NAME = 2
NO_WORDS = "other"  # the name of a cluster without any word


def with_clusters(dataset: Dataset, test: Dataset | None) -> tuple[Dataset, Dataset | None]:
    """Return both with clusters as kinds, which the rows of ``dataset`` make; unchanged where a row
    names its kind, or fewer than ``LEAST_ROWS`` ask for a fact.

    Rows of ``test`` get the nearest cluster."""
    every = [*dataset.rows, *(() if test is None else test.rows)]
    asking = [row for row in dataset.rows if row.applies]
    if len(asking) < LEAST_ROWS or any("kind" in row.strata for row in every):
        return dataset, test
    # A word of one row, or of most of them, tells no kinds apart.
    columns = TfidfVectorizer(
        analyzer=_words, min_df=2, max_df=0.5, max_features=MOST_WORDS, sublinear_tf=True
    )
    try:
        weights = columns.fit_transform(asking)
    except ValueError:  # no word is left
        return dataset, test
    count = min(MOST_CLUSTERS, len(asking) // ROWS_EACH)
    model = KMeans(count, n_init=3, random_state=0)
    with one_numpy_thread():  # the same order of summation for any number of cores
        model.fit(weights)
        names = _names(model.cluster_centers_, columns.get_feature_names_out().tolist())

        def clustered(data: Dataset) -> Dataset:
            nearest = model.predict(columns.transform(data.rows)).tolist()
            rows = [
                replace(row, strata=row.strata | {"kind": names[number]}) if row.applies else row
                for row, number in zip(data.rows, nearest, strict=True)
            ]
            return replace(data, rows=tuple(rows), clustered=True)

        return clustered(dataset), None if test is None else clustered(test)


def _words(row: Row) -> list[str]:
    return sorted(content_of(row.texts[-1])[0])


def _names(centers: NDArray[np.float64], words: Sequence[str]) -> list[str]:
    """Return a name for each cluster, [k], of its strongest words: centers [k, w]."""
    names = list[str]()
    for center in centers:
        strongest = [words[at] for at in np.argsort(-center, kind="stable") if center[at] > 0]
        length = WORDS_IN_NAME
        name = ", ".join(strongest[:length]) or NO_WORDS
        while name in names:
            length += 1
            name = ", ".join(strongest[:length]) if length <= len(strongest) else f"{name} +"
        names.append(name)
    return names
