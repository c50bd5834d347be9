"""Every error a user can meet, as one tree.

    HalluTracerError                500 internal_error
    |-- RequestError                422 invalid_request      the request is at fault
    |   |-- EmptyPrompt             422 empty_prompt
    |   |-- PromptTooLong           413 prompt_too_long      longer than the model's context; never truncated
    |   |-- BodyTooLarge            413 body_too_large
    |   `-- BodyTooSlow             408 body_too_slow
    |-- Unauthorized                401 unauthorized
    |-- NotFound                    404 not_found            no such bundle or model
    |-- Overloaded                  429 overloaded           the queue is full; carries Retry-After
    |-- ClientGone                  499 client_closed_request   nobody is there to read the answer
    |-- NotReady                    503 not_ready
    |-- DeadlineExceeded            504 deadline_exceeded
    |-- UnknownFamily               500 unknown_family       no entry in engines/families.py
    |-- EngineError                 500 engine_error
    |   |-- ModelLoadError          500 model_load_error     the model folder or name cannot be loaded
    |   `-- NonFiniteReadout        500 non_finite_readout   a NaN is never served as a risk
    `-- TrainingError               500 training_error
        |-- DataError               500 bad_data             rows at fault, by line number
        |-- RunMismatch             500 run_mismatch         a run folder of another model, data or option
        `-- NoDirection             500 no_direction         every probe of a layer shrank to zero

The bundle's own errors live in ``probes_store.errors``, which imports nothing of ours.
Knows neither HTTP frameworks nor engines: ``status`` and ``code`` are data that the API writes on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence


class HalluTracerError(Exception):
    """Root of the tree.  The message names the cause and the cure."""

    status: int = 500
    code: str = "internal_error"
    retry_after_s: int | None = None  # when it is worth trying again; None: not by itself

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param  # the request field or option at fault


class RequestError(HalluTracerError):
    """The request is at fault and would fail again unchanged."""

    status, code = 422, "invalid_request"


class EmptyPrompt(RequestError):
    """A prompt without a single token has no answer onset."""

    status, code = 422, "empty_prompt"


class PromptTooLong(RequestError):
    """Longer than the model's context.  Never truncated silently."""

    status, code = 413, "prompt_too_long"


class BodyTooLarge(RequestError):
    """The request body exceeds the configured limit."""

    status, code = 413, "body_too_large"


class BodyTooSlow(RequestError):
    """The request body did not arrive before the deadline."""

    status, code = 408, "body_too_slow"


class Unauthorized(HalluTracerError):
    """No bearer key, or one that is not configured."""

    status, code = 401, "unauthorized"


class NotFound(HalluTracerError):
    """The bundle or model that was named is not loaded here."""

    status, code = 404, "not_found"


class Overloaded(HalluTracerError):
    """The queue is full."""

    status, code = 429, "overloaded"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ClientGone(HalluTracerError):
    """The client closed its connection before its answer was there; seen in logs and metrics only."""

    status, code = 499, "client_closed_request"


class NotReady(HalluTracerError):
    """No bundle has matched its golden prompts yet."""

    status, code = 503, "not_ready"
    retry_after_s = 1


class DeadlineExceeded(HalluTracerError):
    """The request's deadline passed before its answer was there."""

    status, code = 504, "deadline_exceeded"


class UnknownFamily(HalluTracerError):
    """The model's type has no entry in ``engines/families.py``."""

    status, code = 500, "unknown_family"


class EngineError(HalluTracerError):
    """The engine broke."""

    status, code = 500, "engine_error"


class ModelLoadError(EngineError):
    """The model could not be loaded."""

    status, code = 500, "model_load_error"


class NonFiniteReadout(EngineError):
    """A NaN or infinity came out of the forward pass."""

    status, code = 500, "non_finite_readout"


class TrainingError(HalluTracerError):
    """A training run cannot go on."""

    status, code = 500, "training_error"


class DataError(TrainingError):
    """Rows of a data file are at fault.  ``problems`` has one line each, ``line 7: ...``."""

    status, code = 500, "bad_data"

    def __init__(self, source: str, problems: Sequence[str], *, shown: int = 20) -> None:
        grouped = _grouped(problems)
        head = "\n".join(f"  {problem}" for problem in grouped[:shown])
        more = f"\n  ... and {len(grouped) - shown} more kinds" if len(grouped) > shown else ""
        super().__init__(f"{source}: {len(problems)} problem(s); nothing was done\n{head}{more}")
        self.problems = list(problems)


def _grouped(problems: Sequence[str]) -> list[str]:
    """Each problem once, with its first line and how many more: ``line 3 and 597 more: 'id' is missing``."""
    places: dict[str, list[str]] = {}
    for problem in problems:
        place, _, what = problem.partition(": ") if problem.startswith("line ") else ("", "", problem)
        places.setdefault(what, []).append(place)
    grouped = []
    for what, lines in places.items():
        more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        grouped.append(f"{lines[0]}{more}: {what}" if lines[0] else what)
    return grouped


class RunMismatch(TrainingError):
    """The run folder belongs to another model, data file or set of options."""

    status, code = 500, "run_mismatch"


class NoDirection(TrainingError):
    """Every probe of a layer has only zero coefficients."""

    status, code = 500, "no_direction"
