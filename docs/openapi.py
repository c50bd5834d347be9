"""Write docs/openapi.json, the HTTP API of a service that asks for keys.  Run it after a change of
a route."""

from __future__ import annotations

import json
from pathlib import Path

from service.access.callers import ApiKey
from service.access.keys import KeyRing
from service.api.app import create_app
from service.serving.service import Scorers, Service
from service.settings import ServiceSettings

TARGET = Path(__file__).parent / "openapi.json"


def document() -> str:
    """The OpenAPI document as text.  A key makes the app declare what asks for one; no model is
    loaded."""

    def load() -> Scorers:
        raise AssertionError("the app is only described, not started")

    keys = KeyRing([ApiKey("described", "described").hashed()])
    service = Service(load, keys=keys, settings=ServiceSettings(protect_metrics=True))
    return json.dumps(create_app(service).openapi(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
