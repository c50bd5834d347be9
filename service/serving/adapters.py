"""Which bundle reads which of vLLM's LoRA adapters: the one that names the adapter's digest, and no
other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from probes_store.bundle import Bundle
from service.engines.adapters import digest_of
from service.errors import EngineError
from service.scoring import Scorer


class Adapters:
    """The adapters that were looked at; ``load`` and ``scorer`` take vLLM's ``LoRARequest``."""

    def __init__(
        self,
        bundles: Mapping[str, Bundle],
        place: Callable[[str], str],
        replaced: set[int] | None = None,
    ) -> None:
        """``bundles``: all that are served, by reference; ``place``: where vLLM finds what a
        request names.

        ``replaced``: numbers of adapters whose weights were replaced under requests, which is added
            to."""
        self._bundles = {
            name: bundle
            for name, bundle in bundles.items()
            if bundle.manifest.model.adapter is not None
        }
        self._place, self._scorers = place, dict[str, Scorer]()  # by the adapter's digest
        self._digests: dict[tuple[int, str, str], str] = {}
        self._replaced = set[int]() if replaced is None else replaced
        self.forget()

    def forget(self) -> None:
        """Have every bundle wait for its adapter again: another engine, or other weights, read it
        from now on."""
        self.waiting = dict(self._bundles)
        self._scorers.clear()

    def load(self, engine: Any, request: Any) -> dict[str, Scorer]:
        """Return scorers for the bundles that read this adapter, by reference, where there were
        none yet.

        ``engine`` is a ``VllmEngine``; each has replayed its golden prompts with the adapter.
        Raises what ``Scorer`` raises, ModelLoadError, and EngineError."""
        if request.load_inplace:
            return {}  # what it is in the next step is not known
        digest = self._digest(request)
        own = {
            name: bundle
            for name, bundle in self.waiting.items()
            if bundle.manifest.model.adapter == digest
        }
        scorers = {
            name: Scorer(engine.adapted(request, digest), bundle) for name, bundle in own.items()
        }
        for name, scorer in scorers.items():
            self._scorers.setdefault(digest, scorer)
            self.waiting.pop(name, None)
        return scorers

    def note(self, request: Any) -> None:
        """Remember an adapter that takes another's place: vLLM reads its files anew with every
        step."""
        if request is not None and request.load_inplace:
            self._replaced.add(request.lora_int_id)

    def check_place(self, number: int, request: Any) -> None:
        """Raise EngineError where a request would replace the adapter of this number, and a bundle
        reads that."""
        if request.load_inplace and any(
            key[0] == number and digest in self._scorers for key, digest in self._digests.items()
        ):
            raise EngineError(
                f"a bundle reads the adapter {request.lora_name!r}: load its successor under"
                " another name"
            )

    def keep(self, request: Any) -> None:
        """Raise EngineError for an adapter that takes the place of one that a bundle reads; else
        ``note`` it."""
        self.check_place(request.lora_int_id, request)
        self.note(request)

    def scorer(self, request: Any) -> Scorer:
        """Return the scorer for a request that runs with this adapter.  Raises EngineError,
        ModelLoadError."""
        self.note(request)
        if request.lora_int_id in self._replaced:
            raise EngineError(
                f"the adapter {request.lora_name!r} was replaced in place, and is not read: load it"
                " under a name and a path of its own"
            )
        if (scorer := self._scorers.get(self._digest(request))) is None:
            raise EngineError(
                f"no bundle here reads the adapter {request.lora_name!r}: train one for it, and"
                " name it beside the others"
            )
        return scorer

    def check(self, request: Any, scorer: Scorer) -> None:
        """Raise EngineError unless the scorer's bundle reads what this adapter makes of the model,
        None: the model."""
        own = None if request is None else self.scorer(request).engine.identity.adapter
        if scorer.engine.identity.adapter != own:
            raise EngineError(
                f"bundle {scorer.bundle.reference} reads another adapter, or the model without one"
            )

    def _digest(self, request: Any) -> str:
        key = (request.lora_int_id, request.lora_name, request.lora_path)
        if key not in self._digests:
            digest = digest_of(self._place(request.lora_path))
            if any(
                known[1:] == key[1:] and other != digest for known, other in self._digests.items()
            ):
                # vLLM's prefix cache knows an adapter by its name and path: it would give the
                # earlier one's blocks.
                raise EngineError(
                    f"the files of the adapter {request.lora_name!r} have changed: load it from"
                    " another path"
                )
            self._digests[key] = digest
        return self._digests[key]
