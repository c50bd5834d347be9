"""The notebooks run from top to bottom, and show what their committed outputs show."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="pip install 'hallutracer[test]'")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("pandas")

from jupyter_client.manager import KernelManager  # noqa: E402

from tests.docs.pages import ROOT  # noqa: E402
from tests.serve_process import inherited  # noqa: E402

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelManager]:
    """One kernel for all of them, emptied in between: most of a notebook's time goes into importing torch."""
    manager = KernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = sys.executable
    home = str(tmp_path_factory.mktemp("home"))
    paths = {"HOME": home, "IPYTHONDIR": home, "JUPYTER_CONFIG_DIR": home, "PYTHONPATH": str(ROOT)}
    manager.start_kernel(env=inherited() | paths | {"TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"})
    yield manager
    manager.shutdown_kernel(now=True)


def executed(path: Path, folder: Path, kernel: KernelManager) -> Any:
    """The notebook after all of its cells ran in ``folder``."""
    book = nbformat.read(path, as_version=4)
    for name in FOLDER.glob("*.jsonl"):
        shutil.copy(name, folder)
    start = nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {folder}")
    ran = nbformat.from_dict({**book, "cells": [start, *book.cells]})
    nbclient.NotebookClient(ran, km=kernel, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    ran["cells"] = ran["cells"][1:]
    return ran


def shown(book: Any) -> list[tuple[str, ...]]:
    """What each cell shows: kinds of output, and the text of those that are not pictures."""
    found = []
    for cell in book.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            kinds = tuple(sorted(data)) or (output["output_type"],)
            found.append(kinds if "image/png" in data else (*kinds, str(data.get("text/plain", output.get("text")))))
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_committed(path: Path, tmp_path: Path, kernel: KernelManager) -> None:
    committed = nbformat.read(path, as_version=4)
    ran = executed(path, tmp_path, kernel)
    assert all(cell.execution_count for cell in committed.cells if cell.cell_type == "code"), "execute and commit it"
    assert not [output for cell in ran.cells for output in cell.get("outputs", ()) if output.output_type == "stream"]
    assert [kinds[:-1] for kinds in shown(ran)] == [kinds[:-1] for kinds in shown(committed)]
    assert any("image/png" in kinds for kinds in shown(ran))
    if os.environ.get("HALLUTRACER_WRITE_NOTEBOOKS"):
        nbformat.write(ran, path)


def test_there_are_notebooks_and_a_broken_one_fails(tmp_path: Path, kernel: KernelManager) -> None:
    assert {path.stem for path in NOTEBOOKS} == {"score-and-look", "train-on-your-rows"}
    path = tmp_path / "broken.ipynb"
    cells = [nbformat.v4.new_code_cell("import hallutracer as ht\nht.lode('demo')")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="hallutracer has no 'lode'; it has"):
        executed(path, tmp_path, kernel)
