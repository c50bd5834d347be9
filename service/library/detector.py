"""``load``: a model and a bundle that reads it, ready to score prompts in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from service.engines.places import place_of
from service.errors import RequestError
from service.library.engine import SHIPPED, Engine, default_bundles, load_engine, open_store
from service.library.results import Risks, risk_of
from service.progress import Report, note
from service.settings import DEFAULT_STORE

if TYPE_CHECKING:
    from probes_store.bundle import Bundle
    from service.prompts import Message
    from service.scoring import Scorer


class Detector:
    """A loaded model and a bundle that reads it. ``close`` frees the model; ``with`` does so at its end."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def __repr__(self) -> str:
        return f"<Detector: {self.model} read by {self.bundle.reference}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bundle(self) -> Bundle:
        """Return the bundle: its manifest, probes, ``card()`` and ``evaluation()``."""
        return self._scorer.bundle

    @property
    def model(self) -> str:
        """Return the name of the loaded model."""
        return self._scorer.engine.identity.model

    @property
    def threshold(self) -> float:
        """Return the bundle's: a risk of so much is flagged."""
        return self.bundle.manifest.threshold

    def score(
        self, prompts: str | Sequence[str | Sequence[Message]] | Sequence[Message], *, threshold: float | None = None,
        generate: int = 0,
    ) -> Risks:  # fmt: skip
        """Return the risk of each prompt, before its first answer token.

        Args:
            prompts: One prompt or several.  Each is a text, or a conversation: a list of messages with ``role`` and
                ``content``.
            threshold: Flag a risk at or above this one; None: the bundle's own.
            generate: Also answer with up to so many tokens, greedily, where the risk is below the threshold.

        Raises:
            RequestError: A prompt is empty, too long for the model, or no prompt at all.

        >>> import hallutracer as ht
        >>> detector = ht.load("demo")
        >>> risks = detector.score(["What is the capital of Italy?", "What is the capital of Palau?"], generate=8)
        >>> [(round(risk.risk, 1), risk.decision, risk.answer) for risk in risks]
        [(0.0, 'continue', 'It is Rome.'), (0.6, 'abstain', None)]
        >>> risks.trajectory.shape  # prompts, layers
        (2, 8)
        >>> detector.score([{"role": "user", "content": "What is the capital of Italy?"}])[0].flagged
        False
        """
        from service.engines.base import Sampling
        from service.policies.guard import GATE
        from service.serving.judgement import Judgement

        given = as_prompts(prompts)
        ids = [
            self._scorer.render(prompt=prompt) if isinstance(prompt, str) else self._scorer.render(messages=prompt)
            for prompt in given
        ]
        policy = GATE.at(threshold)
        if generate < 0:
            raise RequestError(f"generate must be 0 or more tokens, not {generate}", param="generate")
        reports = (
            self._scorer.score_or_continue(ids, Sampling(max_tokens=generate), policy)
            if generate
            else self._scorer.score(ids, policy)
        )
        judgement = Judgement.of(self._scorer, policy, reports)
        return Risks(tuple(map(risk_of, given, judgement.prompts)), self.bundle)

    def close(self) -> None:
        """Free the model; later calls raise EngineError."""
        self._scorer.engine.close()


def load(
    model: str | Path | None = None, bundle: str | None = None, *, store: str | Path = DEFAULT_STORE,
    require_signature: str | Path | None = None, engine: Engine | None = None, report: Report = note,
) -> Detector:  # fmt: skip
    """Load a model and a bundle that reads it.

    Args:
        model: Model folder, GGUF file, hub name, "smollm2" or "demo".  None: the model of a shipped bundle, else
            smollm2 where its package is installed, else demo.
        bundle: NAME, NAME@ALIAS or NAME:VERSION, with @sha256:DIGEST to pin it.  None: the shipped bundle of the model.
        store: Folder or URL (s3://, gs://, az://) of published bundles; those shipped with the package are found as
            well.
        require_signature: Public key or certificates (PEM) that the bundle must be signed with.
        engine: How the model is loaded: dtype, device, threads, vLLM.
        report: Takes lines about what takes long; the default writes them to standard error.

    Raises:
        ModelLoadError: The model is not there, or cannot be loaded.
        NoDefaultBundle: The model comes without bundles, and none is named.
        probes_store.errors.BundleError: There is no such bundle, it is damaged, or it is for another model.

    >>> import hallutracer as ht
    >>> with ht.load("demo") as detector:
    ...     print(detector, round(detector.threshold, 2))
    <Detector: hallutracer-demo read by demo:1> 0.31
    """
    from service.scoring import Scorer

    name = None if model is None else str(model)
    if bundle is None and name not in (None, *SHIPPED):
        place_of(str(name))  # a path where nothing is, rather than the question which bundle reads it
    found = open_store(store, require_signature=require_signature).load(bundle or default_bundles(name)[0])
    chosen = engine or Engine()
    loaded = load_engine(
        chosen.options(name, [found.manifest.name]), bundles=[found], threads=chosen.threads, report=report
    )
    try:
        return Detector(Scorer(loaded, found))
    except BaseException:
        loaded.close()
        raise


def as_prompts(prompts: str | Sequence[str | Sequence[Message]] | Sequence[Message]) -> list[str | list[Message]]:
    """Return one prompt or several as a list; a list of messages is one.  Raises RequestError."""
    if isinstance(prompts, str):
        return [prompts]
    given = list(prompts)
    if given and all(isinstance(one, Mapping) for one in given):
        return [_conversation(given, "prompts")]
    return [one if isinstance(one, str) else _conversation(one, f"prompts[{at}]") for at, one in enumerate(given)]


def _conversation(messages: object, name: str) -> list[Message]:
    if not isinstance(messages, Sequence) or not all(isinstance(one, Mapping) for one in messages):
        raise RequestError(f"{name} is {type(messages).__name__}: a text or a list of messages is expected",
                           param="prompts")  # fmt: skip
    for one in messages:
        if set(one) != {"role", "content"} or not all(isinstance(text, str) for text in one.values()):
            raise RequestError("a message has exactly a text 'role' and a text 'content'", param="prompts")
    return [{"role": one["role"], "content": one["content"]} for one in messages]
