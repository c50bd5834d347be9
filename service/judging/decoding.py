"""Chooses the decoding of an answer, and tells where it differs from the decoding that the risk is
about."""

from __future__ import annotations

from probes_store.manifest import Manifest
from probes_store.records import GREEDY, Decoding
from service.settings import DecodingChoice

OPENAI = Decoding(1.0, 1.0)  # the default of OpenAI, Anthropic and vLLM


def decoding_for(
    manifest: Manifest,
    choice: DecodingChoice | None,
    temperature: float | None,
    top_p: float | None,
) -> Decoding:
    """Return the decoding of a request's answer; ``temperature`` or ``top_p`` is None if the
    request does not name it.

    The default is the decoding of the answers in training, or greedy if the bundle does not record
    it.  If the request names a temperature, that is used, and tokens are left out only by the
    request's own ``top_p``."""
    default = (
        OPENAI if choice == "openai" or temperature is not None else manifest.decoding or GREEDY
    )
    return Decoding(
        default.temperature if temperature is None else float(temperature),
        default.top_p if top_p is None else float(top_p),
    )


def departure(manifest: Manifest, decoding: Decoding) -> str | None:
    """Return how an answer's decoding differs from that of the answers in training; None if it does
    not.

    If the bundle does not record the latter, a greedy answer does not differ."""
    trained = manifest.decoding
    if decoding.same(GREEDY if trained is None else trained):
        return None
    if trained is None:
        return (
            f"{decoding}; how the answers were decoded that the risk was trained on is not recorded"
        )
    return f"{decoding}, where the answers that the risk was trained on were {trained}"
