"""All errors of the service, the engines and the trainer; those of bundles are in ``probes_store.errors``.

``status`` and ``code`` are what the API sends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


class HalluTracerError(Exception):
    """Root of the tree.  The message names the cause and the remedy."""

    status: int = 500
    code: str = "internal_error"
    retry_after_s: int | None = None  # the Retry-After header, seconds

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param  # the request field or option that is wrong


class RequestError(HalluTracerError):
    """The request is wrong and would fail again unchanged."""

    status, code = 422, "invalid_request"


class ReloadFailed(HalluTracerError):
    """Keys or bundles that were to be read again cannot be used; those in force stay."""

    status, code = 409, "reload_failed"


class EmptyPrompt(RequestError):
    """A prompt without tokens has no answer onset."""

    status, code = 422, "empty_prompt"


class PromptTooLong(RequestError):
    """Longer than the model's context.  Prompts are never truncated."""

    status, code = 413, "prompt_too_long"


class BodyTooLarge(RequestError):
    """The request body exceeds the configured limit."""

    status, code = 413, "body_too_large"


class BodyTooSlow(RequestError):
    """The request body did not arrive before the deadline."""

    status, code = 408, "body_too_slow"


class NotHttp(RequestError):
    """What arrived is not HTTP/1.1."""

    status, code = 400, "invalid_http"


class HeadersTooSlow(RequestError):
    """The request's line and headers did not arrive in time."""

    status, code = 408, "headers_too_slow"


class HeadersTooLarge(RequestError):
    """Headers or trailers exceed their limits."""

    status, code = 431, "headers_too_large"


class WrongHost(HalluTracerError):
    """The request is addressed to a name that is not this service's."""

    status, code = 421, "wrong_host"


class Unauthorized(HalluTracerError):
    """The bearer key is missing or unknown."""

    status, code = 401, "unauthorized"


class KeyExpired(Unauthorized):
    """The bearer key was valid until a while ago."""

    status, code = 401, "key_expired"


class KeyRevoked(Unauthorized):
    """The operator has taken the bearer key back."""

    status, code = 401, "key_revoked"


class MissingScope(HalluTracerError):
    """The bearer key does not open this route."""

    status, code = 403, "missing_scope"


class NotAllowed(HalluTracerError):
    """The request chooses what its caller may not; the operator can allow it."""

    status, code = 403, "not_allowed"

    def __init__(self, message: str, *, param: str, cure: str = "") -> None:
        cure = cure or f"the operator can allow it with --callers-may {param}"
        super().__init__(f"{message}; {cure}", param=param)


class NotFound(HalluTracerError):
    """The bundle or model is not loaded."""

    status, code = 404, "not_found"


class Overloaded(HalluTracerError):
    """The queue is full."""

    status, code = 429, "overloaded"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ClientGone(HalluTracerError):
    """The client closed its connection before the answer; in logs and metrics only."""

    status, code = 499, "client_closed_request"


class NotReady(HalluTracerError):
    """The service is still loading, or shutting down."""

    status, code = 503, "not_ready"
    retry_after_s = 1


class BodiesFull(HalluTracerError):
    """The bodies of other requests, this caller's among them, take the memory that there is for bodies."""

    status, code = 503, "bodies_full"
    retry_after_s = 1


class FeedbackUnavailable(HalluTracerError):
    """The database of feedback cannot be read or written; answers do not depend on it."""

    status, code = 503, "feedback_unavailable"
    retry_after_s = 5


class AuditUnavailable(HalluTracerError):
    """The audit log cannot be written: what has to be in it is not done."""

    status, code = 503, "audit_unavailable"
    retry_after_s = 5


class UpstreamFailed(HalluTracerError):
    """The server that a policy falls back on gave no answer; this service is well."""

    status, code = 502, "upstream_failed"


class DeadlineExceeded(HalluTracerError):
    """The request's deadline passed before the answer."""

    status, code = 504, "deadline_exceeded"


class UnknownFamily(HalluTracerError):
    """The model's type has no entry in ``engines/families.py``."""

    status, code = 500, "unknown_family"


class EngineError(HalluTracerError):
    """The engine failed."""

    status, code = 500, "engine_error"


class ModelLoadError(EngineError):
    """The model could not be loaded."""

    status, code = 500, "model_load_error"


class NonFiniteReadout(EngineError):
    """A NaN or infinity came out of the forward pass."""

    status, code = 500, "non_finite_readout"


class ProbeReplaced(EngineError):
    """Another server of the same vLLM has put its own probe into this one's slot; the next request writes it again."""

    status, code = 503, "probe_replaced"
    retry_after_s = 1


class TrainingError(HalluTracerError):
    """A training run cannot go on."""

    status, code = 500, "training_error"


class DataError(TrainingError):
    """Rows of a data file are invalid.  ``problems`` has one entry each, ``line 7: ...``."""

    status, code = 500, "bad_data"

    def __init__(self, source: str, problems: Sequence[str], *, shown: int = 20) -> None:
        grouped = _grouped(problems)
        head = "\n".join(f"  {problem}" for problem in grouped[:shown])
        more = f"\n  ... and {len(grouped) - shown} more kinds" if len(grouped) > shown else ""
        count = "1 problem" if len(problems) == 1 else f"{len(problems):,} problems"
        super().__init__(f"{source}: {count}; nothing was done\n{head}{more}")
        self.problems = list(problems)


_VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")


def _grouped(problems: Sequence[str]) -> list[str]:
    """Each kind of problem once: its first line, and on how many more lines it is.

    Problems are of one kind where they differ in numbers and quoted words at most: ``line 3 and 597 more lines: 'label'
    must be the number 1 or 0, found "yes" (the others are like it)``.
    """
    kinds: dict[str, list[tuple[str, str]]] = {}
    for problem in problems:
        place, _, what = problem.partition(": ") if problem.startswith("line ") else ("", "", problem)
        kinds.setdefault(_VARIES.sub("", what) if place else what, []).append((place, what))
    grouped = []
    for found in kinds.values():
        place, what = found[0]
        lines = len({place for place, _ in found}) - 1
        more = f" and {lines} more line{'' if lines == 1 else 's'}" if lines else ""
        like = " (the others are like it)" if lines and any(other != what for _, other in found) else ""
        grouped.append(f"{place}{more}: {what}{like}" if place else what)
    return grouped


class RunMismatch(TrainingError):
    """The run folder belongs to another model, data file or set of options."""

    status, code = 500, "run_mismatch"


class NoDirection(TrainingError):
    """All coefficients of every probe of a layer are zero."""

    status, code = 500, "no_direction"


class NoThreshold(TrainingError):
    """No threshold keeps the promise of a calibration at any of its alphas; nothing was published."""

    status, code = 500, "no_threshold"


def first_problem(error: ValidationError, model: type[BaseModel]) -> str:
    """Return which field of a file's ``model`` is wrong and what was expected; never the value, which may be secret."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"unknown field {where!r}; known: {', '.join(model.model_fields)}"
    said = first["msg"].removeprefix("Value error, ")
    return f"{where}: {said}" if where else said
