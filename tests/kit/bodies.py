"""Answers as the service writes them."""

from __future__ import annotations

import json
from typing import Any

import httpx


def row(risk: float = 0.1, decision: str = "continue", **more: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "risk": risk,
        "depth_mean": 1.5,
        "decision": decision,
        "flagged": risk >= 0.5,
        "threshold": 0.5,
        **more,
    }


def usage(completion: int = 0) -> dict[str, int]:
    return {
        "prompt_tokens": 7,
        "cached_tokens": 0,
        "completion_tokens": completion,
        "total_tokens": 7 + completion,
    }


def result(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "id": "risk-abc",
        "object": "risk.list",
        "created": 1795186131,
        "model": "m",
        "policy": "gate",
        "bundle": {"name": "demo", "version": 3, "digest": "sha256:00"},
        "data": list(rows) or [row()],
        "usage": usage(),
        **more,
    }


def error(status: int, code: str, message: str = "because", **headers: str) -> httpx.Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return httpx.Response(status, json=body, headers={"x-request-id": "rid-1", **headers})


def chunk(text: str, finish: str | None = None, tokens: int | None = None) -> dict[str, Any]:
    body = {"id": "risk-abc", "object": "completion.chunk", "index": 0, "delta": {"text": text}}
    if finish is not None:
        body["finish_reason"] = finish
    return body if tokens is None else body | {"usage": usage(tokens)}


def events(*bodies: Any, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(body, ensure_ascii=False)}\n\n" for body in bodies]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


def stream(content: Any) -> httpx.Response:
    return httpx.Response(
        200, content=content, headers={"content-type": "text/event-stream; charset=utf-8"}
    )
