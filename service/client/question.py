"""What is asked: the request body, from keyword arguments.  Knows no HTTP.

What the server decides (limits, names of bundles and policies) is left to the server.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict


@dataclass(frozen=True)
class Generate:
    """Go on to the answer where the decision is ``continue``.  What is None is the server's choice."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()

    def body(self) -> dict[str, Any]:
        """The wire's ``generate`` object."""
        if isinstance(self.stop, str):
            raise TypeError("stop is a list of strings; for one, write stop=['...']")
        given = asdict(self) | {"stop": list(self.stop) or None}
        return {name: value for name, value in given.items() if value is not None}


class ScoreOptions(TypedDict, total=False):
    """Arguments of ``score`` and ``stream``: exactly one of the first three, the rest as wanted."""

    prompt: str | Sequence[str] | None  # a question, or a list of them
    messages: Sequence[Mapping[str, str]] | None  # one conversation: [{"role": "user", "content": "..."}]
    input_ids: Sequence[int] | Sequence[Sequence[int]] | None  # token ids, the last one being the answer onset
    model: str | None  # must be the loaded model
    bundle: str | None  # name, name@alias or name:version
    policy: str | None  # what to do with a flagged prompt; the server's default where None
    threshold: float | None  # flag at or above this risk
    include: Sequence[str]  # "trajectory", "running_mean"
    generate: Generate | None  # decode the answer too
    deadline_ms: int | None  # the server gives up after this; at most the server's own deadline


def body_of(options: ScoreOptions, *, stream: bool = False) -> bytes:
    """The JSON body.

    Raises:
        TypeError: an argument that does not exist, or one of a wrong type.
        ValueError: not exactly one of prompt, messages and input_ids; invalid Unicode; a NaN.
    """
    unknown = sorted(set(options) - set(ScoreOptions.__annotations__))
    if unknown:
        known = ", ".join(ScoreOptions.__annotations__)
        raise TypeError(f"unknown argument {unknown[0]!r}; known are {known}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    asked = [name for name in ("prompt", "messages", "input_ids") if name in given]
    if len(asked) != 1:
        found = " and ".join(asked) if asked else "none of them"
        raise ValueError(f"give exactly one of prompt, messages, input_ids; found {found}")
    if isinstance(given.get("include"), str):
        raise TypeError("include is a list of names; for one, write include=['...']")
    body = given | {name: _plain(name, given[name]) for name in ("prompt", "messages", "input_ids") if name in given}
    body.pop("include", None)
    if given.get("include"):
        body["include"] = list(given["include"])
    if (generate := given.get("generate")) is not None:
        if not isinstance(generate, Generate):
            raise TypeError("generate is a Generate(...), for example Generate(max_tokens=64)")
        body["generate"] = generate.body()
    if stream:
        body.setdefault("generate", {})
        body["stream"] = True
    return _encode(body)


def _plain(name: str, value: Any) -> Any:
    if name == "prompt":
        return value if isinstance(value, str) else list(value)
    if name == "messages":
        return [dict(message) for message in value]
    return _ids(value)


def _ids(value: Any) -> Any:
    """Plain lists of integers, from lists, arrays and tensors.  Raises TypeError for anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value
    nested = isinstance(value, Iterable) and not isinstance(value, str | bytes)
    return [_ids(one) for one in value] if nested else operator.index(value)


def _encode(body: Mapping[str, Any]) -> bytes:
    # The errors of json and of the codec carry the text at fault, which may be a prompt: they are not chained.
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError:
        problem = "a text holds a lone surrogate, which is not valid Unicode"
    except ValueError:
        problem = "a number is NaN or infinite"
    raise ValueError(f"the request cannot be sent as JSON: {problem}")
