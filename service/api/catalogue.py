"""GET /v1/models, /v1/bundles and one bundle: what is loaded, what it keeps, and the schema of all
that; and the reload."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field

from probes_store.bundle import Bundle
from service.access.routes import RELOAD_ROUTE, SAMPLE_ROUTE, SCORE_ROUTES
from service.api.asking import answer, requested
from service.api.auth import Admin, TheService, check_page, who_of
from service.api.reply import FAILURES, errors
from service.api.request_schema import Risk, Strict
from service.engines.base import Sampling
from service.errors import AuditUnavailable, NotFound, NotReady, ReloadFailed
from service.judging import evaluation
from service.judging.evaluation import Share
from service.scoring import Scorer
from service.serving import observers
from service.serving.metrics import Comparison
from service.serving.request_log import record_of
from service.serving.sampled import Verdict, judged
from service.serving.service import Service


class _OfRecord(Strict):
    model_config = ConfigDict(from_attributes=True)


class BundleGuarantee(_OfRecord):
    """What the threshold of a bundle promises; the statement says for whom, and when it is void."""

    alpha: float
    delta: float
    threshold: float
    groups: int
    hallucinated: int
    p_value: float
    answered: float
    risk_control_threshold: float | None
    rows: int
    all_groups: int
    data_digest: str
    labels: str
    judge: str | None
    dtype: str
    seed: int
    statement: str


class BundleStratum(_OfRecord):
    """The guarantee for the questions with, or without, a passage beside them, which were tested
    apart.

    It is about these alone, at confidence 1 - its own ``delta``."""

    passage: bool
    delta: float
    threshold: float
    groups: int
    hallucinated: int
    p_value: float
    answered: float
    rows: int
    labelled: int


class BundleInterval(_OfRecord):
    """How wide an interval of the risk is: see the bundle format."""

    level: float
    fits: int
    centre: float
    base: float
    by_log_odds: float
    by_distance: float


class BundleUncertainty(_OfRecord):
    """What a bundle knows of its risks' uncertainty; the statement says what it means."""

    outside_share: float
    outside_rows: int
    interval: BundleInterval | None
    statement: str


class BundleApplicability(_OfRecord):
    """Where P(asks) is below the threshold, a prompt asks for no fact; the statement says what it
    means."""

    threshold: float
    questions_below: float = Field(
        description="share of the training questions that are taken for no question"
    )
    others_above: float = Field(
        description="share of the other training prompts that are taken for questions"
    )
    statement: str


class DriftOut(_OfRecord):
    """The newest window of prompts that this bundle judged, beside its training rows."""

    prompts: int = Field(description="different ones, the newest")
    independent: float = Field(
        description="prompts that tell as much, since neighbours are alike; limits follow it"
    )
    ks: float = Field(description="largest distance of the two distribution functions of the risk")
    psi: float = Field(description="population stability index over the tenths of training")
    shift: float = Field(description="mean risk of the window less that of training")
    outside: float | None = Field(
        description="share of prompts outside training; null where the bundle cannot tell"
    )


class LabelsOut(_OfRecord):
    """Answers that were drawn at random under this bundle, one for each different prompt, up to the
    newest label."""

    drawn: int
    labelled: int = Field(description="of these; the others are taken for right")
    wrong: int


class GateOut(_OfRecord):
    """What answering below one threshold does, as shares of the training rows."""

    threshold: Share
    answered: Share
    wrong_among_answered: Share | None = Field(description="null where nothing is answered")
    right_withheld: Share = Field(description="of the rows that the model answers right")


class TenthOut(_OfRecord):
    """A tenth of the training rows, ordered by risk."""

    low: Share = Field(description="its smallest risk")
    high: Share = Field(description="its largest")
    right: Share = Field(description="share that the model answered right")


class CoverageOut(_OfRecord):
    """What a bundle would answer and get wrong over thresholds, on questions like its training
    rows."""

    source: evaluation.CoverageSource = Field(
        description=(
            "counted from the out-of-fold risks of the training rows; or nothing but the bundle's"
            " own threshold is known"
        )
    )
    rows: int
    hallucinated: Share = Field(
        description="share of the rows: what is wrong where everything is answered"
    )
    gates: list[GateOut] = Field(description="at the thresholds 0, 0.01 ... 1; may be empty")
    own: GateOut | None = Field(
        description="measured at the bundle's own threshold, by cross-validation"
    )
    tenths: list[TenthOut] = Field(
        description="lowest risks first; empty where the rows' risks were not kept, or are too few"
    )


