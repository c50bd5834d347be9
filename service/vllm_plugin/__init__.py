"""For those who keep ``vllm serve``: its own OpenAI server, with risks and gates.

    HALLUTRACER_BUNDLE=my-probe@production vllm serve MODEL

The way of a completion: vLLM's router -> ``middleware`` (a note for this request) -> vLLM's serving
code -> ``generation`` (asks the worker for the reading, judges it, ends what is withheld) ->
``middleware`` (the note into the response).  ``plugin`` is what vLLM loads; ``options`` reads the
same variables as ``hallutracer serve``'s flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.vllm_plugin.plugin import HalluTracerPlugin

__all__ = ["load"]


def load() -> HalluTracerPlugin:
    """The plugin, as vLLM asks for it.  Raises SystemExit where it cannot be had, whatever the
    reason.

    vLLM logs any other exception of a plugin, and starts without it: without the guard."""
    try:
        from service.vllm_plugin.plugin import HalluTracerPlugin

        return HalluTracerPlugin()
    except Exception as error:
        raise SystemExit(f"hallutracer: {error}; vLLM does not start without it") from error
