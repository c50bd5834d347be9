"""Compares the loaded model with the one that a bundle was trained on."""

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


class LoadedModel(Protocol):
    """What an engine reports about its model, each as ``Manifest`` records it."""

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
    def geometry(self) -> object:
        """With the attributes num_layers, num_heads, head_dim and hidden_size."""


def check_identity(manifest: Manifest, loaded: LoadedModel) -> None:
    """Refuse a model that the bundle was not trained on.

    Raises the error of the first difference, in this order: WrongModel (architecture, fingerprint), WrongRevision,
    WrongGeometry, WrongTokenizer, WrongChatTemplate.  The model's name may differ: a folder can move, and a copy keeps
    its fingerprint.
    """
    model, geometry = manifest.model, loaded.geometry
    at = f"{model.name} at revision {model.revision}"
    load = f"Load {at}, or train a bundle for the model that is loaded"
    tokenizer = f"Restore the tokenizer files of {at}, or train a bundle with the present ones"
    template = f"Restore the chat template of {at}, or train a bundle with the present one"
    checks: list[tuple[type[BundleRefused], str, object, object, str, str]] = [
        (WrongModel, "model.architecture", model.architecture, loaded.architecture, "another architecture", load),
        (WrongModel, "model.fingerprint", model.fingerprint, loaded.fingerprint,
         "other weights, or weights and caches of other types", load),
        (WrongRevision, "model.revision", model.revision, loaded.revision, "another revision", load),
        *(
            (WrongGeometry, f"model.{size}", getattr(model, size), getattr(geometry, size), "another shape", load)
            for size in ("num_layers", "num_heads", "head_dim", "hidden_size")
        ),
        (WrongTokenizer, "tokenizer.digest", manifest.tokenizer.digest, loaded.tokenizer, "another tokenizer",
         tokenizer),
        (WrongChatTemplate, "chat_template.digest", manifest.chat_template.digest, loaded.chat_template,
         "another chat template", template),
    ]  # fmt: skip
    for error, field, expected, found, difference, cure in checks:
        if expected != found:
            raise error(
                f"bundle {manifest.reference} was trained on {difference}",
                field=field,
                expected="none" if expected is None else expected,
                found="none" if found is None else found,
                cure=cure,
            )
