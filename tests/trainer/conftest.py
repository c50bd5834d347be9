"""Bundles that several files look at: training one takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes_store.bundle import Bundle
from probes_store.store import Store
from tests.fitting.planted import planted_rows
from tests.trainer.made import ONE, store_of, trained_once

# Of 400 rows, and 80 held-out ones.
trained = trained_once(
    rows=planted_rows(400), test=planted_rows(80, seed=3), evaluate=False, scope="session"
)
# The quickest run, all by default, and what it printed.
quick = trained_once(console=True, scope="session", **ONE)


@pytest.fixture
def store(trained: Bundle, tmp_path: Path) -> Store:
    return store_of(trained, tmp_path)
