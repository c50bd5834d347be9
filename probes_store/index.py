"""What bundles a store at a URL offers, in one small file beside them: ``index.json``.

It saves whoever looks for a bundle a request for each version.  It decides nothing: versions that
it lacks are looked up, versions that are not there are passed over, and whatever is fetched is
checked by its own manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, Protocol

from pydantic import TypeAdapter, ValidationError

from probes_store.errors import BadValue, BundleDamaged
from probes_store.manifest import Manifest, read_manifest
from probes_store.records import Filled, Positive, Record, Share, Text, matching
from probes_store.syntax import NAME, NAMES, parse_json, readable_json

INDEX = "index.json"


@dataclass(frozen=True)
class Offer(Record):
    """Versions of one bundle for one model."""

    name: Annotated[Text, matching(NAME, NAMES)]
    versions: tuple[Positive, ...]
    model: Filled  # as its trainer named it
    fingerprint: Filled  # over the model's configuration and weight files
    auroc: Share | None  # of the highest version, on rows that no fit saw; null if not measured


@dataclass(frozen=True)
class _Index(Record):
    format: Literal["hallutracer-index"]
    format_version: Literal[1]
    bundles: tuple[Offer, ...]


_ADAPTER = TypeAdapter(_Index)


def read_index(data: bytes, file: str = INDEX) -> tuple[Offer, ...]:
    """Read the bytes of an index.  Raises a subclass of BundleDamaged."""
    try:
        return _ADAPTER.validate_python(parse_json(data, file)).bundles
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadValue("bad value", file=file, field=where, expected=first["msg"]) from None


def index_bytes(offers: Iterable[Offer]) -> bytes:
    """Return the bytes of an index."""
    in_order = sorted(offers, key=lambda offer: (offer.name, offer.versions))
    rows = [asdict(offer) for offer in in_order]
    return readable_json({"format": "hallutracer-index", "format_version": 1, "bundles": rows})


def offer_of(manifest: Manifest, evaluation: Mapping[str, Any] | None = None) -> Offer:
    """Return the offer of one version; probes of a model with an adapter are another model's."""
    model, version = manifest.model, (manifest.version,)
    weights = model.fingerprint + ("" if model.adapter is None else f"+{model.adapter}")
    return Offer(manifest.name, version, model.name, weights, auroc_of(evaluation or {}))


def auroc_of(evaluation: Mapping[str, Any]) -> float | None:
    """Return the cross-validated AUROC of a bundle's risk; None if evaluation.json has none."""
    try:
        signals = evaluation["cross_validation"]["signals"]
        return float(signals[evaluation["signal_of_the_bundle"]]["auroc"]["mean"])
    except (KeyError, TypeError, ValueError):
        return None


def joined(offers: Iterable[Offer]) -> list[Offer]:
    """Return one offer for each bundle and model, with all versions and the highest one's AUROC."""
    by_model = dict[tuple[str, str], Offer]()
    for offer in offers:
        key = offer.name, offer.fingerprint
        if (other := by_model.get(key)) is None:
            by_model[key] = offer
        else:
            newer = max(other, offer, key=lambda each: max(each.versions, default=0))
            versions = sorted({*other.versions, *offer.versions})
            by_model[key] = replace(newer, versions=tuple(versions))
    return list(by_model.values())


class Source(Protocol):
    """What ``offers`` asks of a store at a URL."""

    def index(self) -> bytes | None:
        """Return the bytes of ``index.json``; None if there is none."""
        ...

    def names(self) -> Sequence[str]:
        """Return the names of its bundles."""
        ...

    def versions(self, name: str) -> set[int]:
        """Return the versions of a name."""
        ...

    def manifest(self, name: str, version: int) -> bytes:
        """Return the bytes of a version's manifest."""
        ...


def offers(source: Source) -> list[Offer]:
    """Return what a store at a URL offers; damaged bundles and a damaged index are passed over."""
    try:
        listed = read_index(source.index() or index_bytes(()))
    except BundleDamaged:
        listed = ()
    every = list[Offer]()
    for name in source.names():
        left = source.versions(name)
        for offer in listed:
            if offer.name == name and (there := left & {*offer.versions}):
                every.append(replace(offer, versions=tuple(sorted(there))))
                left = left - there
        for version in sorted(left):
            try:
                every.append(offer_of(read_manifest(source.manifest(name, version))))
            except BundleDamaged:
                continue
    return joined(every)
