"""What a run publishes: stored probes, golden prompts, manifest, evaluation.json and the plots' numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from scipy.special import logit

import service
from probes_store import manifest as stored
from probes_store.bundle import spreads, tolerance_for
from probes_store.records import CONTEXT_SIGNALS, AnswerProbe, Context, DType, Uncertainty
from probes_store.tensors import Golden, ProbeTensors
from service.data.forms.crossed import WORDING
from service.data.training_rows import FORM
from service.engines.base import Engine, ModelIdentity
from service.errors import EngineError
from service.fitting import FIRST_TOKEN
from service.fitting.estimator import DepthMeanProbe, FinalClassifier, scale_shift
from service.fitting.nested_cv import Evaluation, Inputs, layer_aurocs, name_of, rounded
from service.fitting.probes import Floats, Index, ProbeFit
from service.fitting.recalibration import LabelledRisks
from service.fitting.scores import debiased_calibration_error, effective_groups, risk_auroc
from service.fitting.thresholds import GateProfile, gate_profile
from service.fitting.uncertainty import TrajectoryReference
from service.prompts import PromptFormat
from service.readout import Probes
from service.trainer.new_rows import Marks, shapes_of
from service.trainer.options import TrainOptions
from service.trainer.plots import PlotData
from service.trainer.prepare import BundleContext, PreparedData, served_signals, with_context

GOLDEN_PROMPTS = 8


def probe_tensors(
    fit: ProbeFit,
    scale: Floats,
    class_mean: Floats,
    class_std: Floats,
    reference: TrajectoryReference,
    context: BundleContext | None = None,
) -> ProbeTensors:
    """Return a fit in the element types that are stored: scale [m]; class_mean, class_std [2, m] out of fold."""
    arrays = {
        "direction": fit.direction,
        "bias": fit.bias,
        "scale": scale,
        "trajectory_mean": class_mean,
        "trajectory_std": class_std,
        "reference_mean": reference.mean,
        "reference_whitening": reference.whitening,
    }
    stored: dict[str, Any] = {name: array.astype(np.float32) for name, array in arrays.items()}
    return ProbeTensors(head=fit.head, **stored, **({} if context is None else context.tensors()))


def golden_rows(risk: Floats, count: int = GOLDEN_PROMPTS) -> Index:
    """Return positions of ``count`` rows spread evenly over the ranks of risk [n], lowest and highest included."""
    order = np.argsort(risk, kind="stable")
    places = np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(np.int64)
    return order[np.unique(places)]


def record_golden(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    probes: Sequence[Probes],
    classifier: FinalClassifier,
    signals: Sequence[stored.Signal],
    collected: Floats,
    context: Context | None = None,
) -> Golden:
    """Replay G prompts of token ids through ``Engine.score`` and return what a server must reproduce.

    ``collected`` [G, (1 + A) m] are the same prompts' logits from the run folder.
    Raises EngineError: the two differ, so the probes were fitted on something that serving does not read."""
    needs_first_token = any(name in signals for name in FIRST_TOKEN)
    onsets = engine.score(prompts, probes, first_token=needs_first_token)
    replayed = np.stack([np.concatenate(onset.trajectories) for onset in onsets])
    check_replay(engine, replayed, collected)
    layers = engine.identity.geometry.num_layers
    first_token = np.zeros((len(prompts), 2))
    if needs_first_token:
        first_token = np.array([[t.log_max_prob, t.entropy] for t in (onset.first_token for onset in onsets) if t])
    tokens = np.array([onset.prompt_tokens for onset in onsets])
    risk = classifier.risk(served_signals(replayed, first_token, tokens, signals, context, layers))
    return Golden.record(prompts, replayed, risk, first_token if needs_first_token else None)


def check_replay(engine: Engine, replayed: Floats, collected: Floats) -> None:
    """Raise EngineError where the engine replays other logits, [G, k m], than it collected of the same tokens."""
    dtype = engine.identity.dtype
    layers, limit = engine.identity.geometry.num_layers, tolerance_for(dtype).trajectory
    worst = float(np.max(np.abs(replayed - collected) / spreads(collected, layers)))
    if not worst <= limit:
        raise EngineError(
            f"serving and training read different logits: they differ by {worst:.3g} spreads, "
            f"{limit:.3g} would pass in {dtype}; if another run says so, too, the engine does not fit "
            "this model"
        )


def model_record(identity: ModelIdentity) -> stored.ModelRecord:
    """Return the manifest's record.  Of a folder it has only the last part: the path on this machine is private."""
    geometry, folder = identity.geometry, Path(identity.model)
    return stored.ModelRecord(
        name=folder.resolve().name if folder.is_dir() else identity.model,
        revision=identity.revision,
        fingerprint=identity.fingerprint,
        architecture=identity.architecture,
        model_type=identity.model_type,
        num_layers=geometry.num_layers,
        num_heads=geometry.num_heads,
        head_dim=geometry.head_dim,
        hidden_size=geometry.hidden_size,
        adapter=identity.adapter,
    )


