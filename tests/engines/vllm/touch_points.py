"""What of vLLM's insides HalluTracer calls, replaces or reads, looked up in vLLM's sources without
importing them.

    python -m tests.engines.vllm.touch_points          # the installed version
    python -m tests.engines.vllm.touch_points 0.33.0   # its wheel, which pip downloads, or newest

It says what broke, and ends with 1 if anything did.  ``touch_points.json`` has the list, a point a
line, beside what our sources import; ``touch_points.md`` is the record for readers."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[3]
OURS = ("service/engines/vllm", "service/vllm_plugin")
# Rows are known before a graph is chosen and runs: in V2 it is chosen by what was gathered.
LIST = Path(__file__).with_suffix(".json")
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Point:
    """Something in a file of vLLM's that our ``ours`` depends on."""

    ours: str
    path: str
    name: str = ""  # of a class, a method or a function; empty: the file
    takes: str = ""  # a function's first parameters but ``self``; behind *: some of its parameters
    has: str = ""  # members of a class or names of a file
    order: Sequence[str] = ()  # texts of a function, in this order
    says: Sequence[str] = ()  # texts of a class or a file


V1, V2 = "v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"
CORE, SCHEDULER = "v1/engine/core.py", "v1/core/sched/scheduler.py"
POINTS = [Point(**point) for point in json.loads(LIST.read_text(encoding="utf-8"))]


class Sources:
    """A version of vLLM: the files of its package as text, or ``changed`` ones in their stead."""

    def __init__(
        self,
        package: Path | zipfile.Path,
        changed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        def text(path: str) -> str:
            file = package / path
            there = path not in changed and file.is_file()
            return file.read_text(encoding="utf-8") if there else changed.get(path, "")

        self.package, self.text = package, cache(text)
        self.tree = cache(lambda path: ast.parse(self.text(path)))
        self.members = cache(members)  # of a node

    def broken(self, point: Point) -> str | None:
        """Return what ``point`` asks for and is not there; None: it holds."""
        if not self.text(point.path):
            return "no such file"
        node = self._find(point.path, point.name)
        if node is None:
            return f"no {point.name}"
        text = self.text(point.path)
        if isinstance(node, DEFINITIONS):
            text = "\n".join(text.split("\n")[node.lineno - 1 : node.end_lineno])
        if missing := [item for item in point.says if item not in text]:
            return f"nothing says {', '.join(missing)}"
        places = [text.find(item) for item in point.order]
        if min(places, default=0) < 0 or places != sorted(places):
            return f"{point.name} does not call, in this order: {', '.join(point.order)}"
        if missing := [item for item in point.has.split() if item not in self.members(node)]:
            return f"{point.name} has no {', '.join(missing)}"
        if point.takes:
            return self._called(node, point)
        return None

    def imports(self, module: str, name: str) -> bool:
        """Return whether ``from module import name`` finds something."""
        folder = module.partition(".")[2].replace(".", "/")
        files = [f"{folder}/__init__.py".lstrip("/"), f"{folder}.py"]
        if any(self.text(f"{folder}/{name}{end}".lstrip("/")) for end in (".py", "/__init__.py")):
            return True
        trees = [self.tree(file) for file in files if self.text(file)]
        return any(name in self.members(tree) for tree in trees)

    def _find(self, path: str, name: str) -> ast.AST | None:
        node: ast.AST = self.tree(path)
        for part in filter(None, name.split(".")):
            node_of = next((item for item in defined(node) if item.name == part), None)
            if node_of is None:
                return None
            node = node_of
        return node

    def _called(self, node: ast.AST, point: Point) -> str | None:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return f"{point.name} is no function"
        names = [
            item.arg
            for item in (*node.args.posonlyargs, *node.args.args)
            if item.arg not in ("self", "cls")
        ]
        first, _, some = point.takes.partition("*")
        every = [*names, *(item.arg for item in node.args.kwonlyargs)]
        if names[: len(first.split())] != first.split() or not set(some.split()) <= set(every):
            return f"{point.name} takes ({', '.join(every)}), not ({point.takes})"
        return None


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what stands in a module, a class or a function, also under a condition."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.If | ast.Try):
            yield from statements(child)


def defined(node: ast.AST) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the classes and functions that stand in ``node``."""
    return [statement for statement in statements(node) if isinstance(statement, DEFINITIONS)]


def members(node: ast.AST) -> set[str]:
    """Return the names that a class or a module has: definitions, fields, what its methods set,
    what it hands on."""
    names, module = {item.name for item in defined(node)}, isinstance(node, ast.Module)
    for item in statements(node) if module else ast.walk(node):
        match item:
            case ast.Assign() | ast.AnnAssign():
                targets = item.targets if isinstance(item, ast.Assign) else [item.target]
                for inner in (inner for target in targets for inner in ast.walk(target)):
                    if isinstance(inner, ast.Name):
                        names.add(inner.id)
                    elif isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "self":
                        names.add(inner.attr)
                if module and isinstance(
                    item.value, ast.Dict
                ):  # names that vLLM's package imports when they are used
                    names |= {
                        str(key.value) for key in item.value.keys if isinstance(key, ast.Constant)
                    }
            case ast.ImportFrom():
                names |= {name.asname or name.name for name in item.names}
    return names


def imported() -> Iterator[tuple[str, str, str]]:
    """Yield our file, vLLM's module and the name for each import of vLLM in our sources."""
    for file in (file for folder in OURS for file in sorted((ROOT / folder).glob("*.py"))):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and re.match(r"vllm(\.|$)", node.module or ""):
                yield from ((file.stem, str(node.module), name.name) for name in node.names)


def broken(sources: Sources) -> list[str]:
    """Return a line for each import and point that does not hold."""
    problems = [
        f"service: {ours}.py imports {name} from {module}: not there"
        for ours, module, name in imported()
        if not sources.imports(module, name)
    ]
    for point in POINTS:
        problem = sources.broken(point)
        if problem is not None:
            problems.append(f"{point.ours}.py: vllm/{point.path}: {problem}")
    return problems


@contextmanager
def of_version(version: str) -> Iterator[Sources]:
    """The sources in a version's wheel, "newest": of the newest; or in a wheel that is here."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(version)
        if not wheel.is_file():
            wanted = "vllm" if version == "newest" else f"vllm=={version}"
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            only_wheels = ["--only-binary", ":all:", "--dest", folder, wanted]
            subprocess.run([*download, *only_wheels], check=True)
            [wheel] = Path(folder).glob("*.whl")
        print(wheel.name)
        yield Sources(zipfile.Path(wheel, "vllm/"))


def installed() -> Sources:
    """Return the installed vLLM's sources, which are not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("vLLM is not installed; name a version")
    return Sources(Path(spec.submodule_search_locations[0]))


def main(version: str | None = None) -> int:
    """Say what broke in a version, "newest", a wheel's file or None: the installed one; return 1 if
    anything did."""
    with of_version(version) if version else nullcontext(installed()) as sources:
        problems = broken(sources)
    count = len(POINTS) + len(list(imported()))
    print("\n".join([*problems, f"{len(problems)} of {count} touch points broke"]))
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
