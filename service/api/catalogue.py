"""GET /v1/models and /v1/bundles: the loaded model and bundles."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter

from service.api.dependencies import State
from service.api.response_schema import (
    BundleCard,
    BundleGuarantee,
    BundleList,
    BundleUncertainty,
    ModelCard,
    ModelList,
    errors,
)

router = APIRouter(tags=["catalogue"])
RESPONSES = errors(_401="no bearer key, or an unknown one", _503="not ready: loading, or shutting down")


@router.get("/v1/models", responses=RESPONSES)
async def models(state: State) -> ModelList:
    """The loaded model."""
    state.check_ready()
    identity = state.scorers[0].engine.identity
    card = ModelCard(
        id=identity.model,
        created=state.created,
        architecture=identity.architecture,
        revision=identity.revision,
        dtype=identity.dtype,
        max_model_len=identity.max_tokens,
        bundles=[scorer.bundle.reference for scorer in state.scorers],
    )
    return ModelList(data=[card])


@router.get("/v1/bundles", responses=RESPONSES)
async def bundles(state: State) -> BundleList:
    """The loaded bundles and the available policies."""
    state.check_ready()
    cards = []
    for number, scorer in enumerate(state.scorers):
        manifest = scorer.bundle.manifest
        cards.append(
            BundleCard(
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
                uncertainty=None if manifest.uncertainty is None else BundleUncertainty(**asdict(manifest.uncertainty)),
                default=number == 0,
            )
        )
    default = state.settings.policy
    return BundleList(data=cards, policies=[default, *sorted(set(state.policies) - {default})])
