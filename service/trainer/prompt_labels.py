"""What the prompts of rows show by themselves: labels that cost no answer and no judge."""

from __future__ import annotations

import numpy as np

from service.data.forms.registry import FORMS
from service.data.judges import contains
from service.data.training_rows import Dataset, Row
from service.fitting.context import PromptLabels
from service.fitting.probes import Index
from service.judging.conversation import has_passage
from service.trainer.by_form import FORM

WITH_PASSAGE = ("passages", "long")  # families of forms


def prompt_labels(dataset: Dataset, index: Index, tokens: Index) -> PromptLabels:
    """What the prompts of these rows, of so many ``tokens``, show: a passage, by the row's form or else its shape, and
    an accepted answer.
    """
    rows = [dataset.rows[row] for row in index.tolist()]
    passage = np.array([_has_passage(row) for row in rows], np.bool_)
    stated = np.array([contains("", "\n".join(row.texts), row.answers) for row in rows], np.bool_)
    return PromptLabels(passage, stated & passage, tokens)


def _has_passage(row: Row) -> bool:
    form = FORMS.get(row.strata.get(FORM, ""))
    return has_passage(row.texts[-1]) if form is None else form.family in WITH_PASSAGE
