"""All errors of the service, the engines and the trainer; those of bundles are in
``probes_store.errors``.

``status`` and ``code`` are what the API sends."""

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

    def __init_subclass__(cls, **declared: int | str) -> None:
        """Take ``status``, ``code`` and ``retry_after_s`` from the class's first line, else from
        its parent."""
        for name, value in declared.items():
            setattr(cls, name, value)

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param  # the request field or option that is wrong
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


class RequestError(HalluTracerError, status=422, code="invalid_request"):
    """The request is wrong and would fail again unchanged."""


class BodyTooLarge(RequestError, status=413, code="body_too_large"):
    """The request body exceeds the configured limit."""


class WrongEncoding(RequestError, status=400, code="invalid_encoding"):
    """The request body is not what its Content-Encoding says."""


class UnknownEncoding(RequestError, status=415, code="unknown_encoding"):
    """The request body has a Content-Encoding that is not taken; ``accepted``: those that are, as a
    header's value."""

    def __init__(self, message: str, *, accepted: str) -> None:
        super().__init__(message)
        self.accepted = accepted


class PromptTooLong(RequestError, status=413, code="prompt_too_long"):
    """Longer than the model's context.  Prompts are never truncated."""


class ContextLengthExceeded(PromptTooLong, status=400, code="context_length_exceeded"):
    """PromptTooLong, as OpenAI's routes say it."""


class EmptyPrompt(RequestError, status=422, code="empty_prompt"):
    """A prompt without tokens has no answer onset."""


class BodyTooSlow(RequestError, status=408, code="body_too_slow"):
    """The request body did not arrive before the deadline."""


class NotHttp(RequestError, status=400, code="invalid_http"):
    """What arrived is not HTTP/1.1."""


class HeadersTooSlow(RequestError, status=408, code="headers_too_slow"):
    """The request's line and headers did not come in time."""


class HeadersTooLarge(RequestError, status=431, code="headers_too_large"):
    """Headers or trailers exceed their limits."""


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


class FeedbackUnavailable(
    HalluTracerError, status=503, code="feedback_unavailable", retry_after_s=5
):
    """The database of feedback cannot be read or written; answers do not depend on it."""


class AuditUnavailable(HalluTracerError, status=503, code="audit_unavailable", retry_after_s=5):
    """The audit log cannot be written: what has to be in it is not done."""


class KeyExpired(Unauthorized, status=401, code="key_expired"):
    """The bearer key was valid until a while ago."""


class KeyRevoked(Unauthorized, status=401, code="key_revoked"):
    """The operator has taken the bearer key back."""


class MissingScope(HalluTracerError, status=403, code="missing_scope"):
    """The bearer key does not open this route."""


class NotFound(HalluTracerError, status=404, code="not_found"):
    """The bundle or model is not loaded."""


class ReloadFailed(HalluTracerError, status=409, code="reload_failed"):
    """What was to be read again cannot be; all in force stays."""


class WrongHost(HalluTracerError, status=421, code="wrong_host"):
    """The request is addressed to a name that is not this service's."""


class Overloaded(HalluTracerError, status=429, code="overloaded", retry_after_s=1):
    """The queue is full."""


class ClientGone(HalluTracerError, status=499, code="client_closed_request"):
    """The client has gone, so nobody reads this: it is in logs and metrics only."""


class UpstreamFailed(HalluTracerError, status=502, code="upstream_failed"):
    """The server that a policy falls back on is unwell."""


class BodiesFull(HalluTracerError, status=503, code="bodies_full", retry_after_s=1):
    """All bodies together take their memory."""


class DeadlineExceeded(HalluTracerError, status=504, code="deadline_exceeded"):
    """The deadline passed before the answer."""


class EngineError(HalluTracerError, status=500, code="engine_error"):
    """The engine failed."""


class EngineFailed(EngineError, status=500, code="engine_error"):
    """The engine raised no error of ours: the cause, for no caller."""


class ModelLoadError(EngineError, status=500, code="model_load_error"):
    """The model could not be loaded."""


class EngineBusy(EngineError, status=503, code="engine_error", retry_after_s=1):
    """The engine gave up this request alone; another replica, or the same one a moment later, can
    answer it."""


class UnknownFamily(HalluTracerError, status=500, code="unknown_family"):
    """A model of the type is not read at that site."""


class NonFiniteReadout(EngineError, status=500, code="non_finite_readout"):
    """A NaN or infinity came out of the forward pass."""


class ProbeReplaced(EngineError, status=503, code="probe_replaced", retry_after_s=1):
    """Another server has put its probe into this slot of vLLM's; the next request writes ours
    again."""


class WeightsChanged(EngineError, status=503, code="weights_changed", retry_after_s=5):
    """The model's weights are not those that were tested: the golden prompts have to be replayed
    first."""


class TrainingError(HalluTracerError, status=500, code="training_error"):
    """A training run cannot go on."""


class NoDirection(TrainingError, status=500, code="no_direction"):
    """All coefficients of every probe of a layer are zero."""


class RunMismatch(TrainingError, status=500, code="run_mismatch"):
    """The run folder is of another model, data or set of options."""


class NoThreshold(TrainingError, status=500, code="no_threshold"):
    """No threshold keeps a calibration's promise at its alphas."""


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

    Problems are of one kind where they differ in numbers and quoted words at most: ``line 3 and 597
    more lines: 'label' must be the number 1 or 0, found "yes" (the others are like it)``."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    for problem in problems:
        line, _, fault = (
            problem.partition(": ") if problem.startswith("line ") else ("", "", problem)
        )
        kind = re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "", fault) if line else fault
        kinds.setdefault(kind, []).append((line, fault))
    grouped = []
    for alike in kinds.values():
        line, fault = alike[0]
        count = len({where for where, _ in alike}) - 1
        more = f" and {count} more line{'' if count == 1 else 's'}" if count else ""
        varied = (
            " (the others are like it)" if count and len({text for _, text in alike}) > 1 else ""
        )
        grouped.append(f"{line}{more}: {fault}{varied}" if line else fault)
    return grouped


def first_problem(error: ValidationError, model: type[BaseModel]) -> str:
    """Return which field of a file's ``model`` is wrong and what was expected; never the value,
    which may be secret."""
    # A misspelt field before the one that is missing for it.
    first = min(
        error.errors(include_url=False, include_input=False),
        key=lambda problem: problem["type"] != "extra_forbidden",
    )
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"unknown field {where!r}; known: {', '.join(model.model_fields)}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
