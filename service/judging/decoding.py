"""How an answer is decoded where a request does not say, and where that departs from what its risk is about."""

from __future__ import annotations

from probes_store.manifest import Manifest
from probes_store.records import GREEDY, Decoding
from service.settings import DecodingChoice

OPENAI = Decoding(1.0, 1.0)  # of a request that names nothing, as OpenAI, Anthropic and vLLM have it


def decoding_for(
    manifest: Manifest, choice: DecodingChoice | None, temperature: float | None, top_p: float | None
) -> Decoding:
    """Return how a request's answer is decoded; ``temperature`` or ``top_p`` None: the request does not name it.

    By default as the answers were that the risk was trained on: greedily where the bundle does not record it.  A
    temperature that is named is taken as it is, and then nothing but the request itself leaves tokens out."""
    default = OPENAI if choice == "openai" or temperature is not None else manifest.decoding or GREEDY
    return Decoding(
        default.temperature if temperature is None else float(temperature),
        default.top_p if top_p is None else float(top_p),
    )


def departure(manifest: Manifest, decoding: Decoding) -> str | None:
    """Return how an answer is decoded otherwise than those that the risk was trained on; None: it is not.

    A greedy answer departs from nothing where the bundle does not record how those were decoded."""
    trained = manifest.decoding
    if decoding.same(GREEDY if trained is None else trained):
        return None
    if trained is None:
        return f"{decoding}; how the answers were decoded that the risk was trained on is not recorded"
    return f"{decoding}, where the answers that the risk was trained on were {trained}"
