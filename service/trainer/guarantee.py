"""A threshold with a guarantee: new rows -> risks -> fixed-sequence testing -> a new version of the bundle."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle
from probes_store.local import atomic_write
from probes_store.records import CLOSED, DType, Guarantee, GuaranteeStratum
from probes_store.store import Store
from service.data.run_folder import locked
from service.engines.base import Engine
from service.errors import NoThreshold, RunMismatch, TrainingError
from service.fitting import thresholds
from service.fitting.nested_cv import rounded
from service.fitting.thresholds import GateProfile, GuaranteeStep, GuaranteeTest, least_groups, threshold_sequence
from service.judging.guarantee import Standing, unlike_training
from service.scoring import Scorer
from service.trainer import new_rows
from service.trainer.cards import GuaranteePart, card_of, guaranteed_card, statement
from service.trainer.new_rows import Marks, NewRows
from service.trainer.options import Console, GuaranteeOptions
from service.trainer.prepare import UNKNOWN_LABEL

PILOT_SHARE = 4  # one of so many groups chooses the thresholds of a bundle that records none


@dataclass(frozen=True)
class Stratum:
    """Calibration rows that are tested apart, by whether a passage stands beside the question."""

    passage: bool | None  # None: all rows, of a bundle whose prompts go through no chat template
    groups: int  # that are left for the test
    delta: float  # of one alpha
    tested: bool  # false: the groups are too few for any threshold to pass, so that nothing of them is answered

    @property
    def name(self) -> str:
        """Return what messages call its rows."""
        beside = {True: "questions with a passage", False: "questions without a passage", None: "questions"}
        return beside[self.passage]


@dataclass(frozen=True, eq=False)
class GuaranteePlan:
    """What is going to be tested, on rows that were found to be new.  Made without a look at a label."""

    rows: NewRows[GuaranteeOptions]
    gates: GateProfile | None  # by training's out-of-fold risks; None: a part of the rows has to do
    gates_by_passage: Mapping[bool, GateProfile] = field(default_factory=dict)  # of training's rows, by stratum
    done: Bundle | None = None  # the version that this very guarantee has published already

    @property
    def question(self) -> dict[str, Any]:
        """Return what is asked of the rows: asked again, it has the same answer."""
        options, judge = self.rows.options, self.rows.judge
        return {
            "alphas": list(options.alphas),
            "delta": options.delta,
            "seed": options.seed,
            "labels": options.answers,
            "judge": judge,
            "max_new_tokens": None if judge is None else options.answer_tokens,
        } | ({"recheck": True} if options.recheck else {})

    @cached_property
    def standings(self) -> tuple[Standing, ...]:
        """Return what a service would know of each row beside its token ids."""
        prompt_format = self.rows.bundle.manifest.prompt_format
        return tuple(new_rows.standing_of(row, prompt_format) for row in self.rows.dataset.rows)

    @property
    def shapes(self) -> tuple[str, ...] | None:
        """Return the shapes of the rows' conversations; None where prompts go through no chat template."""
        manifest = self.rows.bundle.manifest
        if manifest.prompt_format != "chat":
            return None
        # No gate answers where the bundle is not trained, whatever the calibration had.
        named = [(unlike_training(manifest, known) is not None, str(known.shape)) for known in self.standings]
        trained = {name for untrained, name in named if not untrained}
        return tuple(sorted(trained or {name for _, name in named}))

    @property
    def each_delta(self) -> float:
        """Return the delta of one alpha: the guarantees hold together with confidence 1 - delta."""
        return self.rows.options.delta / len(self.rows.options.alphas)

    @property
    def groups(self) -> int:
        """Return how many groups are left for the test."""
        return self._left(len(np.unique(self.rows.dataset.groups)))

    def _left(self, groups: int) -> int:
        return groups if self.gates is not None else groups - groups // PILOT_SHARE

    def inside(self, stratum: Stratum) -> NDArray[np.bool_]:
        """Return whether each row belongs to ``stratum``: [N]."""
        every = stratum.passage is None or self.rows.bundle.manifest.prompt_format != "chat"
        return np.array([every or standing.passage is stratum.passage for standing in self.standings], np.bool_)

    @cached_property
    def strata(self) -> tuple[Stratum, ...]:
        """Return the rows with a passage beside the question and those without, as far as there are some of each.

        They share delta evenly.  One whose groups are too few for any threshold has no part of it and is closed."""
        chat, groups = self.rows.bundle.manifest.prompt_format == "chat", self.rows.dataset.groups
        found = [Stratum(passage, 0, self.each_delta, tested=True) for passage in ((False, True) if chat else (None,))]
        found = [replace(one, groups=self._left(len(np.unique(groups[self.inside(one)])))) for one in found]
        found = [one for one in found if one.groups]
        least = least_groups(max(self.rows.options.alphas), self.each_delta / len(found))
        largest = max(found, key=lambda one: one.groups)
        found = [replace(one, tested=one.groups >= least or one is largest) for one in found]
        delta = self.each_delta / sum(one.tested for one in found)
        return tuple(replace(one, delta=delta) for one in found)

    @property
    def tested(self) -> tuple[Stratum, ...]:
        """Return the strata that any threshold may pass in."""
        return tuple(stratum for stratum in self.strata if stratum.tested)

    def sequence(self, stratum: Stratum, alpha: float, pilot: GateProfile | None = None) -> list[float]:
        """Return the thresholds to be tested in their order, by training's profile of the stratum, else by ``pilot``'s.

        Of a bundle that has no profile of this stratum, by that of all its rows."""
        gates = pilot or self.gates
        if pilot is None and stratum.passage is not None:
            gates = self.gates_by_passage.get(stratum.passage, gates)
        assert gates is not None, "a pilot has it"
        return threshold_sequence(gates, alpha, stratum.delta, stratum.groups)

    def wants_label(self, risk: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which rows the test can look at: risk [N], as gated.  No label takes part in that.

        A row at or above the loosest threshold of its stratum is answered at none of them."""
        wanted = np.zeros(len(risk), np.bool_)
        for stratum in self.tested:
            loosest = max(self.sequence(stratum, alpha)[-1] for alpha in self.rows.options.alphas)
            wanted |= self.inside(stratum) & (risk < loosest)
        return wanted

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
        for stratum in self.strata:
            name = f"{stratum.name}, " if len(self.strata) > 1 else ""
            if not stratum.tested:
                lines.append(f"{name}{stratum.groups} groups: too few for any threshold, so none of them is answered")
                continue
            for alpha in self.rows.options.alphas:
                least = least_groups(alpha, stratum.delta)
                text = f"{name}alpha {alpha:g}, delta {stratum.delta:g}: at least {least} answering groups"
                if self.gates is not None:
                    found = self.sequence(stratum, alpha)
                    text += f"; {len(found)} thresholds from {found[0]:.4f} to {found[-1]:.4f}"
                lines.append(text)
        return lines


def plan(bundle: Bundle, options: GuaranteeOptions, store: Store) -> GuaranteePlan:
    """Check everything that needs no model.

    Raises DataError, TrainingError (too few groups; the bundle's rows are not known), and what the store raises."""
    rows = new_rows.read_new_rows(bundle, options, store, all_labelled=False)
    evaluation, dataset = rows.evaluation, rows.dataset
    if options.recheck and bundle.manifest.answer is None:
        raise TrainingError(
            f"{bundle.reference} has no probes of answers: train it on answers, or leave --recheck out", param="recheck"
        )
    # Training's out-of-fold risks do not say which answers their own tokens flag.
    kept: dict[str, Any] = {} if options.recheck else evaluation.get("out_of_fold", {})
    gates = {passage: _profile(one) for passage, one in kept.get("gates_by_passage", {}).items()}
    by_passage = {beside: gates[name] for beside, name in ((False, "false"), (True, "true")) if name in gates}
    made = GuaranteePlan(rows, _profile(kept["gates"]) if "gates" in kept else None, by_passage)
    seen = list(new_rows.seen_by(bundle, evaluation, options.trained_on, options.names))
    for what, version, record in new_rows.spent_sets(store, bundle):
        if record["data"]["digest"] == dataset.digest and record.get("question") == made.question:
            return replace(made, done=version)
        seen.append((f"the rows that the {what} of {version.reference} has spent", Marks.read(record["spent"])))
    new_rows.check_unspent(dataset, seen)
    largest = max(made.tested, key=lambda stratum: stratum.groups)
    least = least_groups(max(options.alphas), largest.delta)
    if largest.groups < least:
        raise TrainingError(
            f"{dataset.path} has {largest.groups} groups for the test, and no threshold can pass at "
            f"alpha = {max(options.alphas):g}, delta = {largest.delta:g} with less than {least} "
            "answering ones: add groups (nothing was spent)",
            param="data",
        )
    if made.gates is None and options.answers == "given":  # of each row either the thresholds or the test reads it
        new_rows.check_labelled(dataset, np.arange(len(dataset)))
    return made


def _profile(document: Mapping[str, Any]) -> GateProfile:
    lists: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in document.items()}
    return GateProfile(**lists)


def guarantee(
    bundle: Bundle, options: GuaranteeOptions, engine_factory: Callable[[], Engine], store: Store, *, console: Console
) -> Bundle | None:
    """Publish a version of a bundle with a threshold that is guaranteed; None for a dry run, which spends nothing.

    A dry run needs no model; ``rows_to_label`` says which rows a run would look at the labels of.

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


def rows_to_label(
    bundle: Bundle, options: GuaranteeOptions, engine_factory: Callable[[], Engine], store: Store, *, console: Console
) -> list[dict[str, Any]]:
    """Return the rows whose labels a guarantee would look at: line, id and prompt or messages, without the risk.

    It spends nothing and reads no label.  Needs no model where all rows want a label.  Raises as ``plan`` does, and
    what the engine raises."""
    made = plan(bundle, replace(options, dry_run=True), store)
    for line in made.described():
        console.print(line)
    if made.done is not None:
        return []
    wanted = np.ones(len(made.rows.dataset), np.bool_)
    if made.gates is not None:
        with locked(made.rows.options.folder), closing(engine_factory()) as engine:
            Scorer(engine, bundle)
            wanted = made.wants_label(new_rows.risks_of(bundle, made.rows.scored(engine), as_gated=True))
    rows = [made.rows.dataset.rows[place] for place in np.flatnonzero(wanted).tolist()]
    console.print(f"{len(rows)} of {len(wanted)} rows want a label")
    return [
        {"line": row.line, "id": row.id}
        | ({"prompt": row.prompt} if row.prompt is not None else {"messages": row.messages})
        for row in rows
    ]


@dataclass(frozen=True, eq=False)
class CalibrationRows:
    """The rows of a test with a verdict, or with a risk so high that none is needed: n of them, of N in the file."""

    place: NDArray[np.int64]  # [n] in the file
    risk: NDArray[np.float64]  # [n] as gated
    label: NDArray[np.int64]  # [n] 1 factual, 0 hallucinated, ``UNKNOWN_LABEL`` where none was looked at
    left_out: int  # rows whose answer had no verdict
    pilot: GateProfile | None = None  # of rows that are not among these; None: training's profile has to do


def _calibration_rows(made: GuaranteePlan, engine: Engine) -> CalibrationRows:
    """Return the risks of all rows, and the labels of those that the test can look at, which alone are answered."""
    rows, options, bundle = made.rows, made.rows.options, made.rows.bundle
    if made.gates is None:
        data = rows.prepare(engine, folds=None, answers=options.recheck)
        withheld = new_rows.answers_withheld(bundle, data) if options.recheck else False
        risk = np.where(withheld, 1.0, new_rows.risks_of(bundle, data, as_gated=True))
        label, group = data.inputs.label, data.inputs.group
        names = np.random.default_rng([options.seed, 1]).permutation(np.unique(group))
        pilot = np.isin(group, names[: len(names) // PILOT_SHARE])
        gates = thresholds.gate_profile(label[pilot], risk[pilot], group[pilot])
        place, left_out = data.labelled.index, len(rows.dataset) - len(label)
        return CalibrationRows(place[~pilot], risk[~pilot], label[~pilot], left_out, gates)
    risk = new_rows.risks_of(bundle, rows.scored(engine), as_gated=True)
    wanted = np.flatnonzero(made.wants_label(risk))
    found = rows.labels_of(engine, wanted)
    label = np.full(len(risk), UNKNOWN_LABEL, np.int64)
    label[found.index] = found.label
    kept = np.setdiff1d(np.arange(len(risk)), np.setdiff1d(wanted, found.index))
    return CalibrationRows(kept, risk[kept], label[kept], len(wanted) - len(found.index))


@dataclass(frozen=True, eq=False)
class StratumResult:
    """What a test of one stratum at one alpha gave."""

    stratum: Stratum
    test: GuaranteeTest | None  # None: its groups are too few for any threshold
    rows: int  # of the calibration
    labelled: int  # of these
    answered: float  # share of its rows, at the threshold that passed

    @property
    def step(self) -> GuaranteeStep | None:
        """Return the threshold that passed."""
        return None if self.test is None else self.test.passed

    @property
    def record(self) -> GuaranteeStratum:
        """Return the manifest's record."""
        step = self.step
        return GuaranteeStratum(
            passage=bool(self.stratum.passage),
            delta=self.stratum.delta,
            threshold=CLOSED if step is None else step.threshold,
            groups=0 if step is None else step.groups,
            hallucinated=0 if step is None else step.wrong,
            p_value=1.0 if step is None else step.p_value,
            answered=self.answered,
            rows=self.rows,
            labelled=self.labelled,
        )


def strata_tests(made: GuaranteePlan, data: CalibrationRows, alpha: float) -> list[StratumResult]:
    """Return the test of each stratum at one alpha."""
    group, found = made.rows.dataset.groups[data.place], []
    for stratum in made.strata:
        inside = made.inside(stratum)[data.place]
        labelled, test = inside & (data.label != UNKNOWN_LABEL), None
        if stratum.tested:
            columns = data.label[labelled], data.risk[labelled], group[labelled]
            sequence = made.sequence(stratum, alpha, data.pilot)
            test = thresholds.certify(*columns, sequence, alpha, stratum.delta, made.rows.options.seed)
        threshold = None if test is None else test.threshold
        answered = 0.0 if threshold is None else float((data.risk[inside] < threshold).mean())
        found.append(StratumResult(stratum, test, int(inside.sum()), int(labelled.sum()), answered))
    return found


def carry_out(made: GuaranteePlan, engine: Engine, store: Store, console: Console) -> Bundle:
    """Score, label what lies below the loosest threshold, test, publish.  Raises as ``guarantee`` does."""
    rows, options, bundle = made.rows, made.rows.options, made.rows.bundle
    Scorer(engine, bundle)  # this model's bundle, and it reads what it should
    _check_question(made)
    data = _calibration_rows(made, engine)
    atomic_write(rows.question, (json.dumps(made.question, indent=2, sort_keys=True) + "\n").encode())
    tests = {alpha: strata_tests(made, data, alpha) for alpha in options.alphas}
    named = len(made.strata) > 1
    for one in (one for found in tests.values() for one in found):
        lines = [] if one.test is None else table(one.test, one.stratum.name if named else "")
        for line in lines:
            console.print(line)
    passed = next((alpha for alpha, found in tests.items() if any(one.step is not None for one in found)), None)
    if passed is None and not options.publish_closed:
        missing = [_missing(one, named) for found in tests.values() for one in found if one.test]
        raise NoThreshold("\n".join(missing), param="data")

    # The bundle as it was, with another threshold, its guarantee and a longer ledger.
    alpha = options.alphas[0] if passed is None else passed
    served = tests[alpha]
    strictest = min((one.record for one in served), key=lambda record: record.threshold)
    group = rows.dataset.groups[data.place]
    record = Guarantee(
        alpha=alpha,
        delta=made.each_delta,
        threshold=strictest.threshold,
        groups=strictest.groups,
        hallucinated=strictest.hallucinated,
        p_value=strictest.p_value,
        answered=sum(one.answered * one.rows for one in served) / len(data.place),
        risk_control_threshold=None,
        rows=len(data.place),
        all_groups=len(np.unique(group)),
        data_digest=rows.dataset.digest,
        labels=options.answers,
        judge=rows.judge,
        dtype=cast(DType, engine.identity.dtype),
        seed=options.seed,
        statement="",
    )
    manifest = replace(
        bundle.manifest,
        guarantee_shapes=made.shapes,
        guarantee_reads_answers=True if options.recheck else None,
        guarantee_strata=tuple(one.record for one in served) if named else None,
        name=options.new_name or bundle.manifest.name,
        threshold=record.threshold,
    )
    parts = [GuaranteePart(one.stratum.passage, one.record, one.step) for one in served]
    record = replace(record, statement=statement(record, manifest, options.answer_tokens, parts))
    manifest = replace(manifest, guarantee=record)
    evaluation, known = bundle.evaluation(), data.label[data.label != UNKNOWN_LABEL]
    ledger = {
        "data": {
            "file": rows.dataset.path.name,
            "digest": rows.dataset.digest,
            "rows": len(rows.dataset),
            "labelled": len(known),
            "factual": int((known == 1).sum()),
            "hallucinated": int((known == 0).sum()),
            "left_out": data.left_out,
            "groups": len(np.unique(rows.dataset.groups)),
        },
        "question": made.question,
        "thresholds_from": "training's out-of-fold risks" if made.gates else f"one group of {PILOT_SHARE}",
        "promises": [
            {
                "alpha": at,
                "delta": one.test.delta,
                "threshold": one.test.threshold,
                "least_alpha": rounded(one.test.least_alpha),
                "passage": one.stratum.passage,
                "steps": rounded([asdict(step) for step in one.test.steps]),
            }
            for at, found in tests.items()
            for one in found
            if one.test is not None
        ],
        "spent": Marks.of(rows.dataset).document(),
    }
    evaluation["calibrations"] = [*evaluation.get("calibrations", []), ledger]
    card = guaranteed_card(card_of(bundle), manifest, parts)
    published = store.publish(new_rows.draft_of(bundle, manifest, evaluation, card))
    console.print(f"published {published.reference}")
    return published


def table(test: GuaranteeTest, stratum: str = "") -> list[str]:
    """Return the thresholds that were tested, in their order; the last one is the first that failed, if any did."""
    name = f"{stratum}, " if stratum else ""
    head = f"{name}alpha {test.alpha:g}: of the answering groups, counted equally; the answered rows have no guarantee"
    return [head, "threshold  answering groups  hallucinated  answered rows  hallucinated  p"] + [
        f"{step.threshold:9.4f}  {step.groups:16}  {step.wrong:12}  {step.rows:13}  {step.wrong_rows:12}  "
        f"{step.p_value:.2g}{'' if step.p_value <= test.delta else '  failed'}"
        for step in test.steps
    ]


def _missing(tested: StratumResult, named: bool) -> str:
    test, rows, stratum = tested.test, tested.rows, f"{tested.stratum.name}: " if named else ""
    assert test is not None
    first, wanted = test.steps[0], test.groups_wanted
    more = max(wanted - first.groups, 1)
    about = f", about {more * rows // first.groups} rows like these" if first.groups else ""
    cure = f"{more} more answering groups are wanted{about}"
    if wanted < 0:
        cure = "no number of rows makes up for its share of hallucinations"
    return (
        f"{stratum}no threshold qualifies at alpha = {test.alpha:g}, delta = {test.delta:g}. The first, "
        f"{first.threshold:.4f}, had {first.groups} answering groups, {first.wrong} of them hallucinated "
        f"(p = {first.p_value:.2g}). The least alpha that it would have passed at is {test.least_alpha:.3f}; {cure}. "
        "Nothing was published. These rows are spent: ask again with new ones, or publish a gate that answers nothing "
        "with --publish-closed"
    )


def _check_question(made: GuaranteePlan) -> None:
    """Raise RunMismatch where the rows were asked something else before."""
    path = made.rows.question
    if path.exists() and (before := json.loads(path.read_text(encoding="utf-8"))) != made.question:
        changed = ", ".join(f"{key} = {before.get(key)!r}" for key in before if before[key] != made.question.get(key))
        raise RunMismatch(
            f"the rows of {made.rows.dataset.path} are spent: they were tested before, with {changed}. A "
            "question that an earlier answer led to carries no guarantee; use new "
            "rows",
            param="data",
        )
