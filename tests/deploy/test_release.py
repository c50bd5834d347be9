"""A release: one version everywhere, and a workflow whose jobs may do no more than they do."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from service import __version__
from tests.kit import packaging as p
from tests.kit.packaging import ROOT
from tests.kit.pages import PAGES

SCRIPT = ROOT / "deploy" / "release" / "version.py"
VERSIONS = runpy.run_path(str(SCRIPT))
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
JOBS = yaml.safe_load(WORKFLOW.read_text())["jobs"]
SIGNS = {"id-token": "write", "attestations": "write"}
PERMISSIONS = {
    "build": {"contents": "read"},
    "attest": SIGNS,
    "pypi": {"id-token": "write"},
    "images": {"contents": "read", "packages": "write"} | SIGNS,
    "chart": {"contents": "read", "packages": "write"},
    "page": {"contents": "write"},
}
PUBLISHERS = ("actions/", "docker/", "pypa/")
BIN = Path(sys.executable).parent


def set_version(folder: Path, version: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of the script beside copies of the files."""
    for name in (*VERSIONS["PLACES"], str(SCRIPT.relative_to(ROOT))):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    command = [sys.executable, folder / SCRIPT.relative_to(ROOT), version]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_file_that_names_the_version_names_this_one() -> None:
    versions = {name: set(VERSIONS["versions"](name)) for name in VERSIONS["PLACES"]}
    assert versions == dict.fromkeys(versions, {__version__}), (
        f"run: python deploy/release/version.py {__version__}"
    )
    deployed = [path for path in (ROOT / "deploy").rglob("*.y*ml") if "templates" not in path.parts]
    for path in {*PAGES, *deployed}:  # another file that names an image is one more place
        if str(path.relative_to(ROOT)) not in versions:
            assert not re.search(r"(?<![\w-])hallutracer(:|==)\d+\.\d+\.\d+", path.read_text()), (
                path
            )


def test_the_script_sets_all_of_them_and_nothing_else(tmp_path: Path) -> None:
    done = set_version(tmp_path, "9.8.7")
    assert (done.returncode, done.stdout) == (0, "9.8.7\n"), done.stderr
    for name in VERSIONS["PLACES"]:
        texts = ((folder / name).read_text().splitlines() for folder in (ROOT, tmp_path))
        changed = [(before, after) for before, after in zip(*texts, strict=True) if before != after]
        assert len(changed) >= len(VERSIONS["PLACES"][name].split("|")), name
        assert [
            after for before, after in changed if before.replace(__version__, "9.8.7") != after
        ] == []


@pytest.mark.parametrize("version", ["v1.0.0", "1.0", "1.0.0rc1", "1.0.0-rc.1", ""])
def test_a_version_of_another_form_is_refused(tmp_path: Path, version: str) -> None:
    done = set_version(tmp_path, version)
    assert done.returncode == 1
    assert "give it as X.Y.Z" in done.stderr
    assert (tmp_path / VERSIONS["SOURCE"]).read_text() == (ROOT / VERSIONS["SOURCE"]).read_text()


