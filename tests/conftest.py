"""What all tests share: threads, certificates, and which files run side by side under
pytest-xdist."""

from __future__ import annotations

import functools
import gc
import os
import ssl
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.kit.vllm_service import VllmService

# One thread for each worker and each process that a test starts, since the workers share the cores.
# Before torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Fits take as many processes as there are cores, each of which imports torch for seconds: here one,
# unless a test asks for more.
os.environ.setdefault("LOKY_MAX_CPU_COUNT", "1")
# A busy machine must not fail a test: no example has a time limit.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
# vLLM binds a worker to a core, by default the first one of the machine: those of tests that run
# side by side would share it, and leave the others idle.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# Tests are about the embedded model, also where another is installed; those of another one say so.
os.environ.setdefault("HALLUTRACER_MODEL", "demo")
# httpx reads all certificates for every client, which takes longer than most requests of these
# tests.
ssl.create_default_context = functools.cache(ssl.create_default_context)  # type: ignore[assignment]
# No test cuts the power.  Waiting for the disk takes milliseconds, eight times for each bundle;
# a descriptor that is not open is still an error.
os.fsync = os.fstat  # type: ignore[assignment]


@pytest.fixture
def anyio_backend() -> str:
    """Tests that are coroutines run on asyncio, as the service does."""
    return "asyncio"


LONGEST = ("client/test_libraries", "trainer/test_run", "docs/test_commands", "trainer/test_forms")


@pytest.fixture(scope="session")
def vllm_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmService]:
    from tests.kit.vllm_service import started

    with started(tmp_path_factory.mktemp("vllm")) as service:
        yield service


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation as a site: half a minute."""
    from tests.kit.site import ROOT, build

    pytest.importorskip("furo", reason="pip install 'hallutracer[docs]'")
    target = tmp_path_factory.mktemp("docs")
    done = build(ROOT, target)
    assert done.returncode == 0, done.stderr
    return target / "site"


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training draws none, as in tests/trainer: most of a quick run's time."""
    from tests.trainer.made import blank

    monkeypatch.setattr("service.trainer.run.draw", blank)


@pytest.fixture
def jobs_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits divide their work by the number of jobs, but do it in this process: starting another
    takes seconds.  That processes change no bit: tests/fitting/test_probes.py."""
    from joblib.parallel import BACKENDS, SequentialBackend

    class InTurn(SequentialBackend):
        supports_inner_max_num_threads = True

    monkeypatch.setitem(BACKENDS, "loky", InTurn)


# Of ``make test-long``, files of many minutes whose tests share next to nothing.
APART = ("docs/test_commands", "test_bench_scripts")
# But for those that ask a service on SmolLM2, which takes half a minute to start.
ON_SMOLLM2 = ("test_the_commands_on_smollm2_run", "test_the_readmes_table_is")
# Files that ask the same service, or look at the same site, which take most of a minute to make.
TOGETHER = (
    ("tests/test_vllm_service", "tests/test_openai_mixed", "tests/test_newer_protocols"),
    ("vllm_plugin/test_calls", "vllm_plugin/test_observing"),
    ("tests/docs/test_pages", "tests/browser/test_site"),
)


def group_of(file: str) -> str:
    """The file that gives the name to those which ask the same service, or the file itself."""
    for names in TOGETHER:
        if any(name in file for name in names):
            return names[0]
    return file


def scope_of(file: str, nodeid: str, long: bool) -> str:
    """What one worker runs in order: a file, or all of vLLM's files; of ``make test-long`` a model
    family's starts, or a test."""
    group = group_of(file)
    if not starts_vllm(file):
        if not (long and any(name in file for name in APART)):
            return group
        return "smollm2" if any(name in nodeid for name in ON_SMOLLM2) else nodeid
    if not long:
        return "vllm"
    family = "faults" if "_fault_" in nodeid else nodeid.partition("[")[2].partition("-")[0]
    return f"parity {family}" if "parity" in file else group


def is_long(config: pytest.Config) -> bool:
    """Whether long tests are chosen, as by ``make test-long`` and ``make test-matrix``."""
    chosen = config.option.markexpr
    return chosen.startswith("long") or chosen == "matrix"


def starts_vllm(path: str) -> bool:
    """Whether a test file starts vLLM.  In ``make test`` those share one worker: one start is most
    of a core."""
    return "vllm" in path or "parity" in path


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """vLLM's files first: with pytest-xdist one worker runs them while the other runs everything
    else.

    Then the longest ones, so that no worker is alone with one of them at the end.  Of ``make
    test-long`` the longest are those without vLLM, then vLLM's files, some of which take minutes;
    the families' starts fill the end."""

    def order(item: pytest.Item) -> int:
        file = item.nodeid.split("::")[0]
        if is_long(config):
            return starts_vllm(file) + ("parity" in file)
        return 0 if starts_vllm(file) else 1 if any(name in file for name in LONGEST) else 2

    items.sort(key=order)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Looking for garbage while all files are imported takes seconds of each worker, and there is
    none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What importing all test files has made is never garbage: without this each collection, those
    that tests ask for too, looks through all of it, for seconds."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Libraries written in C++ tell of what is never freed."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One file goes to one worker, so that its fixtures are made once; all of vLLM's files go to
    the same one."""
    from xdist.scheduler import LoadFileScheduling

    class OneVllm(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(super()._split_scope(nodeid), nodeid, is_long(config))

    config.option.loadscopereorder = False  # in the order above, not by number of tests
    return OneVllm(config, log)
