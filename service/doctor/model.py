"""The model's files and the bundles that are to read it: compared as `serve` does it, without reading the weights."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probes_store.errors import BundleError
from probes_store.syntax import is_url
from service.doctor.findings import Finding, fail, ok, warn
from service.doctor.machine import TEMPORARY, memory_free, shown

if TYPE_CHECKING:
    from probes_store.bundle import Bundle
    from probes_store.store import Store
    from service.engines.base import EngineOptions
    from service.engines.loading import ModelFiles
    from service.readout import Geometry

HUB_ADVICE = "huggingface.co is asked at the start; HF_HUB_OFFLINE=1 reads the cache alone"


def check_store(store: Store) -> Iterator[Finding]:
    """The folder, who may write to it, and every bundle in it that is damaged."""
    root, remote = store.root, is_url(store.where)
    if not root.exists():
        found = "is not there yet: bundles that come with the package are found"
        yield ok("store", f"{store.where}, nothing is copied from it yet" if remote else f"{root} {found}")
    elif not root.is_dir() or not os.access(root, os.R_OK | os.X_OK):
        yield fail("store", f"{root} cannot be read", "check --store and the folder's permissions")
        return
    else:
        loose = [path for path in (root, *root.iterdir()) if path.is_dir() and path.stat().st_mode & stat.S_IWOTH]
        if loose:
            yield warn("store", f"anyone on this machine can put bundles into {loose[0]}", f"chmod o-w {loose[0]}")
        else:
            writable = "" if os.access(root, os.W_OK) else ", read-only: nothing can be published here"
            yield ok("store", f"{store.where}, copies in {root}" if remote else f"{root}{writable}")
    versions: dict[str, set[int]] = {}
    for summary in store.list():
        versions.setdefault(summary.name, set()).add(summary.version)
        if summary.error is not None:
            yield warn("store", _about(summary.reference, summary.error), "publish or copy it again, or remove it")
    for name, known in versions.items():
        yield from _aliases(store, name, known)


def _aliases(store: Store, name: str, versions: set[int]) -> Iterator[Finding]:
    """Those that lead nowhere: a bare name, too, where it is ``production``."""
    try:
        aliases = store.aliases(name)
    except BundleError as error:
        yield warn("store", f"{name}: {error}", "set the aliases of this bundle again")
        return
    for alias, version in aliases.items():
        if version not in versions:
            cure = f"hallutracer bundle alias {name} {alias} {max(versions)}, or another of its versions"
            yield warn("store", f"{name}@{alias} means version {version}, which is not there", cure)


def check_bundles(store: Store, names: Sequence[str], loaded: dict[str, Bundle]) -> Iterator[Finding]:
    """Every byte of each; what could be read is added to ``loaded``.  Of several, only the first is necessary."""
    for place, name in enumerate(names):
        try:
            bundle = store.verify(name)
        except BundleError as error:
            yield fail("bundle", _about(name, error)) if not place else left_out("bundle", name, error)
            continue
        loaded[name] = bundle
        yield ok("bundle", f"{bundle.reference}, {bundle.manifest.digest[:19]}, for {bundle.manifest.model.name}")


def _about(name: str, error: BundleError) -> str:
    """Most errors begin with the bundle's name."""
    return str(error) if str(error).startswith(f"{name}:") else f"{name}: {error}"


def left_out(check: str, name: str, error: BundleError) -> Finding:
    """One that the service starts without."""
    return warn(check, f"{name} is left out: {str(error).removeprefix(f'{name}: ')}", "mend it, or do not name it")


@dataclass(frozen=True)
class _Files:
    """What ``check_identity`` compares, from a model's files."""

    fingerprint: str
    architecture: str
    revision: str
    tokenizer: str
    chat_template: str | None
    geometry: Geometry


def check_model(options: EngineOptions, loaded: dict[str, Bundle], unpack: bool) -> Iterator[Finding]:
    """Configuration, tokenizer, weights on disk, memory; then each bundle's identity.  ``unpack`` a GGUF file, too.

    What is not the default and was trained on another model leaves ``loaded``.
    """
    from service.engines import gguf, places
    from service.engines.places import place_of

    place = place_of(options.model)
    if place is not None and gguf.is_gguf(place) and not unpack and gguf.unpacked(place) is None:
        yield ok("model", f"{place.name}, {place.stat().st_size / 2**20:.0f} MiB, unpacked at the first start; "
                 "--load unpacks it and compares it with its bundles")  # fmt: skip
        return
    if place is None and not places.reachable(options.model, options.revision):
        yield warn("model", f"{options.model}: the hub cannot be reached, the cache is read", HUB_ADVICE)
    from service.engines.families import geometry
    from service.engines.loading import find_model_files, folder_fingerprint, revision_of, weight_files
    from service.engines.tokens import Tokens

    files = find_model_files(options)
    weights = weight_files(files.folder)
    if place is None and not weights:
        yield ok("model", f"{options.model} on the hub, not downloaded yet")
        return
    tokens = Tokens(files.tokenizer)
    size = sum(path.stat().st_size for path in weights)
    yield ok("model", f"{files.name}, {files.config.model_type}, {shown(size)} in {files.folder}")
    yield from _memory(size, files, options)
    found = _Files(
        folder_fingerprint(files.folder),
        str((files.config.architectures or [type(files.config).__name__])[0]),
        revision_of(files.config),
        tokens.digest,
        tokens.chat_template_digest,
        geometry(files.config),
    )
    yield from _identities(found, loaded)


def _identities(found: _Files, loaded: dict[str, Bundle]) -> Iterator[Finding]:
    from probes_store.manifest import check_identity

    for place, (name, bundle) in enumerate(list(loaded.items())):
        try:
            check_identity(bundle.manifest, found)
        except BundleError as error:
            if not place:
                yield fail("identity", f"{name}: {error}")
            else:
                yield left_out("identity", name, error)
                del loaded[name]
        else:
            yield ok("identity", f"{bundle.reference} was trained on this model, tokenizer and chat template")


def _memory(size: int, files: ModelFiles, options: EngineOptions) -> Iterator[Finding]:
    """The weights in the type that they are loaded in, against what is free; only where they lie in the main memory."""
    from service.engines.loading import DTYPES, choose_device, choose_dtype

    if choose_device(options.device).type != "cpu":
        return
    chosen = choose_dtype(options.dtype, files.config, choose_device("cpu"))
    saved: Any = getattr(files.config, "dtype", None)
    grows = chosen.itemsize / saved.itemsize if saved in DTYPES.values() else 1.0
    free = memory_free()
    needed = size * grows
    if free is not None and needed > free:
        yield fail("memory", f"the weights take {shown(needed)}, and {shown(free)} are free",
                   "a larger limit, --dtype bfloat16, or a smaller model")  # fmt: skip
    else:
        of = "" if free is None else f" of {shown(free)} that are free"
        yield ok("memory", f"{shown(needed)} for the weights{of}")


def folders(store: Store, feedback: Path | None) -> dict[str, Path]:
    """Where a service and its commands write: what for -> folder."""
    import tempfile

    from huggingface_hub import constants

    from service.engines.gguf import cache_folder

    found = {
        "bundles": store.root.absolute(),
        "downloaded models": Path(constants.HF_HUB_CACHE).absolute(),
        "unpacked models": cache_folder().absolute(),
        TEMPORARY: Path(tempfile.gettempdir()),
    }
    return found | ({} if feedback is None else {"feedback": feedback.absolute().parent})
