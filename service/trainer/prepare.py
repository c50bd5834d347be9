"""From a data file to readouts and labels: what training and calibrating begin with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.data.collection import Collection, collect
from service.data.labels import Labelled, given_labels, judged_labels, sampled_labels
from service.data.sampled_answers import SampleOptions, sample_answers
from service.data.training_rows import Dataset, class_problems
from service.engines.base import Engine
from service.errors import TrainingError
from service.fitting.fit import Floats, Index, Readouts
from service.fitting.nested_cv import Inputs
from service.prompts import PromptFormat
from service.readout import Probes, Site
from service.risk import truth_logits
from service.trainer.options import NewRowsOptions, TrainOptions
from service.trainer.prompt_labels import prompt_labels


@dataclass(frozen=True, eq=False)
class PreparedData:
    """One data file, collected and labelled; ``inputs`` has the labelled rows."""

    dataset: Dataset
    collection: Collection
    labelled: Labelled
    inputs: Inputs

    @property
    def others(self) -> Index:
        """Positions in the data file, as those of ``labelled.index``, of rows that do not apply."""
        return self.dataset.others

    def readouts_of(self, index: Index, label: Index) -> Readouts:
        """Readouts at any positions in the data file, with the caller's labels [n], such as whether the rows apply.

        The groups are ``dataset.groups[index]``.
        """
        return Readouts(self.inputs.readouts.file, index, label)

    @property
    def counts(self) -> dict[str, int]:
        """Rows by class, as the manifest and the evaluation name them; ``rows`` are those that apply."""
        label = self.labelled.label
        return {
            "rows": len(self.dataset.asking),
            "others": len(self.others),
            "factual": int(label.sum()),
            "hallucinated": int(len(label) - label.sum()),
            "left_out": sum(self.labelled.left_out.values()),
            "groups": len(np.unique(self.inputs.group)),
        }


def prepare(
    engine: Engine,
    dataset: Dataset,
    options: TrainOptions | NewRowsOptions,
    prompt_format: PromptFormat,
    name: str,
    *,
    sites: Sequence[Site],
    folds: int | None,
    sampled: SampleOptions | None = None,
) -> PreparedData:
    """Run one file through the engine, into the folder ``name`` of the run, where it resumes, and label it.

    sites: what is collected, the site that the probes read first; sampled: soft labels from sampled answers, too;
    folds: how many groups each class must have once the answers are judged; None: any number, also none.
    Raises what ``collect`` and ``judged_labels`` raise, and TrainingError for a class with too few groups.
    """
    folder = options.folder / name
    collection = collect(
        engine,
        dataset,
        folder,
        sites=sites,
        prompt_format=prompt_format,
        batch_rows=options.batch_rows,
        max_new_tokens=options.answer_tokens if options.answers == "generate" else None,
    )
    if options.answers == "given":
        labelled = given_labels(dataset)
    else:
        if sampled is None:
            labelled = judged_labels(dataset, folder, options)
        else:
            sample_answers(engine, dataset, collection.prompts, folder, sampled, options.answer_tokens)
            labelled = sampled_labels(dataset, folder, options, sampled)
        groups = dataset.groups[labelled.index]
        problems = [] if folds is None else class_problems(labelled.label, groups, folds)
        if problems:
            raise TrainingError(f"{dataset.path}, labelled by its answers: {'; '.join(problems)}", param="labels")
    index = labelled.index
    tokens = collection.prompts.lengths[index]
    inputs = Inputs(
        readouts=Readouts(collection.rows[sites[0]], index, labelled.label, labelled.share),
        group=dataset.groups[index],
        first_token=collection.first_token[index],
        prompt_tokens=tokens,
        strata=tuple(dataset.rows[row].strata for row in index.tolist()),
        prompts=prompt_labels(dataset, index, tokens),
    )
    return PreparedData(dataset, collection, labelled, inputs)


def trajectories(readouts: Readouts, probes: Sequence[Probes]) -> Floats:
    """Scaled logits of collected rows as a server computes them: [n, probes m], one probe's behind the other's."""
    columns = []
    for probe in probes:
        for layer, head in enumerate(probe.head.tolist()):
            a = readouts.file.head(layer, head)[readouts.index]
            own = slice(layer, layer + 1)
            columns.append(truth_logits(a[:, None], probe.direction[own], probe.bias[own], probe.scale[own]))
    return np.concatenate(columns, axis=1)
