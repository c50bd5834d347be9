"""Makes the parts of a bundle: stored probes, golden prompts, manifest, evaluation.json and the
plots' numbers."""

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
from probes_store.records import CONTEXT_SIGNALS, AnswerProbe, Context, DType, Uncertainty
from probes_store.tensors import Golden, ProbeTensors
from service.data.forms.crossed import WORDING
from service.data.options import SAMPLE_TEMPERATURE, SAMPLES
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
from service.matching import spreads, tolerance_for
from service.prompts import PromptFormat
from service.readout import Probes
from service.trainer.new_rows import Marks, scripts_of_rows, shapes_of
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
    """Return a fit in the stored element types: scale [m]; class_mean, class_std [2, m] out of
    fold."""
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


def golden_rows(risk: Floats) -> Index:
    """Return positions of ``GOLDEN_PROMPTS`` rows, evenly spread over the ranks of risk [n],
    with the lowest and the highest."""
    order = np.argsort(risk, kind="stable")
    ranks = np.linspace(0, len(order) - 1, min(GOLDEN_PROMPTS, len(order))).round().astype(np.int64)
    return order[np.unique(ranks)]


def record_golden(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    probes: Sequence[Probes],
    classifier: FinalClassifier,
    signals: Sequence[stored.Signal],
    collected: Floats,
    context: Context | None = None,
) -> Golden:
    """Replay G prompts of token ids through ``Engine.score`` and return what a service must
    reproduce.

    ``collected`` [G, (1 + A) m] are the same prompts' logits from the run folder.
    Raises EngineError if the two differ: then the probes were fitted on activations that serving
    does not read."""
    needs_first_token = any(name in signals for name in FIRST_TOKEN)
    onsets = engine.score(prompts, probes, first_token=needs_first_token)
    replayed = np.stack([np.concatenate(onset.trajectories) for onset in onsets])
    check_replay(engine, replayed, collected)
    layers = engine.identity.geometry.num_layers
    first_token = np.zeros((len(prompts), 2))
    if needs_first_token:
        first_tokens = [onset.first_token for onset in onsets]
        first_token = np.array([[t.log_max_prob, t.entropy] for t in first_tokens if t])
    tokens = np.array([onset.prompt_tokens for onset in onsets])
    risk = classifier.risk(served_signals(replayed, first_token, tokens, signals, context, layers))
    return Golden.record(prompts, replayed, risk, first_token if needs_first_token else None)


def check_replay(engine: Engine, replayed: Floats, collected: Floats) -> None:
    """Raise EngineError if the engine's replayed logits, [G, k m], differ from those that it
    collected before."""
    dtype = engine.identity.dtype
    layers, limit = engine.identity.geometry.num_layers, tolerance_for(dtype).trajectory
    worst = float(np.max(np.abs(replayed - collected) / spreads(collected, layers)))
    if not worst <= limit:
        raise EngineError(
            f"serving and training read different logits: they differ by {worst:.3g} spreads,"
            f" {limit:.3g} would pass in {dtype}; if another run says so, too, the engine does not"
            " fit this model"
        )


def model_record(identity: ModelIdentity) -> stored.ModelRecord:
    """Return the manifest's record.  It names only the last part of a model's folder, since the
    path is private."""
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
    """Return the manifest without version, time, digests and files, which publishing adds."""
    counts = {
        key: count for key, count in data.counts.items() if key != "others"
    }  # only the evaluation names them
    training = stored.TrainingRecord(
        data_digest=data.dataset.origin.file_digest,
        labels=options.answers,
        judge=options.judged_by if options.answers == "generate" else None,
        samples=SAMPLES if options.answers == "self" else None,
        sample_temperature=SAMPLE_TEMPERATURE if options.answers == "self" else None,
        seeds=options.shuffles,
        folds=options.folds,
        c=c,
        c_grid=tuple(sorted(set(options.c_grid))) if options.c is None else (),
        class_balance=options.class_balance,
        hallutracer_version=service.__version__,
        decoding=options.decoding(data.dataset.origin.decodings),
        shapes=shapes_of(data.dataset.rows, prompt_format),
        scripts=scripts_of_rows(data.dataset.rows, prompt_format),
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
        logit_scale=options.scale,
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
    """Return evaluation.json of a bundle with these ``signals`` and the fitted and calibrated
    ``probe``."""
    label, group = data.inputs.label, data.inputs.group
    learnt = data.inputs.readouts.label
    scaled = probe.scaled_[options.scale]
    layers, means = layer_aurocs(label, scaled.out_of_fold)
    shift = scale_shift(scaled.out_of_fold.mean(axis=-1), scaled.trajectory.mean(axis=-1), learnt)
    counts: dict[str, Any] = {
        "file": options.file.name,
        "digest": data.dataset.origin.file_digest,
        "effective_groups": rounded(effective_groups(group)),
        "largest_group_share": rounded(
            float(np.unique(group, return_counts=True)[1].max() / len(group))
        ),
    } | data.counts
    if data.labelled.left_out:
        counts["left_out_because"] = data.labelled.left_out
    if data.labelled.agreement is not None:
        counts["self_labels"] = {
            "samples": SAMPLES,
            "temperature": SAMPLE_TEMPERATURE,
            "agreement": rounded(float(data.labelled.agreement.mean())),
            "figures_by": data.labelled.figures_by,
            "wrong": rounded(float(1 - label.mean())),
        }
    if data.dataset.origin.clustered:
        counts["kinds"] = "clusters"
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
            "risks": risks_document(risks, learnt, group),
        },
        "rows_seen": {"training": Marks.of(data.dataset).document()},
        "signal_of_the_bundle": name_of(signals, options.scale),
    }
    if nested is not None:
        document["cross_validation"] = nested.document
    return document


