"""Keys and certificates for tests, made anew."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclass(frozen=True)
class KeyPair:
    private: Path
    public: Path


def key_pair(folder: Path, name: str, password: bytes | None = None) -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    pair = KeyPair(folder / f"{name}.pem", folder / f"{name}.pub")
    locked = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    pair.private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, locked))
    pair.public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return pair


@dataclass(frozen=True)
class Certified:
    private: Path
    certificate: Path
    root: Path


def certified(folder: Path, name: str) -> Certified:
    """A key whose certificate a root signed."""
    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} {role}")]) for role in ("root", "signer")]
    made = Certified(folder / f"{name}.pem", folder / f"{name}.crt", folder / f"{name}-root.crt")
    for place, path in enumerate((made.root, made.certificate)):
        others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
        usage = dict.fromkeys((*others, "decipher_only"), False)
        builder = (
            x509.CertificateBuilder()
            .subject_name(names[place])
            .issuer_name(names[0])
            .public_key(keys[place].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + datetime.timedelta(days=3650))
            .add_extension(x509.BasicConstraints(ca=place == 0, path_length=None), critical=True)
            .add_extension(
                x509.KeyUsage(digital_signature=place == 1, key_cert_sign=place == 0, crl_sign=place == 0, **usage),
                critical=True,
            )
        )
        if place == 1:
            builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
        path.write_bytes(builder.sign(keys[0], hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    made.private.write_bytes(
        keys[1].private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return made
