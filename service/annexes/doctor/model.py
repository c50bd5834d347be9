"""The model's files, the bundles that are to read it and their roles: as `serve` finds them,
without the weights."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from probes_store.errors import BundleError, BundleNotFound, InvalidReference
from probes_store.syntax import is_url
from service.annexes.doctor.machine import TEMPORARY, Finding, fail, memory_free, ok, warn
from service.progress import size_text
from service.settings import DEFAULT_SHARE

if TYPE_CHECKING:
    from probes_store.bundle import Bundle
    from probes_store.store import Store
    from service.engines.base import EngineOptions
    from service.scoring import Scorer
    from service.serving.catalogue import RolloutPlan

HUB_ADVICE = "huggingface.co is asked at the start; HF_HUB_OFFLINE=1 reads the cache alone"


def check_store(store: Store, *, named: bool = False) -> Iterator[Finding]:
    """Look at the folder, who may write to it, every bundle in it that is damaged, and aliases that
    lead nowhere.

    ``named``: by the operator, so that it has to be there."""
    root, remote = store.root, is_url(store.where)
    if named and not remote and not root.exists():
        cure = (
            "correct --store, publish there first, or leave it out for the bundles that come with"
            " the package"
        )
        yield fail("store", f"there is no folder {root}", cure)
        return
    if not root.exists():
        there = (
            f"{store.where}, nothing is copied from it yet"
            if remote
            else f"{root} is not there yet: bundles that "
        )
        yield ok("store", there if remote else there + "come with the package are found")
    elif not root.is_dir() or not os.access(root, os.R_OK | os.X_OK):
        yield fail("store", f"{root} cannot be read", "check --store and the folder's permissions")
        return
    elif loose := [
        path
        for path in (root, *root.iterdir())
        if path.is_dir() and path.stat().st_mode & stat.S_IWOTH
    ]:
        yield warn(
            "store",
            f"anyone on this machine can put bundles into {loose[0]}",
            f"chmod o-w {loose[0]}",
        )
    else:
        writable = "" if os.access(root, os.W_OK) else ", read-only: nothing can be published here"
        yield ok("store", f"{store.where}, copies in {root}" if remote else f"{root}{writable}")
    versions: dict[str, set[int]] = {}
    for summary in store.list():
        versions.setdefault(summary.name, set()).add(summary.version)
        if summary.error is not None:
            yield warn(
                "store",
                _about(summary.reference, summary.error),
                "publish or copy it again, or remove it",
            )
    for name, known in versions.items():
        try:
            aliases = store.aliases(name)
        except BundleError as error:
            yield warn("store", f"{name}: {error}", "set the aliases of this bundle again")
            continue
        for alias, version in aliases.items():
            if version not in known:
                cure = (
                    f"hallutracer bundle alias {name} {alias} {max(known)}, or another of its"
                    " versions"
                )
                yield warn(
                    "store", f"{name}@{alias} means version {version}, which is not there", cure
                )


def check_bundles(
    store: Store, served: Sequence[str], of_rollout: Sequence[str], loaded: dict[str, Bundle]
) -> Iterator[Finding]:
    """Read every byte of each; what could be read is added to ``loaded``.

    Of ``served`` the service needs the first, and that the store knows the others; those of the
    rollout may be missing."""
    for index, name in enumerate(dict.fromkeys((*served, *of_rollout))):
        try:
            bundle = store.verify(name)
        except BundleError as error:
            unknown = name in served and isinstance(error, BundleNotFound | InvalidReference)
            necessary = index == 0 or unknown
            yield (
                fail("bundle", _about(name, error))
                if necessary
                else _left_out("bundle", name, error)
            )
            continue
        loaded[name] = bundle
        yield ok(
            "bundle",
            f"{bundle.reference}, {bundle.manifest.digest[:19]}, for {bundle.manifest.model.name}",
        )


def _about(name: str, error: BundleError) -> str:
    # most begin with the name
    return str(error) if str(error).startswith(f"{name}:") else f"{name}: {error}"


def _left_out(check: str, name: str, error: BundleError) -> Finding:
    return warn(
        check,
        f"{name} is left out: {str(error).removeprefix(f'{name}: ')}",
        "mend it, or do not name it",
    )


def check_model(
    options: EngineOptions, loaded: dict[str, Bundle], unpack: bool
) -> Iterator[Finding]:
    """Check configuration, tokenizer, weights on disk, memory; then each bundle's identity.

    ``unpack`` a GGUF file, too.  What is not the default and was trained on another model leaves
    ``loaded``."""
    from service.engines import places
    from service.engines.places import place_of
    from service.matching import check_identity

    source = place_of(options.model)
    if (
        source is not None
        and places.is_gguf(source)
        and not unpack
        and places.unpacked(source) is None
    ):
        yield ok(
            "model",
            f"{source.name}, {source.stat().st_size / 2**20:.0f} MiB, unpacked at the first start; "
            "--load unpacks it and compares it with its bundles",
        )
        return
    if source is None and not places.reachable(options.model, options.revision):
        yield warn(
            "model", f"{options.model}: the hub cannot be reached, the cache is read", HUB_ADVICE
        )
    from service.engines.adapters import digest_of
    from service.engines.checkpoint import folder_fingerprint, weight_files
    from service.engines.checks import Tokens
    from service.engines.devices import choose_device
    from service.engines.families import geometry
    from service.engines.loading import DTYPES, choose_dtype, find_model_files

    files = find_model_files(options)
    weights = weight_files(files.folder)
    if source is None and not weights:
        yield ok("model", f"{options.model} on the hub, not downloaded yet")
        return
    config, tokens = files.config, Tokens(files.tokenizer)
    if tokens.chat_template_digest is None:
        yield warn(
            "template",
            f"{files.name} has no chat template, so the routes for chats refuse every request",
            "send text to /v1/completions or /score, or put a chat_template.jinja beside the model",
        )
    size = sum(path.stat().st_size for path in weights)
    yield ok("model", f"{files.name}, {config.model_type}, {size_text(size)} in {files.folder}")
    if choose_device(options.device).type == "cpu":  # else the weights lie in the GPU's memory
        saved: Any = getattr(config, "dtype", None)
        chosen = choose_dtype(options.dtype, config, choose_device("cpu"))
        needed = size * (chosen.itemsize / saved.itemsize if saved in DTYPES.values() else 1.0)
        free = memory_free()
        if free is not None and needed > free:
            yield fail(
                "memory",
                f"the weights take {size_text(needed)}, and {size_text(free)} are free",
                "a larger limit, --dtype bfloat16, or a smaller model",
            )
        else:
            of = "" if free is None else f" of {size_text(free)} that are free"
            yield ok("memory", f"{size_text(needed)} for the weights{of}")
    identity = files.identity(
        tokens,
        fingerprint=folder_fingerprint(files.folder),
        geometry=geometry(config),
        dtype=options.dtype,  # which no bundle is compared with
        max_tokens=0,
        arguments=next(
            (bundle.manifest.chat_template.arguments for bundle in loaded.values()), None
        ),
    )
    if options.adapter is not None:
        identity = replace(identity, adapter=digest_of(options.adapter))
    for number, (name, bundle) in enumerate(list(loaded.items())):
        try:
            check_identity(bundle.manifest, identity)
        except BundleError as error:
            if number:
                del loaded[name]
            yield (
                _left_out("identity", name, error)
                if number
                else fail("identity", f"{name}: {error}")
            )
        else:
            yield ok(
                "identity",
                f"{bundle.reference} was trained on this model, tokenizer and chat template",
            )


def folders(store: Store, feedback: Path | None) -> dict[str, Path]:
    """Return where a service and its commands write: what for -> folder."""
    import tempfile

    from huggingface_hub import constants

    from service.engines.places import cache_folder

    written = {
        "bundles": store.root.absolute(),
        "downloaded models": Path(constants.HF_HUB_CACHE).absolute(),
        "unpacked models": cache_folder().absolute(),
        TEMPORARY: Path(tempfile.gettempdir()),
    }
    return written | ({} if feedback is None else {"feedback": feedback.absolute().parent})


def check_rollout(
    plan: RolloutPlan, loaded: Mapping[str, Bundle], watch_s: float
) -> Iterator[Finding]:
    """Check the canary and the shadows against the default bundle, the first of ``loaded``."""
    from service.prompts import as_prompt_format
    from service.serving.catalogue import rolled_out

    scorers = {  # what a rollout looks at in a scorer, without the model
        name: cast(
            "Scorer",
            SimpleNamespace(
                bundle=bundle, prompt_format=as_prompt_format(bundle.manifest.prompt_format)
            ),
        )
        for name, bundle in loaded.items()
    }
    if not scorers:
        return  # the check of the bundles has said why

    default = next(iter(scorers.values()))
    if plan.canary is None and plan.share != DEFAULT_SHARE:
        yield warn(
            "rollout",
            f"a share of {plan.share:g}, and no canary that would get it",
            "give --canary",
        )
    if plan.canary is not None and not plan.share:
        cure = "raise --canary-share, or make it a --shadow"
        yield warn("rollout", f"the canary {plan.canary} gets no request", cure)
    rollout, left_out = rolled_out(plan, scorers)
    for name, reason in left_out.items():
        yield warn(
            "rollout",
            f"{name} is left out: {reason}",
            "move the alias to another version, or do not name it",
        )
    canary, shadows = rollout.canary, [shadow.bundle.reference for shadow in rollout.shadows]
    parts = [f"{default.bundle.reference} judges"]
    if canary is not None and plan.share:
        parts.append(f"the canary {canary.bundle.reference} gets {plan.share:.3g} of the requests")
    parts += [f"{', '.join(shadows)} watches"] if shadows else []
    how = f"every {watch_s:g} s" if watch_s else "at a SIGHUP and POST /v1/admin/reload"
    yield ok("rollout", f"{'; '.join(parts)}; aliases are followed {how}")


def check_drift(judging: Iterable[Bundle], replay_s: float) -> Iterator[Finding]:
    """Whether the service could say of each bundle that its guarantee is violated, and by what."""
    from service.judging.drift import reference_of

    for bundle in judging:
        try:
            reference = reference_of(bundle)
        except BundleError as error:
            yield warn("drift", f"{bundle.reference} is not watched: {error}", "copy it again")
            continue
        if reference is None:
            problem = (
                f"{bundle.reference} keeps none of its training's risks: no change of the questions"
                " is seen"
            )
            yield warn("drift", problem, "train it again with this release")
            continue
        yield ok("drift", f"{bundle.reference} is compared with its training's risks")
    if not replay_s:
        yield warn(
            "drift",
            "golden prompts are not replayed while serving: a readout that changes is not seen",
            "--replay-s 600",
        )
