"""An MCP server with one tool, ``hallucination_risk``, that an assistant asks before it answers
from memory.

    hallutracer-mcp                  over stdio, as a host starts it
    hallutracer-mcp --port 8766      over streamable HTTP, for this machine only:
                                     http://127.0.0.1:8766/mcp

Over HTTP it asks the service with its own key for whoever comes, so callers need a token:
HALLUTRACER_MCP_TOKEN. Each call is one ``score`` of the service at --url, under that service's own
policy, threshold and bundle. Needs ``hallutracer-client[mcp]``."""

from __future__ import annotations

import argparse
import hmac
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field

from hallutracer_client.client import AsyncClient
from hallutracer_client.errors import ClientError, TransportError, Unauthorized
from hallutracer_client.results import ScoreResult
from hallutracer_client.version import VERSION

try:
    import uvicorn
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.server.transport_security import TransportSecuritySettings
    from mcp.types import CallToolResult, TextContent, ToolAnnotations
    from starlette.datastructures import Headers
    from starlette.responses import PlainTextResponse
    from starlette.types import ASGIApp, Receive, Scope, Send
except ImportError as error:
    raise ImportError(f"{error}; pip install 'hallutracer-client[mcp]'", name=error.name) from error

LOOPBACK = "127.0.0.1"
TOKEN = "HALLUTRACER_MCP_TOKEN"
LEAST_CHARACTERS = 16  # of a token
MAKE_TOKEN = "python3 -c 'import secrets; print(secrets.token_urlsafe(32))' makes one"
LONGEST = 8000  # characters of a question
CHECK = "look it up, or say that you are not sure"
DESCRIPTION = (
    "How likely an answer to this question is wrong if it is given from memory: a calibrated risk"
    " from 0 to 1, and whether it reaches the threshold.  Ask before you state a fact for which you"
    " have no source; where it is flagged, look the answer up or say that you are not sure.  The"
    " risk is that of the language model that the HalluTracer service serves (`model`), read from"
    " its hidden states before it answers.  It need not be the model that you are: then it only"
    " tells how hard the question is for that one.  Nothing is generated."
)
ANNOTATIONS = ToolAnnotations(
    title="Risk of a wrong answer",
    read_only_hint=True,
    destructive_hint=False,
    idempotent_hint=True,
    open_world_hint=False,
)
Question = Annotated[
    str, Field(min_length=1, max_length=LONGEST, description="one question, as the user asked it")
]


class Assessment(BaseModel):
    """What the tool returns beside its sentence."""

    risk: float = Field(
        ge=0, le=1, description="probability that this model's answer from memory is wrong"
    )
    flagged: bool = Field(description="the risk applies and reached the threshold")
    threshold: float = Field(ge=0, le=1)
    decision: str = Field(
        description=(
            "what the service's policy does with it: continue, or how it withholds an answer"
        )
    )
    model: str = Field(description="whose risk it is")
    bundle: str = Field(description="the probes that read it, NAME:VERSION")
    message: str | None = Field(
        None, description="the policy's text to show instead of an answer, or before it"
    )
    outside_training: bool | None = Field(
        None, description="unlike all that the probes were trained on; absent: unknown"
    )
    applies: bool | None = Field(
        None, description="false: it asks for no fact, so the risk says nothing; absent: unknown"
    )


def assessment(result: ScoreResult) -> Assessment:
    """Return what is told of the only question."""
    one = result.only
    return Assessment(
        risk=one.risk,
        flagged=one.flagged,
        threshold=one.threshold,
        decision=one.decision,
        model=result.model,
        bundle=result.bundle.reference,
        message=one.message,
        outside_training=one.outside_training,
        applies=one.applies,
    )


def advice(told: Assessment) -> str:
    """Return one sentence that an assistant can act on."""
    risk = f"Risk {told.risk:.2f} of a wrong answer from memory"
    threshold = f"the threshold {told.threshold:.2f}"
    if told.flagged:
        return f"{risk}, at or above {threshold}: {CHECK}."
    if told.decision != "continue" or told.outside_training:
        why = (
            "is outside training, unlike all that the probes were trained on"
            if told.outside_training
            else "is withheld by the policy"
        )
        return f"{risk}, below {threshold}, but the question {why}: {CHECK}."
    if told.applies is False:
        return "The question asks for no fact, so the risk says nothing of it."
    return f"{risk}, below {threshold}: it may be answered from memory."


