"""The routes that read a prompt, and what a key needs for each route."""

from __future__ import annotations

from service.access.callers import USER_SCOPES, Scope

SCORE_ROUTES = ("/v1/risk/score", "/score")  # the second is an alias
CHAT_ROUTE, TEXT_ROUTE = "/v1/chat/completions", "/v1/completions"
RESPONSES_ROUTE = "/v1/responses"  # OpenAI's newer protocol
MESSAGES_ROUTE = "/v1/messages"  # Anthropic's
COUNT_ROUTE = f"{MESSAGES_ROUTE}/count_tokens"  # no answer and no risk: it only renders
CONVERSATION_ROUTES = (CHAT_ROUTE, RESPONSES_ROUTE, MESSAGES_ROUTE)
LITELLM_ROUTE = "/beta/litellm_basic_guardrail_api"  # LiteLLM's own name
CLASSIFY_ROUTE = "/classify"
CONTENTS_DETECTOR, MESSAGES_DETECTOR = "/api/v1/text/contents", "/api/v1/text/chat"  # of FMS Guardrails
DETECTOR_ROUTES = (CONTENTS_DETECTOR, MESSAGES_DETECTOR)
FEEDBACK_ROUTE = "/v1/feedback"
ANSWER_ROUTES = (*SCORE_ROUTES, CHAT_ROUTE, TEXT_ROUTE, RESPONSES_ROUTE, MESSAGES_ROUTE)
PROMPT_ROUTES = (*ANSWER_ROUTES, LITELLM_ROUTE, CLASSIFY_ROUTE, *DETECTOR_ROUTES)
CALLED = frozenset({*PROMPT_ROUTES, COUNT_ROUTE, FEEDBACK_ROUTE})
CATALOGUE = ("/v1/models", "/v1/bundles")
METRICS = "/metrics"
ADMIN = "/v1/admin/"  # what changes the service is below it
RELOAD_ROUTE = f"{ADMIN}reload"
OTHER = "other"  # of vLLM's own server, whose further routes read prompts, too
COUNTED = tuple(route for route in PROMPT_ROUTES if route != SCORE_ROUTES[1]) + (OTHER,)


def canonical(route: str) -> str:
    """Return the route that an alias stands for."""
    return SCORE_ROUTES[0] if route in SCORE_ROUTES else route


def scopes_of(path: str) -> frozenset[Scope]:
    """Return the scopes of which a key needs one for this path; none: every key opens it."""
    if path.startswith(ADMIN):
        return frozenset({Scope.ADMIN})
    if path in CALLED:
        return frozenset({Scope.SCORE})
    if path == METRICS:
        return frozenset({Scope.OBSERVE})
    if path.startswith(CATALOGUE):  # the names that every answer has
        return USER_SCOPES
    return frozenset()
