"""A threshold with a guarantee: new rows -> risks -> fixed-sequence testing -> a new version of the bundle.

The rows must be new to the bundle, and they are spent by being tested: a second question put to the same rows, asked
because of the first one's answer, would carry no promise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle, BundleDraft
from probes_store.durable import atomic_write
from probes_store.guarantee import CLOSED, Guarantee
from probes_store.manifest import DType
from probes_store.store import Store
from service.data.run_folder import locked
from service.data.training_rows import Dataset
from service.engines.base import Engine
from service.errors import NoThreshold, RunMismatch, TrainingError
from service.fitting.nested_cv import rounded
from service.fitting.promise import Profile, Promise, Step, least_groups, profile, risk_control, sequence_of
from service.fitting.promise import calibrate as test_sequence
from service.judging.conversation import shape_of
from service.prompts import as_prompt_format
from service.readout import Site
from service.scoring import Scorer
from service.trainer.ledger import Marks, check_unspent, seen_by, spent_sets
from service.trainer.new_rows import QUESTION, NewRows, draft_of, read_new_rows, risks_of
from service.trainer.options import Console, GuaranteeOptions
from service.trainer.prepare import PreparedData, prepare
from service.trainer.statement import guaranteed_card, statement

PILOT_SHARE = 4  # one of so many groups chooses the thresholds of a bundle that records none


@dataclass(frozen=True, eq=False)
class Plan:
    """What is going to be tested, on rows that were found to be new.  Made without a look at a label."""

    options: GuaranteeOptions  # filled in
    rows: NewRows
    gates: Profile | None  # by training's out-of-fold risks; None: a part of the calibration rows has to do
    done: Bundle | None = None  # the version that this very calibration has published already

    @property
    def bundle(self) -> Bundle:
        """That is calibrated."""
        return self.rows.bundle

    @property
    def site(self) -> Site:
        """Return what the bundle's probes read."""
        return Site(self.bundle.manifest.readout.site)

    @property
    def dataset(self) -> Dataset:
        """The calibration rows."""
        return self.rows.dataset

    @property
    def question(self) -> dict[str, Any]:
        """What is asked of the rows: asked again, it has the same answer."""
        options = self.options
        judge = options.judged_by if options.answers == "generate" else None
        return {
            "alphas": list(options.alphas), "delta": options.delta, "seed": options.seed,
            "labels": options.answers, "judge": judge,
            "max_new_tokens": None if judge is None else options.answer_tokens,
        }  # fmt: skip

    @property
    def shapes(self) -> tuple[str, ...] | None:
        """Of the rows' conversations; None where prompts go through no chat template and have none."""
        if self.bundle.manifest.prompt_format != "chat":
            return None
        asked = [row.messages or [{"role": "user", "content": row.prompt or ""}] for row in self.dataset.rows]
        return tuple(sorted({str(shape_of(messages)) for messages in asked}))

    @property
    def each_delta(self) -> float:
        """Of one alpha: the promises hold together with confidence 1 - delta."""
        return self.options.delta / len(self.options.alphas)

    @property
    def groups(self) -> int:
        """Groups left for the test."""
        total = len(np.unique(self.dataset.groups))
        return total if self.gates is not None else total - total // PILOT_SHARE


def plan(bundle: Bundle, options: GuaranteeOptions, store: Store) -> Plan:
    """Check everything that needs no model.

    Raises DataError, TrainingError (too few groups; the bundle's rows are not known), and what the store raises.
    """
    rows = read_new_rows(bundle, options, store)
    options = cast(GuaranteeOptions, rows.options)
    evaluation, dataset = rows.evaluation, rows.dataset
    gates = evaluation["out_of_fold"].get("gates") if "out_of_fold" in evaluation else None
    made = Plan(options, rows, None if gates is None else Profile(**_tuples(gates)))
    seen = list(seen_by(bundle, evaluation, options.trained_on))
    for what, version, record in spent_sets(store, bundle):
        if record["data"]["digest"] == dataset.digest and record.get("question") == made.question:
            return replace(made, done=version)
        seen.append((f"the rows that the {what} of {version.reference} has spent", Marks.read(record["spent"])))
    check_unspent(dataset, seen)
    least = least_groups(max(options.alphas), made.each_delta)
    if made.groups < least:
        raise TrainingError(
            f"{dataset.path} has {made.groups} groups for the test, and no threshold can pass at alpha = "
            f"{max(options.alphas):g}, delta = {made.each_delta:g} with less than {least} answering ones. Nothing was "
            "spent: add groups",
            param="data",
        )
    return made


