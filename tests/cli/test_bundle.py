"""``hallutracer bundle``: aliases that move, stores by URL, signatures, pins, and the hub."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import httpx
import pytest

from probes_store.bucket import Objects
from probes_store.bundle import BundleDraft
from probes_store.store import SHIPPED, Store
from service.scoring import Scorer
from service.serving.catalogue import RolloutPlan
from tests.command_line import ROOT, hallutracer, one_line_says
from tests.kit.hub_stand_in import TOKEN, Hub, hub_stand_in
from tests.kit.key_pairs import key_pair
from tests.kit.reseal import edit_manifest
from tests.matching import matching_draft
from tests.running import Running, running
from tests.scripted_engine import ScriptedEngine
from tests.serve_process import inherited

Run = Callable[..., CompletedProcess[str]]


def my_demo(intercept: float | None = None) -> BundleDraft:
    """The shipped bundle under another name, and with another intercept."""
    shipped = Store(SHIPPED).load("demo")
    manifest = replace(shipped.manifest, name="my-demo")
    if intercept is not None:
        manifest = replace(manifest, classifier=replace(manifest.classifier, intercept=intercept))
    return BundleDraft(
        manifest, shipped.probes, shipped.golden, shipped.evaluation(), shipped.card()
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pairs of keys, and the store ``own``, which has my-demo:1."""
    folder = tmp_path_factory.mktemp("bundles")
    for name in ("key", "other"):
        key_pair(folder, name)
    Store(folder / "own").publish(my_demo())
    return folder


def refused(done: CompletedProcess[str], status: int, *words: str) -> str:
    """What it printed, which holds the words."""
    text = done.stdout + done.stderr
    assert done.returncode == status, text
    assert [word for word in words if word not in text] == []
    return done.stdout


def fine(done: CompletedProcess[str], *words: str) -> str:
    return refused(done, 0, *words)


@pytest.mark.parametrize(
    ("command", "status", "word"),
    [
        ("list --store s4://bucket", 1, "s3://BUCKET/PREFIX"),
        ("list --store hf://me/probe@v1", 1, "hf://OWNER/NAME"),
        ("push demo s4://bucket", 1, "s3://BUCKET/PREFIX"),
        ("push demo memory://x --private", 2, "--private"),
        ("push demo hf://me/x@v1", 2, "hf://me/x"),
        ("push nothing hf://me/x", 1, "no bundle nothing"),
        ("pull memory://x/nothing", 1, "no bundle nothing in memory://x"),
        ("pull me/nothing", 1, "hf://OWNER/NAME"),
        ("pull hf://me/nothing --digest abc", 1, "64 hex digits"),
        ("sign demo --certificate x.crt", 2, "--key-file"),
        ("sign demo --key-file x.pem --chain x.crt", 2, "--chain"),
        ("compare demo", 2, "two bundles"),
        ("verify demo --require-signature absent.pub", 1, "absent.pub"),
    ],
)
def test_one_line_says_what_is_wrong(command: str, status: int, word: str) -> None:
    one_line_says(("bundle", *command.split()), status, word)


def test_a_bundle_of_the_hub_is_pulled_first() -> None:
    for command in (("score", "why?"), ("serve", "--port", "0")):
        done = hallutracer(*command, "--model", "demo", "--bundle", "hf://me/my-demo@v1")
        refused(done, 1, "hallutracer bundle pull")