def _template_record(identity: ModelIdentity) -> stored.ChatTemplateRecord:
    arguments = None if identity.template_arguments is None else dict(identity.template_arguments)
    return stored.ChatTemplateRecord(identity.chat_template, arguments)


def manifest_of(
    options: TrainOptions,
    identity: ModelIdentity,
    prompt_format: PromptFormat,
    data: PreparedData,
    c: float,
    classifier: FinalClassifier,
    threshold: float,
    uncertainty: Uncertainty,
    context: BundleContext | None = None,
    answer: AnswerProbe | None = None,
) -> stored.Manifest:
    """Return the manifest, without what publishing adds: version, time, digests and files."""
    counts = {key: count for key, count in data.counts.items() if key != "others"}  # only the evaluation names them
    training = stored.TrainingRecord(
        data_digest=data.dataset.origin.file_digest,
        labels=options.answers,
        judge=options.judged_by if options.answers == "generate" else None,
        seeds=options.shuffles,
        folds=options.folds,
        c=c,
        c_grid=tuple(sorted(set(options.c_grid))) if options.c is None else (),
        class_balance=options.class_balance,
        hallutracer_version=service.__version__,
        decoding=options.decoding(data.dataset.origin.decodings),
        shapes=shapes_of(data.dataset.rows, prompt_format),
        reworded=None if context is None else context.reworded,
        **counts,
    )
    return stored.Manifest(
        name=options.name,
        model=model_record(identity),
        tokenizer=stored.TokenizerRecord(identity.tokenizer),
        chat_template=_template_record(identity),
        prompt_format=prompt_format,
        dtype=cast(DType, identity.dtype),  # checked on publishing
        readout=stored.ReadoutRecord(options.readout, "last"),
        logit_scale=options.logit_scale,
        signals=with_context(options.reads, context),
        classifier=stored.Classifier(tuple(classifier.weight.tolist()), classifier.intercept),
        threshold=threshold,
        uncertainty=uncertainty,
        context=None if context is None else context.record(),
        training=training,
        answer=answer,
    )