def guarantee(
    bundle: Bundle, options: GuaranteeOptions, engine_factory: Callable[[], Engine], store: Store, *, console: Console
) -> Bundle | None:
    """Publish a version of a bundle with a threshold that is guaranteed; None for a dry run, which spends nothing.

    Raises:
        NoThreshold: none qualifies, and ``publish_closed`` is not set.
        DataError: rows are at fault, or not new to the bundle, by line number.
        RunMismatch: the run folder belongs to another run, or its rows were asked something else before.
        TrainingError: see ``plan``.
        probes_store.errors.BundleError: the bundle is not the model's, or the store cannot be written.
    """
    made = plan(bundle, options, store)
    for line in described(made):
        console.print(line)
    if options.dry_run or made.done is not None:
        return made.done
    store.check_writable()
    with locked(made.options.folder), closing(engine_factory()) as engine:
        return carry_out(made, engine, store, console)


def described(made: Plan) -> list[str]:
    """What is going to be tested, in lines."""
    if made.done is not None:
        return [f"{made.done.reference} is this very calibration"]
    lines = [f"{len(made.dataset)} rows in {made.groups} groups for the test, new to {made.bundle.reference}"]
    lines += made.dataset.remarks
    if made.gates is None:
        lines.append(f"one group of {PILOT_SHARE} chooses the thresholds: the bundle records no out-of-fold risks")
    for alpha in made.options.alphas:
        least = least_groups(alpha, made.each_delta)
        text = f"alpha {alpha:g}, delta {made.each_delta:g}: at least {least} answering groups"
        if made.gates is not None:
            found = sequence_of(made.gates, alpha, made.each_delta, made.groups)
            text += f"; {len(found)} thresholds from {found[0]:.4f} to {found[-1]:.4f}"
        lines.append(text)
    return lines


def carry_out(made: Plan, engine: Engine, store: Store, console: Console) -> Bundle:
    """Score, test, publish.  Raises as ``calibrate`` does."""
    Scorer(engine, made.bundle)  # this model's bundle, and it reads what it should
    prompt_format = as_prompt_format(made.bundle.manifest.prompt_format)
    data = prepare(engine, made.dataset, made.options, prompt_format, made.rows.folder, sites=[made.site], folds=None)
    _note_question(made, made.options.folder / made.rows.folder)
    value, label, group = risks_of(made.bundle, data, withhold_outside=True), data.inputs.label, data.inputs.group
    gates, tested = made.gates, np.arange(len(label))
    if gates is None:
        pilot = _pilot(group, made.options.seed)
        gates, tested = profile(label[pilot], value[pilot], group[pilot]), np.flatnonzero(~pilot)
    label, value, group = label[tested], value[tested], group[tested]
    delta, seed = made.each_delta, made.options.seed
    promises = [
        test_sequence(label, value, group, sequence_of(gates, alpha, delta, made.groups), alpha, delta, seed)
        for alpha in made.options.alphas
    ]
    for promise in promises:
        for line in table(promise):
            console.print(line)
    served = next((promise for promise in promises if promise.passed is not None), None)
    if served is None and not made.options.publish_closed:
        raise NoThreshold("\n".join(_missing(promise, len(label)) for promise in promises), param="data")
    guarantee = _guarantee(made, served or promises[0], label, value, group, cast(DType, engine.identity.dtype))
    controls = [_control(label, value, group, promise.alpha) for promise in promises]
    step = None if served is None else served.passed
    bundle = store.publish(_draft(made, guarantee, step, _record(made, data, promises, controls)))
    console.print(f"published {bundle.reference}")
    return bundle


def table(promise: Promise) -> list[str]:
    """The thresholds that were tested, in their order; the last one is the first that failed, if any did."""
    lines = [
        f"alpha {promise.alpha:g}: of the answering groups, counted equally; the answered rows are not promised",
        "threshold  answering groups  hallucinated  answered rows  hallucinated  p",
    ]
    for step in promise.steps:
        verdict = "" if step.p_value <= promise.delta else "  failed"
        rows = f"{step.rows:13}  {step.wrong_rows:12}"
        lines.append(f"{step.threshold:9.4f}  {step.groups:16}  {step.wrong:12}  {rows}  {step.p_value:.2g}{verdict}")
    return lines


