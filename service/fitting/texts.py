"""A logistic regression on what prompts say: the rival that reads words and no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from service.fitting.probes import Floats, Index


class NoWords(ValueError):
    """No training text has a word."""


def text_logits(
    columns: Any,
    texts: Sequence[Any],
    target: NDArray[np.int64],
    train: Index,
    test: Index,
    *,
    c_grid: Sequence[float] = (1.0,),
) -> list[Floats]:
    """Return the log odds [n_test] of ``target`` being 1, for each C.

    ``columns``: a vectorizer of scikit-learn, which is fitted on the training side's ``texts`` [n].
    Raises NoWords."""
    rows = np.empty(len(texts), dtype=object)
    rows[:] = texts
    try:
        fitted = columns.fit_transform(rows[train])
    except ValueError as error:
        raise NoWords(str(error)) from error
    scored = columns.transform(rows[test])
    logits = []
    for c in c_grid:
        model = LogisticRegression(C=c, solver="liblinear", max_iter=1000)
        model.fit(fitted, target[train])
        logits.append(np.asarray(model.decision_function(scored), np.float64))
    return logits
