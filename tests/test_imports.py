"""Imports go one way, and importing the package stays cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Each layer may import the layers below it and itself; siblings (same line) do not import each other.
LAYERS = [
    ["service.cli", "service.vllm_plugin", "hallutracer"],
    ["service.library", "service.doctor"],
    ["service.demo"],
    ["service.api", "service.paper"],
    ["service.evaluation"],
    ["service.trainer", "service.serving"],
    ["service.fitting", "service.picture"],
    ["service.data"],
    ["service.scoring", "service.drift"],
    ["service.prompts", "service.policies", "service.guarantee", "service.uncertainty", "service.coverage"],
    ["service.guard", "service.form_table", "service.sample"],
    ["service.upstreams", "service.feedback", "service.access", "service.audit"],
    ["service.engines"],
    ["service.risk", "service.context"],
    ["service.readout"],
    ["probes_store"],
    ["service.options"],
    ["service.settings"],
    ["service.routes", "service.conversation"],
    ["service.errors", "service.callers", "service.progress"],
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def owner(module: str) -> str | None:
    """The layer entry that a dotted module belongs to."""
    return next((name for name in RANK if module == name or module.startswith(name + ".")), None)


def module_name(path: Path, root: Path = ROOT) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


SOURCES = sorted(p for folder in ("service", "probes_store", "hallutracer") for p in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_go_one_way(path: Path) -> None:
    module = module_name(path)
    if module == "service":
        return
    own = owner(module)
    assert own is not None, f"{module} has no place in the layers: add it to tests/test_imports.py"
    for target in imported(path):
        other = owner(target)
        if other is None or other == own:
            continue
        assert not (own == "probes_store" and other.startswith("service")), "probes_store imports nothing of ours"
        assert RANK[own] < RANK[other], f"{module} imports {target}, which is not below it"


def modules_imported(path: Path, modules: set[str]) -> set[str]:
    """Those of ``modules`` that a file imports anywhere in it, under ``TYPE_CHECKING`` too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full in modules else node.module)
    return names & modules


def circle(paths: list[Path], root: Path = ROOT) -> list[str]:
    """Modules that import each other in a ring; empty where there is none."""
    by_name = {module_name(path, root): path for path in paths}
    graph = {name: modules_imported(path, set(by_name)) - {name} for name, path in by_name.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    assert circle(SOURCES) == []


@pytest.mark.parametrize("indent", ["", "if TYPE_CHECKING:\n    ", "def late():\n    "])
def test_a_circle_would_be_caught(tmp_path: Path, indent: str) -> None:
    sources = {"a": "from p import b\n", "b": "import p.c\n", "c": f"{indent}from p.a import name\n", "__init__": ""}
    (tmp_path / "p").mkdir()
    for name, text in sources.items():
        (tmp_path / "p" / f"{name}.py").write_text(text)
    paths = sorted(tmp_path.rglob("*.py"))
    assert set(circle(paths, tmp_path)) == {"p.a", "p.b", "p.c"}
    (tmp_path / "p" / "c.py").write_text("import os\n")
    assert circle(paths, tmp_path) == []


def test_every_source_file_is_seen() -> None:
    assert len(SOURCES) > 20


def test_a_wrong_direction_would_be_caught(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("from service.cli.main import main\n")
    assert "service.cli.main" in imported(bad)
    assert RANK["service.risk"] > RANK["service.cli"]


HEAVY = ("torch", "vllm", "transformers", "sklearn", "pandas", "matplotlib")


LIGHT = ("service", "service.cli", "service.risk", "probes_store", "service.demo", "hallutracer")


@pytest.mark.parametrize("module", LIGHT)
def test_import_stays_light(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
