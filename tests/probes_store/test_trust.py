"""Signatures, pins and permissions: what passes where the operator asks for more than sound
bytes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from probes_store import errors
from probes_store.bundle import SIGNATURE, Bundle
from probes_store.errors import (
    DigestMismatch,
    OpenStore,
    SignatureMismatch,
    SignatureMissing,
    SigningError,
)
from probes_store.local import write_files
from probes_store.manifest import MANIFEST, manifest_bytes, sealed
from probes_store.store import SHIPPED, Store, Trust
from probes_store.transfer import copy
from probes_store.trust import Signing, check_closed, required_signature
from tests.kit.bundles import ANSWER, answer_tensors, make_draft
from tests.kit.key_pairs import KeyPair, certified, key_pair
from tests.kit.reseal import edit_manifest, replace_file
from tests.probes_store.conftest import Opens


def requiring(store: Store, public: Path) -> Store:
    """The same store, where a signature by this key is required."""
    return Store(store.root, [SHIPPED], trust=Trust(required_signature(str(public))))


@pytest.fixture
def strict(store: Store, keys: KeyPair) -> Store:
    return requiring(store, keys.public)


def signed(store: Store, keys: KeyPair, seed: int = 0) -> Bundle:
    return store.sign(
        store.publish(make_draft(seed, answer=ANSWER)).reference, Signing(keys.private)
    )


def tamper(path: Path) -> None:
    """Seal another bundle in the place of this one, which passes every digest."""
    edit_manifest(path, lambda manifest: manifest["classifier"].update(intercept=9.0))


def test_a_signed_bundle_passes(store: Store, strict: Store, keys: KeyPair) -> None:
    bundle = signed(store, keys)
    for opened in (store, strict):
        assert opened.verify("tiny").manifest == bundle.manifest
        assert opened.verify(f"tiny:1@{bundle.manifest.digest}").manifest == bundle.manifest
    strict.set_alias("tiny", "production", 1)
    assert [summary.error for summary in strict.list() if summary.name == "tiny"] == [None]


def test_an_unsigned_bundle_does_not(store: Store, strict: Store, tmp_path: Path) -> None:
    assert strict.load("demo").path == SHIPPED / "demo" / "1"  # the package's need none
    bundle = store.publish(make_draft())
    for use in (strict.load, strict.verify, lambda name: strict.set_alias(name, "production", 1)):
        with pytest.raises(SignatureMissing, match="hallutracer bundle sign"):
            use("tiny")
    assert strict.publish(make_draft(1)).reference == "tiny:2"  # signed after it is published
    assert {type(summary.error) for summary in strict.list() if summary.name == "tiny"} == {
        SignatureMissing
    }
    store.publish(make_draft(name="demo"))
    with pytest.raises(SignatureMissing, match="demo:1"):  # and no reason to take the package's
        strict.load("demo")
    back = Store(tmp_path / "back", trust=strict.trust)
    with pytest.raises(SignatureMissing):
        copy(bundle, back, source="here")
    assert not back.root.exists()


def test_every_file_is_covered(store: Store, strict: Store, keys: KeyPair) -> None:
    bundle = signed(store, keys)
    whole = bundle.files()
    answer = answer_tensors(bundle.manifest)
    other = dict.fromkeys(("README.md", "evaluation.json", "plots/roc.png"), b"{}\n")
    other["answer.safetensors"] = dataclasses.replace(answer, bias=-answer.bias).pack()
    for name in (MANIFEST, *other):
        if name == MANIFEST:
            tamper(bundle.path)
        else:
            replace_file(bundle.path, name, other[name])
        assert store.load("tiny").reference == "tiny:1"
        with pytest.raises(SignatureMismatch, match="tiny:1"):
            strict.load("tiny")
        write_files(bundle.path, whole)


def test_a_signature_is_for_one_version_and_one_key(
    store: Store, strict: Store, keys: KeyPair, tmp_path: Path
) -> None:
    first = signed(store, keys, 0)
    second = store.publish(make_draft(1))
    shutil.copy(first.path / SIGNATURE, second.path / SIGNATURE)
    with pytest.raises(SignatureMismatch):
        strict.load("tiny:2")
    again = sealed(
        first.manifest, version=2, created=first.manifest.created
    )  # an old one, put in front of a new one
    for name, data in (first.files() | {MANIFEST: manifest_bytes(again)}).items():
        (second.path / name).write_bytes(data)
    assert store.load("tiny:2").manifest.digest == first.manifest.digest
    with pytest.raises(SignatureMismatch):
        strict.load("tiny:2")
    store.sign("tiny:1", Signing(key_pair(tmp_path, "theirs").private))
    with pytest.raises(SignatureMismatch, match=r"not signed by .*ours\.pub"):
        strict.load("tiny:1")


def test_what_is_no_signature_or_leaves_a_file_out_does_not(
    store: Store, strict: Store, keys: KeyPair
) -> None:
    from model_signing import hashing, signing

    path = store.publish(make_draft()).path
    config = signing.Config()
    for data in (b"", b"{}", b"\xff", b"[" * 10_000, b"x" * (2 << 20)):
        (path / SIGNATURE).write_bytes(data)
        with pytest.raises((SignatureMismatch, errors.BundleDamaged)):
            strict.load("tiny")
    (path / SIGNATURE).unlink()
    config.use_elliptic_key_signer(private_key=keys.private)
    config.set_hashing_config(hashing.Config().set_ignored_paths(paths=["bundle.json"])).sign(
        path, path / SIGNATURE
    )
    with pytest.raises(SignatureMismatch, match="leaves files out"):
        strict.load("tiny")


def test_what_was_loaded_is_what_is_compared(store: Store, keys: KeyPair) -> None:
    """Files that change between loading and comparing: neither the old nor the new ones pass for
    each other."""
    bundle = signed(store, keys)
    tamper(bundle.path)
    changed = store.load("tiny")
    (bundle.path / MANIFEST).write_bytes(manifest_bytes(bundle.manifest))
    required = required_signature(str(keys.public))
    required.check(bundle)
    with pytest.raises(SignatureMismatch):
        required.check(changed)


def test_certificates(store: Store, tmp_path: Path) -> None:
    (ours, root), (theirs, other) = certified(tmp_path, "ours"), certified(tmp_path, "theirs")
    store.publish(make_draft())
    store.sign("tiny", Signing(ours.private, certificate=ours.public, chain=[root]))
    trusting = requiring(store, root)
    assert trusting.load("tiny").reference == "tiny:1"
    with pytest.raises(SignatureMismatch, match=r"theirs-root\.crt"):
        requiring(store, other).load("tiny")
    store.sign("tiny", Signing(theirs.private, certificate=theirs.public))  # over the other one
    with pytest.raises(SignatureMismatch):
        trusting.load("tiny")


@pytest.mark.long
def test_the_tool_of_others_agrees(store: Store, strict: Store, keys: KeyPair) -> None:
    """Both ways with OpenSSF's own command line."""
    bundle = signed(store, keys)
    tool = [sys.executable, "-m", "model_signing"]
    at = [str(bundle.path), "--signature", str(bundle.path / SIGNATURE)]
    by_key = {"verify": ("--public_key", keys.public), "sign": ("--private_key", keys.private)}
    for verb, key in by_key.items():
        command = [*tool, verb, "key", *at, *map(str, key)]
        subprocess.run(command, check=True, capture_output=True)
        if verb == "verify":
            (bundle.path / SIGNATURE).unlink()
    assert strict.load("tiny").reference == "tiny:1"


