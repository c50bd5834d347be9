"""The models that come with bundles of their own, and which of them is used where none is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

DEMO, SMOLLM2 = "demo", "smollm2"
SHIPPED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {SMOLLM2: ("smollm2", "smollm2-fused"), DEMO: ("demo", "demo-fused")}
)
"""Short name of a model -> its bundles, the default first."""


def default_model(bundles: Sequence[str] = ()) -> str:
    """Short name of the model that these shipped bundles belong to; else SmolLM2 where it is installed, else the demo.

    ``bundles``: references; only names count.
    """
    from service.engines.packaged import PACKAGED

    for reference in bundles:
        name = reference.partition("@")[0].partition(":")[0]
        for model, own in SHIPPED.items():
            if name in own:
                return model
    return SMOLLM2 if PACKAGED[SMOLLM2].is_installed else DEMO
