"""Imports go one way, and importing the package stays cheap."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Each layer may import the layers below it and itself; siblings (same line) do not import each
# other.
LAYERS = [
    ["service.annexes.doctor", "service.annexes.hub"],
    ["service.annexes.feedback", "service.annexes.guardrails", "service.annexes.traces"],
    ["hallutracer"],
    ["hallutracer_research"],
    ["service.cli", "service.vllm_plugin"],
    ["service.library"],
    ["service.demo", "service.api"],
    ["service.trainer", "service.serving"],
    ["service.fitting"],
    ["service.data"],
    ["service.scoring"],
    ["service.turn", "service.matching"],
    ["service.prompts", "service.judging"],
    ["service.policies"],
    ["service.feedback", "service.audit"],
    ["service.engines.transformers", "service.engines.vllm"],
    ["service.engines", "service.access"],
    ["service.risk"],
    ["service.readout"],
    ["probes_store"],
    ["service.options"],
    ["service.settings"],
    ["service.access.routes"],
    [
        "service.errors",
        "service.progress",
        "service.batch_writer",
        "service.proxies",
        "service.access.callers",
        "service.tool_calls",
    ],
    ["service.json_limits", "service.annexes"],
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def owner(module: str) -> str | None:
    """The layer entry that a dotted module belongs to: the longest that fits."""
    return max(
        (name for name in RANK if module == name or module.startswith(name + ".")),
        key=len,
        default=None,
    )


def module_name(path: Path, root: Path = ROOT) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "research" else parts).removesuffix(".__init__")


Imports = dict[
    str, set[str]
]  # module -> names that it asks for: "package.module" or "package.module.name"


def read(paths: list[Path], root: Path = ROOT) -> Imports:
    """What each module imports anywhere in it, under ``TYPE_CHECKING`` too.  Each file is parsed
    once."""
    found: Imports = {}
    for path in paths:
        names = found[module_name(path, root)] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                assert node.level == 0, f"{path}: relative import"
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FOLDERS = ("service", "probes_store", "hallutracer", "research/hallutracer_research")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


@pytest.fixture(scope="module")
def imports() -> Imports:
    return read(SOURCES)


def wrong_ways(imports: Imports) -> list[str]:
    """Imports that go up or sideways, and modules without a place."""
    results = []
    for module in imports.keys() - {"service"}:
        own = owner(module)
        if own is None:
            results.append(f"{module} has no place in the layers: add it to tests/test_imports.py")
            continue
        for target in imports[module]:
            other = owner(target)
            if other not in (None, own) and RANK[own] >= RANK[other]:
                results.append(f"{module} imports {target}, which is not below it")
    return results


def test_imports_go_one_way(imports: Imports) -> None:
    assert wrong_ways(imports) == []


def test_the_store_imports_nothing_of_ours(imports: Imports) -> None:
    for module, names in imports.items():
        if module.startswith("probes_store"):
            assert not any(name.startswith("service") for name in names), module


def test_nothing_that_serves_imports_research(imports: Imports) -> None:
    """``hallutracer`` names its ``evaluate`` for type checkers, and loads it where it is asked
    for."""
    for module, names in imports.items():
        if module.startswith(("service", "probes_store")):
            assert not any("hallutracer_research" in name for name in names), module


NAMED = re.compile(r"service\.annexes\.\w|service/annexes/\w")


def annexes_named(paths: list[Path]) -> list[str]:
    """Sources that name an annex, as an import or in any other way; the list in
    ``service/annexes/__init__.py`` and the annexes themselves aside."""
    core = [path for path in paths if ROOT / "service" / "annexes" not in path.parents]
    return [str(path) for path in core if NAMED.search(path.read_text(encoding="utf-8"))]


def test_nothing_outside_the_annexes_names_one(tmp_path: Path) -> None:
    assert annexes_named(SOURCES) == []
    (late := tmp_path / "late.py").write_text('import_module("service.annexes.doctor")\n')
    assert annexes_named([late]) == [str(late)]


def circle(imports: Imports) -> list[str]:
    """Modules that import each other in a ring; empty where there is none."""
    graph = {}
    for module, names in imports.items():
        asked = {name if name in imports else name.rpartition(".")[0] for name in names}
        graph[module] = asked & imports.keys() - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other(imports: Imports) -> None:
    client = ROOT / "clients" / "python"
    assert circle(imports) == circle(read(sorted(client.rglob("*.py")), client)) == []


@pytest.mark.parametrize("indent", ["", "if TYPE_CHECKING:\n    ", "def late():\n    "])
def test_a_circle_would_be_caught(tmp_path: Path, indent: str) -> None:
    sources = {
        "a": "from p import b\n",
        "b": "import p.c\n",
        "c": f"{indent}from p.a import name\n",
        "__init__": "",
    }
    (tmp_path / "p").mkdir()
    for name, text in sources.items():
        (tmp_path / "p" / f"{name}.py").write_text(text)
    paths = sorted(tmp_path.rglob("*.py"))
    assert set(circle(read(paths, tmp_path))) == {"p.a", "p.b", "p.c"}
    (tmp_path / "p" / "c.py").write_text("import os\n")
    assert circle(read(paths, tmp_path)) == []


def test_every_source_file_is_seen() -> None:
    seen = {parent for path in SOURCES for parent in path.parents}
    assert {ROOT / folder for folder in FOLDERS} <= seen


def test_a_wrong_direction_would_be_caught(tmp_path: Path) -> None:
    (tmp_path / "service").mkdir()
    bad = tmp_path / "service" / "risk.py"
    bad.write_text("from service.cli.main import main\n")
    assert wrong_ways(read([bad], tmp_path)) != []
    bad.write_text("from probes_store.bundle import Bundle\n")
    assert wrong_ways(read([bad], tmp_path)) == []
    bad.rename(bad.with_name("new.py"))
    assert "has no place" in wrong_ways(read([bad.with_name("new.py")], tmp_path))[0]


HEAVY = ("torch", "vllm", "transformers", "sklearn", "pandas", "matplotlib")


COMMANDS = ("serve", "held_out", "score", "train", "records", "bundle")
LIGHT = (
    "service",
    "service.cli",
    *(f"service.cli.{name}" for name in COMMANDS),
    "service.annexes.doctor.command",
    "service.annexes.hub.command",
    "service.risk",
    "probes_store",
    "service.demo",
    "hallutracer",
)


def test_a_service_starts_without_what_only_training_needs() -> None:
    names = ("scipy", "sklearn", "matplotlib", "pandas", "numba")
    code = (
        f"import sys, service.cli.serve, service.api.app; print([m for m in {names} if m in"
        " sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_imports_stay_light() -> None:
    """One after the other in one process: what none of them loads, each alone does not."""
    code = f"""
import importlib, sys
for name in {LIGHT}:
    importlib.import_module(name)
    print(name, *[heavy for heavy in {HEAVY} if heavy in sys.modules])
"""
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert out.stdout.splitlines() == list(LIGHT)
