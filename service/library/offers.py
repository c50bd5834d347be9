"""Which bundles of some stores are for a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from probes_store.index import Offer
from probes_store.store import SHIPPED, Store
from service.library.engine import name_and_weights


@dataclass(frozen=True)
class Match:
    """A bundle that may be for a model."""

    offer: Offer
    where: str  # the store's folder or URL
    same_weights: bool  # else only the names are alike, and the weights are not here to compare

    @property
    def reference(self) -> str:
        """NAME:VERSION, of the highest version."""
        return f"{self.offer.name}:{self.offer.versions[-1]}"


def for_model(model: str, stores: Sequence[Store], *, hashing: bool = True) -> list[Match]:
    """Return bundles of the stores and of the package: of the same weights, or where the weights
    are not here, of the same name.

    ``hashing``: as ``name_and_weights`` has it.  Raises ModelLoadError for a place where no model
    is, and what ``Store.offers`` raises."""
    name, weights = name_and_weights(model, hashing=hashing)
    matches = [
        Match(offer, store.where, weights is not None)
        for store in (*stores, Store(SHIPPED))
        for offer in store.offers()
        if (_same_name(offer.model, name) if weights is None else offer.fingerprint == weights)
    ]
    return sorted(matches, key=lambda match: -(match.offer.auroc or 0.0))


def _same_name(name: str, other: str) -> bool:
    """Return whether two names of a model end alike: a folder has the name of its repository."""
    first, second = (text.rstrip("/").rpartition("/")[2].casefold() for text in (name, other))
    return first == second
