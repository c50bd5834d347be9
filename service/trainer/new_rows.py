"""Reads and scores rows that a published bundle has never seen, and makes the draft of its next
version.

A guarantee needs rows that were used for nothing else.  So evaluation.json keeps marks of all rows
that a bundle was fitted and tested on, and of the rows that guarantees and recalibrations have
spent.  Marks are digests of the prompts, of their content words and of the groups' names; they hold
no text.  A mark has 64 bits: the probability that two of a million rows share one by chance is
3e-8."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle, BundleDraft
from probes_store.manifest import PROBES, Manifest
from probes_store.records import GREEDY, OUTSIDE
from probes_store.store import Store
from probes_store.tensors import Golden
from service.data.labels import Labelled, check_answers
from service.data.near_duplicates import content_of
from service.data.rows import MARK_DIGITS, Message, prompt_mark
from service.data.training_rows import Dataset, Row, check_all_apply, read_dataset
from service.engines.base import Engine, prompt_context
from service.errors import DataError, TrainingError
from service.judging.guarantee import UNKNOWN, Standing, shape_around, shape_of, unlike_training
from service.judging.scripts import recorded_scripts
from service.judging.uncertainty import distance
from service.prompts import as_prompt_format
from service.readout import Probes, Site
from service.risk import depth_mean, risk, served_risk
from service.trainer.options import NewRowsOptions, other_decoding
from service.trainer.prepare import PreparedData, prepare, served_signals, trajectories, was_read

Options = TypeVar("Options", bound=NewRowsOptions)


@dataclass(frozen=True)
class Marks:
    """Digests of the prompts and of the named groups of some rows."""

    prompts: frozenset[str]  # of the prompts and of their content words
    groups: frozenset[str]

    @classmethod
    def of(cls, dataset: Dataset) -> Marks:
        """Return the marks of all rows, also of left-out rows and of the rows that rows in forms
        come from."""
        groups = {group_mark(row.group) for row in dataset.origin.rows if row.group}
        rows = [*dataset.origin.rows, *(dataset.rows if dataset.made_of else ())]
        prompts = {prompt_mark(row.prompt_digest) for row in rows} | {
            words_mark(row) for row in rows
        }
        return cls(frozenset(prompts), frozenset(groups))

    @classmethod
    def read(cls, document: Mapping[str, str]) -> Marks:
        """Parse what ``document`` returns."""
        return cls(frozenset(document["prompts"].split()), frozenset(document["groups"].split()))

    def document(self) -> dict[str, str]:
        """Return the part of evaluation.json: two texts, since a list takes a line for each
        mark."""
        return {"prompts": " ".join(sorted(self.prompts)), "groups": " ".join(sorted(self.groups))}


def group_mark(name: str) -> str:
    """Return the mark of a group's name."""
    return hashlib.blake2b(name.encode(), digest_size=MARK_DIGITS // 2).hexdigest()


def words_mark(row: Row) -> str:
    """Return the mark of a row's content words, which does not depend on case, order and
    punctuation."""
    words, digits = content_of("\n".join(row.texts))
    return group_mark(json.dumps([sorted(words), digits]))


def seen_by(
    bundle: Bundle,
    evaluation: Mapping[str, Any],
    trained_on: Sequence[str],
    columns: Mapping[str, str],
) -> Iterator[tuple[str, Marks]]:
    """Yield name and marks of each set of rows that a bundle was fitted and tested on.

    A bundle of an older trainer records only the digests of its files, so ``trained_on`` must name
    them. Raises TrainingError that names the missing file, and DataError."""
    recorded = evaluation.get("rows_seen", {})
    for what, marks in recorded.items():
        yield f"the {what} rows of {bundle.manifest.name}", Marks.read(marks)
    labels = bundle.manifest.training.labels
    files = [read_dataset(Path(path), labels, folds=None, columns=columns) for path in trained_on]
    yield from ((str(dataset.path), Marks.of(dataset)) for dataset in files)
    held_out = (evaluation.get("held_out") or {}).get("digest")
    for what, digest in (
        ("training", bundle.manifest.training.data_digest),
        ("held-out", held_out),
    ):
        if (
            not recorded
            and digest is not None
            and digest not in {dataset.digest for dataset in files}
        ):
            raise TrainingError(
                f"{bundle.reference} does not record which rows it has seen: name its {what} file "
                f"({digest}) with --trained-on",
                param="trained_on",
            )


def spent_sets(store: Store, bundle: Bundle) -> list[tuple[str, Bundle, dict[str, Any]]]:
    """Return every guarantee and recalibration of these probes: its kind, the first version with
    it, its record."""
    probes = bundle.manifest.files[PROBES].sha256
    sets: dict[tuple[str, str], tuple[str, Bundle, dict[str, Any]]] = {}
    for summary in store.list():
        if summary.manifest is not None and summary.manifest.files[PROBES].sha256 == probes:
            version = store.load(summary.reference)
            for what in ("calibration", "recalibration"):
                for record in version.evaluation().get(f"{what}s", []):
                    sets.setdefault((what, record["data"]["digest"]), (what, version, record))
    return list(sets.values())


def check_unspent(dataset: Dataset, seen: Sequence[tuple[str, Marks]]) -> None:
    """Raise DataError that lists every row whose prompt or group was seen before."""
    problems = []
    for row in dataset.rows:
        for what, marks in seen:
            if prompt_mark(row.prompt_digest) in marks.prompts:
                problem = f"its prompt is among {what}"
            elif row.group and group_mark(row.group) in marks.groups:
                problem = f"its group is among {what}"
            elif not row.group and words_mark(row) in marks.prompts:
                problem = f"it asks in other words what is among {what}"
            else:
                continue
            problems.append(f"line {row.line}: {problem}")
            break
    if problems:
        raise DataError(str(dataset.path), problems)


@dataclass(frozen=True, eq=False)
class NewRows(Generic[Options]):
    """A bundle and a file of rows for it, which may not be new to it: ``check_unspent`` checks
    that."""

    bundle: Bundle
    evaluation: dict[str, Any]
    dataset: Dataset
    options: Options  # completed from the bundle's record

    @property
    def folder(self) -> str:
        """Return the rows' folder in the run.  Guarantee and recalibration share it, so each sees
        the other's use."""
        return f"calibration-{self.dataset.digest.removeprefix('sha256:')[:12]}"

    @property
    def question(self) -> Path:
        """Return the file that records for what these rows were used, written when a label is
        read."""
        return self.options.folder / self.folder / "question.json"

    @property
    def judge(self) -> str | None:
        """Return the record of the judge of generated labels."""
        return self.options.judged_by if self.options.answers == "generate" else None

    def prepare(
        self, engine: Engine, *, folds: int | None, name: str = "", answers: bool = False
    ) -> PreparedData:
        """Return the labelled rows, collected in the folder ``name`` of the run; with ``answers``
        also their answers' tokens."""
        return self._prepared(engine, self.dataset, name or self.folder, folds, answers=answers)

    def scored(self, engine: Engine) -> PreparedData:
        """Return every row without an answer and a label, for its risk alone."""
        return self._prepared(engine, self.dataset, f"{self.folder}/scored", None, labelled=False)

    def labels_of(self, engine: Engine, index: NDArray[np.int64]) -> Labelled:
        """Return the labels of these rows alone; if labels are generated, the model answers only
        these rows.

        Raises DataError if one of them has no label, and what ``judged_labels`` raises."""
        if self.options.answers == "given":
            check_labelled(self.dataset, index)
            label = np.array([self.dataset.rows[row].label for row in index.tolist()], np.int64)
            return Labelled(index, label, {})
        if not len(index):
            return Labelled(index, index, {})
        part = self.dataset.part(index.tolist())
        name = f"{self.folder}/answered-{part.digest.removeprefix('sha256:')[:12]}"
        labelled = self._prepared(engine, part, name, None).labelled
        return replace(labelled, index=index[labelled.index])

    def _prepared(
        self,
        engine: Engine,
        dataset: Dataset,
        name: str,
        folds: int | None,
        *,
        answers: bool = False,
        labelled: bool = True,
    ) -> PreparedData:
        manifest = self.bundle.manifest
        return prepare(
            engine,
            dataset,
            self.options,
            as_prompt_format(manifest.prompt_format),
            name,
            sites=[Site(manifest.readout.site)],
            folds=folds,
            answer_probes=answers,
            labelled=labelled,
        )


def check_labelled(dataset: Dataset, index: NDArray[np.int64]) -> None:
    """Raise DataError that names each of these rows without a label."""
    missing = [dataset.rows[row] for row in index.tolist() if dataset.rows[row].label is None]
    cure = (
        "give it one (--dry-run lists all that need one), or generate the labels (--labels"
        " generate)"
    )
    if missing:
        raise DataError(
            str(dataset.path), [f"line {row.line}: 'label' is missing: {cure}" for row in missing]
        )


def read_new_rows(
    bundle: Bundle,
    options: Options,
    store: Store,
    *,
    folds: int | None = None,
    all_labelled: bool = True,
) -> NewRows[Options]:
    """Read new rows and check everything that needs no model; ``folds`` and ``all_labelled`` as in
    ``read_dataset``.

    Raises DataError, TrainingError, and what the store raises."""
    options.check()
    options = options.of(bundle.manifest.name, bundle.manifest.training)
    if options.new_name == bundle.manifest.name and not store.is_own(bundle.path):
        raise TrainingError(
            f"{bundle.reference} is not in {store.where}, and a version there would hide it:"
            " publish under another name (--new-name)",
            param="name",
        )
    dataset = read_dataset(
        options.file, options.answers, folds=folds, columns=options.names, all_labelled=all_labelled
    )
    check_all_apply(dataset)
    if options.answers == "generate":
        check_answers(dataset, options)
    served = bundle.manifest.decoding or GREEDY  # for a request that names no temperature
    if differing := other_decoding(dataset.decodings, served):
        raise TrainingError(
            f"rows of {dataset.path} have answers that were {differing}, and under"
            f" {bundle.reference} answers are {served} where a request names no temperature: label"
            " answers that were decoded so",
            param="data",
        )
    return NewRows(bundle, bundle.evaluation(), dataset, options)


def risks_of(bundle: Bundle, data: PreparedData, *, as_gated: bool = False) -> NDArray[np.float64]:
    """Return the bundle's risk of each labelled row as a service computes it: [n].

    ``as_gated`` replaces the risk by 1 where a gate withholds a row that is unlike training, and by
    0 where it lets a row through that asks for no fact (``Scorer.judge``)."""
    manifest, inputs = bundle.manifest, data.inputs
    logits = trajectories(
        inputs.readouts, Probes.all_of(Site(manifest.readout.site), bundle.probes)
    )
    layers, context = manifest.model.num_layers, manifest.context
    signals = served_signals(
        logits, inputs.first_token, inputs.prompt_tokens, manifest.signals, manifest.context, layers
    )
    risks = served_risk(signals, manifest)
    if not as_gated:
        return risks
    standings = [
        standing_of(data.dataset.rows[row], manifest.prompt_format)
        for row in data.labelled.index.tolist()
    ]
    if context is not None and context.applicability is not None:
        means = depth_mean(logits.reshape(len(logits), -1, layers))[:, 1:]
        pairs = zip(means.tolist(), inputs.prompt_tokens.tolist(), strict=True)
        asks = np.array([prompt_context(context, *pair).asks for pair in pairs], np.float64)
        risks = np.where(
            asks < [standing.no_fact_below(manifest) for standing in standings], 0.0, risks
        )
    outside = np.array(
        [unlike_training(manifest, standing) is not None for standing in standings], np.bool_
    )
    if manifest.tells_outside:
        outside |= (
            distance(logits, bundle.probes.reference_mean, bundle.probes.reference_whitening)
            >= OUTSIDE
        )
    return np.where(outside, 1.0, risks)


def standing_of(row: Row, prompt_format: str) -> Standing:
    """Return what a service knows about a row's prompt besides its token ids."""
    messages = messages_of(row, prompt_format)
    return UNKNOWN if messages is None else Standing(shape_of(messages))


def shapes_of(rows: Sequence[Row], prompt_format: str) -> tuple[str, ...] | None:
    """Return the shapes of the rows' conversations for the bundle's record; None if no row has
    one."""
    conversations = [messages_of(row, prompt_format) for row in rows]
    shapes = {shape_around(messages).around for messages in conversations if messages is not None}
    return tuple(sorted(shapes)) or None


def scripts_of_rows(rows: Sequence[Row], prompt_format: str) -> tuple[str, ...] | None:
    """Return the scripts of the rows' last questions for the bundle's record; None if no row has
    one."""
    conversations = filter(None, (messages_of(row, prompt_format) for row in rows))
    return recorded_scripts(shape_around(messages).scripts for messages in conversations)


def messages_of(row: Row, prompt_format: str) -> Sequence[Message] | None:
    """Return a row's conversation; None if its prompt uses no chat template."""
    if row.messages is None and prompt_format != "chat":
        return None
    return row.messages or [{"role": "user", "content": row.prompt or ""}]


def answers_withheld(bundle: Bundle, data: PreparedData) -> NDArray[np.bool_]:
    """Return whether a policy with recheck withholds each labelled row's answer, [n]: its tokens
    flag it, or none was read.  Raises TrainingError if no answer was read at all."""
    record, stored = bundle.manifest.answer, bundle.answer
    assert record is not None
    assert stored is not None
    read = data.answers
    if read is None:
        raise TrainingError(
            "no answer of these rows was read: have them generated, or name each as 'answer' beside"
            " its label (transformers engine)",
            param="recheck",
        )
    means = depth_mean(trajectories(read, [Probes.of(Site(bundle.manifest.readout.site), stored)]))
    risks = risk(means[:, None], np.array([record.weight]), record.intercept)
    return ~was_read(read) | (risks >= record.threshold)


def draft_of(
    bundle: Bundle,
    manifest: Manifest,
    evaluation: dict[str, Any],
    card: str,
    *,
    golden: Golden | None = None,
    plots: Mapping[str, bytes] = MappingProxyType({}),
) -> BundleDraft:
    """Return a draft with the bundle's probes and plots, and another manifest, evaluation and card.

    ``plots`` adds further plots."""
    files = [name for name in bundle.manifest.files if "/" in name]
    stored_plots = {
        name.removeprefix("plots/"): (bundle.path / name).read_bytes() for name in files
    }
    return BundleDraft(
        manifest,
        bundle.probes,
        golden or bundle.golden,
        evaluation,
        card,
        stored_plots | dict(plots),
        answer=bundle.answer,
    )
