"""Keys and certificates for tests, made anew."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

PEM = serialization.Encoding.PEM
_USES = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
         "decipher_only")  # fmt: skip


@dataclass(frozen=True)
class KeyPair:
    private: Path
    public: Path


@dataclass(frozen=True)
class Certified:
    private: Path
    certificate: Path
    root: Path


def _private(key: ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    locked = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, locked)


def key_pair(folder: Path, name: str, password: bytes | None = None) -> KeyPair:
    key, pair = ec.generate_private_key(ec.SECP256R1()), KeyPair(folder / f"{name}.pem", folder / f"{name}.pub")
    pair.private.write_bytes(_private(key, password))
    pair.public.write_bytes(key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return pair


def certified(folder: Path, name: str) -> Certified:
    """A key whose certificate a root signed."""
    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} {role}")]) for role in ("root", "signer")]
    made = Certified(folder / f"{name}.pem", folder / f"{name}.crt", folder / f"{name}-root.crt")
    for place, path in enumerate((made.root, made.certificate)):
        usage = {"digital_signature": place == 1, "key_cert_sign": place == 0, "crl_sign": place == 0}
        builder = x509.CertificateBuilder().subject_name(names[place]).issuer_name(names[0])
        builder = builder.public_key(keys[place].public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(start).not_valid_after(start + datetime.timedelta(days=3650))
        builder = builder.add_extension(x509.BasicConstraints(ca=place == 0, path_length=None), critical=True)
        builder = builder.add_extension(x509.KeyUsage(**usage, **dict.fromkeys(_USES, False)), critical=True)
        if place == 1:
            builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
        path.write_bytes(builder.sign(keys[0], hashes.SHA256()).public_bytes(PEM))
    made.private.write_bytes(_private(keys[1]))
    return made
