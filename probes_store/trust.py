"""What an operator may ask of a bundle beside sound bytes: a signature, and a store that not everyone can write to.

Signatures are in the format of OpenSSF model signing, beside a bundle as ``model.sig``.  They cover bundle.json and
every file that it lists, and so the name, the version and the digest."""

from __future__ import annotations

import base64
import importlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes_store.bundle import Bundle, read_signature
from probes_store.errors import InvalidReference, OpenStore, SignatureMismatch, SignatureMissing, SigningError, one_line
from probes_store.local import write_files
from probes_store.syntax import expanded

SIGSTORE = "sigstore:"
EXPECTED = "a PEM file with a public key or certificates, or sigstore:IDENTITY@ISSUER"


@dataclass(frozen=True)
class RequiredSignature:
    """Whose signature a bundle must have."""

    key: Path | None = None  # PEM, one public key
    certificates: Path | None = None  # PEM, the roots and what lies between
    identity: str | None = None  # of sigstore, with its issuer
    issuer: str | None = None

    def check(self, bundle: Bundle) -> None:
        """Raise SignatureMissing or SignatureMismatch; of the bundle in memory: its folder may change meanwhile."""
        signature, at = read_signature(bundle.path), bundle.reference
        if signature is None:
            cure = "Ask its publisher to sign it, or check it and run 'hallutracer bundle sign'"
            raise SignatureMissing("a signature is required here, and this bundle has none", file=at, cure=cure)
        with _folder(bundle) as (folder, names):
            path = folder.with_suffix(".sig")
            path.write_bytes(signature)
            try:
                self._verifier().verify(folder, path)
                # The files that it names: its signer may have told the tool to leave some out.
                payload = json.loads(base64.b64decode(json.loads(signature)["dsseEnvelope"]["payload"]))
                covered = {resource["name"] for resource in payload["predicate"]["resources"]}
            except Exception as error:  # of cryptography, OpenSSL, sigstore and protobuf, as they come
                cure = "Ask its publisher which key it is"
                raise SignatureMismatch(f"not signed by {self}: {one_line(error)}", file=at, cure=cure) from error
        if covered != names:
            raise SignatureMismatch(
                "the signature leaves files out",
                file=at,
                expected=", ".join(sorted(names)),
                found=", ".join(sorted(covered)),
                cure="Sign it anew",
            )

    def __str__(self) -> str:
        return f"{self.identity} ({self.issuer})" if self.identity else str(self.key or self.certificates)

    def _verifier(self) -> Any:
        config = _model_signing("verifying").Config()
        if self.key is not None:
            return config.use_elliptic_key_verifier(public_key=self.key)
        if self.certificates is not None:
            return config.use_certificate_verifier(certificate_chain=[self.certificates])
        return config.use_sigstore_verifier(identity=self.identity, oidc_issuer=self.issuer)


def required_signature(text: str) -> RequiredSignature:
    """Parse a file's name or ``sigstore:IDENTITY@ISSUER``.  Raises InvalidReference and OpenStore."""
    _model_signing("verifying")  # a package that is missing is told before a model is loaded
    if text.startswith(SIGSTORE):
        identity, _, issuer = text.removeprefix(SIGSTORE).rpartition("@https://")
        if not identity or not issuer:
            raise InvalidReference("no identity", expected=EXPECTED, found=ascii(text), cure="ISSUER is a https URL")
        return RequiredSignature(identity=identity, issuer=f"https://{issuer}")
    path = expanded(text, "HALLUTRACER_REQUIRE_SIGNATURE")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidReference(f"cannot be read: {error.strerror}", file=str(path), cure=f"Name {EXPECTED}") from error
    _check_not_writable(path)
    if b"PRIVATE KEY" in data:
        raise InvalidReference(
            "a private key", file=str(path), cure="Take the public one: openssl pkey -in KEY -pubout"
        )
    if b"-----BEGIN CERTIFICATE-----" in data:
        return RequiredSignature(certificates=path)
    if b"-----BEGIN PUBLIC KEY-----" in data:
        return RequiredSignature(key=path)
    raise InvalidReference("no key", file=str(path), expected=EXPECTED, found="other bytes", cure="Name another file")


