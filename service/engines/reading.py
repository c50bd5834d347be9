"""How transformers reads a checkpoint's weights: mapped, or tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from transformers import modeling_utils

from service.engines.families import text_config


@contextmanager
def read_for(config: Any, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Let transformers read one tensor after another where it converts all of them for a CPU.

    Mapped, each page of the file would stay in memory beside what was made of it: half as much
    again, from float16 to float32.  Without a conversion the mapped file is the weights, and
    processes share it."""
    own = getattr(config, "dtype", None) or getattr(text_config(config), "dtype", None)
    if device.type != "cpu" or own in (None, dtype):
        yield
        return
    transformers: Any = modeling_utils
    transformers.safe_open = _opened
    try:
        yield
    finally:
        # another load's, too, if one is under way: it maps what is left
        transformers.safe_open = safe_open


def _opened(file: Any, **options: Any) -> Any:
    return safe_open(file, **options | {"backend": "pread"})
