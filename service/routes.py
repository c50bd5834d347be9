"""The routes that read a prompt."""

SCORE_ROUTES = ("/v1/risk/score", "/score")  # the second is an alias
CHAT_ROUTE, TEXT_ROUTE = "/v1/chat/completions", "/v1/completions"
LITELLM_ROUTE = "/beta/litellm_basic_guardrail_api"  # LiteLLM's own name
CLASSIFY_ROUTE = "/classify"
FEEDBACK_ROUTE = "/v1/feedback"
RELOAD_ROUTE = "/v1/admin/reload"
ANSWER_ROUTES = (*SCORE_ROUTES, CHAT_ROUTE, TEXT_ROUTE)
PROMPT_ROUTES = (*ANSWER_ROUTES, LITELLM_ROUTE, CLASSIFY_ROUTE)


def canonical(route: str) -> str:
    """An alias's own route."""
    return SCORE_ROUTES[0] if route in SCORE_ROUTES else route
