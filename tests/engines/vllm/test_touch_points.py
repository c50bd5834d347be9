"""What HalluTracer touches of vLLM is there in the installed version, is listed, and is missed
where it is gone."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from service.vllm_plugin.front_end import GROUPS, SERVERS
from tests.engines.vllm import touch_points as touched
from tests.engines.vllm.installed import vllm_or_skip
from tests.engines.vllm.touch_points import CORE, POINTS, ROOT, SCHEDULER, V1, V2, Sources

vllm_or_skip()
OURS, ARGUMENTS = ROOT / "service/vllm_plugin", "engine/arg_utils.py"
WORKER = ast.parse((ROOT / "service/engines/vllm/worker.py").read_text(encoding="utf-8"))


def test_all_of_it_is_there_in_the_installed_version() -> None:
    assert touched.broken(touched.installed()) == []


def test_what_the_worker_overrides_and_the_gate_replaces_is_listed() -> None:
    """Imports list themselves; methods are named once more in the list."""
    listed = {(point.path, name) for point in POINTS for name in (point.name, *point.has.split())}
    classes = {node.name: node for node in ast.walk(WORKER) if isinstance(node, ast.ClassDef)}
    for ours, path, theirs in (
        ("Worker", "v1/worker/gpu_worker.py", "Worker"),
        ("V1Reading", V1, "GPUModelRunner"),
        ("V2Reading", V2, "GPUModelRunner"),
    ):
        calls = re.findall(r"super\(\)\.(\w+)\(", ast.unparse(classes[ours]))
        assert len(calls) > 3
        assert [name for name in calls if (path, f"{theirs}.{name}") not in listed] == []
    for module, name in SERVERS:
        assert (module.removeprefix("vllm.").replace(".", "/") + ".py", name) in listed
    [plugins] = [point for point in POINTS if point.path == "plugins/__init__.py"]
    assert {f"vllm.{group}_plugins" for group in GROUPS} <= set(plugins.says)
    gate, front = (OURS / "engine_gate.py").read_text(), (OURS / "front_end.py").read_text()
    of = {
        "EngineArgs": ARGUMENTS,
        "EngineCore": CORE,
        "EngineCoreProc": CORE,
        "Executor": "v1/executor/abstract.py",
    }
    used = {(CORE, "EngineCore", name) for name in re.findall(r"\b_?core\.(\w+)", gate)}
    used |= {(SCHEDULER, "Scheduler", name) for name in re.findall(r"\bscheduler\.(\w+)", gate)}
    used |= {
        (of[name], name, member)
        for name, member in re.findall(rf"\b({'|'.join(of)})\.(\w+)", front)
    }
    assert len(used) > 15
    assert [
        use
        for use in used
        if use[2] and not {(use[0], use[2]), (use[0], f"{use[1]}.{use[2]}")} & listed
    ] == []


GONE = json.loads(Path(__file__).with_name("gone.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("path", "was", "becomes", "words"), GONE)
def test_what_is_gone_is_named(path: str, was: str | None, becomes: str, words: str) -> None:
    """Only the one file is looked at: the others are as they are."""
    here = touched.installed()
    text = here.text(path)
    assert was is None or was in text
    changed = Sources(here.package, {path: "" if was is None else text.replace(was, becomes)})
    of_points = [changed.broken(point) for point in POINTS if point.path == path]
    problems = [f"vllm/{path}: {problem}" for problem in of_points if problem]
    problems += [
        f"imports {name} from {module}"
        for _, module, name in touched.imported()
        if path == module.removeprefix("vllm.").replace(".", "/") + ".py"
        and not changed.imports(module, name)
    ]
    assert any(words in line for line in problems), problems
