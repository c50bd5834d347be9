"""Each annex is a folder, a line of the list, and nothing that the others or the core need."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from service.annexes import ANNEXES, Annex, annexes, imported
from service.serving.service import Service

ROOT = Path(__file__).parent.parent.parent
# The commands, with what is behind each, the options of serve, and the paths that there are where
# one annex is left out and its folder is as good as gone.
LEFT_OUT = """
import json, sys
import service.annexes
service.annexes.ANNEXES = tuple(name for name in service.annexes.ANNEXES if name != sys.argv[1])
sys.modules[sys.argv[1]] = None
from service.cli.main import imported, make_app, own_commands
from service.options import Sources, commands_of, options_of
commands = [imported(path) for path, _ in own_commands().values()]
listed = dict(commands_of(make_app(Sources({}))))
options = [argument.name for argument in options_of(listed[("serve",)])]
from service.api.app import create_app
from service.serving.service import Service
paths = create_app(Service(lambda: {})).openapi()["paths"]
print(json.dumps([[" ".join(path) for path in listed], options, list(paths)]))
"""


def import_paths(annex: Annex) -> Iterator[str]:
    """Each import path that an annex names."""
    yield from (path for path, _ in annex.commands.values())
    yield from annex.groups.values()
    yield from (*annex.routers, *annex.error_bodies.values())
    if annex.options:
        yield annex.options


def test_each_annex_is_a_folder_with_tests_and_a_line_of_the_list() -> None:
    for folder in (ROOT / "service" / "annexes", ROOT / "tests" / "annexes"):
        names = {f"service.annexes.{path.parent.name}" for path in folder.glob("*/__init__.py")}
        assert names == set(ANNEXES)
    assert len(set(ANNEXES)) == len(ANNEXES)


def test_what_an_annex_adds_is_its_own_and_is_there() -> None:
    for name, annex in zip(ANNEXES, annexes(), strict=True):
        assert name == f"service.annexes.{annex.name}"
        for path in import_paths(annex):
            assert path.startswith(f"{name}.")
            assert imported(path) is not None


def test_the_options_of_an_annex_fill_fields_of_the_service() -> None:
    known = {field.name for field in fields(Service)}
    for annex in annexes():
        if annex.options:
            assert imported(annex.options)().hooks().keys() <= known


@pytest.mark.parametrize("name", ANNEXES)
def test_without_its_line_an_annex_is_gone_and_all_else_is_there(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OUT, name], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    commands, options, paths = (set(names) for names in json.loads(done.stdout))
    annex = dict(zip(ANNEXES, annexes(), strict=True))[name]
    own = {route.path for router in map(imported, annex.routers) for route in router.routes}
    assert own >= {*annex.prompt_routes, *annex.score_routes}
    assert not commands & annex.commands.keys()
    for group, path in annex.groups.items():
        assert not commands & {f"{group} {command}" for command in imported(path)[1]}
    assert not paths & own
    added = fields(imported(annex.options)) if annex.options else ()
    assert not options & {f"--{field.name.replace('_', '-')}" for field in added}
    assert options >= {"--host", "--model", "--policy"}
    assert commands >= {"serve", "score", "train", "bundle list"}
    assert paths >= {"/score", "/v1/chat/completions", "/v1/bundles", "/metrics"}
