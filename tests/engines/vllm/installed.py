"""Whether vLLM's tests can run here: skipped with a reason, or failed where they must not be
skipped."""

from __future__ import annotations

import importlib.util
import os
import platform

import pytest


def vllm_or_skip() -> None:
    """To be called at the top of a module, before vLLM is imported.

    With ``HALLUTRACER_REQUIRE_VLLM=1``, which ``make test`` sets if it has installed vLLM, it fails
    instead."""
    here = f"{platform.system()} {platform.machine()}"
    reason = ""
    if here != "Linux x86_64":
        reason = f"vLLM's CPU build is for Linux on x86-64, not {here}"
    elif importlib.util.find_spec("vllm") is None:
        reason = "vLLM is not installed (make install leaves it out with VLLM= or a CUDA torch)"
    if reason and os.environ.get("HALLUTRACER_REQUIRE_VLLM") == "1":
        pytest.fail(reason, pytrace=False)
    if reason:
        pytest.skip(reason, allow_module_level=True)
