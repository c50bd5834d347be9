"""Options that several commands share, in the groups that ``--help`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from service import settings
from service.data.options import DRY_RUN, JudgeOptions
from service.errors import HalluTracerError, ModelLoadError, TrainingError
from service.library.engine import SHIPPED, Engine
from service.settings import AT_LEAST_1, DATABASE, DEFAULT_STORE, option, section

if TYPE_CHECKING:
    from service.engines.base import EngineOptions

Output = Annotated[
    Path | None, option("File that the results are written to, as JSON.  Default: standard output.")
]
Json = Annotated[bool, option("Print JSON, for programs.", "json"), Parameter(negative="")]
Out = Annotated[
    Path | None,
    option(
        "Folder for the results; finished steps are kept.  Default: one named after the command."
    ),
]
FeedbackDatabase = Annotated[
    str,
    option(
        "Where each prompt's risk is kept with the labels that POST /v1/feedback takes: a file"
        " (SQLite) or postgresql://USER@HOST/DATABASE.  Without it serve keeps nothing.",
        metavar=DATABASE,
    ),
]
DryRun = Annotated[bool, DRY_RUN]
Reference = Annotated[
    str,
    Parameter(
        help="name, name@alias or name:version; @sha256:DIGEST behind it pins", show_env_var=False
    ),
]


class UsageError(HalluTracerError):
    """The command line is wrong: exit status 2.  ``flag`` is the option at fault."""

    def __init__(self, flag: str, message: str) -> None:
        super().__init__(f"{flag}: {message}", param=flag)


def check(options: JudgeOptions) -> None:
    """Raise UsageError for an invalid value."""
    try:
        options.check()
    except TrainingError as error:
        raise UsageError(f"--{(error.param or '').replace('_', '-')}", error.message) from None


def check_place(model: str | None) -> None:
    """Raise UsageError for a path where nothing is."""
    from service.engines.places import place_of

    try:
        if model is not None and model not in SHIPPED:
            place_of(model)
    except ModelLoadError as error:
        raise UsageError("--model", error.message) from None


@dataclass(frozen=True, kw_only=True)
class _ModelChoice:
    model: Annotated[
        str | None,
        option(
            "Model folder, GGUF file, hub name, smollm2 or demo.  Default: smollm2 where its"
            " package is installed, else demo.",
            everyday=True,
        ),
    ] = None


@section("Model and engine", 10)
@dataclass(frozen=True, kw_only=True)
class EngineChoice(Engine, _ModelChoice):
    """Which model is loaded, by which engine, and how."""

    tensor_parallel_size: Annotated[
        int, option("vllm: ranks that split each layer.", limits=AT_LEAST_1)
    ] = 1
    pipeline_parallel_size: Annotated[
        int, option("vllm: stages that the layers are spread over.", limits=AT_LEAST_1)
    ] = 1
    engine_arg: Annotated[
        tuple[str, ...],
        option(
            "NAME=VALUE, repeatable: any other argument of the engine, such as max_model_len=8192"
            " or gpu_memory_utilization=0.8 with vllm, attn_implementation=eager with transformers."
        ),
    ] = ()

    def options_for(self, bundles: Sequence[str] = ()) -> EngineOptions:
        """Return what the engine takes; without a model, that of these shipped bundles.  Raises
        UsageError."""
        check_place(self.model)
        extra: dict[str, str] = {}
        for argument in self.engine_arg:
            name, equals, value = argument.partition("=")
            if not (name and equals):
                raise UsageError("--engine-arg", f"{argument!r} is not NAME=VALUE")
            extra[name] = value
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if (size := getattr(self, name)) > 1:
                if self.engine != "vllm":
                    raise UsageError(f"--{name.replace('_', '-')}", "needs --engine vllm")
                extra[name] = str(size)
        try:
            return replace(self, extra=extra).options(self.model, bundles)
        except ModelLoadError as error:
            raise UsageError(f"--{error.param}", error.message) from None


@section("Bundles", 20)
@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Where bundles are, and which are trusted."""

    store: settings.StorePlace = DEFAULT_STORE
    store_cache: settings.StoreCache = None
    require_signature: settings.RequireSignature = None
    allow_open_store: settings.AllowOpenStore = False


@section("Bundles", 20)
@dataclass(frozen=True, kw_only=True)
class BundleOptions(StoreOptions):
    """Where bundles are, and which are used."""

    bundle: settings.BundleNames = ()
