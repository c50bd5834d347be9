"""The routes that read a prompt, and what a key needs for each route."""

from __future__ import annotations

import re

from service.access.callers import USER_SCOPES, Scope
from service.annexes import annexes

SCORE_ROUTES = ("/v1/risk/score", "/score")  # the second is an alias
CHAT_ROUTE, TEXT_ROUTE = "/v1/chat/completions", "/v1/completions"
RESPONSES_ROUTE = "/v1/responses"  # OpenAI's newer protocol
MESSAGES_ROUTE = "/v1/messages"  # Anthropic's
COUNT_ROUTE = f"{MESSAGES_ROUTE}/count_tokens"  # no answer and no risk: it only renders
CONVERSATION_ROUTES = (CHAT_ROUTE, RESPONSES_ROUTE, MESSAGES_ROUTE)
ANSWER_ROUTES = (*SCORE_ROUTES, CHAT_ROUTE, TEXT_ROUTE, RESPONSES_ROUTE, MESSAGES_ROUTE)
PROMPT_ROUTES = (*ANSWER_ROUTES, *(route for annex in annexes() for route in annex.prompt_routes))
CALLED = frozenset(
    {
        *PROMPT_ROUTES,
        COUNT_ROUTE,
        *(route for annex in annexes() for route in annex.score_routes),
    }
)
CATALOGUE = ("/v1/models", "/v1/bundles")
# it answers a question that the bundle carries
SAMPLE_ROUTE = "/v1/bundles/{bundle}/sample/{number}"
_SAMPLE = re.compile(r"/v1/bundles/[^/]+/sample(/.*)?", re.DOTALL)
METRICS = "/metrics"
HEALTH = frozenset({"/health", "/health/live", "/health/ready"})
# by it HAProxy asks for a server's health where nothing else is named
PLAIN_CHECK = ("OPTIONS", "/")
ADMIN = "/v1/admin/"  # what changes the service is below it
RELOAD_ROUTE = f"{ADMIN}reload"
OTHER = "other"  # of vLLM's own server, whose further routes read prompts, too
COUNTED = (*(route for route in PROMPT_ROUTES if route != SCORE_ROUTES[1]), SAMPLE_ROUTE, OTHER)


def canonical(route: str) -> str:
    """Return the route that an alias stands for, or that a path with parameters is one of."""
    if route in SCORE_ROUTES:
        return SCORE_ROUTES[0]
    return SAMPLE_ROUTE if _SAMPLE.fullmatch(route) else route


def has_engine_work(path: str) -> bool:
    """Return whether a request there takes a place in the queue for the engine."""
    return path in PROMPT_ROUTES or canonical(path) == SAMPLE_ROUTE


def is_health_check(method: str, path: str) -> bool:
    """Return whether a request asks for the service's health, which everybody may."""
    return path in HEALTH or (method, path) == PLAIN_CHECK


def scopes_of(path: str) -> frozenset[Scope]:
    """Return the scopes of which a key needs one for this path; none: every key opens it."""
    if path.startswith(ADMIN):
        return frozenset({Scope.ADMIN})
    if path in CALLED or canonical(path) == SAMPLE_ROUTE:
        return frozenset({Scope.SCORE})
    if path == METRICS:
        return frozenset({Scope.OBSERVE})
    if path.startswith(CATALOGUE):  # the names that every answer has
        return USER_SCOPES
    return frozenset()
