"""The checks of machine and packages, on machines that this one is not."""

from __future__ import annotations

import os
import shutil
import sys
from collections import namedtuple
from collections.abc import Iterable
from pathlib import Path

import pytest

from service.doctor import machine
from service.doctor.machine import Finding, fail, ok, run, warn, worst

Usage = namedtuple("Usage", "total used free")


def lines(findings: Iterable[Finding]) -> str:
    return "\n".join(finding.line() for finding in findings)


def test_the_gravest_status_and_a_check_that_breaks() -> None:
    def broken() -> Iterable[Finding]:
        yield ok("a", "fine")
        raise ZeroDivisionError("division by zero")

    found = list(run([("a", broken), ("b", lambda: [warn("b", "hm", "mend it")])]))
    assert [finding.status for finding in found] == ["ok", "fail", "warn"]
    assert "ZeroDivisionError" in found[1].found
    assert (worst([]), worst(found[:1]), worst(found[2:]), worst(found)) == ("ok", "ok", "warn", "fail")
    assert warn("b", "hm", "mend it").line() == "warn  b         hm -> mend it"
    assert fail("b", "no").line() == "fail  b         no"


def test_missing_and_unfit_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "requires", lambda _: [
        "numpy>=1", "torch<0.1", "no-such-package>=2", 'other; extra == "docs"', "never; sys_platform == 'x'",
    ])  # fmt: skip
    found = list(machine.check_packages())
    assert [finding.status for finding in found] == ["ok", "fail", "fail"]
    assert "wanted <0.1 -> pip install 'torch<0.1'" in found[1].line()
    assert "pip install 'no-such-package>=2'" in found[2].cure


def test_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: str) -> list[str]:
        raise machine.PackageNotFoundError

    monkeypatch.setattr(machine, "requires", absent)
    assert "pip install --editable ." in lines(machine.check_packages())


def gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str, torch: str = "2.13.0+cpu") -> None:
    """An nvidia-smi that lists these, and a torch of this version."""
    program = folder / "nvidia-smi"
    rows = "".join(f"echo '{name}, 80000 MiB, 570.1'\n" for name in names)
    program.write_text(f"#!/bin/sh\n{rows or 'exit 9'}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(machine, "version", lambda _: torch)


@pytest.mark.parametrize(
    ("names", "torch", "device", "ranks", "status"),
    [
        ((), "2.13.0+cpu", "auto", 1, "ok"), ((), "2.13.0+cpu", "cuda", 1, "fail"), ((), "2.13.0", "auto", 2, "fail"),
        ((), "2.13.0+cpu", "auto", 2, "ok"), (("H200",), "2.13.0+cpu", "auto", 1, "warn"),
        (("H200",), "2.13.0+cpu", "cuda", 1, "fail"), (("H200",), "2.13.0+cpu", "cpu", 1, "ok"),
        (("H200",), "2.13.0", "auto", 1, "ok"), (("H200",), "2.13.0", "auto", 2, "fail"),
        (("H200", "H200"), "2.13.0", "auto", 2, "ok"),
    ],
)  # fmt: skip
def test_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], torch: str, device: str, ranks: int,
    status: str,
) -> None:  # fmt: skip
    gpus(tmp_path, monkeypatch, *names, torch=torch)
    [finding] = machine.check_gpu(device, ranks)
    assert finding.status == status, finding


@pytest.mark.parametrize(("free", "status"), [(10 << 30, "ok"), (500 << 20, "warn"), (50 << 20, "fail")])
def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1, 1, free))
    [finding] = machine.check_disk({"bundles": tmp_path / "not" / "yet", "models": tmp_path})
    assert finding.status == status
    [finding] = machine.check_disk({machine.TEMPORARY: tmp_path})  # a container's /tmp is small on purpose
    assert finding.status == ("warn" if free < 60 << 20 else "ok")


def test_a_clock_that_is_behind_or_not_set_by_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_unsynchronised", lambda: False)
    made = "2026-06-01T00:00:00Z"
    assert "set the clock" in lines(machine.check_clock(made, now=1.6e9))
    assert lines(machine.check_clock(made, now=1.9e9)).startswith("ok")
    assert lines(machine.check_clock(None, now=1.6e9)).startswith("ok")
    monkeypatch.setattr(machine, "_unsynchronised", lambda: True)
    assert "not synchronised -> run chrony" in lines(machine.check_clock(made, now=1.9e9))


@pytest.mark.skipif(sys.platform != "linux", reason="adjtimex is Linux's")
def test_the_kernel_is_asked_about_the_clock() -> None:
    assert machine._unsynchronised() in (True, False)


def test_a_limit_of_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("joblib.cpu_count", lambda: 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "8 threads on 1 CPUs: they would wait for each other -> --threads 1" in lines(machine.check_cpu(8))
    assert lines(machine.check_cpu(1)).startswith("ok")
    assert lines(machine.check_cpu(None)).startswith("ok")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "4 threads on 1 CPUs" in lines(machine.check_cpu(None))
    assert lines(machine.check_cpu(1)).startswith("ok")


def test_memory_that_is_free_is_a_number_of_this_machine() -> None:
    free = machine.memory_free()
    assert free is None or 1 << 20 < free < 1 << 50


def test_vllm_and_what_it_loads_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.engines.vllm.launch.check_installed", lambda: None)
    monkeypatch.setattr(machine, "find_library", lambda _: None)
    monkeypatch.setattr(machine, "version", lambda _: "2.13.0+cpu")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1, 1, 64 << 20))
    found = lines(machine.check_engine("vllm", 2))
    assert "libnuma1" in found
    assert "g++" in found
    assert "--shm-size" in found


def test_postgresql_without_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(machine.check_extras(False)) == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "hallutracer[postgres]" in lines(machine.check_extras(True))