@dataclass(frozen=True)
class Signing:
    """With what to sign: a private key, with certificates or without, or sigstore."""

    key: Path | None = None  # PEM, elliptic curve; without a key: sigstore
    password: str | None = None
    certificate: Path | None = None  # PEM, of this key
    chain: Sequence[Path] = ()  # PEM, from the certificate's issuer up

    def sign(self, bundle: Bundle) -> bytes:
        """Return the bytes of model.sig.  Raises SigningError for what the key or sigstore do not allow."""
        with _folder(bundle) as (folder, _):
            path = folder.with_suffix(".sig")
            try:
                self._signer().sign(folder, path)
            except Exception as error:
                cure = "Make a key: openssl ecparam -name prime256v1 -genkey -noout"
                problem, at = f"cannot sign: {one_line(error)}", str(self.key or "sigstore")
                raise SigningError(problem, file=at, cure=cure) from error
            return path.read_bytes()

    def _signer(self) -> Any:
        config = _model_signing("signing").Config()
        if self.key is None:
            return config.use_sigstore_signer(use_ambient_credentials=True)
        if self.certificate is not None:
            chain = list(self.chain) or [self.certificate]  # the library takes no empty one
            return config.use_certificate_signer(
                private_key=self.key, signing_certificate=self.certificate, certificate_chain=chain
            )
        # The library hands the password on as it is, and cryptography takes bytes.
        password: Any = self.password.encode() if self.password else None
        return config.use_elliptic_key_signer(private_key=self.key, password=password)


@contextmanager
def _folder(bundle: Bundle) -> Iterator[tuple[Path, set[str]]]:
    """Make a folder with what a signature covers, of this user alone, and the names in it.

    Standard output is ours: what model_signing prints goes to standard error meanwhile."""
    files = bundle.files()
    with tempfile.TemporaryDirectory() as outside, redirect_stdout(sys.stderr):
        folder = Path(outside, bundle.manifest.name)
        write_files(folder, files)
        yield folder, set(files)


def _model_signing(module: str) -> Any:
    try:
        return importlib.import_module(f"model_signing.{module}")
    except ImportError as error:
        raise SigningError(f"no package for it: {error}", cure="Run: pip install 'hallutracer[signing]'") from error


def check_closed(path: Path) -> None:
    """Raise OpenStore where any user of this machine could put another file or folder in ``path``'s place.

    ``path`` and every folder above it must not be writable for all.  In a folder such as /tmp, where all may write but
    only owners may rename, what comes next must be this user's or root's.  Where there is nothing, nothing is wrong."""
    path = Path(os.path.abspath(path))
    for part in (path, path.resolve()):  # a link's own place, and where it leads
        for below, folder in zip((part, *part.parents), part.parents, strict=False):
            try:
                mode, owner = folder.stat().st_mode, below.lstat().st_uid
            except OSError:  # nothing there, or nothing that this user may see
                continue
            if mode & stat.S_IWOTH and mode & stat.S_ISVTX and owner not in (0, os.geteuid()):
                cure = "Name a store in a folder of your own, or --allow-open-store"
                raise OpenStore("another user made this, in a folder where all may write", file=str(below), cure=cure)
            if not mode & stat.S_ISVTX:
                _check_not_writable(folder)
    _check_not_writable(path)


def check_bundle_closed(folder: Path) -> None:
    """Raise OpenStore where a bundle's folder, that of its name, or a file in either is writable for all."""
    for path in (folder.parent, *folder.parent.glob("*.json"), folder, *folder.rglob("*")):
        _check_not_writable(path)


def _check_not_writable(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # whoever reads it will say so
    if mode & stat.S_IWOTH:
        cure = f"Run: chmod o-w {path}  Where you know better: --allow-open-store"
        raise OpenStore("anyone on this machine can write here", file=str(path), cure=cure)
