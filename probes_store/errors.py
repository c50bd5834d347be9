"""Defines all errors about bundles and the store.

The API sends their ``status`` (by default that of the base class) as HTTP status, and their
``code``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass


@dataclass(eq=False)
class BundleError(Exception):
    """The base class.  Its message names file, field, expected and found values and the cure, as
    far as known.  A class may have a usual problem and a usual cure."""

    problem: str = ""
    _: KW_ONLY
    file: str | None = None
    field: str | None = None
    expected: object = None
    found: object = None
    cure: str | None = None

    status, code = 500, "bundle_error"

    def __post_init__(self) -> None:
        self.problem = self.problem or type(self).problem
        self.cure = self.cure or type(self).cure

    def __str__(self) -> str:
        source = " ".join(
            part for part in (self.file, self.field and f"field {self.field}") if part
        )
        text = f"{source}: {self.problem}" if source else self.problem
        if self.expected is not None:
            text += f"; expected {_short(self.expected)}, found {_short(self.found)}"
        return f"{text}. {self.cure}" if self.cure else text


@contextmanager
def located(at: str) -> Iterator[None]:
    """Put ``at`` before the file that an error of the block names: the folder of that file, or if
    it names none, the file itself."""
    try:
        yield
    except BundleError as error:
        error.file = f"{at}/{error.file}" if error.file else at
        raise


def _short(value: object) -> str:
    """Return a value as text, shortened so that a hostile file cannot flood the log."""
    text = str(value)
    return text if len(text) <= 120 else f"{text[:120]}... ({len(text)} characters)"


def one_line(error: object) -> str:
    """Return the beginning of an error's message as one printable line without a full stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else " " for c in text)[:300].rstrip(".")


class BundleNotFound(BundleError):
    """No bundle, version or alias of that name."""

    status, code = 404, "bundle_not_found"


class InvalidReference(BundleError):
    """Not NAME, NAME@ALIAS or NAME:VERSION, or a path that leads out of the store."""

    status, code = 422, "invalid_bundle_reference"


class BundleDamaged(BundleError):
    """The bytes on disk are not those that were published."""

    status, code = 503, "bundle_damaged"
    cure = "Restore it, or train and publish it again"


class MissingFile(BundleDamaged):
    """A file of the bundle is missing."""

    problem = "the file is missing"
    code = "bundle_missing_file"


class UnknownFile(BundleDamaged):
    """The folder holds a file that the manifest does not list and no digest covers."""

    problem = "the manifest does not list this file"
    code = "bundle_unknown_file"
    cure = "Remove the file: a published bundle is immutable"


class Truncated(BundleDamaged):
    """A file is shorter than it was when it was published."""

    problem = "the end is missing"
    code = "bundle_truncated"


class DigestMismatch(BundleDamaged):
    """A file or the manifest was changed after it was published."""

    code = "bundle_digest_mismatch"


class NotFinite(BundleDamaged):
    """A NaN or an infinity."""

    problem = "not finite"
    code = "bundle_not_finite"


class WrongShape(BundleDamaged):
    """A tensor or a list has another shape or element type than the manifest implies."""

    code = "bundle_wrong_shape"


class UnknownField(BundleDamaged):
    """A field or tensor that this version of the format does not have."""

    problem = "this format has no such field, tensor or file"
    code = "bundle_unknown_field"


class MissingField(BundleDamaged):
    """A required field or tensor is missing."""

    problem = "the field is missing"
    code = "bundle_missing_field"


class BadValue(BundleDamaged):
    """A value of the wrong type, or outside its range."""

    problem = "bad value"
    code = "bundle_bad_value"


class BundleRefused(BundleError):
    """The bundle is valid but belongs to another model than the one that is loaded."""

    status, code = 503, "bundle_refused"
    cure = "Load what the bundle was trained on"


class WrongModel(BundleRefused):
    """Another architecture or other weights."""

    code = "bundle_wrong_model"


class WrongRevision(BundleRefused):
    """Another revision of the model's repository."""

    code = "bundle_wrong_revision"


class WrongGeometry(BundleRefused):
    """Another number of layers or heads, or another head or hidden size."""

    code = "bundle_wrong_geometry"


class WrongTokenizer(BundleRefused):
    """Another tokenizer: the same text would become other token ids."""

    code = "bundle_wrong_tokenizer"


class WrongChatTemplate(BundleRefused):
    """Another chat template: the answer onset would follow other tokens."""

    code = "bundle_wrong_chat_template"


class GoldenMismatch(BundleRefused):
    """The engine does not reproduce the bundle's golden prompts, so no risk can be trusted."""

    code = "bundle_golden_mismatch"
    cure = "Check dtype, engine and model"


class BundleConflict(BundleError):
    """Another bundle has that version, that tag or that name already."""

    status, code = 409, "bundle_conflict"


class HubError(BundleError):
    """The Hugging Face hub refused a request, or what it holds is not what was sent."""

    status, code = 502, "hub_error"


class HubMissing(HubError):
    """No such repository on the hub, or one that this token may not see."""

    status, code = 404, "hub_missing"


class HubUnreachable(HubError):
    """No answer from the hub, and no copy in the cache."""

    status, code = 503, "hub_unreachable"


class StoreNotWritable(BundleError):
    """The store's folder cannot be written."""

    code = "store_not_writable"
    cure = "Make the store writable, or name another one"


class StoreUnreachable(BundleError):
    """No answer from a store's URL."""

    status, code = 503, "store_unreachable"


class StoreRefused(BundleError):
    """The server of a store's URL refused a request, or cannot do what a store needs."""

    status, code = 502, "store_refused"


class SigningError(BundleError):
    """Nothing can be signed or verified: the key does not fit, sigstore refused, or the package is
    missing."""

    code = "signing_error"


class BundleUntrusted(BundleError):
    """The bytes are intact, but the operator requires more."""

    status, code = 503, "bundle_untrusted"


class OpenStore(BundleUntrusted):
    """Anyone on this machine can write to the store, so anyone may have made its bundles."""

    code = "open_store"


class SignatureMissing(BundleUntrusted):
    """A signature is required, and the bundle has none."""

    code = "signature_missing"


class SignatureMismatch(BundleUntrusted):
    """The signature belongs to another key or to other files."""

    code = "signature_mismatch"
