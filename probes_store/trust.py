"""Checks an operator's requirements on a bundle: a signature, and a store that not everyone can
write to.

Signatures have the format of OpenSSF model signing and lie beside a bundle as ``model.sig``.  They
cover bundle.json and every file that it lists, and so the name, the version and the digest."""

from __future__ import annotations

import base64
import importlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from probes_store.bundle import Bundle, read_signature
from probes_store.errors import (
    InvalidReference,
    OpenStore,
    SignatureMismatch,
    SignatureMissing,
    SigningError,
    one_line,
)
from probes_store.local import write_files
from probes_store.syntax import expanded

SIGSTORE = "sigstore:"
EXPECTED = "a PEM file with a public key or certificates, or sigstore:IDENTITY@ISSUER"


@dataclass(frozen=True)
class RequiredSignature:
    """The key, certificates or identity whose signature a bundle must have."""

    signer: str  # for messages
    verifier: Callable[[], Any]  # makes one of model_signing

    def check(self, bundle: Bundle) -> None:
        """Raise SignatureMissing or SignatureMismatch.  Checks the bundle in memory, since its
        folder may change."""
        signature = read_signature(bundle.path)
        at = bundle.reference
        if signature is None:
            raise SignatureMissing(
                "a signature is required here, and this bundle has none",
                file=at,
                cure="Ask its publisher to sign it, or check it and run 'hallutracer bundle sign'",
            )
        with _folder(bundle) as (folder, names):
            path = folder.with_suffix(".sig")
            path.write_bytes(signature)
            try:
                self.verifier().verify(folder, path)
                # The files that it covers: a signer can tell the tool to leave some out.
                envelope = json.loads(signature)["dsseEnvelope"]
                statement = json.loads(base64.b64decode(envelope["payload"]))
                covered = {file["name"] for file in statement["predicate"]["resources"]}
            # cryptography, OpenSSL, sigstore and protobuf raise many classes
            except Exception as error:
                raise SignatureMismatch(
                    f"not signed by {self.signer}: {one_line(error)}",
                    file=at,
                    cure="Ask its publisher which key it is",
                ) from error
        if covered != names:
            raise SignatureMismatch(
                "the signature leaves files out",
                file=at,
                expected=", ".join(sorted(names)),
                found=", ".join(sorted(covered)),
                cure="Sign it anew",
            )


def required_signature(text: str) -> RequiredSignature:
    """Parse a file's name or ``sigstore:IDENTITY@ISSUER``.  Raises InvalidReference and
    OpenStore."""
    config = _model_signing("verifying").Config()
    if text.startswith(SIGSTORE):
        identity, _, issuer = text.removeprefix(SIGSTORE).rpartition("@https://")
        if not identity or not issuer:
            raise InvalidReference(
                "no identity", expected=EXPECTED, found=ascii(text), cure="ISSUER is a https URL"
            )
        verifier = partial(
            config.use_sigstore_verifier, identity=identity, oidc_issuer=f"https://{issuer}"
        )
        return RequiredSignature(text, verifier)
    path = expanded(text, "HALLUTRACER_REQUIRE_SIGNATURE")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidReference(
            f"cannot be read: {error.strerror}", file=text, cure=f"Name {EXPECTED}"
        ) from error
    _check_not_writable(path)
    if b"PRIVATE KEY" in data:
        raise InvalidReference(
            "a private key", file=text, cure="Take the public one: openssl pkey -in KEY -pubout"
        )
    if b"-----BEGIN CERTIFICATE-----" in data:
        verifier = partial(config.use_certificate_verifier, certificate_chain=[path])
        return RequiredSignature(text, verifier)
    if b"-----BEGIN PUBLIC KEY-----" in data:
        return RequiredSignature(text, partial(config.use_elliptic_key_verifier, public_key=path))
    raise InvalidReference("no key", file=text, expected=EXPECTED, found="other bytes")


@dataclass(frozen=True)
class Signing:
    """The means to sign: a private key, with or without certificates, or sigstore."""

    key: Path | None = None  # PEM, elliptic curve; without a key: sigstore
    password: str | None = None
    certificate: Path | None = None  # PEM, for this key
    chain: Sequence[Path] = ()  # PEM, from the certificate's issuer upwards

    def sign(self, bundle: Bundle) -> bytes:
        """Return the bytes of model.sig.  Raises SigningError if the key or sigstore refuse."""
        with _folder(bundle) as (folder, _):
            path = folder.with_suffix(".sig")
            try:
                self._signer().sign(folder, path)
            except Exception as error:
                raise SigningError(
                    f"cannot sign: {one_line(error)}",
                    file=str(self.key or "sigstore"),
                    cure="Make a key: openssl ecparam -name prime256v1 -genkey -noout",
                ) from error
            return path.read_bytes()

    def _signer(self) -> Any:
        config = _model_signing("signing").Config()
        if self.key is None:
            return config.use_sigstore_signer(use_ambient_credentials=True)
        if self.certificate is not None:
            chain = list(self.chain) or [self.certificate]  # the library refuses an empty chain
            return config.use_certificate_signer(
                private_key=self.key, signing_certificate=self.certificate, certificate_chain=chain
            )
        # The library passes the password on unchanged, and cryptography needs bytes.
        password: Any = self.password.encode() if self.password else None
        return config.use_elliptic_key_signer(private_key=self.key, password=password)


@contextmanager
def _folder(bundle: Bundle) -> Iterator[tuple[Path, set[str]]]:
    """Make a private folder with the files that a signature covers; yield it and the names of the
    files.

    Meanwhile the output of model_signing goes to standard error, since standard output has our own
    results."""
    files = bundle.signed_files()
    with tempfile.TemporaryDirectory() as outside, redirect_stdout(sys.stderr):
        folder = Path(outside, bundle.manifest.name)
        write_files(folder, files)
        yield folder, set(files)


def _model_signing(module: str) -> Any:
    try:
        return importlib.import_module(f"model_signing.{module}")
    except ImportError as error:
        raise SigningError(
            f"no package for it: {error}", cure="Run: pip install 'hallutracer[signing]'"
        ) from error


def check_closed(path: Path) -> None:
    """Raise OpenStore if any user of this machine could replace ``path`` by another file or folder.

    ``path`` and every folder above it must not be writable for all.  In a folder such as /tmp,
    where all may write but only owners may rename, the next folder must belong to this user or
    root.  A missing path is fine."""
    path = Path(os.path.abspath(path))
    for part in (path, path.resolve()):  # a link itself, and its target
        for below, folder in pairwise((part, *part.parents)):
            try:
                mode = folder.stat().st_mode
                owner = below.lstat().st_uid
            except OSError:  # it does not exist, or this user may not see it
                continue
            if not mode & stat.S_ISVTX:
                _check_not_writable(folder)
            elif mode & stat.S_IWOTH and owner not in (0, os.geteuid()):
                raise OpenStore(
                    "another user made this, in a folder where all may write",
                    file=str(below),
                    cure="Name a store in a folder of your own, or --allow-open-store",
                )
    _check_not_writable(path)


def check_bundle_closed(folder: Path) -> None:
    """Raise OpenStore if a bundle's folder, the folder of its name, or a file in either is writable
    for all."""
    for path in (folder.parent, *folder.parent.glob("*.json"), folder, *folder.rglob("*")):
        _check_not_writable(path)


def _check_not_writable(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # reading it will raise a proper error
    if mode & stat.S_IWOTH:
        raise OpenStore(
            "anyone on this machine can write here",
            file=str(path),
            cure=f"Run: chmod o-w {path}  Where you know better: --allow-open-store",
        )
