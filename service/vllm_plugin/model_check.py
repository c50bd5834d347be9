"""Whether bundles belong to the model that vLLM is about to load, and whether it renders chats as
training did.

Needs no weights, so that a bundle of another model costs no minutes.  What only weights tell, the
readout and the golden prompts, is tested once they are loaded."""

from __future__ import annotations

import hashlib
import json
import shlex
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from probes_store.bundle import Bundle
from probes_store.errors import WrongChatTemplate
from probes_store.manifest import Manifest
from service.errors import ModelLoadError
from service.matching import check_identity
from service.settings import env


class ChatOptions(NamedTuple):
    """What vLLM's command line says of how every chat is rendered."""

    template: str | None = None  # --chat-template: a file, or a template's text
    variables: Mapping[str, Any] | None = None  # --default-chat-template-kwargs
    known: bool = False  # whether there is a command line at all

    @classmethod
    def of(cls, arguments: Namespace) -> ChatOptions:
        """Return those of a parsed command line, of a program that may have neither option."""
        template = getattr(arguments, "chat_template", None)
        return cls(template, getattr(arguments, "default_chat_template_kwargs", None), known=True)


def chat_options(frame: FrameType | None) -> ChatOptions:
    """Return the options of the command line that a caller of ``frame`` was given; without one
    there are none."""
    while frame is not None:
        arguments = frame.f_locals.get("args")
        if isinstance(arguments, Namespace) and hasattr(arguments, "chat_template"):
            return ChatOptions.of(arguments)
        frame = frame.f_back
    return ChatOptions()


def model_option(arguments: Sequence[str]) -> str:
    """Return the model that vLLM's command line names, as it was typed; "" without one."""
    words = list[str]()
    for word in arguments:
        words += word.split("=", 1) if word.startswith("--model=") else [word]
    named = [
        word
        for before, word in pairwise(words)
        if before in ("--model", "serve") and not word.startswith("-")
    ]
    return next(iter(named), "")


def short_name_problem(model: str) -> str | None:
    """Return what to give vLLM instead of a model's short name, which only our own commands know;
    else None."""
    from service.demo import MODEL_DIR
    from service.engines.places import PACKAGED, unpacked
    from service.library.engine import DEMO, SHIPPED

    if model not in SHIPPED or Path(model).exists():
        return None
    folder: Path | None = MODEL_DIR if model == DEMO else None
    if model in PACKAGED and PACKAGED[model].is_installed:
        folder = unpacked(PACKAGED[model].path)
    cure = f"name its folder, {folder}"
    if folder is None:
        cure = (
            f"name its folder, which 'hallutracer score --model {model} hello' unpacks below"
            " ~/.cache/hallutracer"
        )
    return (
        f"{model!r} is a short name of HalluTracer's own commands, and vLLM would ask the hub for"
        f" it: {cure}"
    )


def check_model(config: Any, bundles: Iterable[Bundle], options: ChatOptions) -> None:
    """Check the bundles that read the model itself against the one of a ``VllmConfig``, before its
    weights are read.

    Raises a subclass of BundleRefused for another model, tokenizer or rendering, ModelLoadError for
    files that cannot be read."""
    manifests = [bundle.manifest for bundle in bundles if bundle.manifest.model.adapter is None]
    if not manifests:
        return
    from service.engines import checkpoint, loading
    from service.engines.base import EngineOptions
    from service.engines.checks import Tokens
    from service.engines.families import geometry
    from service.engines.vllm.launch import changes_at_load

    model = config.model_config
    files = loading.find_model_files(
        EngineOptions(model.model, model.revision, trust_remote_code=model.trust_remote_code)
    )
    tokenizer = _tokenizer(model) or files.tokenizer
    tokens, fingerprint = Tokens(tokenizer), checkpoint.fingerprint_on_disk(files.folder)
    if fingerprint is not None:
        fingerprint = checkpoint.changed_at_load(fingerprint, changes_at_load(config, files.config))
    identity = files.identity(
        tokens,
        fingerprint=fingerprint or "",
        geometry=geometry(files.config),
        dtype=model.dtype,
        max_tokens=int(model.max_model_len),
        arguments=manifests[0].chat_template.arguments,
    )
    for manifest in manifests:
        # Weights that are still to be downloaded are compared once they are loaded.
        known = (
            replace(identity, fingerprint=manifest.model.fingerprint)
            if fingerprint is None
            else identity
        )
        check_identity(manifest, known)
        check_rendering(manifest, options, getattr(tokenizer, "chat_template", None))


def check_rendering(manifest: Manifest, options: ChatOptions, template: Any) -> None:
    """Raise WrongChatTemplate where vLLM would render every chat otherwise than the bundle's
    training did.

    ``template``: the tokenizer's chat template, whose digest is the bundle's."""
    if manifest.prompt_format != "chat":
        return
    if options.template is not None:
        name, text = _read(options.template)
        # Jinja leaves a last line feed out, which many an editor adds.
        if (
            text is None
            or not isinstance(template, str)
            or text.removesuffix("\n") != template.removesuffix("\n")
        ):
            raise WrongChatTemplate(
                f"--chat-template {name} renders every chat otherwise than in the training of"
                f" bundle {manifest.reference}",
                expected=f"a template of the digest {manifest.chat_template.digest}",
                found="none" if text is None else hashlib.sha256(text.encode()).hexdigest(),
                cure=(
                    "Leave the option out, or train a bundle on a model folder that has this"
                    " template"
                ),
            )
    trained, served = dict(manifest.chat_template.arguments or {}), dict(options.variables or {})
    # Of an engine that no command line starts, nothing is known.
    if served == trained or not (served or options.known):
        return
    option, cure = "--default-chat-template-kwargs", "Leave the option out"
    if trained:
        cure = f"Start vLLM with {option} {shlex.quote(json.dumps(trained))}"
    without = f"without {option} vLLM"
    if served:
        without = f"{option} {json.dumps(served, default=str)}"
    raise WrongChatTemplate(
        f"{without} renders every chat otherwise than in the training of bundle"
        f" {manifest.reference}",
        cure=(
            f"{cure}; requests may send 'chat_template_kwargs' where {env('callers-may')}=rendering"
            " allows it"
        ),
    )


def _read(template: str) -> tuple[str, str | None]:
    """Return what to call a template, and its text; None for what is neither a file nor a text."""
    try:
        return template, Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError):
        if any(mark in template for mark in "{}\n"):  # as vLLM tells a text from a name
            return "(a text)", template
        return template, None


def _tokenizer(model: Any) -> Any:
    """Return vLLM's tokenizer where it is not the model's own; else None."""
    if model.skip_tokenizer_init or model.tokenizer == model.model:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            model.tokenizer,
            revision=model.tokenizer_revision,
            trust_remote_code=model.trust_remote_code,
        )
    except Exception as error:  # file formats raise their own types
        raise ModelLoadError(
            f"the tokenizer {model.tokenizer} cannot be loaded: {type(error).__name__}: {error}",
            param="model",
        ) from error