def test_what_signs_and_what_is_signed(
    store: Store, strict: Store, keys: KeyPair, tmp_path: Path
) -> None:
    first = store.publish(make_draft(0))
    second = store.publish(make_draft(1))
    locked = key_pair(tmp_path, "locked", b"open sesame")
    for signing in (
        Signing(tmp_path / "nothing.pem"),
        Signing(locked.private),
        Signing(locked.private, "wrong"),
    ):
        with pytest.raises(SigningError, match="cannot sign"):
            store.sign("tiny", signing)
    store.sign("tiny", Signing(locked.private, "open sesame"))
    assert requiring(store, locked.public).load("tiny").reference == "tiny:2"
    with pytest.raises(errors.BundleConflict, match="comes with the package"):
        strict.sign("demo", Signing(keys.private))
    with pytest.raises(DigestMismatch):
        strict.sign(f"tiny:2@{first.manifest.digest}", Signing(keys.private))
    strict.sign(
        f"tiny:2@{second.manifest.digest}", Signing(keys.private)
    )  # it need not have been signed so
    assert strict.load("tiny").reference == "tiny:2"
    (first.path / "README.md").write_bytes(b"x")
    with pytest.raises(errors.BundleDamaged):
        store.sign("tiny:1", Signing(keys.private))


def test_a_warning_of_the_library_stays_out_of_standard_output(
    store: Store, strict: Store, keys: KeyPair, capsys: pytest.CaptureFixture[str]
) -> None:
    path = signed(store, keys).path / SIGNATURE
    signature = json.loads(path.read_bytes())
    del signature["verificationMaterial"]["publicKey"]["hint"]  # as older signers left it
    path.write_text(json.dumps(signature))
    assert strict.load("tiny").reference == "tiny:1"
    out, err = capsys.readouterr()
    assert out == ""
    assert "older verification material format" in err


