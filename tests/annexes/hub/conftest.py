"""Keys, and stores in a folder or at a URL, as the tests of the store have them."""

from __future__ import annotations

from tests.probes_store.conftest import keys, opens

__all__ = ["keys", "opens"]