def test_the_changelog_begins_with_the_release_that_comes() -> None:
    headings = re.findall(
        r"^## \[(.*?)\] - (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    version, date = headings[0]
    assert date == "unreleased" or (
        version == __version__ and re.fullmatch(r"\d{4}-\d{2}-\d{2}", date)
    )


# --- the workflow ---


def steps() -> Iterator[tuple[str, p.Document]]:
    for name, job in JOBS.items():
        yield from ((name, step) for step in job["steps"])


def needed(job: str) -> set[str]:
    """Every job that has passed before this one starts."""
    wanted = JOBS[job].get("needs", [])
    names = {wanted} if isinstance(wanted, str) else set(wanted)
    return names.union(*(needed(name) for name in names))


def test_the_workflow_runs_for_tags_alone() -> None:
    assert yaml.safe_load(WORKFLOW.read_text())[True] == {
        "push": {"tags": ["v*"]}
    }  # YAML 1.1 reads "on" as a boolean


def test_a_job_has_the_permissions_that_it_uses() -> None:
    assert yaml.safe_load(WORKFLOW.read_text())["permissions"] == {}
    assert {name: job["permissions"] for name, job in JOBS.items()} == PERMISSIONS
    for name, rights in PERMISSIONS.items():
        used = " ".join(
            f"{step.get('uses', '')} {step.get('run', '')}" for job, step in steps() if job == name
        )
        assert ("checkout@" in used) == (rights.get("contents") == "read")
        assert ("gh release create" in used) == (rights.get("contents") == "write")
        assert bool(re.search(r"build-push-action|helm push", used)) == ("packages" in rights)
        assert bool(re.search(r"attest-|gh-action-pypi-publish", used)) == ("id-token" in rights)
        assert ("attest-" in used) == ("attestations" in rights)


def test_nothing_is_published_before_it_was_signed_and_somebody_agreed() -> None:
    assert {name for name, job in JOBS.items() if "environment" in job} == {"pypi"}
    assert JOBS["pypi"]["environment"] == "pypi"
    assert {"build", "attest"} <= needed("pypi")
    for name in set(JOBS) - {"build", "attest", "pypi"}:
        assert "pypi" in needed(name), name
    [publish] = [step for _, step in steps() if "pypi-publish" in step.get("uses", "")]
    assert publish["with"] == {"attestations": True}  # and no password


def test_actions_have_a_version_and_leave_no_token_in_the_checkout() -> None:
    for _, step in steps():
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+|[0-9a-f]{40})", step["uses"]), (
                step
            )
            assert step["uses"].startswith(PUBLISHERS)
            assert "checkout" not in step["uses"] or step["with"] == {"persist-credentials": False}


def scripts() -> list[str]:
    return [step["run"] for _, step in steps() if "run" in step]


def test_what_a_step_runs_exists_and_is_sound(tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):(?!=)", makefile, re.MULTILINE))
    for number, script in enumerate(scripts()):
        assert set(re.findall(r"\bmake ([\w-]+)", script)) <= targets
        for path in re.findall(
            r"(?<![\w/])((?:deploy|docs|research|clients)/[\w./-]+|[A-Z]{6,}\.md)", script
        ):
            assert (ROOT / path).exists(), path
        assert "${{" not in script  # a tag's name must not become part of a script
        (file := tmp_path / f"{number}.sh").write_text(f"#!/bin/bash -e\n{script}")
        done = subprocess.run(
            [BIN / "shellcheck", file], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout
    uploaded = [
        step["with"]["path"] for _, step in steps() if "upload-artifact" in step.get("uses", "")
    ]
    assert all(f" {path}" in makefile for path in uploaded)
    stages = {step.stage for step in p.dockerfile()}
    assert {entry["target"] for entry in JOBS["images"]["strategy"]["matrix"]["include"]} <= stages


@pytest.mark.parametrize(
    ("tag", "heading", "passes"),
    [
        ("v{}", "2026-01-31", True),
        ("{}", "2026-01-31", False),
        ("v9.9.9", "2026-01-31", False),
        ("v{}", "unreleased", False),
    ],
)
def test_a_tag_that_is_not_the_dated_version_stops_it(
    tmp_path: Path, tag: str, heading: str, passes: bool
) -> None:
    [check] = [
        script for script in scripts() if "CHANGELOG.md" in script and "version.py" in script
    ]
    assert set_version(tmp_path, __version__).returncode == 0
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{__version__}] - {heading}\n")
    environment = os.environ | {
        "GITHUB_REF_NAME": tag.format(__version__),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
    }
    environment["PATH"] = f"{BIN}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", check], cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    assert (done.returncode == 0) == passes, done.stderr
    assert (tmp_path / "output").read_text() == f"version={__version__}\n"


def test_make_dist_builds_all_three() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "dist"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for folder in (".", "clients/python", "research"):
        assert f"build --no-isolation --outdir dist {folder} " in done.stdout
    assert "twine check --strict dist/*" in done.stdout
