"""Stores by URL, signatures and pins as a user types them; against a real S3 server in the long run."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from probes_store.bucket import Objects
from probes_store.bundle import BundleDraft
from probes_store.store import SHIPPED, Store
from tests.command_line import hallutracer, one_line_says
from tests.probes_store.keys import key_pair
from tests.probes_store.reseal import edit_manifest
from tests.probes_store.s3_server import BUCKET, VARIABLES, s3_server, use

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    kept = {name: os.environ.get(name) for name in (*VARIABLES, "AWS_ENDPOINT_URL")}
    with s3_server() as address:
        use(address)
        yield address
    for name, value in kept.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.long)])
def url(request: pytest.FixtureRequest) -> str:
    """The empty place of a store."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        return f"s3://{BUCKET}/{uuid.uuid4().hex}"
    return f"memory://{uuid.uuid4().hex}"


def my_demo(intercept: float | None = None) -> BundleDraft:
    """The shipped bundle under another name, and with another intercept."""
    shipped = Store(SHIPPED).load("demo")
    manifest = replace(shipped.manifest, name="my-demo")
    if intercept is not None:
        manifest = replace(manifest, classifier=replace(manifest.classifier, intercept=intercept))
    return BundleDraft(manifest, shipped.probes, shipped.golden, shipped.evaluation(), shipped.card())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("by-url")
    key_pair(folder, "key")
    key_pair(folder, "other")
    return folder


