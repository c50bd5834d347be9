"""The JSON body of a scoring request, from keyword arguments.

Limits and the names of bundles and policies are checked by the server."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias, TypedDict


@dataclass(frozen=True)
class Generate:
    """Decode the answer if the decision is ``continue``.  None means the server's default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()

    def body(self) -> dict[str, Any]:
        """Return the wire's ``generate`` object."""
        if isinstance(self.stop, str):
            raise TypeError("stop is a list of strings: stop=['...']")
        given = asdict(self) | {"stop": list(self.stop) or None}
        return {name: value for name, value in given.items() if value is not None}


Prompt: TypeAlias = str | Sequence[str]  # a question, or a list of them


class GenerateOptions(TypedDict, total=False):
    """``Generate`` as a dictionary."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    stop: Sequence[str]


class ScoreOptions(TypedDict, total=False):
    """Arguments of ``score`` and ``stream``: exactly one of the first three, all others
    optional."""

    prompt: Prompt | None
    messages: (
        Sequence[Mapping[str, str]] | None
    )  # one conversation: [{"role": "user", "content": "..."}]
    input_ids: (
        Sequence[int] | Sequence[Sequence[int]] | None
    )  # token ids ending at the answer onset
    model: str | None  # must be the loaded model
    bundle: str | None  # name, name@alias or name:version
    policy: str | None  # what to do with a flagged prompt; None: the server's default
    threshold: float | None  # flag at or above this risk
    include: Sequence[str]  # "trajectory", "running_mean", "answer_risk"
    generate: Generate | GenerateOptions | None  # decode the answer too
    retrieval_of: (
        str | None
    )  # id of the answer whose decision was retrieve: the same question, with a passage
    deadline_ms: int | None  # at most the server's own deadline


def with_prompt(prompt: Prompt | None, options: ScoreOptions) -> ScoreOptions:
    """Return the arguments with a prompt that was given by its place.  Raises TypeError for two."""
    if prompt is None:
        return options
    if options.get("prompt") is not None:
        raise TypeError("the prompt is given twice: by its place, and as prompt=")
    return {**options, "prompt": prompt}


def request_body(options: ScoreOptions, *, stream: bool = False) -> bytes:
    """Return the JSON body.  Raises TypeError; ValueError: invalid Unicode, a NaN, none or several
    kinds of prompt."""
    if unknown := sorted(set(options) - set(ScoreOptions.__annotations__)):
        known = ", ".join(ScoreOptions.__annotations__)
        raise TypeError(f"unknown argument {unknown[0]!r}; expected one of {known}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    prompts = [name for name in ("prompt", "messages", "input_ids") if name in given]
    if len(prompts) != 1:
        raise ValueError(
            "give exactly one of prompt, messages, input_ids; found"
            f" {' and '.join(prompts) or 'none'}"
        )
    if isinstance(given.get("include"), str):
        raise TypeError("include is a list of names: include=['...']")
    body = given
    if "messages" in given:
        body["messages"] = [dict(message) for message in given["messages"]]
    elif "input_ids" in given:
        body["input_ids"] = _ids(given["input_ids"])
    elif not isinstance(given["prompt"], str):
        body["prompt"] = list(given["prompt"])
    if include := body.pop("include", None):
        body["include"] = list(include)
    if (generate := body.get("generate")) is not None:
        body["generate"] = _generate(generate).body()
    if stream:
        body.setdefault("generate", {})
        body["stream"] = True
    # The errors of json and of the codec contain the text, which may be a prompt: they are not
    # chained.
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError:
        problem = "a text contains a lone surrogate, which is not valid Unicode"
    except ValueError:
        problem = "a number is NaN or infinite"
    raise ValueError(f"the request cannot be sent as JSON: {problem}")


def _generate(given: Any) -> Generate:
    if isinstance(given, Generate):
        return given
    known = Generate.__dataclass_fields__
    if not isinstance(given, Mapping):
        raise TypeError(
            'generate is a Generate(...) or a dictionary, for example {"max_tokens": 64}'
        )
    if unknown := sorted(str(name) for name in given if name not in known):
        raise TypeError(
            f"generate has an unknown {unknown[0]!r}; expected one of {', '.join(known)}"
        )
    stop = given.get("stop")
    return Generate(**{**given, "stop": () if stop is None else stop})


def _ids(value: Any) -> Any:
    """Return plain lists of integers, from lists, arrays and tensors.  Raises TypeError for
    anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value
    nested = isinstance(value, Iterable) and not isinstance(value, str | bytes)
    return [_ids(item) for item in value] if nested else operator.index(value)
