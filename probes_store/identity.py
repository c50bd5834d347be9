"""Is the loaded model the one that the bundle was trained on?  Knows no engine: it compares strings and sizes."""

from __future__ import annotations

from typing import Protocol

from probes_store.errors import (
    BundleRefused,
    WrongChatTemplate,
    WrongGeometry,
    WrongModel,
    WrongRevision,
    WrongTokenizer,
)
from probes_store.manifest import Manifest


class ModelShape(Protocol):
    """The sizes that decide what a readout is."""

    @property
    def num_layers(self) -> int:
        """Transformer blocks, m."""

    @property
    def num_heads(self) -> int:
        """Query heads, K."""

    @property
    def head_dim(self) -> int:
        """Length of one head's output, d_h."""

    @property
    def hidden_size(self) -> int:
        """Length of the hidden state."""


class LoadedModel(Protocol):
    """What an engine says of the model it holds; each as ``Manifest`` records it."""

    @property
    def fingerprint(self) -> str:
        """Over configuration and weights."""

    @property
    def architecture(self) -> str:
        """Class name in the model's configuration."""

    @property
    def revision(self) -> str:
        """Hub commit, or "local"."""

    @property
    def tokenizer(self) -> str:
        """Digest of the tokenizer."""

    @property
    def chat_template(self) -> str | None:
        """Digest of the chat template, None where there is none."""

    @property
    def geometry(self) -> ModelShape:
        """The model's sizes."""


def check_identity(manifest: Manifest, loaded: LoadedModel) -> None:
    """Refuse a model that the bundle was not trained on; the first difference, in this order, names the error.

    WrongModel (architecture, fingerprint), WrongRevision, WrongGeometry, WrongTokenizer, WrongChatTemplate.
    The model's name may differ: a folder can move, and a copy keeps its fingerprint.
    """
    model = manifest.model

    def compare(error: type[BundleRefused], field: str, expected: object, found: object, what: str, cure: str) -> None:
        if expected != found:
            raise error(
                f"bundle {manifest.reference} was trained on {what}",
                field=field,
                expected="none" if expected is None else expected,
                found="none" if found is None else found,
                cure=cure,
            )

    at = f"{model.name} at revision {model.revision}"
    cure = f"Load {at}, or train a bundle for the model that is loaded"
    compare(WrongModel, "model.architecture", model.architecture, loaded.architecture, "another architecture", cure)
    compare(WrongModel, "model.fingerprint", model.fingerprint, loaded.fingerprint, "other weights", cure)
    compare(WrongRevision, "model.revision", model.revision, loaded.revision, "another revision", cure)
    for size in ("num_layers", "num_heads", "head_dim", "hidden_size"):
        compare(
            WrongGeometry, f"model.{size}", getattr(model, size), getattr(loaded.geometry, size), "another shape", cure
        )
    compare(
        WrongTokenizer,
        "tokenizer.digest",
        manifest.tokenizer.digest,
        loaded.tokenizer,
        "another tokenizer",
        f"Restore the tokenizer files of {at}, or train a bundle with the present ones",
    )
    compare(
        WrongChatTemplate,
        "chat_template.digest",
        manifest.chat_template.digest,
        loaded.chat_template,
        "another chat template",
        f"Restore the chat template of {at}, or train a bundle with the present one",
    )
