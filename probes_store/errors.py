"""Defines all errors about bundles and the store.

The API sends their ``status`` (by default that of the base class) as HTTP status, and their
``code``."""

from __future__ import annotations


class BundleError(Exception):
    """The base class.  Its message names file, field, expected and found values and the cure, as
    far as known."""

    status, code = 500, "bundle_error"
    default_cure: str | None = None

    def __init_subclass__(
        cls, *, code: str, status: int | None = None, cure: str | None = None
    ) -> None:
        cls.code = code
        cls.status = status or cls.status
        cls.default_cure = cure or cls.default_cure

    def __init__(
        self,
        problem: str,
        *,
        file: str | None = None,
        field: str | None = None,
        expected: object = None,
        found: object = None,
        cure: str | None = None,
    ) -> None:
        self.file, self.field = file, field
        self.expected, self.found = expected, found
        self.cure = cure or self.default_cure
        source = " ".join(part for part in (file, field and f"field {field}") if part)
        text = f"{source}: {problem}" if source else problem
        if expected is not None:
            text += f"; expected {_short(expected)}, found {_short(found)}"
        self.message = f"{text}. {self.cure}" if self.cure else text
        super().__init__(self.message)


def _short(value: object, limit: int = 120) -> str:
    """Return a value as text, shortened so that a hostile file cannot flood the log."""
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def one_line(error: object, limit: int = 300) -> str:
    """Return an error's message as one printable line without a full stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else " " for c in text)[:limit].rstrip(".")


class BundleNotFound(BundleError, code="bundle_not_found", status=404):
    """No bundle, version or alias of that name."""


class InvalidReference(BundleError, code="invalid_bundle_reference", status=422):
    """Not NAME, NAME@ALIAS or NAME:VERSION, or a path that leads out of the store."""


class BundleDamaged(
    BundleError, code="bundle_damaged", status=503, cure="Restore it, or train and publish it again"
):
    """The bytes on disk are not those that were published."""


class MissingFile(BundleDamaged, code="bundle_missing_file"):
    """A file of the bundle is missing."""


class UnknownFile(
    BundleDamaged,
    code="bundle_unknown_file",
    cure="Remove the file: a published bundle is immutable",
):
    """The folder holds a file that the manifest does not list and no digest covers."""


class Truncated(BundleDamaged, code="bundle_truncated"):
    """A file is shorter than it was when it was published."""


class DigestMismatch(BundleDamaged, code="bundle_digest_mismatch"):
    """A file or the manifest was changed after it was published."""


class NotFinite(BundleDamaged, code="bundle_not_finite"):
    """A NaN or an infinity."""


class WrongShape(BundleDamaged, code="bundle_wrong_shape"):
    """A tensor or a list has another shape or element type than the manifest implies."""


class UnknownField(BundleDamaged, code="bundle_unknown_field"):
    """A field or tensor that this version of the format does not have."""


class MissingField(BundleDamaged, code="bundle_missing_field"):
    """A required field or tensor is missing."""


class BadValue(BundleDamaged, code="bundle_bad_value"):
    """A value of the wrong type, or outside its range."""


class BundleRefused(
    BundleError, code="bundle_refused", status=503, cure="Load what the bundle was trained on"
):
    """The bundle is valid but belongs to another model than the one that is loaded."""


class WrongModel(BundleRefused, code="bundle_wrong_model"):
    """Another architecture or other weights."""


class WrongRevision(BundleRefused, code="bundle_wrong_revision"):
    """Another revision of the model's repository."""


class WrongGeometry(BundleRefused, code="bundle_wrong_geometry"):
    """Another number of layers or heads, or another head or hidden size."""


class WrongTokenizer(BundleRefused, code="bundle_wrong_tokenizer"):
    """Another tokenizer: the same text would become other token ids."""


class WrongChatTemplate(BundleRefused, code="bundle_wrong_chat_template"):
    """Another chat template: the answer onset would follow other tokens."""


class GoldenMismatch(
    BundleRefused, code="bundle_golden_mismatch", cure="Check dtype, engine and model"
):
    """The engine does not reproduce the bundle's golden prompts, so no risk can be trusted."""


class BundleConflict(BundleError, code="bundle_conflict", status=409):
    """Another bundle has that version, that tag or that name already."""


class HubError(BundleError, code="hub_error", status=502):
    """The Hugging Face hub refused a request, or what it holds is not what was sent."""


class HubMissing(HubError, code="hub_missing", status=404):
    """No such repository on the hub, or one that this token may not see."""


class HubUnreachable(HubError, code="hub_unreachable", status=503):
    """No answer from the hub, and no copy in the cache."""


class StoreNotWritable(
    BundleError, code="store_not_writable", cure="Make the store writable, or name another one"
):
    """The store's folder cannot be written."""


class StoreUnreachable(BundleError, code="store_unreachable", status=503):
    """No answer from a store's URL."""


class StoreRefused(BundleError, code="store_refused", status=502):
    """The server of a store's URL refused a request, or cannot do what a store needs."""


class SigningError(BundleError, code="signing_error"):
    """Nothing can be signed or verified: the key does not fit, sigstore refused, or the package is
    missing."""


class BundleUntrusted(BundleError, code="bundle_untrusted", status=503):
    """The bytes are intact, but the operator requires more."""


class OpenStore(BundleUntrusted, code="open_store"):
    """Anyone on this machine can write to the store, so anyone may have made its bundles."""


class SignatureMissing(BundleUntrusted, code="signature_missing"):
    """A signature is required, and the bundle has none."""


class SignatureMismatch(BundleUntrusted, code="signature_mismatch"):
    """The signature belongs to another key or to other files."""