def _missing(promise: Promise, rows: int) -> str:
    """Why no threshold qualifies, and what would have done."""
    first = promise.steps[0]
    text = (
        f"no threshold qualifies at alpha = {promise.alpha:g}, delta = {promise.delta:g}. The first, "
        f"{first.threshold:.4f}, had {first.groups} answering groups, {first.wrong} of them hallucinated "
        f"(p = {first.p_value:.2g}). The least alpha that it would have passed at is {promise.least_alpha:.3f}; "
    )
    wanted = promise.groups_wanted
    if wanted < 0:
        text += "no number of rows makes up for its share of hallucinations"
    else:
        more = max(wanted - first.groups, 1)
        about = f", about {more * rows // first.groups} rows like these" if first.groups else ""
        text += f"{more} more answering groups are wanted{about}"
    return (
        f"{text}. Nothing was published. These rows are spent: ask again with new ones, or publish a gate that answers "
        "nothing with --publish-closed"
    )


def _pilot(group: NDArray[np.integer], seed: int) -> NDArray[np.bool_]:
    """Rows of the groups that choose the thresholds: [n]."""
    names = np.random.default_rng([seed, 1]).permutation(np.unique(group))
    return np.isin(group, names[: len(names) // PILOT_SHARE])


def _note_question(made: Plan, folder: Path) -> None:
    """Keep what is asked beside the rows, before it is answered.  Raises RunMismatch: it was something else before."""
    path = folder / QUESTION
    if path.exists() and (before := json.loads(path.read_text(encoding="utf-8"))) != made.question:
        changed = ", ".join(f"{key} = {before.get(key)!r}" for key in before if before[key] != made.question.get(key))
        raise RunMismatch(
            f"the rows of {made.dataset.path} are spent: they were tested before, with {changed}. A question that an "
            "earlier answer led to carries no promise; calibrate on new rows",
            param="data",
        )
    atomic_write(path, (json.dumps(made.question, indent=2, sort_keys=True) + "\n").encode())


def _guarantee(
    made: Plan,
    promise: Promise,
    label: NDArray[np.integer],
    value: NDArray[np.floating],
    group: NDArray[np.integer],
    dtype: DType,
) -> Guarantee:
    """What the manifest records; ``promise`` without a threshold closes the gate."""
    step, question = promise.passed, made.question
    threshold = CLOSED if step is None else step.threshold
    guarantee = Guarantee(
        alpha=promise.alpha,
        delta=promise.delta,
        threshold=threshold,
        groups=0 if step is None else step.groups,
        hallucinated=0 if step is None else step.wrong,
        p_value=1.0 if step is None else step.p_value,
        answered=float((value < threshold).mean()),
        risk_control_threshold=_control(label, value, group, promise.alpha),
        rows=len(label),
        all_groups=len(np.unique(group)),
        data_digest=made.dataset.digest,
        labels=question["labels"],
        judge=question["judge"],
        dtype=dtype,
        seed=made.options.seed,
        statement="",
    )
    manifest = replace(made.bundle.manifest, guarantee_shapes=made.shapes)
    text = statement(guarantee, manifest, made.options.answer_tokens, step)
    return replace(guarantee, statement=text)


def _control(
    label: NDArray[np.integer], value: NDArray[np.floating], group: NDArray[np.integer], alpha: float
) -> float | None:
    """The threshold of ``risk_control``, rounded down to what the statement prints: any lower one keeps it too."""
    found = risk_control(label, value, group, alpha)
    return None if found is None else math.floor(found * 1e6) / 1e6


def _record(
    made: Plan, data: PreparedData, promises: Sequence[Promise], controls: Sequence[float | None]
) -> dict[str, Any]:
    """The ledger's entry in evaluation.json."""
    return {
        "data": {"file": made.dataset.path.name, "digest": made.dataset.digest} | data.counts,
        "question": made.question,
        "thresholds_from": "training's out-of-fold risks" if made.gates else f"one group of {PILOT_SHARE}",
        "promises": [
            {
                "alpha": promise.alpha,
                "delta": promise.delta,
                "threshold": promise.threshold,
                "least_alpha": rounded(promise.least_alpha),
                "risk_control_threshold": control,
                "steps": rounded([asdict(step) for step in promise.steps]),
            }
            for promise, control in zip(promises, controls, strict=True)
        ],
        "spent": Marks.of(made.dataset).document(),
    }


def _draft(made: Plan, guarantee: Guarantee, step: Step | None, record: dict[str, Any]) -> BundleDraft:
    """The bundle as it was, with another threshold, its guarantee and a longer ledger."""
    bundle = made.bundle
    manifest = replace(
        bundle.manifest,
        name=made.options.new_name or bundle.manifest.name,
        threshold=guarantee.threshold,
        guarantee=guarantee,
        guarantee_shapes=made.shapes,
    )
    evaluation = bundle.evaluation()
    evaluation["calibrations"] = [*evaluation.get("calibrations", []), record]
    return draft_of(bundle, manifest, evaluation, guaranteed_card(bundle.card(), manifest, step))


def _tuples(document: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in document.items()}
