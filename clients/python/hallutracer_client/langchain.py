"""LangChain: ``RiskGuard`` stands before a model in a chain, ``RiskMiddleware`` before an agent.

Needs ``hallutracer-client[langchain]``.  In async chains and agents the request runs in a
thread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hallutracer_client.client import Client
from hallutracer_client.guard import Guard, details, turn
from hallutracer_client.results import Risk, Withheld

try:
    from langchain.agents.middleware import AgentMiddleware, AgentState, hook_config
    from langchain_core.language_models import LanguageModelInput
    from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages
    from langchain_core.prompt_values import PromptValue
    from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
except ImportError as error:
    raise ImportError(
        f"{error}; pip install 'hallutracer-client[langchain]'", name=error.name
    ) from error

ROLES = {"system": "system", "developer": "system", "human": "user", "ai": "assistant"}


class RiskGuard(Runnable[LanguageModelInput, LanguageModelInput]):
    """Passes a model's input on where its risk allows, as in ``prompt | guard | model``; else
    raises ``Withheld``.

    ``policy``, ``threshold`` and ``bundle`` are those of a request; None: the service's own."""

    def __init__(
        self,
        client: Client,
        *,
        policy: str | None = None,
        threshold: float | None = None,
        bundle: str | None = None,
    ) -> None:
        self._guard = Guard(client, policy, threshold, bundle)

    def invoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **_: Any
    ) -> LanguageModelInput:
        """Return the input, unchanged.  Raises Withheld, ValueError for what cannot be scored,
        ClientError."""

        def passed(value: LanguageModelInput) -> LanguageModelInput:
            self._guard.risk(messages=conversation(value), raises=True)
            return value

        return self._call_with_config(passed, input, config, run_type="chain")

    def before(self, model: Runnable[LanguageModelInput, Any]) -> Runnable[LanguageModelInput, Any]:
        """Return ``model``, answering where the risk allows; else with the policy's message, as
        ``refused``."""

        def choose(value: LanguageModelInput) -> Any:
            try:
                self._guard.risk(messages=conversation(value), raises=True)
            except Withheld as withheld:
                return refused(withheld.risk)
            return model  # which RunnableLambda invokes, or streams, with the same input

        return RunnableLambda(choose, name="RiskGuard")


class RiskMiddleware(AgentMiddleware):
    """Scores an agent's conversation before it starts; where the risk is too high, it ends with
    ``refused``.

    The risk is that of answering at once, without a tool: calls of tools and their results are left
    out."""

    def __init__(
        self,
        client: Client,
        *,
        policy: str | None = None,
        threshold: float | None = None,
        bundle: str | None = None,
    ) -> None:
        super().__init__()
        self._guard = Guard(client, policy, threshold, bundle)

    @hook_config(can_jump_to=["end"])
    def before_agent(self, state: AgentState[Any], runtime: Any) -> dict[str, Any] | None:
        """End an agent before it starts.  Raises ValueError for what cannot be scored,
        ClientError."""
        spoken = [
            one
            for one in state["messages"]
            if one.type != "tool" and not getattr(one, "tool_calls", None)
        ]
        risk = self._guard.risk(messages=conversation(spoken))
        return {"messages": [refused(risk)], "jump_to": "end"} if risk.gated else None


def conversation(value: LanguageModelInput) -> list[dict[str, str]]:
    """Return a model's input, in any form that LangChain takes, as messages of a request."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: Iterable[BaseMessage]
    messages = value.to_messages() if isinstance(value, PromptValue) else convert_to_messages(value)
    return [turn(message.type, _text(message), ROLES) for message in messages]


def refused(risk: Risk) -> AIMessage:
    """Return the message that stands for a withheld answer; its finish reason is
    ``content_filter``."""
    told = details(risk)
    return AIMessage(
        risk.message or "",
        additional_kwargs={"refusal": told.pop("refusal")},
        response_metadata=told,
    )


def _text(message: BaseMessage) -> str | None:
    """Return plain text, also in parts; None where something else is among them."""
    if getattr(message, "tool_calls", None):
        return None
    if isinstance(message.content, str):
        return message.content or message.additional_kwargs.get("refusal") or ""
    parts = [
        one if isinstance(one, str) else one.get("type") == "text" and one.get("text")
        for one in message.content
    ]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else None