def evaluation_document(
    options: TrainOptions,
    signals: Sequence[stored.Signal],
    data: PreparedData,
    probe: DepthMeanProbe,
    gates: GateProfile,
    risks: Floats,
    nested: Evaluation | None,
) -> dict[str, Any]:
    """Return evaluation.json of a bundle with these ``signals``, whose fitted ``probe`` was calibrated."""
    label, group, scaled = data.inputs.label, data.inputs.group, probe.scaled_[options.logit_scale]
    layers, means = layer_aurocs(label, scaled.out_of_fold)
    shift = scale_shift(scaled.out_of_fold.mean(axis=-1), scaled.trajectory.mean(axis=-1), label)
    counts: dict[str, Any] = {
        "file": options.file.name,
        "digest": data.dataset.origin.file_digest,
        "effective_groups": rounded(effective_groups(group)),
        "largest_group_share": rounded(float(np.unique(group, return_counts=True)[1].max() / len(group))),
    } | data.counts
    if data.labelled.left_out:
        counts["left_out_because"] = data.labelled.left_out
    forms = [row.strata.get(FORM) for row in data.dataset.rows]
    if None not in forms:
        counts["forms"] = dict(sorted(Counter(forms).items()))
    if data.dataset.left_out_forms:
        counts["left_out_forms"] = list(data.dataset.left_out_forms)
    document: dict[str, Any] = {
        "data": counts,
        "c_search": rounded(probe.c_search_),
        "out_of_fold": {
            "layer_auroc": rounded(layers.mean(axis=0).tolist()),
            "depth_mean_auroc": rounded(float(means.mean())),
            "depth_mean_cross_fitted_and_refitted": rounded(shift),
            "gates": asdict(gates),
            "risks": risks_document(risks, label, group),
        },
        "rows_seen": {"training": Marks.of(data.dataset).document()},
        "signal_of_the_bundle": name_of(signals, options.logit_scale),
    }
    if nested is not None:
        document["cross_validation"] = nested.document
    return document


LEAST_PROFILED = 100  # groups of a stratum, below which the profile of all rows says more


def gates_by_passage(
    label: NDArray[np.int64], risk: Floats, group: NDArray[np.int64], passage: NDArray[np.bool_]
) -> dict[str, Any]:
    """Return the profile of the rows with a passage beside the question ("true") and of those without ("false").

    label, risk, group, passage [n]; of a stratum with few groups none."""
    return {
        str(beside).lower(): asdict(gate_profile(label[inside], risk[inside], group[inside]))
        for beside in (False, True)
        if len(np.unique(group[inside := passage == beside])) >= LEAST_PROFILED
    }


def risks_document(risk: Floats, label: NDArray[np.integer], group: NDArray[np.integer]) -> dict[str, str]:
    """Return risk, class and group of each row [n]: texts, since lists would take a line for each number."""
    numbers = np.unique(group, return_inverse=True)[1]
    return {
        "risk": " ".join(f"{value:.6f}" for value in risk),
        "hallucinated": " ".join(str(1 - int(value)) for value in label),
        "group": " ".join(map(str, numbers.tolist())),
    }


def read_risks(document: Mapping[str, str]) -> LabelledRisks:
    """Return what ``risks_document`` wrote."""
    hallucinated, group = (np.array(document[key].split(), np.int64) for key in ("hallucinated", "group"))
    return LabelledRisks(np.array(document["risk"].split(), np.float64), 1 - hallucinated, group)


MOST_KINDS = 20  # of a table by kind: a mixture's sources have subjects, of which there may be hundreds
BY_STRATUM = {"by_form": FORM, "by_kind": "kind"}


def strata_tables(
    label: NDArray[np.int64], risk: Floats, strata: Sequence[Mapping[str, str]], threshold: float
) -> dict[str, Any]:
    """Return ``by_stratum`` for each of ``BY_STRATUM`` that every row names, and of kinds where there are few."""
    found = {name: by_stratum(label, risk, strata, threshold, key) for name, key in BY_STRATUM.items()}
    return {name: table for name, table in found.items() if table and (name != "by_kind" or len(table) <= MOST_KINDS)}


LEAST_WORDINGS = 3  # of a question, where a decision could differ


