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
_USES = (
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "encipher_only",
    "decipher_only",
)


@dataclass(frozen=True)
class KeyPair:
    private: Path
    public: Path  # or the certificate


def key_pair(folder: Path, name: str, password: bytes | None = None) -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    pair = KeyPair(folder / f"{name}.pem", folder / f"{name}.pub")
    locked = (
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption()
    )
    pair.private.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, locked))
    pair.public.write_bytes(
        key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return pair


def loaded(private: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(private.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def certified(folder: Path, name: str) -> tuple[KeyPair, Path]:
    """A key with its certificate, and the certificate of the root that signed it."""
    start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    pairs = [key_pair(folder, name), key_pair(folder, f"{name}-root")]
    keys = [loaded(pair.private) for pair in pairs]
    names = [
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, pair.private.stem)]) for pair in pairs
    ]
    certificates = [folder / f"{name}.crt", folder / f"{name}-root.crt"]
    for root, path in enumerate(certificates):
        usage = {"digital_signature": not root, "key_cert_sign": bool(root), "crl_sign": bool(root)}
        builder = x509.CertificateBuilder().subject_name(names[root]).issuer_name(names[1])
        builder = builder.public_key(keys[root].public_key()).serial_number(
            x509.random_serial_number()
        )
        builder = builder.not_valid_before(start).not_valid_after(
            start + datetime.timedelta(days=3650)
        )
        builder = builder.add_extension(
            x509.BasicConstraints(ca=bool(root), path_length=None), critical=True
        )
        builder = builder.add_extension(
            x509.KeyUsage(**usage, **dict.fromkeys(_USES, False)), critical=True
        )
        if not root:
            builder = builder.add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False
            )
        path.write_bytes(builder.sign(keys[1], hashes.SHA256()).public_bytes(PEM))
    return KeyPair(pairs[0].private, certificates[0]), certificates[1]