def bundle(*arguments: str, store: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return hallutracer("bundle", *arguments, "--store", store, "--store-cache", str(cache))


def test_signed_pushed_verified_and_pulled(url: str, folder: Path, tmp_path: Path) -> None:
    own, key, public = str(tmp_path / "own"), str(folder / "key.pem"), str(folder / "key.pub")
    Store(own).publish(my_demo())
    cache, digest = tmp_path / "cache", Store(own).load("my-demo").manifest.digest
    unsigned = bundle("verify", "my-demo", "--files-only", "--require-signature", public, store=own, cache=cache)
    assert (unsigned.returncode, unsigned.stdout) == (1, "")
    assert "a signature is required here, and this bundle has none" in unsigned.stderr
    signed = bundle("sign", "my-demo", "--key-file", key, store=own, cache=cache)
    assert signed.returncode == 0, signed.stderr
    assert signed.stdout.startswith(f"my-demo:1@{digest}: signed, ")
    dry = bundle("push", "my-demo", url, "--dry-run", store=own, cache=cache)
    assert dry.stdout == "my-demo:1: would be added\n"
    pushed = bundle("push", "my-demo", url, store=own, cache=cache)
    assert pushed.returncode == 0, pushed.stderr
    assert pushed.stdout.splitlines() == [
        f"my-demo:1: added to {url}",
        f"hallutracer bundle verify my-demo:1@{digest} --store {url}",
    ]
    again = bundle("push", "my-demo", url, store=own, cache=cache)
    assert again.stdout.startswith(f"my-demo:1: the same is there already: {url}")
    moved = bundle("alias", "my-demo", "production", "1", store=url, cache=cache)
    assert moved.returncode == 0, moved.stderr
    reference = f"my-demo@production@{digest}"
    checks = ("--files-only", "--require-signature", public)
    verified = bundle("verify", reference, *checks, store=url, cache=cache)
    assert verified.returncode == 0, verified.stderr
    assert f"my-demo:1: signed by {public}" in verified.stdout
    pulled = hallutracer("bundle", "pull", f"{url}/my-demo@production", "--digest", digest, "--require-signature",
                         public, "--store-cache", str(cache), "--store", str(tmp_path / "pulled"))  # fmt: skip
    assert pulled.returncode == 0, pulled.stderr
    assert pulled.stdout.startswith(f"my-demo:1: pulled from {url}/my-demo@production\n")
    assert (tmp_path / "pulled" / "my-demo" / "1" / "model.sig").is_file()


def test_promoted_rolled_back_and_compared_with_the_signature_that_is_required(
    url: str, folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    there, key = Store(url, cache=cache), ("--key-file", str(folder / "key.pem"))
    for intercept in (0.1, 0.2):
        there.publish(my_demo(intercept))
    command = partial(bundle, store=url, cache=cache)
    required = ("--require-signature", str(folder / "key.pub"))
    assert command("sign", "my-demo:1", *key).returncode == 0
    assert command("alias", "my-demo", "production", "1", *required).returncode == 0
    refused = command("promote", "my-demo:2", "--ungated", *required)
    assert (refused.returncode, "a signature is required here" in refused.stderr) == (1, True)
    assert there.aliases("my-demo") == {"production": 1}
    assert command("sign", "my-demo:2", *key).returncode == 0
    digest = there.load("my-demo:2").manifest.digest
    wrong = command("promote", f"my-demo:2@sha256:{'0' * 64}", "--ungated", *required)
    assert (wrong.returncode, "not the bundle that the reference pins" in wrong.stderr) == (1, True)
    promoted = command("promote", f"my-demo:2@{digest}", "--ungated", *required)
    assert promoted.returncode == 0, promoted.stderr
    assert there.aliases("my-demo") == {"production": 2, "previous": 1}
    different = command("diff", "my-demo@previous", "my-demo@production", *required)
    assert "| classifier.intercept | 0.1 | 0.2 |" in different.stdout, different.stderr
    back = command("rollback", "my-demo", *required)
    assert back.returncode == 0, back.stderr
    assert there.aliases("my-demo") == {"production": 1, "previous": 2}
    assert Objects(url).children("my-demo", "aliases") == ["1.json", "2.json", "3.json"]  # one step for each command


@pytest.mark.parametrize("command", [("score", "why?"), pytest.param(("serve", "--port", "0"), marks=pytest.mark.long)])
def test_what_does_not_vouch_is_refused_before_a_model_is_loaded(command: tuple[str, ...], folder: Path) -> None:
    store = folder / f"resealed-{command[0]}"
    shipped = Store(SHIPPED).load("demo")
    Store(store).publish(BundleDraft(shipped.manifest, shipped.probes, shipped.golden, shipped.evaluation(), "card"))
    options = ["--store", str(store), "--bundle", "demo", "--model", "demo"]
    signed = hallutracer("bundle", "sign", "demo", "--store", str(store), "--key-file", str(folder / "key.pem"))
    assert signed.returncode == 0, signed.stderr
    edit_manifest(store / "demo" / "1", lambda manifest: manifest["classifier"].update(intercept=99.0))
    resealed = hallutracer("bundle", "verify", "demo", "--files-only", "--store", str(store))
    assert resealed.returncode == 0  # nothing but a signature tells
    for key in ("key.pub", "other.pub"):
        done = hallutracer(*command, *options, "--require-signature", str(folder / key))
        assert (done.returncode, done.stdout) == (1, "")
        assert "demo:1: not signed by" in done.stderr
    store.chmod(0o777)
    done = hallutracer(*command, *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"chmod o-w {store}" in done.stderr
    verify = ("bundle", "verify", "demo", "--files-only", "--store", str(store))
    assert hallutracer(*verify).returncode == 1
    assert hallutracer(*verify, "--allow-open-store").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (("list", "--store", "s4://bucket"), 1, "s3://BUCKET/PREFIX"),
        (("list", "--store", "hf://me/probe@v1"), 1, "hf://OWNER/NAME"),
        (("push", "demo", "s4://bucket"), 1, "s3://BUCKET/PREFIX"),
        (("push", "demo", "memory://x", "--private"), 2, "--private"),
        (("pull", "memory://x/nothing"), 1, "no bundle nothing in memory://x"),
        (("sign", "demo", "--certificate", "x.crt"), 2, "--key-file"),
        (("sign", "demo", "--key-file", "x.pem", "--chain", "x.crt"), 2, "--chain"),
        (("verify", "demo", "--require-signature", "absent.pub"), 1, "absent.pub"),
    ],
)
def test_one_line_says_what_is_wrong(arguments: tuple[str, ...], status: int, word: str) -> None:
    one_line_says(("bundle", *arguments), status, word)


def test_what_comes_with_the_package_needs_no_signature(folder: Path) -> None:
    done = hallutracer("bundle", "verify", "demo", "--files-only", "--require-signature", str(folder / "key.pub"),
                       "--store", str(folder / "empty"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "demo:1: comes with the package, which vouches for it" in done.stdout


def test_the_commands_stay_light() -> None:
    code = (
        "import sys, service.cli.main, probes_store.store; "
        "print([name for name in ('fsspec', 's3fs', 'model_signing', 'sigstore') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