def rewording(data: PreparedData, risk: Floats, threshold: float) -> dict[str, Any]:
    """Return how decisions hold where a question is asked in other words, for evaluation.json: risk [seeds, n] of the
    labelled rows; empty where no question has ``LEAST_WORDINGS``.

    ``decided_differently``: share of the questions that were answered alike, all right or all wrong, whose decision is
    not the same in every wording; ``log_odds_spread``: standard deviation of a risk's log odds within a question."""
    label, wordings = data.inputs.label, defaultdict[str, list[int]](list)
    for position, number in enumerate(data.labelled.index.tolist()):
        row = data.dataset.rows[number]
        if (form := row.strata.get(FORM, "")).startswith(WORDING):
            wordings[row.id.partition(f"+{form}")[0]].append(position)
    questions = [index for index in map(np.array, wordings.values()) if len(index) >= LEAST_WORDINGS]
    if not questions:
        return {}
    alike = [index for index in questions if len(np.unique(label[index])) == 1]
    differ = [len(np.unique(of_seed[index] < threshold)) > 1 for index in alike for of_seed in risk]
    variances = [logit(risk[:, index]).var(axis=1, ddof=1).mean() for index in questions]
    record = {
        "questions": len(questions),
        "wordings": sum(map(len, questions)) / len(questions),
        "answered_alike": len(alike),
        "decided_differently": float(np.mean(differ)) if alike else None,
        "log_odds_spread": float(np.sqrt(np.mean(variances))),
    }
    return {"rewording": rounded(record)}


def by_stratum(
    label: NDArray[np.int64], risk: Floats, strata: Sequence[Mapping[str, str]], threshold: float, key: str = FORM
) -> dict[str, Any]:
    """Return rows, share wrong, mean risk, its error, AUROC and the gate of each form or kind, for evaluation.json.

    label [n], risk [seeds, n]; means over seeds.  ``calibration_error`` is debiased.  No AUROC where a stratum has one
    class only, nothing of answered rows where there are none.  Empty unless every row names its ``key``."""
    names = [row[key] for row in strata if row.get(key)]
    stratum, table = np.array(names), dict[str, Any]()
    for name in sorted(set(names)) if len(names) == len(strata) else ():
        inside = stratum == name
        own, risks = label[inside], risk[:, inside]
        both, answered = 0 < own.sum() < len(own), risks < threshold
        table[name] = rounded(
            {
                "rows": len(own),
                "wrong": float(1 - own.mean()),
                "mean_risk": float(risks.mean()),
                "calibration_error": float(np.mean([debiased_calibration_error(own, of_seed) for of_seed in risks])),
                "auroc": float(np.mean([risk_auroc(own, of_seed) for of_seed in risks])) if both else None,
                "answered": float(answered.mean()),
                "wrong_among_answered": (1 - own)[np.nonzero(answered)[1]].mean() if answered.any() else None,
                "mean_risk_among_answered": risks[answered].mean() if answered.any() else None,
            }
        )
    return table


def plot_data(
    options: TrainOptions,
    signals: Sequence[stored.Signal],
    inputs: Inputs,
    out_of_fold: Floats,
    class_mean: Floats,
    class_std: Floats,
    nested: Evaluation | None,
    threshold: float,
) -> PlotData:
    """Return the numbers of the plots on the card of a bundle with these ``signals``."""
    layers, means = layer_aurocs(inputs.label, out_of_fold)
    groups = {"first token": FIRST_TOKEN, "passage": CONTEXT_SIGNALS}
    read = (words for words, names in groups.items() if any(name in signals for name in names))
    own = " and ".join(["depth mean", *read])
    risks: dict[str, Floats] = {}
    if nested is not None:  # the first seed's folds; together they cover every row once
        shown = {
            "depth mean": name_of(options.reads[:1], options.logit_scale),
            own: name_of(signals, options.logit_scale),
            "first-token probability": "first_token_max_prob",
            "prompt length": "prompt_length",
        }
        risks = {text: nested.risk[name][0] for text, name in shown.items()}
    units = {"unit_norm": "distance from the probe's plane", "standardized": "within-class std", "joint": "log odds"}
    return PlotData(
        inputs.label,
        inputs.group,
        risks,
        class_mean,
        class_std,
        layers,
        means,
        logit_unit=units[options.logit_scale],
        own=own,
        threshold=threshold,
        ranking_only=("prompt length",),
    )
