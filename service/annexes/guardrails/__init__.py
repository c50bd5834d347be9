"""Guardrails in the protocols of other products: LiteLLM's proxy, callers of a classifier, and the
detectors of FMS Guardrails."""

from __future__ import annotations

from service.annexes import Annex

LITELLM_ROUTE = "/beta/litellm_basic_guardrail_api"  # LiteLLM's own name
CLASSIFY_ROUTE = "/classify"
# of FMS Guardrails
CONTENTS_DETECTOR = "/api/v1/text/contents"
MESSAGES_DETECTOR = "/api/v1/text/chat"
DETECTOR_ROUTES = (CONTENTS_DETECTOR, MESSAGES_DETECTOR)

ANNEX = Annex(
    name="guardrails",
    routers=(
        "service.annexes.guardrails.guardrail_routes:guarding",
        "service.annexes.guardrails.guardrail_routes:router",
        "service.annexes.guardrails.detector_routes:router",
    ),
    prompt_routes=(LITELLM_ROUTE, CLASSIFY_ROUTE, *DETECTOR_ROUTES),
    error_bodies=dict.fromkeys(
        DETECTOR_ROUTES, "service.annexes.guardrails.detector_routes:error_body"
    ),
)