LEAST_PROFILED = 100  # groups; a stratum with fewer has no profile of its own


def gates_by_passage(
    label: NDArray[np.int64], risk: Floats, group: NDArray[np.int64], passage: NDArray[np.bool_]
) -> dict[str, Any]:
    """Return the profile of the rows with a passage ("true") and of those without ("false"); label
    .. passage [n].

    A stratum with few groups has none."""
    profiles = {}
    for name, inside in (("false", ~passage), ("true", passage)):
        if len(np.unique(group[inside])) >= LEAST_PROFILED:
            profiles[name] = asdict(gate_profile(label[inside], risk[inside], group[inside]))
    return profiles


def risks_document(
    risk: Floats, label: NDArray[np.integer], group: NDArray[np.integer]
) -> dict[str, str]:
    """Return risk, class and group of each row [n], as texts, since a list takes a line for each
    number."""
    numbers = np.unique(group, return_inverse=True)[1]
    return {
        "risk": " ".join(f"{value:.6f}" for value in risk),
        "hallucinated": " ".join(str(1 - int(value)) for value in label),
        "group": " ".join(map(str, numbers.tolist())),
    }


def read_risks(document: Mapping[str, str]) -> LabelledRisks:
    """Parse what ``risks_document`` returns."""
    hallucinated, group = (
        np.array(document[key].split(), np.int64) for key in ("hallucinated", "group")
    )
    return LabelledRisks(np.array(document["risk"].split(), np.float64), 1 - hallucinated, group)


MOST_KINDS = 20  # in a table by kind; some sources have hundreds of kinds
BY_STRATUM = {"by_form": FORM, "by_kind": "kind"}


def strata_tables(
    label: NDArray[np.int64], risk: Floats, strata: Sequence[Mapping[str, str]], threshold: float
) -> dict[str, Any]:
    """Return ``by_stratum`` for each key of ``BY_STRATUM`` that every row has; by kind only if the
    kinds are few."""
    tables = {
        name: by_stratum(label, risk, strata, threshold, key) for name, key in BY_STRATUM.items()
    }
    return {
        name: table
        for name, table in tables.items()
        if table and (name != "by_kind" or len(table) <= MOST_KINDS)
    }


LEAST_WORDINGS = 3  # wordings that a question needs to be measured


def rewording(data: PreparedData, risk: Floats, threshold: float) -> dict[str, Any]:
    """Return for evaluation.json how much decisions depend on a question's wording; risk [seeds, n]
    of labelled rows.

    Empty if no question has ``LEAST_WORDINGS``.  ``decided_differently``: of the questions whose
    answers are all right or all wrong, the share whose decision is not the same in every wording.
    ``log_odds_spread``: standard deviation of a risk's log odds within a question."""
    label, wordings = data.inputs.label, defaultdict[str, list[int]](list)
    for position, number in enumerate(data.labelled.index.tolist()):
        row = data.dataset.rows[number]
        if (form := row.strata.get(FORM, "")).startswith(WORDING):
            wordings[row.id.partition(f"+{form}")[0]].append(position)
    questions = [
        index for index in map(np.array, wordings.values()) if len(index) >= LEAST_WORDINGS
    ]
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
    label: NDArray[np.int64],
    risk: Floats,
    strata: Sequence[Mapping[str, str]],
    threshold: float,
    key: str = FORM,
) -> dict[str, Any]:
    """Return for evaluation.json rows, share wrong, mean risk, its error, AUROC and the gate of
    each form or kind.

    label [n], risk [seeds, n]; means over seeds.  ``calibration_error`` is debiased.  AUROC is None
    if a stratum has only one class; figures of answered rows are None if none is answered.  Empty
    unless every row has its ``key``."""
    names = [row[key] for row in strata if row.get(key)]
    stratum, table = np.array(names), dict[str, Any]()
    for name in sorted(set(names)) if len(names) == len(strata) else ():
        inside = stratum == name
        labels, risks = label[inside], risk[:, inside]
        both, answered = 0 < labels.sum() < len(labels), risks < threshold
        table[name] = rounded(
            {
                "rows": len(labels),
                "wrong": float(1 - labels.mean()),
                "mean_risk": float(risks.mean()),
                "calibration_error": float(
                    np.mean([debiased_calibration_error(labels, of_seed) for of_seed in risks])
                ),
                "auroc": (
                    float(np.mean([risk_auroc(labels, of_seed) for of_seed in risks]))
                    if both
                    else None
                ),
                "answered": float(answered.mean()),
                "wrong_among_answered": (
                    (1 - labels)[np.nonzero(answered)[1]].mean() if answered.any() else None
                ),
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
    read = (words for words, names in groups.items() if set(names) & set(signals))
    served = " and ".join(["depth mean", *read])
    risks: dict[str, Floats] = {}
    if nested is not None:  # the first seed's folds; together they cover every row once
        shown = {
            "depth mean": name_of(options.reads[:1], options.scale),
            served: name_of(signals, options.scale),
            "first-token probability": "first_token_max_prob",
            "prompt length": "prompt_length",
        }
        risks = {text: nested.risk[name][0] for text, name in shown.items()}
    units = {
        "unit_norm": "distance from the probe's plane",
        "standardized": "within-class std",
        "joint": "log odds",
    }
    return PlotData(
        inputs.label,
        inputs.group,
        risks,
        class_mean,
        class_std,
        layers,
        means,
        logit_unit=units[options.scale],
        served=served,
        threshold=threshold,
        ranking_only=("prompt length",),
    )
