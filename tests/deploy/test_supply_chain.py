"""Pins with hashes, the SBOM and the list of licences agree with what the project asks for."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.deploy.packaging import ROOT

SCRIPT = runpy.run_path(str(ROOT / "deploy/supply_chain/sbom.py"))
HASHED = (ROOT / "requirements-hashed.txt").read_text()
CURE = "run: make pins, then make sbom"


def pins(name: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE)
    return {SCRIPT["normal"](package): version for package, version in found}


def test_every_dependency_is_pinned_with_hashes_in_the_version_of_the_constraints() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {SCRIPT["normal"](Requirement(text).name) for text in wanted} - {"torch"}
    hashed, constraints = pins("requirements-hashed.txt"), pins("constraints.txt")
    assert names <= set(hashed), CURE
    assert {name: hashed[name] for name in hashed if name in constraints} == {
        name: version for name, version in constraints.items() if name in hashed
    }, CURE
    blocks = re.split(r"^(?=[\w.-]+==)", HASHED, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(hashed) >= 70
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", block) for block in blocks)


def test_the_lists_of_an_image_meet_what_the_project_asks_for() -> None:
    """A dependency that was added, or asked for anew, is not forgotten: the Dockerfile reads the lists alone."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    cuda = pins("requirements-torch-cuda.txt")
    locked = pins("requirements-hashed.txt") | {"torch": cuda["torch"]}
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(locked[SCRIPT["normal"](requirement.name)]), CURE
    assert cuda["torch"] == pins("constraints.txt")["torch"], CURE
    vllm = pins("requirements-vllm-cuda.txt")
    for ours, theirs in ((cuda, locked), (cuda, vllm), (locked, vllm)):
        both = ours.keys() & theirs.keys()
        assert {name: ours[name] for name in both} == {name: theirs[name] for name in both}, CURE
    assert len([name for name in cuda if name.startswith("nvidia")]) > 10


def environment(**changes: str) -> dict[str, Any]:
    """A document as cyclonedx-py writes it, of what is locked, a tool and a package that leads to it."""
    versions = {**SCRIPT["locked"](), "torch": "2.13.0", "pytest": "9", "mypy": "2"} | changes
    components = [{"bom-ref": name, "name": name, "version": version} for name, version in versions.items()]
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "metadata": {"component": {"bom-ref": "root", "name": "x"}},
        "components": components,
        "dependencies": [{"ref": "root", "dependsOn": ["numpy", "pytest"]}, {"ref": "numpy", "dependsOn": ["mypy"]}],
    }  # fmt: skip


def test_the_sbom_has_what_a_service_runs_on_and_the_models() -> None:
    found = SCRIPT["pruned"](environment())
    names = {component["name"] for component in found["components"]}
    assert {"torch", "numpy", "transformers", "demo", "smollm2", "hallutracer-demo"} <= names
    assert not {"pytest", "mypy"} & names
    refs = {component["bom-ref"] for component in found["components"]}
    assert len(refs) == len(found["components"])
    for entry in found["dependencies"]:
        assert set(entry["dependsOn"]) <= refs
    assert "bundle:demo:1" in found["dependencies"][0]["dependsOn"]
    manifest = json.loads((ROOT / "probes_store/shipped/demo/1/bundle.json").read_text())
    [demo] = [component for component in found["components"] if component["bom-ref"] == "bundle:demo:1"]
    assert f"sha256:{demo['hashes'][0]['content']}" == manifest["digest"]


def test_an_environment_of_other_versions_is_refused() -> None:
    with pytest.raises(SystemExit, match="numpy"):
        SCRIPT["pruned"](environment(numpy="1.0"))


def test_the_list_of_licences_is_of_what_is_pinned() -> None:
    rows = re.findall(r"^\| ([\w.-]+) \| (\S*) \| (.+) \|$", (ROOT / "docs/licences.md").read_text(), re.MULTILINE)
    listed = {SCRIPT["normal"](name): version for name, version, _ in rows if name != "component"}
    assert SCRIPT["locked"]().items() <= listed.items(), CURE
    assert {"torch", "demo", "smollm2", "hallutracer-demo"} <= set(listed)
    assert all(licence.strip() for _, _, licence in rows)


def test_the_makefile_makes_them() -> None:
    for target, said in (
        ("sbom", "deploy/supply_chain/sbom.py"),
        ("audit", "pip-audit --strict"),
        ("pins", "--generate-hashes"),
    ):
        done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
