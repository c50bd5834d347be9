"""For those who keep ``vllm serve``: its own OpenAI server, with risks and gates.

    VLLM_PLUGINS=hallutracer vllm serve MODEL --worker-cls service.engines.vllm.worker.Worker

The way of a completion: vLLM's router -> ``middleware`` (a note for this request) -> vLLM's serving code ->
``generation`` (asks the worker for the reading, judges it, ends what is gated) -> ``middleware`` (the note into the
response).  ``plugin`` is what vLLM loads; ``options`` reads the same variables as ``hallutracer serve``'s flags.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.vllm_plugin.plugin import HalluTracerPlugin

__all__ = ["HalluTracerPlugin"]


def __getattr__(name: str) -> object:
    """vLLM asks for ``service.vllm_plugin:HalluTracerPlugin``; nothing heavy is imported before."""
    if name == "HalluTracerPlugin":
        from service.vllm_plugin.plugin import HalluTracerPlugin

        return HalluTracerPlugin
    raise AttributeError(name)
