"""The walk's questions by the protocols' own clients: Responses, Messages, chats with a tool, an
MCP tool.

    python clients.py URL KNOWN UNKNOWN      the key is in HALLUTRACER_API_KEY

KNOWN is a question that the service answers, UNKNOWN one whose answer it withholds.  Each line is
an answer; the first that is not as expected ends with status 1.  Needs the packages openai,
anthropic and hallutracer-client[mcp].
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from anthropic import Anthropic
from mcp import Client, StdioServerParameters, stdio_client
from openai import OpenAI

TOKENS = 12
LOOK_UP: dict[str, Any] = {
    "type": "object",
    "properties": {"of": {"type": "string"}},
    "required": ["of"],
}


def check(what: str, right: bool, seen: object) -> None:
    """Print what was seen; leave where it is not right."""
    print(f"{'ok' if right else 'FAILED'}: {what}: {seen}", flush=True)
    if not right:
        sys.exit(1)


def ended(stream: Any, of: str) -> Any:
    """What a stream of a response ends with."""
    [last] = [event for event in stream if event.type == of]
    return last.response


def responses(client: OpenAI, model: str, question: str, withheld: bool) -> None:
    """Ask whole and streamed: a withheld answer is a refusal and an incomplete response."""
    for stream in (False, True):
        asked = {"model": model, "input": question, "max_output_tokens": TOKENS, "temperature": 0}
        made = client.responses.create(**asked, stream=stream)
        if stream:
            made = ended(made, "response.incomplete" if withheld else "response.completed")
        refusals = [
            part.refusal for item in made.output for part in item.content if part.type == "refusal"
        ]
        seen = f"status {made.status}, text {made.output_text!r}, refusals {refusals}"
        right = (
            made.output_text == "" and len(refusals) == 1
            if withheld
            else made.output_text != "" and not refusals
        )
        check(
            f"Responses{', streamed' * stream}",
            right and (made.status == "incomplete") == withheld,
            seen,
        )


def messages(client: Anthropic, model: str, question: str, withheld: bool) -> None:
    """Ask whole and streamed: a withheld answer has the stop reason refusal, and no token was
    decoded."""
    asked: dict[str, Any] = {
        "model": model,
        "max_tokens": TOKENS,
        "messages": [{"role": "user", "content": question}],
    }
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for name, made in (("Messages", whole), ("Messages, streamed", streamed)):
        seen = f"stop reason {made.stop_reason}, text {made.content[0].text!r}"
        check(
            name,
            (made.stop_reason == "refusal") == withheld
            and (made.usage.output_tokens == 0) == withheld,
            seen,
        )


def tools(client: OpenAI, model: str, question: str) -> None:
    """A tool is offered; then its result is there, and the answer from it is judged as any.

    With the tool's description the prompt is another, and so is its risk: what is shown has to
    follow the decision."""
    offered: Any = [{"type": "function", "function": {"name": "look_up", "parameters": LOOK_UP}}]
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "look_up", "arguments": '{"of": "Honiara"}'},
    }
    turns: list[Any] = [{"role": "user", "content": question}]
    results = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a city"},
    ]
    for name, asked in (
        ("a tool is offered", turns),
        ("behind a tool's result", turns + results + turns),
    ):
        made = client.chat.completions.create(
            model=model, messages=asked, tools=offered, max_tokens=TOKENS, temperature=0
        )
        [choice] = made.choices
        is_withheld = choice.finish_reason == "content_filter"
        row = made.model_extra["hallutracer"]["data"][0] if made.model_extra else {}
        seen = (
            f"risk {row.get('risk', float('nan')):.2f}, {row.get('decision')}, text"
            f" {choice.message.content!r}"
        )
        right = is_withheld == (row.get("decision") == "abstain") and is_withheld != bool(
            choice.message.content
        )
        check(f"chat, {name}", right, seen)


async def assistant(url: str, question: str, withheld: bool) -> None:
    """What an assistant is told that asks before it answers: over stdio, as a host starts the
    server."""
    command = str(Path(sys.executable).with_name("hallutracer-mcp"))
    server = StdioServerParameters(command=command, args=["--url", url], env=dict(os.environ))
    async with Client(stdio_client(server)) as client:
        told = await client.call_tool("hallucination_risk", {"question": question})
    row = told.structured_content or {}
    check("MCP, hallucination_risk", row.get("flagged") is withheld, told.content[0].text)  # type: ignore[union-attr]


def main(url: str, known: str, unknown: str) -> None:
    """Ask both questions in each protocol."""
    key = os.environ["HALLUTRACER_API_KEY"]
    openai = OpenAI(base_url=f"{url}/v1", api_key=key)
    anthropic = Anthropic(base_url=url, auth_token=key, api_key=None)
    model = next(iter(openai.models.list())).id
    for question, withheld in ((known, False), (unknown, True)):
        print(f"{question}")
        responses(openai, model, question, withheld)
        messages(anthropic, model, question, withheld)
        tools(openai, model, question)
        asyncio.run(assistant(url, question, withheld))


if __name__ == "__main__":
    main(*sys.argv[1:])
