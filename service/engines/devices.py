"""Which device a model runs on.  Imports torch alone, so that a device that is not there is told in
a second."""

from __future__ import annotations

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