def test_whose_signature(tmp_path: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    found = required_signature("sigstore:me@example.org@https://accounts.example.org")
    assert isinstance(found.verifier, partial)
    assert found.verifier.keywords == {
        "identity": "me@example.org",
        "oidc_issuer": "https://accounts.example.org",
    }
    (tmp_path / "text").write_text("hello")
    for text in (
        "sigstore:",
        "sigstore:me@example.org",
        "sigstore:@https://x",
        str(tmp_path / "absent"),
        str(tmp_path / "text"),
        str(keys.private),
        str(tmp_path),
    ):
        with pytest.raises(
            errors.InvalidReference, match="private key" if text == str(keys.private) else None
        ):
            required_signature(text)
    keys.public.chmod(0o666)
    with pytest.raises(OpenStore, match=r"ours\.pub"):
        required_signature(str(keys.public))
    monkeypatch.setitem(sys.modules, "model_signing.verifying", None)  # told at once
    with pytest.raises(SigningError, match=r"pip install 'hallutracer\[signing\]'"):
        required_signature(str(keys.public))


def test_a_signature_goes_along(
    store: Store, strict: Store, keys: KeyPair, url: str, opens: Opens
) -> None:
    bundle = signed(store, keys)
    trust = strict.trust
    copy(bundle, opens(url), source=store.where)
    there = opens(url, "new", trust)
    assert there.load("tiny").manifest == bundle.manifest
    back = Store(store.root.parent / "back", trust=trust)
    copy(there.load("tiny"), back, source=url)
    assert back.load("tiny").files() == bundle.files()


def test_a_signature_may_come_later(
    store: Store, strict: Store, keys: KeyPair, url: str, opens: Opens
) -> None:
    bundle = store.publish(make_draft())
    there = opens(url)
    copy(bundle, there, source=store.where)
    opens(url, "reader").load("tiny")
    with pytest.raises(SignatureMissing):
        opens(url, "reader", strict.trust).load("tiny")
    there.sign("tiny", Signing(keys.private))
    assert opens(url, "reader", strict.trust).load("tiny").reference == "tiny:1"
    copy(there.load("tiny"), store, source=url)  # which has the bundle, without the signature
    assert strict.load("tiny").reference == "tiny:1"
    there.sign("tiny", Signing(key_pair(store.root.parent, "other").private))
    with pytest.raises(SignatureMismatch):
        opens(url, "reader", strict.trust).load("tiny")
    copy(
        opens(url, "reader").load("tiny"), store, source=url
    )  # does not replace the one that is there
    assert strict.load("tiny").reference == "tiny:1"


def test_pins(store: Store) -> None:
    first = store.publish(make_draft(0))
    second = store.publish(make_draft(1))
    store.set_alias("tiny", "canary", 1)
    for reference in ("tiny:1", "tiny@canary"):
        assert store.load(f"{reference}@{first.manifest.digest}").reference == "tiny:1"
        with pytest.raises(DigestMismatch, match="pins"):
            store.load(f"{reference}@{second.manifest.digest}")
    assert store.load(f"tiny@{second.manifest.digest}").reference == "tiny:2"
    with pytest.raises(DigestMismatch):
        store.verify(f"tiny@{first.manifest.digest}")  # a pin checks, it does not search
    store.set_alias("tiny", "sha256", 1)
    assert store.load("tiny@sha256").reference == "tiny:1"


@pytest.fixture
def made(store: Store) -> Store:
    store.publish(make_draft())
    store.set_alias("tiny", "production", 1)
    return store


def test_what_all_may_write_is_refused(made: Store) -> None:
    for place in (
        "",
        "..",
        "tiny",
        "tiny/1",
        "tiny/aliases.json",
        "tiny/1/bundle.json",
        "tiny/1/plots/roc.png",
    ):
        path = made.root.parent if place == ".." else made.root / place
        path.chmod(path.stat().st_mode | 0o002)
        for use in (made.load, made.verify):
            with pytest.raises(OpenStore, match=f"{path}: .*chmod o-w .*--allow-open-store"):
                use("tiny")
        assert Store(made.root, trust=Trust(open_store=True)).verify("tiny").reference == "tiny:1"
        path.chmod(path.stat().st_mode & ~0o002)
        assert made.verify("tiny").reference == "tiny:1"


def test_open_bundles_and_stores_hide_nothing(made: Store) -> None:
    second = made.publish(make_draft(1)).path
    second.chmod(0o777)
    assert [type(summary.error) for summary in made.list()] == [type(None), OpenStore]
    assert made.load("tiny:1").reference == "tiny:1"
    made.root.chmod(
        0o777
    )  # whoever can write there could have put a bundle in the place of the package's
    both = Store(made.root, [SHIPPED])
    for use in (
        lambda: both.load("demo"),
        both.list,
        both.check_writable,
        lambda: both.publish(make_draft(2)),
    ):
        with pytest.raises(OpenStore):
            use()
    assert not (made.root / "tiny" / "3").exists()


@pytest.mark.parametrize(
    "foreign",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                os.geteuid() != 0, reason="needs root, to give a folder to another user"
            ),
        ),
    ],
)
def test_a_folder_for_all_in_which_only_owners_rename(made: Store, foreign: bool) -> None:
    made.root.parent.chmod(0o1777)  # as /tmp
    if foreign:
        os.chown(made.root, 65534, 65534)
        with pytest.raises(OpenStore, match="another user"):
            made.load("tiny")
        made.root.parent.chmod(0o755)  # somebody's store, in a folder that is not for all
    assert made.load("tiny").reference == "tiny:1"


@pytest.mark.parametrize("into", [True, False])
def test_a_link_into_or_in_an_open_folder(made: Store, tmp_path: Path, into: bool) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    link, target = (tmp_path / "link", folder / "store") if into else (folder / "link", made.root)
    made.root.rename(target)
    link.symlink_to(target)
    assert Store(link).load("tiny").reference == "tiny:1"
    folder.chmod(0o777)
    with pytest.raises(OpenStore, match="open"):
        Store(link).load("tiny")


def test_copies_of_a_url_are_checked_too_and_nothing_there_is_not_wrong(tmp_path: Path) -> None:
    check_closed(tmp_path / "absent" / "below")
    store = Store("memory://permissions", cache=tmp_path / "cache")
    store.publish(make_draft())
    assert store.load("tiny").reference == "tiny:1"
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(OpenStore, match="cache"):
        store.load("tiny")