class FormOut(_OfRecord):
    """What a bundle's risk is worth on questions that were asked in one form of conversation."""

    form: str
    rows: int
    wrong: Share = Field(description="share that the model answers wrong")
    mean_risk: Share = Field(
        description="far from 'wrong', the risk is no probability in this form"
    )
    calibration_error: Share = Field(description="debiased")
    auroc: Share | None = Field(description="null where the rows are of one class")
    answered: Share | None = Field(
        description="null, as the next, where a calibration has set another threshold since"
    )
    wrong_among_answered: Share | None = Field(description="null where nothing is answered")


class FormsOut(_OfRecord):
    """A bundle's risk by form of conversation."""

    source: evaluation.FormsSource = Field(
        description=(
            "measured on held-out rows, or on the training rows by folds that never saw the row"
        )
    )
    data: list[FormOut]


class SampleQuestionOut(_OfRecord):
    """A held-out question that the bundle carries."""

    prompt: str
    answers: list[str] = Field(description="accepted ones")
    kind: str = Field(description="'' where the data name none")


class ModelCard(Strict):
    """The loaded model, as OpenAI lists models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "hallutracer"
    architecture: str
    revision: str
    dtype: str
    max_model_len: int
    bundles: list[str] = Field(description="references of the loaded bundles, the default first")
    root: str = Field(description="the model's own name; `id` may be one of --served-model-name")


class ModelList(Strict):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class GoldenOut(Strict):
    """The golden prompts, replayed when the bundle was loaded: the largest deviation from what was
    recorded."""

    risk: float
    risk_tolerance: float
    trajectory: float = Field(description="in units of the trajectories' spread")
    trajectory_tolerance: float


class ComparedOut(Strict):
    """A shadow beside the bundles that judged the same prompts, in this process."""

    prompts: int
    stricter: int = Field(description="prompts that it alone flags")
    looser: int = Field(description="prompts that it alone does not flag")
    failed: int = Field(description="prompts of which it gave no number")
    disagreement: float | None = Field(
        description="share that was not agreed on, failures included"
    )
    mean_difference: float | None = Field(description="of the two risks, absolute")


class LeftOut(Strict):
    """A bundle that was asked for and is not used."""

    reference: str
    reason: str


class LoadedOut(Strict):
    """When the bundles were loaded, and what could not be."""

    since: str = Field(description="when the loaded bundles began to serve, UTC")
    left_out: list[LeftOut]
    reload_error: str | None = Field(description="why the newest reload changed nothing")
    reload_failing_since: str | None = Field(
        description="when the first reload failed since one was done, UTC"
    )


class BundleCard(Strict):
    """A loaded bundle."""

    id: str = Field(description="name:version")
    object: Literal["bundle"] = "bundle"
    name: str
    version: int
    digest: str
    created: str
    model: str
    site: str = Field(description="where each layer is read: attention_head or residual_stream")
    logit_scale: str
    signals: list[str]
    prompt_format: str
    threshold: float
    guarantee: BundleGuarantee | None = None
    uncertainty: BundleUncertainty | None = None
    applicability: BundleApplicability | None = Field(
        None, description="tells prompts that ask for no fact; null where the bundle cannot"
    )
    guarantee_shapes: list[str] | None = Field(
        None,
        description=(
            "shapes of conversation that the guarantee was calibrated on; null where it does"
            " not say"
        ),
    )
    guarantee_strata: list[BundleStratum] | None = Field(
        None,
        description=(
            "the guarantee with and without a passage beside the question; null where it was not"
            " tested apart"
        ),
    )
    role: Literal["default", "canary", "shadow", "none"] = Field(
        description="what it does for requests that name no bundle; none: nothing"
    )
    share: float | None = Field(
        None, description="of these requests, that a default or a canary judges"
    )
    compared: ComparedOut | None = Field(None, description="of a shadow, since the service started")
    reads_answers: bool = Field(description="it reads an answer's own tokens, and the engine does")
    golden: GoldenOut
    drift: DriftOut | None = Field(
        None, description="none before the first window, or without a reference"
    )
    labels: LabelsOut | None = Field(
        None, description="what the guarantee is held against; none without both"
    )
    void: list[str] = Field(
        description="why a guarantee does not hold just now, whatever the request"
    )
    default: bool


class ClassTrajectories(Strict):
    """Where the truth logits of the training rows lie, out of fold, layer by layer."""

    factual: list[float] = Field(
        description="mean over the rows that the model answered right, one for each layer"
    )
    hallucinated: list[float] = Field(description="the same over the rows that it answered wrong")
    factual_std: list[float]
    hallucinated_std: list[float]


class SampleOut(_OfRecord):
    """Held-out questions that were drawn before any risk was known: what the risk is worth, for a
    stranger to see."""

    file: str = Field(description="of the rows that they were drawn from")
    questions: list[SampleQuestionOut]


class SampleAnswerOut(Strict):
    """What came of a question of the sample under the caller's policy, and the risk that was read
    before the answer."""

    object: Literal["sample.answer"] = "sample.answer"
    number: int = Field(description="of the question, from 0")
    prompt: str
    kind: str
    risk: Risk
    threshold: Risk
    flagged: bool = Field(description="what a gate would withhold")
    decision: str = Field(
        description="what the caller's policy does: continue, or how it withholds the answer"
    )
    outside_training: bool | None = Field(description="null where the bundle cannot tell")
    applies: bool | None = Field(
        description="false: it asks for no fact; null where the bundle cannot tell"
    )
    answer: str | None = Field(
        description="null where the policy withholds it: none is decoded then"
    )
    verdict: Verdict | None = Field(
        description="null where the policy withholds the answer, or ends it under way"
    )
    accepted: list[str] = Field(description="answers that are right")


class BundleDetail(BundleCard):
    """GET /v1/bundles/{bundle}: the card, and what a picture of a risk needs."""

    trajectories: ClassTrajectories
    coverage: CoverageOut
    forms: FormsOut | None = Field(
        None, description="null where none is kept, and after a recalibration"
    )
    sample: SampleOut | None = Field(
        None, description="null where the bundle carries none (train --no-sample)"
    )
    recommendation: str | None = Field(
        None,
        description="whether the bundle pays for its model: use it, use it for some kinds of"
        " question, or do not; null where none was measured, or the gate was changed since",
    )


class BundleList(Strict):
    """GET /v1/bundles."""

    object: Literal["list"] = "list"
    data: list[BundleCard]
    policies: list[str] = Field(description="values of a request's 'policy', the default first")
    status: LoadedOut


router, admin = APIRouter(tags=["catalogue"]), APIRouter(tags=["admin"])
RESPONSES = errors(
    _401="no bearer key, or an unknown one", _503="not ready: loading, or shutting down"
)


@router.head("/v1/models", include_in_schema=False)
@router.head("/v1/models/", include_in_schema=False)
@router.get("/v1/models/", include_in_schema=False)  # else the model of the name ""
@router.get("/v1/models", summary="The loaded model and its names", responses=RESPONSES)
async def models(service: TheService) -> ModelList:
    """The loaded model, then the other names that requests may give it."""
    card = _loaded_model(service)
    names = [name for name in service.settings.model_names if name not in ("*", card.id)]
    return ModelList(data=[card, *(card.model_copy(update={"id": name}) for name in names)])


@router.head("/v1/models/{name:path}", include_in_schema=False)
@router.get(
    "/v1/models/{name:path}",
    summary="The loaded model, by a name",
    responses=RESPONSES | errors(_404="no such model is loaded"),
)
async def model(name: str, service: TheService) -> ModelCard:
    """The loaded model, by one of its names."""
    service.ready.scorer(None, name)
    return _loaded_model(service).model_copy(update={"id": name})


def _loaded_model(service: Service) -> ModelCard:
    service.lifecycle.check_ready()
    scorers = service.catalogue.scorers
    identity, bundles = scorers[0].engine.identity, [scorer.bundle.reference for scorer in scorers]
    return ModelCard(
        id=identity.model,
        created=service.created,
        architecture=identity.architecture,
        revision=identity.revision,
        dtype=identity.dtype,
        max_model_len=identity.max_tokens,
        bundles=bundles,
        root=identity.model,
    )


@router.head("/v1/bundles", include_in_schema=False)
@router.get("/v1/bundles", summary="Loaded bundles and policies", responses=RESPONSES)
async def bundles(service: TheService) -> BundleList:
    """The loaded bundles, what each does, and the available policies."""
    default, lifecycle = service.settings.policy, service.lifecycle
    loaded = service.catalogue.loaded
    lifecycle.check_ready()
    return BundleList(
        data=[BundleCard(**_card(scorer, service)) for scorer in service.catalogue.scorers],
        policies=[default, *sorted(set(service.catalogue.policies.named) - {default})],
        status=LoadedOut(
            since=_time(loaded.time),
            left_out=[
                LeftOut(reference=name, reason=reason) for name, reason in loaded.left_out.items()
            ],
            reload_error=lifecycle.reload_error,
            reload_failing_since=(
                None if lifecycle.failing_since is None else _time(lifecycle.failing_since)
            ),
        ),
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


@router.head("/v1/bundles/{bundle}", include_in_schema=False)
@router.get(
    "/v1/bundles/{bundle}",
    summary="One bundle: what its thresholds and risks are worth",
    responses=RESPONSES | errors(_404="no such bundle is loaded"),
)
async def one_bundle(bundle: str, service: TheService) -> BundleDetail:
    """One loaded bundle, as name, name:version or name@alias: its classes, what its thresholds do,
    its forms."""
    scorer = service.ready.scorer(bundle, None)
    card, probes = _card(scorer, service), scorer.bundle.probes
    mean, std = [
        dict(zip(("hallucinated", "factual"), array.tolist(), strict=True))
        for array in (probes.trajectory_mean, probes.trajectory_std)
    ]
    return BundleDetail(
        **card,
        trajectories=ClassTrajectories(
            **mean, **{f"{name}_std": values for name, values in std.items()}
        ),
        **await asyncio.to_thread(_evaluated, scorer.bundle),
    )


@lru_cache(maxsize=32)  # reads a file; a bundle never changes
def _evaluated(bundle: Bundle) -> dict[str, Any]:
    return {
        "coverage": evaluation.coverage(bundle),
        "recommendation": evaluation.recommendation_of(bundle),
        "forms": evaluation.form_table(bundle),
        "sample": evaluation.sample_of(bundle),
    }


def _card(scorer: Scorer, service: Service) -> dict[str, Any]:
    manifest, golden = scorer.bundle.manifest, scorer.golden
    rollout, monitor = service.catalogue.rollout, service.catalogue.monitors.get(manifest.reference)
    role = rollout.role(scorer, service.catalogue.scorers[0])
    alike = [name for name in BundleCard.model_fields if hasattr(manifest, name)]
    compared = service.metrics.compared.get(manifest.reference, Comparison())
    return {name: getattr(manifest, name) for name in alike} | {
        "id": manifest.reference,
        "model": manifest.model.name,
        "site": manifest.readout.site,
        "applicability": None if manifest.context is None else manifest.context.applicability,
        "default": role == "default",
        "role": role,
        "reads_answers": scorer.answer_probes is not None,
        "share": (
            {
                "default": 1.0 if rollout.canary is None else 1.0 - rollout.share,
                "canary": rollout.share,
            }.get(role)
        ),
        "compared": _compared(compared) if rollout.shadowed(manifest.digest) else None,
        "drift": monitor and monitor.drift,
        "labels": monitor and monitor.labels,
        "void": [] if monitor is None else monitor.reasons,
        "golden": GoldenOut(
            risk=golden.found.risk,
            risk_tolerance=golden.allowed.risk,
            trajectory=golden.found.trajectory,
            trajectory_tolerance=golden.allowed.trajectory,
        ),
    }


def _compared(comparison: Comparison) -> ComparedOut:
    counts = comparison.by_verdict
    prompts = sum(counts.values())
    scored = prompts - counts["failed"]
    return ComparedOut(
        prompts=prompts,
        **{str(verdict): count for verdict, count in counts.items() if verdict != "agrees"},
        disagreement=1.0 - counts["agrees"] / prompts if prompts else None,
        mean_difference=comparison.difference / scored if scored else None,
    )


@router.get(
    SAMPLE_ROUTE,
    summary="A held-out question, judged under the caller's policy, and its answer",
    responses=FAILURES | errors(_404="no such bundle is loaded, or it carries no such question"),
)
async def sample_answer(
    bundle: str, number: int, request: Request, service: TheService
) -> SampleAnswerOut:
    """One question of the bundle's sample: the risk before the answer, and where the policy lets it
    the answer.

    It is asked as a prompt of /v1/risk/score is: in the queue, by the deadline, and in the audit
    log each time.  What was answered once under a policy is kept.  Neither feedback nor the drift
    monitor is told: it is no traffic."""
    check_page(request, service.settings.cors_origins)
    scorer = service.ready.scorer(bundle, None)
    sample: evaluation.Sample | None = (await asyncio.to_thread(_evaluated, scorer.bundle))[
        "sample"
    ]
    count = 0 if sample is None else len(sample.questions)
    if sample is None or not 0 <= number < count:
        raise NotFound(
            f"{scorer.bundle.reference} carries {count} questions, and none of number {number}"
        )
    prompts, reference = [sample.questions[number].prompt], scorer.bundle.reference
    spec = requested(request, service, SCORE_ROUTES[0], "prompt", prompts, bundle=reference)
    key = spec.scorer.bundle.manifest.digest, number, spec.policy
    judgement = service.sampled.get(key)
    if judgement is None:
        sampling = Sampling(max_tokens=min(sample.max_tokens, service.settings.max_new_tokens))
        reply = await answer(request, service, replace(spec, sampling=sampling, of_sample=True))
        reply.end()
        served = {current.bundle.manifest.digest for current in service.catalogue.scorers}
        for old_key in [old_key for old_key in service.sampled if old_key[0] not in served]:
            del service.sampled[old_key]  # of bundles that were served before
        judgement = service.sampled[key] = reply.judgement
    else:
        id, who = record_of(request).request_id, who_of(request)
        await observers.judged(
            service, replace(judgement, request_id=id, caller=spec.caller, who=who)
        )
    (prompt,) = judgement.prompts
    answered = judged(sample, number, spec.scorer, prompt.token_ids, prompt.report)
    question, report = answered.question, answered.report
    return SampleAnswerOut(
        number=number,
        prompt=question.prompt,
        kind=question.kind,
        risk=report.risk,
        flagged=report.verdict.flagged,
        decision=str(report.decision),
        threshold=report.verdict.threshold,
        outside_training=report.uncertain.outside,
        applies=report.context.said,
        answer=answered.answer,
        verdict=answered.verdict,
        accepted=list(question.answers),
    )


RELOADED = errors(
    _401="no bearer key, or an unknown one",
    _403=(
        "the key does not have the scope admin, or there are no keys and the caller is not on this"
        " machine"
    ),
    _404="this service was not started by a command that can reload",
    _409=(
        "the keys or the bundles cannot be used; the message tells of each, and what cannot be used"
        " is as before"
    ),
    _503="not ready: loading, or shutting down; or the audit log cannot be written",
)


@admin.post(RELOAD_ROUTE, summary="Load keys and bundles again", responses=RELOADED)
async def reload(service: TheService, who: Admin) -> BundleList:
    """Read the keys again, look the bundles up again and swap them; requests under way end with
    what they began with.

    Of keys and bundles each is taken where it can be, whatever is wrong with the other."""
    if service.lifecycle.load_again is None:
        raise NotFound("this service cannot load its bundles again")
    keys, error = await service.reload(who)
    if keys is None and error is None:
        return await bundles(service)
    swapped = "swapped" if error is None else f"not swapped, those that were loaded stay: {error}"
    kind = type(error) if isinstance(error, NotReady | AuditUnavailable) else ReloadFailed
    raise kind(f"keys: {keys or 'as their file says'}; bundles: {swapped}")
