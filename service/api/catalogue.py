"""GET /v1/models, /v1/bundles and one bundle: what is loaded."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from datetime import UTC, datetime
from functools import lru_cache

from fastapi import APIRouter

from probes_store.bundle import Bundle
from service.api.auth import TheService
from service.api.catalogue_schema import (
    BundleApplicability,
    BundleCard,
    BundleDetail,
    BundleGuarantee,
    BundleList,
    BundleUncertainty,
    ClassTrajectories,
    ComparedOut,
    CoverageOut,
    DriftOut,
    FormsOut,
    GoldenOut,
    LabelsOut,
    LeftOut,
    LoadedOut,
    ModelCard,
    ModelList,
    SampleAnswerOut,
    SampleOut,
    SampleQuestionOut,
)
from service.api.response_schema import errors
from service.errors import NotFound
from service.judging.evaluation import coverage, form_table, sample_of
from service.scoring import Scorer
from service.serving.rollout import Comparison
from service.serving.service import Service

router = APIRouter(tags=["catalogue"])
RESPONSES = errors(_401="no bearer key, or an unknown one", _503="not ready: loading, or shutting down")


NAMED = RESPONSES | errors(_404="no such model is loaded")


@router.get("/v1/models", summary="The loaded model and its names", responses=RESPONSES)
async def models(service: TheService) -> ModelList:
    """The loaded model, then the other names that requests may give it."""
    card = loaded(service)
    names = [name for name in service.settings.model_names if name not in ("*", card.id)]
    return ModelList(data=[card, *(card.model_copy(update={"id": name}) for name in names)])


@router.get("/v1/models/{name:path}", summary="The loaded model, by a name", responses=NAMED)
async def model(name: str, service: TheService) -> ModelCard:
    """The loaded model, by one of its names."""
    service.ready.scorer(None, name)
    return loaded(service).model_copy(update={"id": name})


def loaded(service: Service) -> ModelCard:
    """The loaded model under its own name.  Raises NotReady."""
    service.lifecycle.check_ready()
    identity = service.catalogue.scorers[0].engine.identity
    return ModelCard(
        id=identity.model,
        created=service.created,
        architecture=identity.architecture,
        revision=identity.revision,
        dtype=identity.dtype,
        max_model_len=identity.max_tokens,
        bundles=[scorer.bundle.reference for scorer in service.catalogue.scorers],
        root=identity.model,
    )


@router.get("/v1/bundles", summary="Loaded bundles and policies", responses=RESPONSES)
async def bundles(service: TheService) -> BundleList:
    """The loaded bundles, what each does, and the available policies."""
    return bundle_list(service)


def bundle_list(service: Service) -> BundleList:
    """What is loaded, since when, and what is left out.  Raises NotReady."""
    service.lifecycle.check_ready()
    default, loaded, lifecycle = service.settings.policy, service.catalogue.loaded, service.lifecycle
    return BundleList(
        data=[_card(scorer, service) for scorer in service.catalogue.scorers],
        policies=[default, *sorted(set(service.catalogue.policies.named) - {default})],
        status=LoadedOut(
            since=_time(loaded.time),
            left_out=[LeftOut(reference=name, reason=reason) for name, reason in loaded.left_out.items()],
            reload_error=lifecycle.reload_error,
            reload_failing_since=None if lifecycle.failing_since is None else _time(lifecycle.failing_since),
        ),
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


@router.get(
    "/v1/bundles/{bundle}",
    summary="One bundle: what its thresholds and risks are worth",
    responses=RESPONSES | errors(_404="no such bundle is loaded"),
)
async def one_bundle(bundle: str, service: TheService) -> BundleDetail:
    """One loaded bundle, as name, name:version or name@alias: its classes, what its thresholds do, its forms."""
    scorer = service.ready.scorer(bundle, None)
    card = _card(scorer, service)
    probes = scorer.bundle.probes
    hallucinated, factual = probes.trajectory_mean.tolist()
    hallucinated_std, factual_std = probes.trajectory_std.tolist()
    by_threshold, by_form, sample = await asyncio.to_thread(_evaluated, scorer.bundle)  # reads a file
    return BundleDetail(
        **dict(card),
        trajectories=ClassTrajectories(
            factual=factual, hallucinated=hallucinated, factual_std=factual_std, hallucinated_std=hallucinated_std
        ),
        coverage=by_threshold,
        forms=by_form,
        sample=sample,
    )


@lru_cache(maxsize=32)  # a bundle never changes
def _evaluated(bundle: Bundle) -> tuple[CoverageOut, FormsOut | None, SampleOut | None]:
    forms, sample = form_table(bundle), sample_of(bundle)
    return (
        CoverageOut.model_validate(asdict(coverage(bundle))),
        None if forms is None else FormsOut.model_validate(asdict(forms)),
        None
        if sample is None
        else SampleOut(
            file=sample.file, questions=[SampleQuestionOut.model_validate(asdict(one)) for one in sample.questions]
        ),
    )


def _card(scorer: Scorer, service: Service) -> BundleCard:
    manifest, golden, rollout = scorer.bundle.manifest, scorer.golden, service.catalogue.rollout
    applies = None if manifest.context is None else manifest.context.applicability
    monitor = service.catalogue.monitors.get(manifest.reference)
    role = rollout.role(scorer, service.catalogue.scorers[0])
    shadowed = rollout.shadowed(manifest.digest)
    share = {"default": 1.0 if rollout.canary is None else 1.0 - rollout.share, "canary": rollout.share}.get(role)
    return BundleCard(
        id=manifest.reference,
        name=manifest.name,
        version=manifest.version,
        digest=manifest.digest,
        created=manifest.created,
        model=manifest.model.name,
        site=manifest.readout.site,
        logit_scale=manifest.logit_scale,
        signals=list(manifest.signals),
        prompt_format=manifest.prompt_format,
        threshold=manifest.threshold,
        guarantee=None if manifest.guarantee is None else BundleGuarantee(**asdict(manifest.guarantee)),
        uncertainty=BundleUncertainty(**asdict(manifest.uncertainty)),
        applicability=None if applies is None else BundleApplicability(**asdict(applies)),
        guarantee_shapes=None if manifest.guarantee_shapes is None else list(manifest.guarantee_shapes),
        default=role == "default",
        role=role,
        share=share,
        compared=_compared(service.metrics.compared.get(manifest.reference, Comparison())) if shadowed else None,
        drift=None if monitor is None or monitor.drift is None else DriftOut(**asdict(monitor.drift)),
        labels=None if monitor is None or monitor.labels is None else LabelsOut(**asdict(monitor.labels)),
        void=[] if monitor is None else list(monitor.reasons),
        golden=GoldenOut(
            risk=golden.found.risk,
            risk_tolerance=golden.allowed.risk,
            trajectory=golden.found.trajectory,
            trajectory_tolerance=golden.allowed.trajectory,
        ),
    )


def _compared(found: Comparison) -> ComparedOut:
    counts = found.by_verdict
    prompts = sum(counts.values())
    given = prompts - counts["failed"]
    return ComparedOut(
        prompts=prompts,
        stricter=counts["stricter"],
        looser=counts["looser"],
        failed=counts["failed"],
        disagreement=1.0 - counts["agrees"] / prompts if prompts else None,
        mean_difference=found.difference / given if given else None,
    )


_sample_of = lru_cache(maxsize=32)(sample_of)  # reads a file; a bundle never changes
DOCUMENTED = RESPONSES | errors(_404="no such bundle is loaded, or it carries no such question")


@router.get(
    "/v1/bundles/{bundle}/sample/{number}", summary="A held-out question, answered and judged", responses=DOCUMENTED
)
async def sample_answer(bundle: str, number: int, service: TheService) -> SampleAnswerOut:
    """One question of the bundle's sample: the risk before the answer, the answer, and whether it is right."""
    scorer = service.ready.scorer(bundle, None)
    sample = await asyncio.to_thread(_sample_of, scorer.bundle)
    if sample is None or not 0 <= number < len(sample.questions):
        count = 0 if sample is None else len(sample.questions)
        raise NotFound(f"{scorer.bundle.reference} carries {count} questions, and none of number {number}")
    found = await service.sampled.answer(scorer, sample, number)
    report = found.report
    return SampleAnswerOut(
        number=number,
        prompt=found.question.prompt,
        kind=found.question.kind,
        risk=report.risk,
        threshold=report.verdict.threshold,
        flagged=report.verdict.flagged,
        outside_training=None if report.uncertain is None else report.uncertain.outside,
        answer=found.answer,
        verdict=found.verdict,
        accepted=list(found.question.answers),
    )
