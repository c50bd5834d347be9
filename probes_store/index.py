"""What bundles a store at a URL offers, in one small file beside them: ``index.json``.

It saves whoever looks for a bundle a request for each version.  It decides nothing: versions that
it lacks are looked up, versions that are not there are passed over, and whatever is fetched is
checked by its own manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from probes_store.manifest import Manifest
from probes_store.records import Filled, Name, Positive, Record, Share

INDEX = "index.json"


@dataclass(frozen=True)
class Offer(Record):
    """Versions of one bundle for one model."""

    name: Name
    versions: Annotated[tuple[Positive, ...], Field(min_length=1)]
    model: Filled  # as its trainer named it
    fingerprint: Filled  # over the model's configuration and weight files
    auroc: Share | None  # of the highest version, on rows that no fit saw; null if not measured


@dataclass(frozen=True)
class _Index(Record):
    format: Literal["hallutracer-index"]
    format_version: Literal[1]
    bundles: tuple[Offer, ...]


_ADAPTER = TypeAdapter(_Index)


def read_index(data: bytes | None) -> tuple[Offer, ...]:
    """Read the bytes of an index; of none, or a damaged one, nothing."""
    try:
        return _ADAPTER.validate_json(data or b"").bundles
    except ValidationError:
        return ()


def index_bytes(offers: Iterable[Offer]) -> bytes:
    """Return the bytes of an index."""
    index = _Index("hallutracer-index", 1, tuple(sorted(offers, key=_order)))
    return _ADAPTER.dump_json(index, indent=2)


def _order(offer: Offer) -> tuple[str, int]:
    return offer.name, max(offer.versions)


def offer_of(manifest: Manifest, evaluation: Mapping[str, Any] | None = None) -> Offer:
    """Return the offer of one version; probes of a model with an adapter are another model's."""
    model = manifest.model
    version = (manifest.version,)
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
    for offer in sorted(offers, key=_order):
        key = offer.name, offer.fingerprint
        known = by_model[key].versions if key in by_model else ()
        versions = sorted({*known, *offer.versions})
        by_model[key] = replace(offer, versions=tuple(versions))
    return list(by_model.values())
