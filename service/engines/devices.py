"""Which device a model runs on.  Imports torch alone, so that a device that is not there is told in
a second."""

from __future__ import annotations

from pathlib import Path

import torch

from service.errors import ModelLoadError


def choose_device(device: str) -> torch.device:
    """Return the device; ``auto`` is cuda if available.  Raises ModelLoadError for one that is not
    available."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        problem = "is unknown to torch; use cpu, cuda or cuda:0"
    else:
        there = torch.cuda.device_count()
        if chosen.type == "cpu" or (chosen.type == "cuda" and (chosen.index or 0) < there):
            return chosen
        cuda = chosen.type == "cuda"
        problem = (
            f"is not available: torch finds {there} CUDA device(s); use cpu"
            if cuda
            else "is not cpu or cuda"
        )
    raise ModelLoadError(f"device {device!r} {problem}", param="device")


def multiplies_bfloat16(cpu: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this CPU multiplies bfloat16 natively; where that is unknown, it does not.

    Else bfloat16 is slower than float32.  AVX-512 BF16 and AMX of x86, BF16 of ARM, as Linux names
    them."""
    try:
        flags = cpu.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)
