"""The request of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictInt, StrictStr

from service.api.request_schema import AnswerRequest, ForeignModel, Stop


class TextBlock(ForeignModel):
    """A block of a message; only text can be read."""

    ignored = frozenset(("cache_control", "citations"))

    type: Literal["text"]
    text: StrictStr


Texts = StrictStr | Annotated[list[TextBlock], Field(fail_fast=True, min_length=1, max_length=1024)]


def joined(content: str | list[TextBlock]) -> str:
    """Return the whole text."""
    return content if isinstance(content, str) else "".join(block.text for block in content)


class AnthropicMessage(ForeignModel):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Texts


class OutputConfig(ForeignModel):
    """How the answer is to be written."""

    neutral = {"format": ()}
    ignored = frozenset(("effort",))


class MessagesRequest(AnswerRequest):
    """POST /v1/messages."""

    neutral = {
        "tools": ([],), "tool_choice": ({"type": "auto"}, {"type": "none"}), "thinking": ({"type": "disabled"},),
        "top_k": (-1, 0), "container": (), "mcp_servers": ([],), "context_management": (), "output_format": (),
        "speed": ("standard",),
    }  # fmt: skip
    ignored = frozenset(
        ("metadata", "service_tier", "cache_control", "inference_geo", "diagnostics", "user_profile_id", "workspace_id")
    )

    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True, min_length=1, max_length=1024)]
    max_tokens: StrictInt = Field(ge=1, description="an answer may end earlier, shortly before the deadline")
    system: Texts | None = None
    stop_sequences: Stop | None = None
    temperature: float | None = Field(None, ge=0.0, le=1.0, strict=True, description="default 1; 0 is greedy")
    output_config: OutputConfig | None = None

    @property
    def length(self) -> int | None:
        """Return None: ``max_tokens``, which every request has to name, is only a bound."""
        return None

    def stops(self) -> tuple[str, ...]:
        """Return the texts that end the answer."""
        return tuple(self.stop_sequences or ())

    def conversation(self) -> list[dict[str, str]]:
        """Return the messages for the chat template."""
        first = [] if self.system is None else [{"role": "system", "content": joined(self.system)}]
        return [*first, *({"role": one.role, "content": joined(one.content)} for one in self.messages)]