def test_the_commands_stay_light() -> None:
    heavy = ("fsspec", "s3fs", "model_signing", "sigstore", "huggingface_hub")
    commands = (
        "from service.cli.main import imported, own_commands;"
        " [imported(path) for path, _ in own_commands().values()]"
    )
    code = (
        f"import sys, probes_store.store; {commands}; print([n for n in {heavy} if n in"
        " sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# promote and rollback, by what a service has seen


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two versions of ``mine`` that disagree, and a third with the second's probes and another
    threshold."""
    store, engine = Store(tmp_path / "store"), ScriptedEngine()
    for seed, threshold in ((0, 0.5), (1, 0.5), (0, 0.51)):
        store.publish(matching_draft(engine, "mine", seed, threshold=threshold))
    store.set_alias("mine", "production", 1)
    store.set_alias("mine", "canary", 3)
    return store


@pytest.fixture
def command(store: Store) -> Run:
    return lambda *arguments: hallutracer("bundle", *arguments, "--store", str(store.root))


@pytest.fixture
def service(tmp_path: Path, store: Store) -> Iterator[Running]:
    """Judged by mine:1, shadowed by the others; has read 60 prompts."""
    with running(tmp_path / "service", names=("other",)) as service:
        service.state.catalogue.plan = RolloutPlan(shadows=("mine:2", "mine:3"))
        service.state.lifecycle.load_again = lambda engine: {
            f"mine:{version}": Scorer(engine, store.load(f"mine:{version}"))
            for version in (1, 2, 3)
        }
        httpx.post(f"{service.url}/v1/admin/reload").raise_for_status()
        service.post(prompt=[f"question {number}" for number in range(60)]).raise_for_status()
        yield service


def test_a_candidate_that_agrees_is_promoted_and_rolled_back_and_else_nothing_changes(
    command: Run, store: Store, service: Running
) -> None:
    store.publish(matching_draft(ScriptedEngine(), "mine", 7))
    before = store.aliases("mine")
    for candidate, more, words in (
        ("mine:2", "--least-prompts 60", "FAIL  disagrees on"),
        ("mine:3", "--least-prompts 61 --most-disagreement 1", "FAIL  60 prompts read as a shadow"),
        ("mine:3", "--least-prompts 60 --most-disagreement 0.001", "FAIL  disagrees on"),
        ("mine:4", "", "has not loaded mine:4"),
    ):
        refused(command("promote", candidate, "--service", service.url, *more.split()), 1, words)
    refused(command("promote", "mine:2", "--service", "http://127.0.0.1:9"), 1, "did not answer")
    assert store.aliases("mine") == before
    bounds = ("--service", service.url, "--least-prompts", "60", "--most-disagreement", "0.1")
    fine(command("promote", "mine@canary", *bounds), "mine@production -> mine:3")
    assert store.aliases("mine") == {"production": 3, "canary": 3, "previous": 1}
    fine(command("promote", "mine:3", *bounds), "already")
    assert store.aliases("mine")["previous"] == 1
    for expected in ({"production": 1, "previous": 3}, {"production": 3, "previous": 1}):
        fine(command("rollback", "mine"))
        assert store.aliases("mine") == expected | {"canary": 3}
    refused(command("promote", "mine:1", "--service", service.url), 1, "mine:1 is no shadow there")
    assert store.aliases("mine")["production"] == 3


def test_without_a_service_it_is_said_out_loud_and_what_keeps_the_version_is_named(
    command: Run, store: Store
) -> None:
    refused(command("promote", "mine:2"), 2, "--ungated")
    refused(command("promote", "mine", "--ungated"), 2, "name a version or an alias")
    refused(command("rollback", "mine"), 1, "nothing was promoted")
    fine(command("promote", "mine@canary", "--ungated"))
    store.set_alias("mine", "eu", 1)
    words = (
        "mine@canary is mine:3 still",
        "hallutracer bundle alias mine canary 1",
        "POST /v1/admin/reload",
    )
    done = command("rollback", "mine")
    fine(done, *words)
    assert done.stderr.count("still") == 1
    store.set_alias("mine", "previous", 1)
    refused(command("rollback", "mine"), 1, "nothing to go back to")


# stores by URL


@pytest.fixture
def url() -> str:
    """The empty place of a store; on a real S3 server: tests/probes_store/test_remote.py."""
    return f"memory://{uuid.uuid4().hex}"


def bundle(*arguments: str, store: str, cache: Path) -> CompletedProcess[str]:
    return hallutracer("bundle", *arguments, "--store", store, "--store-cache", str(cache))


def test_signed_pushed_verified_and_pulled(url: str, folder: Path, tmp_path: Path) -> None:
    own, key, public = str(tmp_path / "own"), str(folder / "key.pem"), str(folder / "key.pub")
    Store(own).publish(my_demo())
    cache, digest = tmp_path / "cache", Store(own).load("my-demo").manifest.digest
    here, there = (partial(bundle, store=place, cache=cache) for place in (own, url))
    checks = ("--files-only", "--require-signature", public)
    refused(
        here("verify", "my-demo", *checks),
        1,
        "a signature is required here, and this bundle has none",
    )
    assert fine(here("sign", "my-demo", "--key-file", key)).startswith(
        f"my-demo:1@{digest}: signed, "
    )
    assert fine(here("push", "my-demo", url, "--dry-run")) == "my-demo:1: would be added\n"
    assert fine(here("push", "my-demo", url)).splitlines() == [
        f"my-demo:1: added to {url}",
        f"hallutracer bundle verify my-demo:1@{digest} --store {url}",
    ]
    assert fine(here("push", "my-demo", url)).startswith(
        f"my-demo:1: the same is there already: {url}"
    )
    fine(there("alias", "my-demo", "production", "1"))
    fine(there("verify", f"my-demo@production@{digest}", *checks), f"my-demo:1: signed by {public}")
    pulled = hallutracer(
        "bundle",
        "pull",
        f"{url}/my-demo@production",
        "--digest",
        digest,
        "--require-signature",
        public,
        "--store-cache",
        str(cache),
        "--store",
        str(tmp_path / "pulled"),
    )
    assert fine(pulled).startswith(f"my-demo:1: pulled from {url}/my-demo@production\n")
    assert (tmp_path / "pulled" / "my-demo" / "1" / "model.sig").is_file()


def test_bundles_for_a_model_are_found_by_its_weights_and_without_them_by_its_name(
    url: str, folder: Path, tmp_path: Path
) -> None:
    own = str(folder / "own")
    find = partial(bundle, "find", store=own, cache=tmp_path / "cache")
    found = fine(find("demo"), "my-demo:1", "demo-fused:1", "weights")
    assert " --bundle " in found.splitlines()[-1]
    there = partial(bundle, store=url, cache=tmp_path / "cache")
    fine(bundle("push", "my-demo", url, store=own, cache=tmp_path / "cache"))
    rows = json.loads(fine(find("demo", "--look-in", url, "--json")))
    [row] = [row for row in rows if row["in"] == url and row["bundle"] == "my-demo:1"]
    assert row["next"] == f"hallutracer bundle pull {url}/my-demo:1"
    assert row["known by"] == "weights"
    by_name = json.loads(fine(find(f"owner/{row['model']}", "--json")))
    assert {row["known by"] for row in by_name} == {"name"}
    assert "serve --model" in fine(there("find", "demo"))
    refused(find("owner/unknown"), 1, "hallutracer train --model owner/unknown")
    refused(find(str(tmp_path)), 1, f"hallutracer train --model {tmp_path}")


def test_promoted_rolled_back_and_compared_with_the_signature_that_is_required(
    url: str, folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    there, key = Store(url, cache=cache), ("--key-file", str(folder / "key.pem"))
    for intercept in (0.1, 0.2):
        there.publish(my_demo(intercept))
    command = partial(bundle, store=url, cache=cache)
    required = ("--require-signature", str(folder / "key.pub"))
    fine(command("sign", "my-demo:1", *key))
    fine(command("alias", "my-demo", "production", "1", *required))
    refused(
        command("promote", "my-demo:2", "--ungated", *required), 1, "a signature is required here"
    )
    assert there.aliases("my-demo") == {"production": 1}
    fine(command("sign", "my-demo:2", *key))
    wrong = command("promote", f"my-demo:2@sha256:{'0' * 64}", "--ungated", *required)
    refused(wrong, 1, "not the bundle that the reference pins")
    fine(command("promote", "my-demo:2", "--ungated", *required))
    different = fine(command("compare", "my-demo@previous", "my-demo@production", *required))
    assert "| classifier.intercept | 0.1 | 0.2 |" in different
    assert "0 of 8 layers read another head" in different
    fine(command("rollback", "my-demo", *required))
    assert there.aliases("my-demo") == {"production": 1, "previous": 2}
    assert Objects(url).children("my-demo", "aliases") == [
        "1.json",
        "2.json",
        "3.json",
    ]  # one step for each command


@pytest.mark.parametrize(
    "command", [("score", "why?"), pytest.param(("serve", "--port", "0"), marks=pytest.mark.long)]
)
def test_what_does_not_vouch_is_refused_before_a_model_is_loaded(
    command: tuple[str, ...], folder: Path
) -> None:
    store = folder / f"resealed-{command[0]}"
    shipped = Store(SHIPPED).load("demo")
    Store(store).publish(
        BundleDraft(shipped.manifest, shipped.probes, shipped.golden, shipped.evaluation(), "card")
    )
    options = ["--store", str(store), "--bundle", "demo", "--model", "demo"]
    fine(
        hallutracer(
            "bundle", "sign", "demo", "--store", str(store), "--key-file", str(folder / "key.pem")
        )
    )
    edit_manifest(
        store / "demo" / "1", lambda manifest: manifest["classifier"].update(intercept=99.0)
    )
    verify = ("bundle", "verify", "demo", "--files-only", "--store", str(store))
    fine(hallutracer(*verify))  # nothing but a signature tells
    for key in ("key.pub", "other.pub"):
        refused(
            hallutracer(*command, *options, "--require-signature", str(folder / key)),
            1,
            "demo:1: not signed by",
        )
    store.chmod(0o777)
    refused(hallutracer(*command, *options), 1, f"chmod o-w {store}")
    refused(hallutracer(*verify), 1)
    fine(hallutracer(*verify, "--allow-open-store"))
    (empty := folder / "empty").mkdir(exist_ok=True)
    shipped_one = ("--require-signature", str(folder / "key.pub"), "--store", str(empty))
    fine(
        hallutracer(*verify[:4], *shipped_one),
        "demo:1: comes with the package, which vouches for it",
    )


# the hub: processes of their own, the real client, HF_ENDPOINT


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with hub_stand_in() as running:
        yield running


@pytest.fixture(scope="module")
def run(hub: Hub, folder: Path) -> Run:
    def command(*arguments: str, **variables: str) -> CompletedProcess[str]:
        environment = inherited() | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(folder / "hf"),
            "HF_TOKEN": TOKEN,
        }
        environment |= {
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": str(ROOT),
        } | variables
        return subprocess.run(
            [sys.executable, "-m", "service.cli", "bundle", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return command


def test_a_bundle_is_pushed_to_the_hub_and_pulled(run: Run, hub: Hub, folder: Path) -> None:
    """What the hub refuses, and its cache: tests/annexes/hub/test_transfer.py."""
    own, other = ("--store", str(folder / "own")), ("--store", str(folder / "other"))
    words = "would create the private repository, commit 5 files"
    fine(run("push", "my-demo", "hf://me/my-demo", "--dry-run", "--private", *own), words)
    assert hub.repositories == {}
    first, url, pull = fine(
        run("push", "my-demo", "hf://me/my-demo", "--private", *own)
    ).splitlines()
    assert first.startswith(
        "my-demo:1: to a private repository: create the private repository, commit 5 files ("
    )
    assert (first.endswith(", tag v1"), url) == (True, f"{hub.url}/me/my-demo/tree/v1")
    assert pull.startswith("hallutracer bundle pull hf://me/my-demo@v1 --digest sha256:")
    hub.repositories["me/my-demo"].commits[hub.repositories["me/my-demo"].head][
        "evil\x1b[2J.py"
    ] = b"1/0"
    pulled = run(*pull.split()[2:], *other)  # as the push printed it
    fine(pulled, "pulled from hf://me/my-demo@v1 at commit ", "not downloaded: 'evil\\x1b[2J.py'")
    assert hub.count("evil") == 0
    found = fine(run("find", "demo", "--look-in", "hf://me/my-demo", "--json", *own))
    assert "hallutracer bundle pull hf://me/my-demo@v1" in [
        row["next"] for row in json.loads(found)
    ]
    fine(
        hallutracer("bundle", "verify", "my-demo", *other), "golden prompts gave the recorded risks"
    )
