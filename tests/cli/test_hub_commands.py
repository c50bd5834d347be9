"""``bundle push`` and ``pull`` as a user types them: processes of their own, the real client, HF_ENDPOINT."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from probes_store.bundle import BundleDraft
from probes_store.store import SHIPPED, Store
from tests.command_line import hallutracer, one_line_says
from tests.probes_store.hub_stand_in import TOKEN, Hub, hub_stand_in
from tests.serve_process import inherited

ROOT = Path(__file__).parents[2]
Run = Callable[..., CompletedProcess[str]]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with hub_stand_in() as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def run(hub: Hub, folder: Path) -> Run:
    def command(*arguments: str, **variables: str) -> CompletedProcess[str]:
        environment = inherited() | {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "HF_TOKEN": TOKEN}
        environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)} | variables
        return subprocess.run([sys.executable, "-m", "service.cli", "bundle", *arguments], env=environment,
                              capture_output=True, text=True, check=False, timeout=120)  # fmt: skip

    return command


@pytest.fixture(scope="module")
def published(folder: Path) -> str:
    """The shipped bundle of the demo model under a name of one's own, in a store of one's own."""
    shipped = Store(SHIPPED).load("demo")
    draft = BundleDraft(replace(shipped.manifest, name="my-demo"), shipped.probes, shipped.golden,
                        shipped.evaluation(), shipped.card())  # fmt: skip
    Store(folder / "own").publish(draft)
    return shipped.manifest.model.fingerprint


def test_a_bundle_is_pushed_pulled_and_serves(run: Run, hub: Hub, folder: Path, published: str) -> None:
    own, other = ("--store", str(folder / "own")), ("--store", str(folder / "other"))
    dry = run("push", "my-demo", "hf://me/my-demo", "--dry-run", "--private", *own)
    assert dry.returncode == 0, dry.stderr
    assert "would create the private repository, commit 5 files" in dry.stdout
    assert hub.repositories == {}
    pushed = run("push", "my-demo", "hf://me/my-demo", "--private", *own)
    assert pushed.returncode == 0, pushed.stderr
    first, url, pull = pushed.stdout.splitlines()
    assert first.startswith("my-demo:1: to a private repository: create the private repository, commit 5 files (")
    assert first.endswith(", tag v1")
    assert url == f"{hub.url}/me/my-demo/tree/v1"
    again = run("push", "my-demo", "hf://me/my-demo", *own)
    assert again.stdout.splitlines()[0] == "my-demo:1: the hub has it already, nothing was done"
    assert pull.startswith("hallutracer bundle pull hf://me/my-demo@v1 --digest sha256:")
    hub.repositories["me/my-demo"].commits[hub.repositories["me/my-demo"].head]["evil\x1b[2J.py"] = b"1/0"
    pulled = run(*pull.split()[2:], *other)  # as the push printed it
    assert pulled.returncode == 0, pulled.stderr
    assert pulled.stdout.startswith("my-demo:1: pulled from hf://me/my-demo@v1 at commit ")
    assert "not part of the bundle and not downloaded: 'evil\\x1b[2J.py'" in pulled.stderr
    assert hub.count("evil") == 0
    verified = hallutracer("bundle", "verify", "my-demo", *other)
    assert verified.returncode == 0, verified.stderr
    assert "golden prompts gave the recorded risks" in verified.stdout
    offline = run("pull", "hf://me/my-demo@v1", "--store", str(folder / "third"), HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert "HF_HUB_OFFLINE is set" in offline.stderr
    assert "taken from the cache" in offline.stderr
    same = run("pull", "hf://me/my-demo", *other)
    assert same.stdout.startswith("my-demo:1: here already, the same as hf://me/my-demo at commit ")


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (("push", "demo", "hf://me/x@v1"), 2, "hf://me/x"),
        (("push", "nothing", "hf://me/x"), 1, "no bundle nothing"),
        (("pull", "hf://me/nothing", "--digest", "abc"), 1, "64 hex digits"),
        (("pull", "me/nothing"), 1, "hf://OWNER/NAME"),
    ],
)
def test_one_line_says_what_is_wrong(arguments: tuple[str, ...], status: int, word: str) -> None:
    one_line_says(("bundle", *arguments), status, word)


def test_what_the_hub_refuses_is_one_line(run: Run) -> None:
    done = run("pull", "hf://me/nothing")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: hf://me/nothing: no such repository")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [("score", "why?"), ("serve", "--port", "0")])
def test_a_bundle_of_the_hub_is_pulled_first(command: tuple[str, ...]) -> None:
    done = hallutracer(*command, "--model", "demo", "--bundle", "hf://me/my-demo@v1")
    assert done.returncode == 1
    assert "hallutracer bundle pull" in done.stderr


def test_the_commands_stay_light() -> None:
    code = "import sys, service.cli.main, probes_store.store; print('huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
