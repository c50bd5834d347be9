"""All errors about bundles and the store.

    BundleError                     500 bundle_error
    |-- BundleNotFound              404 bundle_not_found
    |-- InvalidReference            422 invalid_bundle_reference   malformed, or it tries to leave the store
    |-- BundleDamaged               503 bundle_damaged             the bytes are not what was published
    |   |-- MissingFile             503 bundle_missing_file
    |   |-- UnknownFile             503 bundle_unknown_file
    |   |-- Truncated               503 bundle_truncated
    |   |-- DigestMismatch          503 bundle_digest_mismatch
    |   |-- NotFinite               503 bundle_not_finite          NaN or infinity
    |   |-- WrongShape              503 bundle_wrong_shape         shape or element type
    |   |-- UnknownField            503 bundle_unknown_field
    |   |-- MissingField            503 bundle_missing_field
    |   `-- BadValue                503 bundle_bad_value
    |-- BundleRefused               503 bundle_refused             sound, but not for this model
    |   |-- WrongModel              503 bundle_wrong_model
    |   |-- WrongRevision           503 bundle_wrong_revision
    |   |-- WrongGeometry           503 bundle_wrong_geometry
    |   |-- WrongTokenizer          503 bundle_wrong_tokenizer
    |   |-- WrongChatTemplate       503 bundle_wrong_chat_template
    |   `-- GoldenMismatch          503 bundle_golden_mismatch
    |-- BundleConflict              409 bundle_conflict            another bundle has that place
    |-- HubError                    502 hub_error                  the Hugging Face hub refused, or failed
    |   |-- HubMissing              404 hub_missing                no such repository, or a private one
    |   `-- HubUnreachable          503 hub_unreachable            offline, or the hub is down
    |-- StoreNotWritable            500 store_not_writable
    |-- StoreUnreachable            503 store_unreachable          no answer from the store's URL, and no copy here
    |-- StoreRefused                502 store_refused              the server of a store's URL refused, or cannot do it
    |-- SigningError                500 signing_error              the key, sigstore or a missing package
    `-- BundleUntrusted             503 bundle_untrusted           sound, but nobody vouches for it
        |-- OpenStore               503 open_store                 anyone on this machine can write to it
        |-- SignatureMissing        503 signature_missing
        `-- SignatureMismatch       503 signature_mismatch         by another key, or of other files

``status`` and ``code`` are what the API sends: HTTP status and machine-readable code.
"""

from __future__ import annotations


class BundleError(Exception):
    """Base class.  The message names the file, the field, expected and found values and the cure, where known."""

    status: int = 500
    code: str = "bundle_error"
    default_cure: str | None = None

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
        place = f"{file or ''}{' ' if file and field else ''}{f'field {field}' if field else ''}"
        text = f"{place}: {problem}" if place else problem
        if expected is not None:
            text += f"; expected {_short(expected)}, found {_short(found)}"
        self.cure = cure or self.default_cure
        self.message = f"{text}. {self.cure}" if self.cure else text
        self.file, self.field, self.expected, self.found = file, field, expected, found
        super().__init__(self.message)


def _short(value: object, limit: int = 120) -> str:
    """A value as text, shortened so that a hostile file cannot flood the log."""
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


class BundleNotFound(BundleError):
    """No bundle, version or alias of that name."""

    status, code = 404, "bundle_not_found"


class InvalidReference(BundleError):
    """Not NAME, NAME@ALIAS or NAME:VERSION, or a path that leads out of the store."""

    status, code = 422, "invalid_bundle_reference"


class BundleDamaged(BundleError):
    """The bytes on disk are not those that were published."""

    status, code = 503, "bundle_damaged"
    default_cure = "Restore the bundle from where it came from, or train and publish it again"


class MissingFile(BundleDamaged):
    """A file of the bundle is missing."""

    status, code = 503, "bundle_missing_file"


class UnknownFile(BundleDamaged):
    """The folder holds a file that the manifest does not list and no digest covers."""

    status, code = 503, "bundle_unknown_file"
    default_cure = "Remove the file: a published bundle is immutable"


class Truncated(BundleDamaged):
    """A file is shorter than it was when it was published."""

    status, code = 503, "bundle_truncated"


class DigestMismatch(BundleDamaged):
    """A file or the manifest was changed after it was published."""

    status, code = 503, "bundle_digest_mismatch"


class NotFinite(BundleDamaged):
    """A NaN or an infinity."""

    status, code = 503, "bundle_not_finite"


class WrongShape(BundleDamaged):
    """A tensor or a list has another shape or element type than the manifest implies."""

    status, code = 503, "bundle_wrong_shape"


class UnknownField(BundleDamaged):
    """A field or tensor that this version of the format does not have."""

    status, code = 503, "bundle_unknown_field"


class MissingField(BundleDamaged):
    """A required field or tensor is missing."""

    status, code = 503, "bundle_missing_field"


class BadValue(BundleDamaged):
    """A value of the wrong type, or outside its range."""

    status, code = 503, "bundle_bad_value"


class BundleRefused(BundleError):
    """The bundle is valid but belongs to another model than the one that is loaded."""

    status, code = 503, "bundle_refused"
    default_cure = "Load what the bundle was trained on, or train a bundle for what is loaded"


class WrongModel(BundleRefused):
    """Another architecture or other weights."""

    status, code = 503, "bundle_wrong_model"


class WrongRevision(BundleRefused):
    """Another revision of the model's repository."""

    status, code = 503, "bundle_wrong_revision"


class WrongGeometry(BundleRefused):
    """Another number of layers or heads, or another head or hidden size."""

    status, code = 503, "bundle_wrong_geometry"


class WrongTokenizer(BundleRefused):
    """Another tokenizer: the same text would become other token ids."""

    status, code = 503, "bundle_wrong_tokenizer"


class WrongChatTemplate(BundleRefused):
    """Another chat template: the answer onset would follow other tokens."""

    status, code = 503, "bundle_wrong_chat_template"


class GoldenMismatch(BundleRefused):
    """The engine does not reproduce the bundle's golden prompts."""

    status, code = 503, "bundle_golden_mismatch"
    default_cure = "Check dtype, engine and model; until the golden prompts match, no risk can be trusted"


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
    """No answer from the hub, and nothing in the cache that could stand for it."""

    status, code = 503, "hub_unreachable"


class StoreNotWritable(BundleError):
    """The store's folder cannot be written."""

    status, code = 500, "store_not_writable"
    default_cure = "Make the store writable for this user, free space on its disk, or name another store"


class StoreUnreachable(BundleError):
    """No answer from a store's URL, and no copy on this machine that could stand for it."""

    status, code = 503, "store_unreachable"


class StoreRefused(BundleError):
    """The server of a store's URL refused a request, or cannot do what a store needs."""

    status, code = 502, "store_refused"


class SigningError(BundleError):
    """Nothing can be signed or verified: the key does not fit, sigstore refused, or the package is missing."""

    status, code = 500, "signing_error"


class BundleUntrusted(BundleError):
    """The bytes are sound, but the operator asked for more than that."""

    status, code = 503, "bundle_untrusted"


class OpenStore(BundleUntrusted):
    """Anyone on this machine can write to the store, so whoever did may have made its bundles."""

    status, code = 503, "open_store"


class SignatureMissing(BundleUntrusted):
    """A signature is required, and the bundle has none."""

    status, code = 503, "signature_missing"


class SignatureMismatch(BundleUntrusted):
    """The signature is another key's, or it is of other files."""

    status, code = 503, "signature_mismatch"