def make_server(client: AsyncClient) -> MCPServer[Any]:
    """Return the server; ``client`` stays the caller's to close."""
    # Its log goes to stderr. At this level there is no line for a call, and so none that could
    # quote a question.
    server: MCPServer[Any] = MCPServer("hallutracer", version=VERSION, log_level="WARNING")

    @server.tool(description=DESCRIPTION, annotations=ANNOTATIONS)
    async def hallucination_risk(question: Question) -> Annotated[CallToolResult, Assessment]:
        try:
            told = assessment(await client.score(prompt=question))
        except (ClientError, ValueError) as error:
            raise ToolError(f"no risk is known: {error}{_cure(error)}") from None
        content = [TextContent(type="text", text=advice(told))]
        return CallToolResult(
            content=content, structured_content=told.model_dump(exclude_none=True)
        )

    return server


class TokenCheck:
    """Answers 401 unless ``Authorization`` is ``Bearer`` and the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode("utf-8", "surrogateescape")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] == "http":
            scheme, _, sent = Headers(scope=scope).get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(
                sent.strip().encode(), self._token
            ):
                said = (
                    f"send this server's own token ({TOKEN} where it was started) as"
                    " 'Authorization: Bearer TOKEN'\n"
                )
                refusal = PlainTextResponse(said, 401, headers={"WWW-Authenticate": "Bearer"})
                await refusal(scope, receive, send)
                return
        elif scope["type"] != "lifespan":
            return  # no WebSocket routes
        await self._app(scope, receive, send)


def http_app(server: MCPServer[Any], port: int, token: str | None) -> ASGIApp:
    """Return the server as an ASGI app for this port of this machine; ``token`` None: open to all
    its programs.

    Other hosts' names are refused, so that no web page reaches it by DNS rebinding, and pages of
    other origins, those of this machine's other ports among them."""
    names = [f"{name}:{port}" for name in (LOOPBACK, "localhost")]
    checks = TransportSecuritySettings(
        allowed_hosts=names, allowed_origins=[f"http://{name}" for name in names]
    )
    # A call needs no session, and is answered at once: plain JSON, which any number of clients may
    # ask for.
    app = server.streamable_http_app(
        stateless_http=True, json_response=True, transport_security=checks, host=LOOPBACK
    )
    return app if token is None else TokenCheck(app, token)


def _cure(error: Exception) -> str:
    if isinstance(error, TransportError):
        return "  Its address is --url, or HALLUTRACER_URL"
    return (
        "  Give a key of that service as HALLUTRACER_API_KEY"
        if isinstance(error, Unauthorized)
        else ""
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the server until its host ends it."""
    parser = argparse.ArgumentParser(
        prog="hallutracer-mcp",
        description=(
            "An MCP server with one tool, hallucination_risk.  A key of the service is read from"
            " HALLUTRACER_API_KEY, the token that callers over HTTP send from"
            " HALLUTRACER_MCP_TOKEN; both from nowhere else."
        ),
    )
    parser.add_argument("--version", action="version", version=f"hallutracer-client {VERSION}")
    parser.add_argument(
        "--url",
        default=os.environ.get("HALLUTRACER_URL") or "http://127.0.0.1:8765",
        help="the HalluTracer service to ask; HALLUTRACER_URL.  Default: %(default)s",
    )
    parser.add_argument(
        "--port",
        type=int,
        help=(
            f"serve streamable HTTP at http://{LOOPBACK}:PORT/mcp, to callers that send {TOKEN}. "
            " Default: stdio"
        ),
    )
    parser.add_argument(
        "--allow-anonymous",
        action="store_true",
        help="with --port: without a token, for every program of this machine",
    )
    given = parser.parse_args(arguments)
    if given.port is not None and not 0 < given.port < 65536:
        parser.error(f"--port is 1 to 65535, not {given.port}")
    token, key = os.environ.get(TOKEN) or None, os.environ.get("HALLUTRACER_API_KEY") or None
    if given.port is not None:
        _check_token(parser, token, key, anonymous=given.allow_anonymous)
    try:
        client = AsyncClient(given.url, api_key=key)
    except ValueError as error:
        parser.error(str(error))
    server = make_server(client)
    if given.port is None:
        server.run("stdio")
        return
    sys.stderr.write(f"hallucination_risk is at http://{LOOPBACK}:{given.port}/mcp\n")
    uvicorn.run(
        http_app(server, given.port, token), host=LOOPBACK, port=given.port, log_level="warning"
    )


def _check_token(
    parser: argparse.ArgumentParser, token: str | None, key: str | None, *, anonymous: bool
) -> None:
    """Exit where whoever reaches the port could ask with this process's key, and nobody said that
    it is meant."""
    if token is None:
        if not anonymous:
            parser.error(
                "--port: every program of this machine could ask with this process's key; set"
                f" {TOKEN} for callers to send ({MAKE_TOKEN}), or give --allow-anonymous"
            )
    elif len(token) < LEAST_CHARACTERS or token == key:
        parser.error(
            f"{TOKEN} has at least {LEAST_CHARACTERS} characters and is not the service's key:"
            f" {MAKE_TOKEN}"
        )


if __name__ == "__main__":
    main()
