"""The models that come with bundles of their own, and which of them is used where none is named."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from service.errors import HalluTracerError

DEMO, SMOLLM2 = "demo", "smollm2"
SHIPPED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {SMOLLM2: ("smollm2", "smollm2-fused"), DEMO: ("demo", "demo-fused")}
)
"""Short name of a model -> its bundles, the default first."""


class NoDefaultBundle(HalluTracerError):
    """A model that comes without bundles needs one to be named."""


def short_name(bundle: str) -> str | None:
    """Short name of the model that a shipped bundle of this name belongs to."""
    return next((model for model, own in SHIPPED.items() if bundle in own), None)


def default_model(bundles: Sequence[str] = ()) -> str:
    """Short name of the model that these shipped bundles belong to; else SmolLM2 where it is installed, else the demo.

    ``bundles``: references; only names count.
    """
    from service.engines.places import PACKAGED

    for reference in bundles:
        if model := short_name(reference.partition("@")[0].partition(":")[0]):
            return model
    return SMOLLM2 if PACKAGED[SMOLLM2].is_installed else DEMO


def model_folder(model: str) -> str:
    """What an engine takes: the folder of the demo model; any other name as it is."""
    from service.demo import MODEL_DIR

    return str(MODEL_DIR) if model == DEMO else model


def default_bundles(model: str | None) -> tuple[str, ...]:
    """The bundles of a shipped model, or of the default one.  Raises NoDefaultBundle for any other."""
    chosen = model or default_model()
    if chosen in SHIPPED:
        return SHIPPED[chosen]
    near = difflib.get_close_matches(chosen.lower(), SHIPPED, n=1, cutoff=0.75)
    if "/" not in chosen and not Path(chosen).exists():
        meant = f"did you mean {near[0]}?  Else" if near else "for a model of the hub"
        raise NoDefaultBundle(
            f"no folder or file is called {chosen!r} here, and the models that come with bundles are "
            f"{' and '.join(SHIPPED)}; {meant} name the bundle, too, with --bundle ('hallutracer train' makes one)",
            param="model",
        )
    raise NoDefaultBundle(
        f"no bundle comes with {chosen}, and a probe belongs to one model: name one that reads it ('hallutracer bundle "
        "list'), or make one with 'hallutracer train'",
        param="bundle",
    )
