"""All errors of the service, the engines and the trainer; those of bundles are in ``probes_store.errors``.

``status`` and ``code`` are what the API sends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


class HalluTracerError(Exception):
    """Root of the tree.  The message names the cause and the remedy."""

    status: int = 500
    code: str = "internal_error"
    retry_after_s: int | None = None  # the Retry-After header, seconds

    def __init_subclass__(cls, **declared: int | str) -> None:
        """Take ``status``, ``code`` and ``retry_after_s`` from the class's first line, else from its parent."""
        for name, value in declared.items():
            setattr(cls, name, value)

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param  # the request field or option that is wrong
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


E = TypeVar("E", bound=HalluTracerError)


def _kind(
    parent: type[E], status: int, code: str, why: str, *, name: str = "", retry_after_s: int | None = None
) -> type[E]:
    """Return a class for errors that differ from their parent's in these alone; its name is by default the code's."""
    said: dict[str, int | str] = {} if retry_after_s is None else {"retry_after_s": retry_after_s}
    name = name or "".join(map(str.title, code.split("_")))
    return type(name, (parent,), {"__doc__": why}, status=status, code=code, **said)


class RequestError(HalluTracerError, status=422, code="invalid_request"):
    """The request is wrong and would fail again unchanged."""


class BodyTooLarge(RequestError, status=413, code="body_too_large"):
    """The request body exceeds the configured limit."""


class WrongEncoding(RequestError, status=400, code="invalid_encoding"):
    """The request body is not what its Content-Encoding says."""


class UnknownEncoding(RequestError, status=415, code="unknown_encoding"):
    """The request body has a Content-Encoding that is not taken; ``accepted``: those that are, as a header's value."""

    def __init__(self, message: str, *, accepted: str) -> None:
        super().__init__(message)
        self.accepted = accepted


class PromptTooLong(RequestError, status=413, code="prompt_too_long"):
    """Longer than the model's context.  Prompts are never truncated."""


ContextLengthExceeded = _kind(
    PromptTooLong, 400, "context_length_exceeded", "PromptTooLong, as OpenAI's routes say it."
)
EmptyPrompt = _kind(RequestError, 422, "empty_prompt", "A prompt without tokens has no answer onset.")
BodyTooSlow = _kind(RequestError, 408, "body_too_slow", "The request body did not arrive before the deadline.")
NotHttp = _kind(RequestError, 400, "invalid_http", "What arrived is not HTTP/1.1.", name="NotHttp")
HeadersTooSlow = _kind(RequestError, 408, "headers_too_slow", "The request's line and headers did not come in time.")
HeadersTooLarge = _kind(RequestError, 431, "headers_too_large", "Headers or trailers exceed their limits.")


class Unauthorized(HalluTracerError, status=401, code="unauthorized"):
    """The bearer key is missing or unknown."""


class NotAllowed(HalluTracerError, status=403, code="not_allowed"):
    """The request chooses what its caller may not; the operator can allow it."""

    def __init__(self, message: str, *, param: str, cure: str = "") -> None:
        cure = cure or f"the operator can allow it with --callers-may {param}"
        super().__init__(f"{message}; {cure}", param=param)


class NotReady(HalluTracerError, status=503, code="not_ready", retry_after_s=1):
    """The service is still loading, or shutting down; ``retry``: whether it may be ready later."""

    def __init__(self, message: str, *, retry: bool = True) -> None:
        super().__init__(message)
        self.retry_after_s = type(self).retry_after_s if retry else None


class FeedbackUnavailable(HalluTracerError, status=503, code="feedback_unavailable", retry_after_s=5):
    """The database of feedback cannot be read or written; answers do not depend on it."""


class AuditUnavailable(HalluTracerError, status=503, code="audit_unavailable", retry_after_s=5):
    """The audit log cannot be written: what has to be in it is not done."""


