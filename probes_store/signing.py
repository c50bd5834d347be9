"""Signatures in the format of OpenSSF model signing, beside a bundle as ``model.sig``.

They cover bundle.json and every file that it lists, and so the name, the version and the digest.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes_store.bundle import Bundle, read_files, read_signature, write_files
from probes_store.errors import InvalidReference, SignatureMismatch, SignatureMissing, SigningError
from probes_store.manifest import MANIFEST, manifest_bytes
from probes_store.permissions import check_not_writable

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
        """Raise SignatureMissing or SignatureMismatch.

        What is compared is the bundle in memory, and not its folder, which may change meanwhile.
        """
        signature = read_signature(bundle.path)
        if signature is None:
            raise SignatureMissing(
                "a signature is required here, and this bundle has none", file=bundle.reference,
                cure="Ask its publisher to sign it, or look at it and run 'hallutracer bundle sign' yourself",
            )  # fmt: skip
        with _folder(bundle) as (folder, names), _quiet():
            path = folder.with_suffix(".sig")
            path.write_bytes(signature)
            try:
                self._verifier().verify(folder, path)
                covered = _covered(signature)
            except Exception as error:  # of cryptography, OpenSSL, sigstore and protobuf, as they come
                raise SignatureMismatch(
                    f"not signed by {self}: {_line(error)}", file=bundle.reference,
                    cure="Ask its publisher which key it is and whether the bundle is theirs; it is not used",
                ) from error  # fmt: skip
        if covered != names:
            raise SignatureMismatch(
                "the signature leaves files out", file=bundle.reference, expected=", ".join(sorted(names)),
                found=", ".join(sorted(covered)), cure="Sign it anew with 'hallutracer bundle sign'",
            )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.identity} ({self.issuer})" if self.identity else str(self.key or self.certificates)

    def _verifier(self) -> Any:
        verifying = _model_signing("verifying")
        if self.key is not None:
            return verifying.Config().use_elliptic_key_verifier(public_key=self.key)
        if self.certificates is not None:
            return verifying.Config().use_certificate_verifier(certificate_chain=[self.certificates])
        return verifying.Config().use_sigstore_verifier(identity=self.identity, oidc_issuer=self.issuer)


def required_signature(text: str) -> RequiredSignature:
    """From a file's name or ``sigstore:IDENTITY@ISSUER``.  Raises InvalidReference and OpenStore."""
    _model_signing("verifying")  # a package that is missing is told before a model is loaded
    if text.startswith(SIGSTORE):
        identity, _, issuer = text.removeprefix(SIGSTORE).rpartition("@https://")
        if not identity or not issuer:
            raise InvalidReference("no identity", expected=EXPECTED, found=ascii(text), cure="ISSUER is a https URL")
        return RequiredSignature(identity=identity, issuer=f"https://{issuer}")
    path = Path(text).expanduser()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidReference(
            f"the key cannot be read: {error.strerror}", file=str(path), cure=f"Name {EXPECTED}"
        ) from error
    check_not_writable(path)
    if b"PRIVATE KEY" in data:
        raise InvalidReference(
            "this is a private key",
            file=str(path),
            cure="Take the public one: openssl pkey -in KEY -pubout",
        )
    if b"-----BEGIN CERTIFICATE-----" in data:
        return RequiredSignature(certificates=path)
    if b"-----BEGIN PUBLIC KEY-----" in data:
        return RequiredSignature(key=path)
    raise InvalidReference(
        "no key", file=str(path), expected=EXPECTED, found="something else", cure="Name another file"
    )


@dataclass(frozen=True)
class Signing:
    """With what to sign: a private key, with certificates or without, or sigstore."""

    key: Path | None = None  # PEM, elliptic curve; without a key: sigstore
    password: str | None = None
    certificate: Path | None = None  # PEM, of this key
    chain: Sequence[Path] = ()  # PEM, from the certificate's issuer up

    def sign(self, bundle: Bundle) -> bytes:
        """The bytes of model.sig.  Raises SigningError for what the key or sigstore do not allow."""
        with _folder(bundle) as (folder, _), _quiet():
            path = folder.with_suffix(".sig")
            try:
                self._signer().sign(folder, path)
            except Exception as error:
                raise SigningError(
                    f"cannot sign: {_line(error)}", file=str(self.key or "sigstore"),
                    cure="A key is an elliptic curve one in PEM: openssl ecparam -name prime256v1 -genkey -noout",
                ) from error  # fmt: skip
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
    """A folder with what a signature covers, of this user alone, and the names in it."""
    files: Mapping[str, bytes] = {
        **read_files(bundle.path, bundle.manifest), MANIFEST: manifest_bytes(bundle.manifest),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as outside:
        folder = Path(outside, bundle.manifest.name)
        write_files(folder, files)
        yield folder, set(files)


def _covered(signature: bytes) -> set[str]:
    """The files that a signature, which was verified, names: its signer may have told the tool to leave some out."""
    payload = json.loads(base64.b64decode(json.loads(signature)["dsseEnvelope"]["payload"]))
    return {resource["name"] for resource in payload["predicate"]["resources"]}


@contextmanager
def _quiet() -> Iterator[None]:
    """model_signing prints its warnings, and standard output is ours."""
    with redirect_stdout(sys.stderr):
        yield


def _model_signing(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"model_signing.{module}")
    except ImportError as error:
        raise SigningError(
            f"signatures need a package that is not installed: {error}", cure="Run: pip install 'hallutracer[signing]'"
        ) from error


def _line(error: object, limit: int = 300) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else " " for c in text)[:limit].rstrip(".")
