"""From options to a store, an engine, scorers or a running service.  Heavy imports happen inside,
after parsing."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from service.cli.options import BundleOptions, EngineChoice, StoreOptions, UsageError, check_place
from service.errors import HalluTracerError
from service.library import engine as library
from service.library.engine import NoDefaultBundle, check_store, default_bundles
from service.progress import Report, note, progress

if TYPE_CHECKING:
    from probes_store.bundle import Bundle
    from probes_store.store import Store
    from service.engines.base import Engine, EngineOptions
    from service.scoring import Scorer

log = logging.getLogger("hallutracer")
T = TypeVar("T")


def open_store(options: StoreOptions, *, to_read: bool = True) -> Store:
    """Return the user's store, with the shipped bundles behind it.

    ``to_read``: the command makes nothing in it.  Then UsageError is raised for one that was named
        and is not there."""
    store = library.open_store(
        options.store,
        cache=options.store_cache,
        require_signature=options.require_signature,
        allow_open_store=options.allow_open_store,
    )
    if to_read:
        try:
            check_store(options.store)
        except HalluTracerError as error:
            raise UsageError("--store", error.message) from None
    return store


def bundle_names(model: str | None, options: BundleOptions) -> tuple[str, ...]:
    """Return which bundles to load; shipped models have their own, any other must name one.  Raises
    UsageError."""
    check_place(model)
    if options.bundle:
        return options.bundle
    try:
        return default_bundles(model)
    except NoDefaultBundle as error:
        also = _in_the_store(model, options)
        raise UsageError(f"--{error.param}", error.message + also) from None


def _in_the_store(model: str | None, options: BundleOptions) -> str:
    """Return which bundle of the store may be named for a model that comes with none; "" if there
    is none, or the store cannot be read."""
    from service.library.offers import for_model

    try:
        matches = for_model(model or "", [open_store(options)], hashing=False)
    except (HalluTracerError, OSError):
        return ""
    if not matches:
        return ""
    best = matches[0]
    known = "was trained on it" if best.same_weights else "was trained on a model of this name"
    return f"; {best.reference} in {best.where} {known}: --bundle {best.offer.name}"


def chosen_model(choice: EngineChoice, bundles: Sequence[Bundle]) -> EngineOptions:
    """Return how the chosen model is loaded; none named: that of the shipped bundles.

    Raises what ``refuse_another_model`` raises where it is not the one of the first bundle."""
    chosen = choice.options_for([bundle.manifest.name for bundle in bundles])
    library.refuse_another_model(chosen, bundles)
    return chosen


def load_engine(
    choice: EngineChoice,
    *,
    bundles: Sequence[Bundle] = (),
    chosen: EngineOptions | None = None,
    **more: Any,
) -> Engine:
    """Load the ``chosen_model``, which a caller may have looked at.  ``more``: as
    ``library.engine.load_engine``."""
    collects = gc.isenabled()
    gc.disable()  # collections during imports take a second, and find nothing
    try:
        chosen = chosen or chosen_model(choice, bundles)
        if choice.engine == "transformers":
            _import_engine()
        return library.load_engine(
            chosen, bundles=bundles, threads=choice.threads, checked=True, **more
        )
    finally:
        if collects:
            gc.enable()


def _import_engine() -> None:
    from transformers import utils  # which loads scikit-learn and scipy for what no command has

    originals = {
        name: getattr(utils, name) for name in ("is_sklearn_available", "is_scipy_available")
    }
    try:
        vars(utils).update(dict.fromkeys(originals, lambda: False))
        import service.engines.transformers.engine  # noqa: F401
    finally:
        vars(utils).update(originals)


@dataclass
class OptionalBundles:
    """References that ``may`` fail to load: they are logged and left out, and ``reasons`` says why.

    ``must_answer``: a store that gives no answer is an error all the same, for it does not say that
        they would fail."""

    may: Collection[str]
    must_answer: bool = False
    must_be_there: Collection[
        str
    ] = ()  # of these, what the store has to know: a misspelt name is no damaged bundle
    reasons: dict[str, str] = field(default_factory=dict)


def load_first(store: Store, names: Sequence[str]) -> Bundle:
    """Return the bundle of the first reference, for a command that takes one.

    The others, which a variable that ``serve`` reads may name, are not loaded; BundleError is
    raised where the store does not know one."""
    for name in names[1:]:
        store.stamp(name)
    return store.load(names[0])


def load_bundles(
    store: Store, names: Sequence[str], leave_out: OptionalBundles | None = None
) -> dict[str, Bundle]:
    """Return the bundle of each reference."""
    return _usable(names, store.load, leave_out)


def load_scorers(
    engine: Engine,
    bundles: Mapping[str, Bundle],
    report: Report = note,
    leave_out: OptionalBundles | None = None,
    loaded: Sequence[Scorer] = (),
) -> dict[str, Scorer]:
    """Match each bundle with the model and replay its golden prompts, unless it is one of those
    ``loaded``."""
    from service.scoring import Scorer

    known = {
        (scorer.bundle.reference, scorer.bundle.manifest.digest): scorer
        for scorer in loaded
        if scorer.engine is engine
    }

    def scorer_of(name: str) -> Scorer:
        bundle = bundles[name]
        before = known.get((bundle.reference, bundle.manifest.digest))
        return Scorer(engine, bundle) if before is None else before.again(bundle)

    with progress("replaying the bundles' golden prompts", report):
        return _usable(tuple(bundles), scorer_of, leave_out)


def _usable(
    names: Sequence[str], load: Callable[[str], T], leave_out: OptionalBundles | None
) -> dict[str, T]:
    from probes_store.errors import (
        BundleError,
        BundleNotFound,
        HubError,
        InvalidReference,
        StoreRefused,
        StoreUnreachable,
    )

    usable: dict[str, T] = {}
    for name in names:
        try:
            usable[name] = load(name)
        except BundleError as error:
            if leave_out is None or name not in leave_out.may:
                raise
            if name in leave_out.must_be_there and isinstance(
                error, BundleNotFound | InvalidReference
            ):
                raise
            if leave_out.must_answer and isinstance(
                error, StoreUnreachable | StoreRefused | HubError
            ):
                raise
            leave_out.reasons[name] = str(error)
            log.error("bundle %s is left out: %s", name, error)
    return usable


@contextmanager
def running_service(url: str, key: str | None) -> Iterator[Callable[[str], Any]]:
    """Yield a function that GETs the JSON at a path of a running service.  Raises HalluTracerError,
    with its words."""
    import httpx

    def get(path: str) -> Any:
        answer = client.get(path)
        if answer.status_code != 200:
            try:
                message = answer.json()["error"]["message"]
            except (ValueError, LookupError, TypeError):
                message = answer.text[:200]
            raise HalluTracerError(f"GET {answer.url} answered {answer.status_code}: {message}")
        return answer.json()

    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
            yield get
    except (
        httpx.HTTPError,
        httpx.InvalidURL,
        ValueError,
        KeyError,
        TypeError,
        StopIteration,
    ) as error:
        why = error or type(error).__name__
        raise HalluTracerError(
            f"{url} did not answer as a HalluTracer service of this version: {why}"
        ) from error
