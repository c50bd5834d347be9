"""A threshold with a guarantee: new rows -> risks -> fixed-sequence testing -> a new version of the bundle."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np

from probes_store.bundle import Bundle
from probes_store.local import atomic_write
from probes_store.records import CLOSED, DType, Guarantee
from probes_store.store import Store
from service.data.run_folder import locked
from service.engines.base import Engine
from service.errors import NoThreshold, RunMismatch, TrainingError
from service.fitting import thresholds
from service.fitting.nested_cv import rounded
from service.fitting.thresholds import GateProfile, GuaranteeTest, least_groups, threshold_sequence
from service.scoring import Scorer
from service.trainer import new_rows
from service.trainer.cards import card_of, guaranteed_card, statement
from service.trainer.new_rows import Marks, NewRows
from service.trainer.options import Console, GuaranteeOptions

PILOT_SHARE = 4  # one of so many groups chooses the thresholds of a bundle that records none


@dataclass(frozen=True, eq=False)
class GuaranteePlan:
    """What is going to be tested, on rows that were found to be new.  Made without a look at a label."""

    rows: NewRows[GuaranteeOptions]
    gates: GateProfile | None  # by training's out-of-fold risks; None: a part of the rows has to do
    done: Bundle | None = None  # the version that this very guarantee has published already

    @property
    def question(self) -> dict[str, Any]:
        """Return what is asked of the rows: asked again, it has the same answer."""
        options, judge = self.rows.options, self.rows.judge
        return {
            "alphas": list(options.alphas), "delta": options.delta, "seed": options.seed,
            "labels": options.answers, "judge": judge,
            "max_new_tokens": None if judge is None else options.answer_tokens,
        } | ({"recheck": True} if options.recheck else {})  # fmt: skip

    @property
    def shapes(self) -> tuple[str, ...] | None:
        """Return the shapes of the rows' conversations; None where prompts go through no chat template."""
        if self.rows.bundle.manifest.prompt_format != "chat":
            return None
        standings = (new_rows.standing_of(row, "chat") for row in self.rows.dataset.rows)
        # No gate answers where no bundle is trained, whatever the calibration had.
        named = [(standing.untrained, str(standing.shape)) for standing in standings]
        trained = {name for untrained, name in named if not untrained}
        return tuple(sorted(trained or {name for _, name in named}))

    @property
    def each_delta(self) -> float:
        """Return the delta of one alpha: the guarantees hold together with confidence 1 - delta."""
        return self.rows.options.delta / len(self.rows.options.alphas)

    @property
    def groups(self) -> int:
        """Return how many groups are left for the test."""
        total = len(np.unique(self.rows.dataset.groups))
        return total if self.gates is not None else total - total // PILOT_SHARE

    def described(self) -> list[str]:
        """Return what is going to be tested, in lines."""
        if self.done is not None:
            return [f"{self.done.reference} is this very guarantee"]
        rows = f"{len(self.rows.dataset)} rows in {self.groups} groups for the test"
        lines = [f"{rows}, new to {self.rows.bundle.reference}", *self.rows.dataset.remarks]
        if self.gates is None:
            why = (
                "they depend on the answers" if self.rows.options.recheck else "the bundle records no out-of-fold risks"
            )
            lines.append(f"one group of {PILOT_SHARE} chooses the thresholds: {why}")
        for alpha in self.rows.options.alphas:
            least = least_groups(alpha, self.each_delta)
            text = f"alpha {alpha:g}, delta {self.each_delta:g}: at least {least} answering groups"
            if self.gates is not None:
                found = threshold_sequence(self.gates, alpha, self.each_delta, self.groups)
                text += f"; {len(found)} thresholds from {found[0]:.4f} to {found[-1]:.4f}"
            lines.append(text)
        return lines