KeyExpired = _kind(Unauthorized, 401, "key_expired", "The bearer key was valid until a while ago.")
KeyRevoked = _kind(Unauthorized, 401, "key_revoked", "The operator has taken the bearer key back.")
MissingScope = _kind(HalluTracerError, 403, "missing_scope", "The bearer key does not open this route.")
NotFound = _kind(HalluTracerError, 404, "not_found", "The bundle or model is not loaded.")
ReloadFailed = _kind(HalluTracerError, 409, "reload_failed", "What was to be read again cannot be; all in force stays.")
WrongHost = _kind(HalluTracerError, 421, "wrong_host", "The request is addressed to a name that is not this service's.")
Overloaded = _kind(HalluTracerError, 429, "overloaded", "The queue is full.", retry_after_s=1)
ClientGone = _kind(HalluTracerError, 499, "client_closed_request", "In logs and metrics only.", name="ClientGone")
UpstreamFailed = _kind(HalluTracerError, 502, "upstream_failed", "The server that a policy falls back on is unwell.")
BodiesFull = _kind(HalluTracerError, 503, "bodies_full", "All bodies together take their memory.", retry_after_s=1)
DeadlineExceeded = _kind(HalluTracerError, 504, "deadline_exceeded", "The deadline passed before the answer.")


class EngineError(HalluTracerError, status=500, code="engine_error"):
    """The engine failed."""


EngineFailed = _kind(EngineError, 500, "engine_error", "The engine raised no error of ours: the cause, for no caller.",
                     name="EngineFailed")  # fmt: skip


class ModelLoadError(EngineError, status=500, code="model_load_error"):
    """The model could not be loaded."""


# It failed on this request and not on others: the next replica, or a moment later the same one, can answer it.
EngineBusy = _kind(EngineError, 503, "engine_error", "The engine gave up this request, which can be sent again.",
                   name="EngineBusy", retry_after_s=1)  # fmt: skip
UnknownFamily = _kind(HalluTracerError, 500, "unknown_family", "A model of the type is not read at that site.")
NonFiniteReadout = _kind(EngineError, 500, "non_finite_readout", "A NaN or infinity came out of the forward pass.")
# The next request writes it again.
ProbeReplaced = _kind(EngineError, 503, "probe_replaced", "Another server has put its probe into this slot of vLLM's.",
                      retry_after_s=1)  # fmt: skip
# The golden prompts have to be replayed first.
WeightsChanged = _kind(EngineError, 503, "weights_changed", "The model's weights are not those that were tested.",
                       retry_after_s=5)  # fmt: skip


class TrainingError(HalluTracerError, status=500, code="training_error"):
    """A training run cannot go on."""


class NoDirection(TrainingError, status=500, code="no_direction"):
    """All coefficients of every probe of a layer are zero."""


RunMismatch = _kind(TrainingError, 500, "run_mismatch", "The run folder is of another model, data or set of options.")
NoThreshold = _kind(TrainingError, 500, "no_threshold", "No threshold keeps a calibration's promise at its alphas.")


class DataError(TrainingError, status=500, code="bad_data"):
    """Rows of a data file are invalid.  ``problems`` has one entry each, ``line 7: ...``."""

    def __init__(self, source: str, problems: Sequence[str], *, shown: int = 20) -> None:
        grouped = _grouped(problems)
        head = "\n".join(f"  {problem}" for problem in grouped[:shown])
        more = f"\n  ... and {len(grouped) - shown} more kinds" if len(grouped) > shown else ""
        count = "1 problem" if len(problems) == 1 else f"{len(problems):,} problems"
        super().__init__(f"{source}: {count}; nothing was done\n{head}{more}")
        self.problems = list(problems)


def _grouped(problems: Sequence[str]) -> list[str]:
    """Return each kind of problem once: its first line, and on how many more lines it is.

    Problems are of one kind where they differ in numbers and quoted words at most: ``line 3 and 597 more lines: 'label'
    must be the number 1 or 0, found "yes" (the others are like it)``."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    for problem in problems:
        place, _, what = problem.partition(": ") if problem.startswith("line ") else ("", "", problem)
        kind = re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "", what) if place else what
        kinds.setdefault(kind, []).append((place, what))
    grouped = []
    for (place, what), *others in kinds.values():
        lines = len({other for other, _ in others} - {place})
        more = f" and {lines} more line{'' if lines == 1 else 's'}" if lines else ""
        like = " (the others are like it)" if lines and any(other != what for _, other in others) else ""
        grouped.append(f"{place}{more}: {what}{like}" if place else what)
    return grouped


def first_problem(error: ValidationError, model: type[BaseModel]) -> str:
    """Return which field of a file's ``model`` is wrong and what was expected; never the value, which may be secret."""
    # A misspelt field before the one that is missing for it.
    first = min(error.errors(include_url=False, include_input=False), key=lambda one: one["type"] != "extra_forbidden")
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"unknown field {where!r}; known: {', '.join(model.model_fields)}"
    said = first["msg"].removeprefix("Value error, ")
    return f"{where}: {said}" if where else said
