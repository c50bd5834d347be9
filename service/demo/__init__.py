"""The demonstration model: a two-million-parameter Llama trained on real public facts."""

from pathlib import Path
from typing import Literal

ASSETS = Path(__file__).parent / "assets"
MODEL_DIR = ASSETS / "hallutracer-demo"

Passage = Literal[
    "none", "right", "unrelated", "contradicting"
]  # in front of a question (service/demo/questions.py)

__all__ = ["ASSETS", "MODEL_DIR", "Passage"]
