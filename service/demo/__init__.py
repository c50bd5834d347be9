"""The demonstration model: a two-million-parameter Llama trained on real public facts.

It exists so that the quick start runs in seconds, offline, on any machine. Importing this package loads no torch.
"""

from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
MODEL_DIR = ASSETS / "hallutracer-demo"

__all__ = ["ASSETS", "MODEL_DIR"]