def plan(bundle: Bundle, options: GuaranteeOptions, store: Store) -> GuaranteePlan:
    """Check everything that needs no model.

    Raises DataError, TrainingError (too few groups; the bundle's rows are not known), and what the store raises."""
    rows = new_rows.read_new_rows(bundle, options, store)
    evaluation, dataset = rows.evaluation, rows.dataset
    if options.recheck and bundle.manifest.answer is None:
        raise TrainingError(f"{bundle.reference} has no probes of answers: train it on answers, or leave --recheck out",
                            param="recheck")  # fmt: skip
    # Training's out-of-fold risks do not say which answers their own tokens flag.
    gates: dict[str, Any] | None = None if options.recheck else evaluation.get("out_of_fold", {}).get("gates")
    lists: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in (gates or {}).items()
    }
    made = GuaranteePlan(rows, None if gates is None else GateProfile(**lists))
    seen = list(new_rows.seen_by(bundle, evaluation, options.trained_on, options.names))
    for what, version, record in new_rows.spent_sets(store, bundle):
        if record["data"]["digest"] == dataset.digest and record.get("question") == made.question:
            return replace(made, done=version)
        seen.append((f"the rows that the {what} of {version.reference} has spent", Marks.read(record["spent"])))
    new_rows.check_unspent(dataset, seen)
    least = least_groups(max(options.alphas), made.each_delta)
    if made.groups < least:
        raise TrainingError(f"{dataset.path} has {made.groups} groups for the test, and no threshold can pass at alpha "
                            f"= {max(options.alphas):g}, delta = {made.each_delta:g} with less than {least} answering "
                            "ones: add groups (nothing was spent)", param="data")  # fmt: skip
    return made


def guarantee(
    bundle: Bundle, options: GuaranteeOptions, engine_factory: Callable[[], Engine], store: Store, *, console: Console
) -> Bundle | None:
    """Publish a version of a bundle with a threshold that is guaranteed; None for a dry run, which spends nothing.

    Raises NoThreshold unless ``publish_closed``, DataError, RunMismatch where rows were asked something else before,
    TrainingError (see ``plan``), and BundleError for another model's bundle or a store that cannot be written."""
    made = plan(bundle, options, store)
    for line in made.described():
        console.print(line)
    if options.dry_run or made.done is not None:
        return made.done
    store.check_writable()
    with locked(made.rows.options.folder), closing(engine_factory()) as engine:
        return carry_out(made, engine, store, console)


