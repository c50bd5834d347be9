"""Publishes a threshold with a guarantee: scores new rows, tests a sequence of thresholds, makes a
new version."""

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
from probes_store.records import DType, Guarantee
from probes_store.store import Store
from service.data.run_folder import locked
from service.engines.base import Engine
from service.errors import NoThreshold, RunMismatch, TrainingError
from service.fitting import thresholds
from service.fitting.nested_cv import rounded
from service.fitting.thresholds import (
    GateProfile,
    GuaranteeTest,
    least_groups,
    threshold_sequence,
)
from service.judging.guarantee import Standing, unlike_training
from service.scoring import Scorer
from service.trainer import new_rows
from service.trainer.cards import card_of, guaranteed_card, statement
from service.trainer.new_rows import Marks, NewRows
from service.trainer.options import Console, GuaranteeOptions
from service.trainer.prepare import UNKNOWN_LABEL
from service.trainer.strata import Stratum, StratumResult

PILOT_SHARE = 4  # one group in 4 chooses the thresholds, if the bundle records no out-of-fold risks


@dataclass(frozen=True, eq=False)
class GuaranteePlan:
    """The tests to make on new rows.  It depends on no label."""

    rows: NewRows[GuaranteeOptions]
    gates: (
        GateProfile | None
    )  # of training's out-of-fold risks; None: a part of the rows chooses the thresholds
    gates_by_passage: Mapping[bool, GateProfile] = field(
        default_factory=dict
    )  # the same by stratum
    done: Bundle | None = None  # the version that an equal guarantee has published already

    @property
    def question(self) -> dict[str, Any]:
        """Return the settings that determine the result of the tests on these rows."""
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
        """Return what a service knows about each row besides its token ids."""
        prompt_format = self.rows.bundle.manifest.prompt_format
        return tuple(new_rows.standing_of(row, prompt_format) for row in self.rows.dataset.rows)

    @property
    def shapes(self) -> tuple[str, ...] | None:
        """Return the shapes of the rows' conversations; None if prompts use no chat template."""
        manifest = self.rows.bundle.manifest
        if manifest.prompt_format != "chat":
            return None
        # A gate never answers a shape that training did not have, so such shapes need no guarantee.
        named = [
            (unlike_training(manifest, known) is not None, str(known.shape))
            for known in self.standings
        ]
        trained = {name for untrained, name in named if not untrained}
        return tuple(sorted(trained or {name for _, name in named}))

    @property
    def each_delta(self) -> float:
        """Return the delta of one alpha: the guarantees hold together with confidence 1 - delta."""
        return self.rows.options.delta / len(self.rows.options.alphas)

    @property
    def groups(self) -> int:
        """Return the number of groups for the test."""
        return self._left(len(np.unique(self.rows.dataset.groups)))

    def _left(self, groups: int) -> int:
        return groups if self.gates is not None else groups - groups // PILOT_SHARE

    def inside(self, stratum: Stratum) -> NDArray[np.bool_]:
        """Return whether each row belongs to ``stratum``: [N]."""
        every = stratum.passage is None or self.rows.bundle.manifest.prompt_format != "chat"
        return np.array(
            [every or standing.passage is stratum.passage for standing in self.standings], np.bool_
        )

    @cached_property
    def strata(self) -> tuple[Stratum, ...]:
        """Return the strata that have rows: questions without a passage, and with one.

        They share delta evenly.  A stratum with too few groups for any threshold gets no delta and
        is closed."""
        chat, groups = self.rows.bundle.manifest.prompt_format == "chat", self.rows.dataset.groups
        kinds = (False, True) if chat else (None,)
        strata = [Stratum(passage, 0, self.each_delta, tested=True) for passage in kinds]
        strata = [
            replace(stratum, groups=self._left(len(np.unique(groups[self.inside(stratum)]))))
            for stratum in strata
        ]
        strata = [stratum for stratum in strata if stratum.groups]
        least = least_groups(max(self.rows.options.alphas), self.each_delta / len(strata))
        largest = max(strata, key=lambda stratum: stratum.groups)
        strata = [
            replace(stratum, tested=stratum.groups >= least or stratum is largest)
            for stratum in strata
        ]
        delta = self.each_delta / sum(stratum.tested for stratum in strata)
        return tuple(replace(stratum, delta=delta) for stratum in strata)

    @property
    def tested(self) -> tuple[Stratum, ...]:
        """Return the strata in which a threshold can pass."""
        return tuple(stratum for stratum in self.strata if stratum.tested)

    def sequence(
        self, stratum: Stratum, alpha: float, pilot: GateProfile | None = None
    ) -> list[float]:
        """Return the thresholds to test, in order.

        They come from ``pilot``, else from training's profile of the stratum, else from that of all
        its rows."""
        gates = pilot or self.gates
        if pilot is None and stratum.passage is not None:
            gates = self.gates_by_passage.get(stratum.passage, gates)
        assert gates is not None, "a pilot has it"
        return threshold_sequence(gates, alpha, stratum.delta, stratum.groups)

    def wants_label(self, risk: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which rows the test needs a label of: risk [N], as gated.  This depends on no
        label.

        Every threshold withholds a row at or above the loosest threshold of its stratum."""
        wanted = np.zeros(len(risk), np.bool_)
        for stratum in self.tested:
            loosest = max(self.sequence(stratum, alpha)[-1] for alpha in self.rows.options.alphas)
            wanted |= self.inside(stratum) & (risk < loosest)
        return wanted

    def described(self) -> list[str]:
        """Return lines that describe the tests."""
        if self.done is not None:
            return [f"{self.done.reference} is this very guarantee"]
        rows = f"{len(self.rows.dataset)} rows in {self.groups} groups for the test"
        lines = [f"{rows}, new to {self.rows.bundle.reference}", *self.rows.dataset.remarks]
        if self.gates is None:
            why = (
                "they depend on the answers"
                if self.rows.options.recheck
                else "the bundle records no out-of-fold risks"
            )
            lines.append(f"one group of {PILOT_SHARE} chooses the thresholds: {why}")
        for stratum in self.strata:
            name = f"{stratum.name}, " if len(self.strata) > 1 else ""
            if not stratum.tested:
                lines.append(
                    f"{name}{stratum.groups} groups: too few for any threshold, so none of them is"
                    " answered"
                )
                continue
            for alpha in self.rows.options.alphas:
                least = least_groups(alpha, stratum.delta)
                text = (
                    f"{name}alpha {alpha:g}, delta {stratum.delta:g}: at least {least} answering"
                    " groups"
                )
                if self.gates is not None:
                    sequence = self.sequence(stratum, alpha)
                    text += (
                        f"; {len(sequence)} thresholds from {sequence[0]:.4f} to {sequence[-1]:.4f}"
                    )
                lines.append(text)
        return lines


def plan(bundle: Bundle, options: GuaranteeOptions, store: Store) -> GuaranteePlan:
    """Check everything that needs no model, and return the tests to make.

    Raises DataError, TrainingError (too few groups; the bundle's rows are unknown), and what the
    store raises."""
    rows = new_rows.read_new_rows(bundle, options, store, all_labelled=False)
    evaluation, dataset = rows.evaluation, rows.dataset
    if options.recheck and bundle.manifest.answer is None:
        raise TrainingError(
            f"{bundle.reference} has no probes of answers: train it on answers, or leave"
            " --recheck out",
            param="recheck",
        )
    # With --recheck the gate depends on the answers' own tokens, which training's out-of-fold risks
    # do not cover.
    recorded: dict[str, Any] = {} if options.recheck else evaluation.get("out_of_fold", {})
    gates = {
        passage: _profile(profile)
        for passage, profile in recorded.get("gates_by_passage", {}).items()
    }
    by_passage = {
        beside: gates[name] for beside, name in ((False, "false"), (True, "true")) if name in gates
    }
    planned = GuaranteePlan(
        rows, _profile(recorded["gates"]) if "gates" in recorded else None, by_passage
    )
    seen = list(new_rows.seen_by(bundle, evaluation, options.trained_on, options.names))
    for what, version, record in new_rows.spent_sets(store, bundle):
        if (
            record["data"]["digest"] == dataset.digest
            and record.get("question") == planned.question
        ):
            return replace(planned, done=version)
        seen.append(
            (
                f"the rows that the {what} of {version.reference} has spent",
                Marks.read(record["spent"]),
            )
        )
    new_rows.check_unspent(dataset, seen)
    largest = max(planned.tested, key=lambda stratum: stratum.groups)
    least = least_groups(max(options.alphas), largest.delta)
    if largest.groups < least:
        raise TrainingError(
            f"{dataset.path} has {largest.groups} groups for the test, and no threshold can pass at"
            f" alpha = {max(options.alphas):g}, delta = {largest.delta:g} with less than {least}"
            " answering ones: add groups (nothing was spent)",
            param="data",
        )
    if (
        planned.gates is None and options.answers == "given"
    ):  # every label is read, by the pilot or by the test
        new_rows.check_labelled(dataset, np.arange(len(dataset)))
    return planned


def _profile(document: Mapping[str, Any]) -> GateProfile:
    lists: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in document.items()
    }
    return GateProfile(**lists)


def guarantee(
    bundle: Bundle,
    options: GuaranteeOptions,
    engine_factory: Callable[[], Engine],
    store: Store,
    *,
    console: Console,
) -> Bundle | None:
    """Publish a version of a bundle with a guaranteed threshold; return None for a dry run, which
    spends no rows.

    A dry run needs no model; ``rows_to_label`` tells which labels a run would read.

    Raises NoThreshold (unless ``publish_closed``), DataError, RunMismatch (the rows were tested
    before, with other settings), TrainingError (see ``plan``), and BundleError (another model's
    bundle, or a read-only store)."""
    planned = plan(bundle, options, store)
    for line in planned.described():
        console.print(line)
    if options.dry_run or planned.done is not None:
        return planned.done
    store.check_writable()
    with locked(planned.rows.options.folder), closing(engine_factory()) as engine:
        return carry_out(planned, engine, store, console)


def rows_to_label(
    bundle: Bundle,
    options: GuaranteeOptions,
    engine_factory: Callable[[], Engine],
    store: Store,
    *,
    console: Console,
) -> list[dict[str, Any]]:
    """Return the rows whose labels a guarantee would read: line, id and prompt or messages, without
    the risk.

    This spends no rows and reads no label.  It needs no model if all rows need a label.  Raises
    what ``plan`` and the engine raise."""
    planned = plan(bundle, replace(options, dry_run=True), store)
    for line in planned.described():
        console.print(line)
    if planned.done is not None:
        return []
    wanted = np.ones(len(planned.rows.dataset), np.bool_)
    if planned.gates is not None:
        with locked(planned.rows.options.folder), closing(engine_factory()) as engine:
            Scorer(engine, bundle)
            wanted = planned.wants_label(
                new_rows.risks_of(bundle, planned.rows.scored(engine), as_gated=True)
            )
    rows = [planned.rows.dataset.rows[row] for row in np.flatnonzero(wanted).tolist()]
    console.print(f"{len(rows)} of {len(wanted)} rows want a label")
    return [
        {"line": row.line, "id": row.id}
        | ({"prompt": row.prompt} if row.prompt is not None else {"messages": row.messages})
        for row in rows
    ]


@dataclass(frozen=True, eq=False)
class CalibrationRows:
    """The n rows of a test, of N in the file: each has a label, or a risk so high that it needs
    none."""

    row: NDArray[np.int64]  # [n] position in the file
    risk: NDArray[np.float64]  # [n] as gated
    label: NDArray[np.int64]  # [n] 1 factual, 0 hallucinated, ``UNKNOWN_LABEL`` if it was not read
    left_out: int  # rows whose answer got no label
    pilot: GateProfile | None = (
        None  # profile of other rows of the file; None: use training's profile
    )


def _calibration_rows(planned: GuaranteePlan, engine: Engine) -> CalibrationRows:
    """Return the rows with their risks, and with the labels that the test needs.  Only these rows
    are answered."""
    rows = planned.rows
    options, bundle = rows.options, rows.bundle
    if planned.gates is None:
        data = rows.prepare(engine, folds=None, answers=options.recheck)
        withheld = new_rows.answers_withheld(bundle, data) if options.recheck else False
        risk = np.where(withheld, 1.0, new_rows.risks_of(bundle, data, as_gated=True))
        label, group = data.inputs.label, data.inputs.group
        names = np.random.default_rng([options.seed, 1]).permutation(np.unique(group))
        pilot = np.isin(group, names[: len(names) // PILOT_SHARE])
        gates = thresholds.gate_profile(label[pilot], risk[pilot], group[pilot])
        index, left_out = data.labelled.index, len(rows.dataset) - len(label)
        return CalibrationRows(index[~pilot], risk[~pilot], label[~pilot], left_out, gates)
    risk = new_rows.risks_of(bundle, rows.scored(engine), as_gated=True)
    wanted = np.flatnonzero(planned.wants_label(risk))
    labelled = rows.labels_of(engine, wanted)
    label = np.full(len(risk), UNKNOWN_LABEL, np.int64)
    label[labelled.index] = labelled.label
    used = np.setdiff1d(np.arange(len(risk)), np.setdiff1d(wanted, labelled.index))
    return CalibrationRows(used, risk[used], label[used], len(wanted) - len(labelled.index))


def strata_tests(
    planned: GuaranteePlan, data: CalibrationRows, alpha: float
) -> list[StratumResult]:
    """Return the test of each stratum at one alpha."""
    group = planned.rows.dataset.groups[data.row]
    results = []
    for stratum in planned.strata:
        inside = planned.inside(stratum)[data.row]
        labelled, test = inside & (data.label != UNKNOWN_LABEL), None
        if stratum.tested:
            columns = data.label[labelled], data.risk[labelled], group[labelled]
            sequence = planned.sequence(stratum, alpha, data.pilot)
            test = thresholds.certify(
                *columns, sequence, alpha, stratum.delta, planned.rows.options.seed
            )
        threshold = None if test is None else test.threshold
        answered = 0.0 if threshold is None else float((data.risk[inside] < threshold).mean())
        results.append(
            StratumResult(stratum, test, int(inside.sum()), int(labelled.sum()), answered)
        )
    return results


def carry_out(planned: GuaranteePlan, engine: Engine, store: Store, console: Console) -> Bundle:
    """Score the rows, label those below the loosest threshold, test, publish.  Raises what
    ``guarantee`` raises."""
    rows = planned.rows
    options, bundle = rows.options, rows.bundle
    Scorer(
        engine, bundle
    )  # raises if the bundle belongs to another model, or its golden prompts do not replay
    _check_question(planned)
    data = _calibration_rows(planned, engine)
    atomic_write(
        rows.question, (json.dumps(planned.question, indent=2, sort_keys=True) + "\n").encode()
    )
    tests = {alpha: strata_tests(planned, data, alpha) for alpha in options.alphas}
    tested = [
        (alpha, result)
        for alpha, results in tests.items()
        for result in results
        if result.test is not None
    ]
    named = len(planned.strata) > 1
    for _, result in tested:
        assert result.test is not None
        for line in table(result.test, result.stratum.name if named else ""):
            console.print(line)
    passed = [alpha for alpha, result in tested if result.step.groups]
    if not passed and not options.publish_closed:
        raise NoThreshold("\n".join(_missing(result, named) for _, result in tested), param="data")

    # Publish the same bundle with another threshold, its guarantee and a longer ledger.
    alpha = passed[0] if passed else options.alphas[0]
    served = tests[alpha]
    strictest = min((result.record for result in served), key=lambda record: record.threshold)
    group = rows.dataset.groups[data.row]
    record = Guarantee(
        alpha=alpha,
        delta=planned.each_delta,
        threshold=strictest.threshold,
        groups=strictest.groups,
        hallucinated=strictest.hallucinated,
        p_value=strictest.p_value,
        answered=sum(result.answered * result.rows for result in served) / len(data.row),
        risk_control_threshold=None,
        rows=len(data.row),
        all_groups=len(np.unique(group)),
        data_digest=rows.dataset.digest,
        labels="generate" if options.generates else "given",
        judge=rows.judge,
        dtype=cast(DType, engine.identity.dtype),
        seed=options.seed,
        statement="",
    )
    manifest = replace(
        bundle.manifest,
        guarantee_shapes=planned.shapes,
        guarantee_reads_answers=True if options.recheck else None,
        guarantee_strata=tuple(result.record for result in served) if named else None,
        name=options.new_name or bundle.manifest.name,
        threshold=record.threshold,
    )
    record = replace(record, statement=statement(record, manifest, options.answer_tokens, served))
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
        "question": planned.question,
        "thresholds_from": (
            "training's out-of-fold risks" if planned.gates else f"one group of {PILOT_SHARE}"
        ),
        "promises": [_promise(at, result) for at, result in tested],
        "spent": Marks.of(rows.dataset).document(),
    }
    evaluation["calibrations"] = [*evaluation.get("calibrations", []), ledger]
    card = guaranteed_card(card_of(bundle), manifest, served)
    published = store.publish(new_rows.draft_of(bundle, manifest, evaluation, card))
    console.print(f"published {published.reference}")
    return published


def _promise(alpha: float, result: StratumResult) -> dict[str, Any]:
    """Return evaluation.json's record of one test."""
    test = result.test
    assert test is not None
    return {
        "alpha": alpha,
        "delta": test.delta,
        "threshold": test.threshold,
        "least_alpha": rounded(test.least_alpha),
        "passage": result.stratum.passage,
        "steps": rounded([asdict(step) for step in test.steps]),
    }


def table(test: GuaranteeTest, stratum: str = "") -> list[str]:
    """Return a table of the tested thresholds in order; the last is the first that failed, if one
    did."""
    name = f"{stratum}, " if stratum else ""
    head = (
        f"{name}alpha {test.alpha:g}: of the answering groups, counted equally; the answered rows"
        " have no guarantee"
    )
    return [head, "threshold  answering groups  hallucinated  answered rows  hallucinated  p"] + [
        f"{step.threshold:9.4f}  {step.groups:16}  {step.wrong:12}  {step.rows:13} "
        f" {step.wrong_rows:12} "
        f" {step.p_value:.2g}{'' if step.p_value <= test.delta else '  failed'}"
        for step in test.steps
    ]


def _missing(tested: StratumResult, named: bool) -> str:
    test = tested.test
    assert test is not None
    stratum = f"{tested.stratum.name}: " if named else ""
    first, wanted = test.steps[0], test.groups_wanted
    more = max(wanted - first.groups, 1)
    about = f", about {more * tested.rows // first.groups} rows like these" if first.groups else ""
    cure = f"{more} more answering groups are wanted{about}"
    if wanted < 0:
        cure = "no number of rows makes up for its share of hallucinations"
    return (
        f"{stratum}no threshold qualifies at alpha = {test.alpha:g}, delta = {test.delta:g}. The"
        f" first, {first.threshold:.4f}, had {first.groups} answering groups, {first.wrong} of them"
        f" hallucinated (p = {first.p_value:.2g}). The least alpha that it would have passed at is"
        f" {test.least_alpha:.3f}; {cure}. Nothing was published. These rows are spent: ask again"
        " with new ones, or publish a gate that answers nothing with --publish-closed"
    )


def _check_question(planned: GuaranteePlan) -> None:
    """Raise RunMismatch if the rows were tested before, with other settings."""
    path = planned.rows.question
    if (
        path.exists()
        and (before := json.loads(path.read_text(encoding="utf-8"))) != planned.question
    ):
        changed = ", ".join(
            f"{key} = {before.get(key)!r}"
            for key in before
            if before[key] != planned.question.get(key)
        )
        raise RunMismatch(
            f"the rows of {planned.rows.dataset.path} are spent: they were tested before, with"
            f" {changed}. A question that an earlier answer led to carries no guarantee; use new"
            " rows",
            param="data",
        )
