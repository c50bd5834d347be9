"""Bundles that several files look at: training one takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes_store.bundle import Bundle
from probes_store.store import Store
from tests.fitting.planted import Quiet, planted_rows
from tests.trainer.made import ONE, run, store_of


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Of 400 rows, and 80 held-out ones."""
    folder, held_out = tmp_path_factory.mktemp("trained"), planted_rows(80, seed=3)
    return run(folder, rows=planted_rows(400), test=held_out, evaluate=False)[0]


@pytest.fixture(scope="session")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Quiet]:
    """The quickest run, all by default."""
    return run(tmp_path_factory.mktemp("quick"), **ONE)


@pytest.fixture
def store(trained: Bundle, tmp_path: Path) -> Store:
    return store_of(trained, tmp_path)