def carry_out(made: GuaranteePlan, engine: Engine, store: Store, console: Console) -> Bundle:
    """Score, test, publish.  Raises as ``guarantee`` does."""
    rows, options, bundle = made.rows, made.rows.options, made.rows.bundle
    Scorer(engine, bundle)  # this model's bundle, and it reads what it should
    data = rows.prepare(engine, folds=None, answers=options.recheck)
    withheld = new_rows.answers_withheld(bundle, data) if options.recheck else np.zeros(len(data.inputs.label), bool)
    _note_question(made)
    value = np.where(withheld, 1.0, new_rows.risks_of(bundle, data, as_gated=True))
    label, group = data.inputs.label, data.inputs.group
    gates, tested = made.gates, np.arange(len(label))
    if gates is None:
        names = np.random.default_rng([options.seed, 1]).permutation(np.unique(group))
        pilot = np.isin(group, names[: len(names) // PILOT_SHARE])
        gates, tested = thresholds.gate_profile(label[pilot], value[pilot], group[pilot]), np.flatnonzero(~pilot)
    label, value, group = label[tested], value[tested], group[tested]
    delta, seed = made.each_delta, options.seed
    tests = []
    for alpha in options.alphas:
        sequence = threshold_sequence(gates, alpha, delta, made.groups)
        tests.append(thresholds.certify(label, value, group, sequence, alpha, delta, seed))
    for line in (line for test in tests for line in table(test)):
        console.print(line)
    served = next((test for test in tests if test.passed is not None), None)
    if served is None and not options.publish_closed:
        raise NoThreshold("\n".join(_missing(test, len(label)) for test in tests), param="data")
    least = [thresholds.risk_control(label, value, group, alpha) for alpha in options.alphas]
    # Rounded down to what the statement prints: any lower threshold keeps it.
    controls = [None if found is None else math.floor(found * 1e6) / 1e6 for found in least]

    # The bundle as it was, with another threshold, its guarantee and a longer ledger.
    shown = served or tests[0]
    step = shown.passed
    threshold = CLOSED if step is None else step.threshold
    record = Guarantee(
        alpha=shown.alpha, delta=shown.delta, threshold=threshold, groups=0 if step is None else step.groups,
        hallucinated=0 if step is None else step.wrong, p_value=1.0 if step is None else step.p_value,
        answered=float((value < threshold).mean()), risk_control_threshold=controls[tests.index(shown)],
        rows=len(label), all_groups=len(np.unique(group)), data_digest=rows.dataset.digest, labels=options.answers,
        judge=rows.judge, dtype=cast(DType, engine.identity.dtype), seed=seed, statement="",
    )  # fmt: skip
    manifest = replace(bundle.manifest, guarantee_shapes=made.shapes,
                       guarantee_reads_answers=True if options.recheck else None)  # fmt: skip
    record = replace(record, statement=statement(record, manifest, options.answer_tokens, step))
    name = options.new_name or bundle.manifest.name
    manifest = replace(manifest, name=name, threshold=record.threshold, guarantee=record)
    evaluation = bundle.evaluation()
    ledger = {
        "data": {"file": rows.dataset.path.name, "digest": rows.dataset.digest} | data.counts,
        "question": made.question,
        "thresholds_from": "training's out-of-fold risks" if made.gates else f"one group of {PILOT_SHARE}",
        "promises": [
            {"alpha": test.alpha, "delta": test.delta, "threshold": test.threshold,
             "least_alpha": rounded(test.least_alpha), "risk_control_threshold": control,
             "steps": rounded([asdict(step) for step in test.steps])}
            for test, control in zip(tests, controls, strict=True)
        ],
        "spent": Marks.of(rows.dataset).document(),
    }  # fmt: skip
    evaluation["calibrations"] = [*evaluation.get("calibrations", []), ledger]
    card = guaranteed_card(card_of(bundle), manifest, step)
    published = store.publish(new_rows.draft_of(bundle, manifest, evaluation, card))
    console.print(f"published {published.reference}")
    return published


def table(test: GuaranteeTest) -> list[str]:
    """Return the thresholds that were tested, in their order; the last one is the first that failed, if any did."""
    head = f"alpha {test.alpha:g}: of the answering groups, counted equally; the answered rows have no guarantee"
    return [head, "threshold  answering groups  hallucinated  answered rows  hallucinated  p"] + [
        f"{step.threshold:9.4f}  {step.groups:16}  {step.wrong:12}  {step.rows:13}  {step.wrong_rows:12}  "
        f"{step.p_value:.2g}{'' if step.p_value <= test.delta else '  failed'}"
        for step in test.steps
    ]


def _missing(test: GuaranteeTest, rows: int) -> str:
    first, wanted = test.steps[0], test.groups_wanted
    more = max(wanted - first.groups, 1)
    about = f", about {more * rows // first.groups} rows like these" if first.groups else ""
    cure = f"{more} more answering groups are wanted{about}"
    if wanted < 0:
        cure = "no number of rows makes up for its share of hallucinations"
    return (
        f"no threshold qualifies at alpha = {test.alpha:g}, delta = {test.delta:g}. The first, {first.threshold:.4f}, "
        f"had {first.groups} answering groups, {first.wrong} of them hallucinated (p = {first.p_value:.2g}). The least "
        f"alpha that it would have passed at is {test.least_alpha:.3f}; {cure}. Nothing was published. These rows are "
        "spent: ask again with new ones, or publish a gate that answers nothing with --publish-closed"
    )


def _note_question(made: GuaranteePlan) -> None:
    """Keep what is asked beside the rows, before it is answered.  Raises RunMismatch: it was something else before."""
    path = made.rows.question
    if path.exists() and (before := json.loads(path.read_text(encoding="utf-8"))) != made.question:
        changed = ", ".join(f"{key} = {before.get(key)!r}" for key in before if before[key] != made.question.get(key))
        raise RunMismatch(f"the rows of {made.rows.dataset.path} are spent: they were tested before, with {changed}. A "
                          "question that an earlier answer led to carries no guarantee; use new "
                          "rows", param="data")  # fmt: skip
    atomic_write(path, (json.dumps(made.question, indent=2, sort_keys=True) + "\n").encode())
