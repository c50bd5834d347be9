"""A user's store, with the shipped bundles behind it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from probes_store.store import Store


def open_store(
    place: str | Path,
    *,
    cache: str | Path | None = None,
    require_signature: str | Path | None = None,
    allow_open_store: bool = False,
) -> Store:
    """The store in a folder or at a URL; nothing is read yet but the key.

    cache: where copies of a URL's bundles are kept; require_signature: a public key, certificates or
    sigstore:IDENTITY@ISSUER.  Raises InvalidReference, OpenStore and SigningError.
    """
    from probes_store.store import SHIPPED, Store, Trust
    from probes_store.trust import required_signature

    required = None if require_signature is None else required_signature(str(require_signature))
    return Store(
        place,
        fallbacks=[SHIPPED],
        trust=Trust(required, allow_open_store),
        cache=None if cache is None else Path(cache),
    )
