"""The demonstration model: a two-million-parameter Llama trained on real public facts.

The quick start runs on it in seconds, offline.  Importing this package does not load torch.
"""

from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
MODEL_DIR = ASSETS / "hallutracer-demo"

__all__ = ["ASSETS", "MODEL_DIR"]
