"""The SBOM of what a service runs on: cyclonedx-py's document of an environment, without tools and
tests, with models.

    python deploy/supply_chain/sbom.py ENVIRONMENT.cdx.json OUT.cdx.json      `make sbom` calls it

Kept are torch and the packages of requirements-hashed.txt, in these versions; the extras (vLLM,
PostgreSQL, notebooks) are left out.  Added are the bundles and the model that come inside the
package, with their digests."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, str]:
    """Package -> version, of requirements-hashed.txt; a package that is for other platforms only is
    left out."""
    from packaging.requirements import Requirement

    lines = (ROOT / "requirements-hashed.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line.rstrip(" \\")) for line in lines if line[:1].isalnum()]
    here = [one for one in found if one.marker is None or one.marker.evaluate()]
    return {normal(one.name): str(one.specifier).removeprefix("==") for one in here}


def pruned(document: dict[str, Any]) -> dict[str, Any]:
    """The document without what is not ``locked``.  Raises SystemExit where the environment has
    another version."""
    pins = locked()
    components = {
        component["bom-ref"]: component
        for component in document["components"]
        if normal(component["name"]) in pins or component["name"] == "torch"
    }
    versions = {
        normal(component["name"]): component["version"] for component in components.values()
    }
    if wrong := sorted(name for name, pin in pins.items() if versions.get(name) != pin):
        raise SystemExit(
            f"the environment has not what requirements-hashed.txt names: {', '.join(wrong)}"
        )
    root, own = document["metadata"]["component"]["bom-ref"], models()
    edges = {
        entry["ref"]: set(entry.get("dependsOn", [])) & set(components)
        for entry in document["dependencies"]
    }
    top = edges[root] | {model["bom-ref"] for model in own}
    return document | {
        "components": [component for _, component in sorted(components.items())] + own,
        "dependencies": [
            {"ref": root, "dependsOn": sorted(top)},
            *({"ref": ref, "dependsOn": sorted(edges.get(ref, ()))} for ref in sorted(components)),
        ],
    }


def models() -> list[dict[str, Any]]:
    """The shipped bundles and the demo model, as components."""
    from probes_store.store import SHIPPED, Store

    found = []
    for summary in Store(SHIPPED).list():
        assert summary.manifest is not None, summary.error
        found.append(
            {
                "type": "data",
                "bom-ref": f"bundle:{summary.reference}",
                "name": summary.name,
                "version": str(summary.version),
                "description": f"probes for {summary.manifest.model.name}",
                "hashes": [
                    {"alg": "SHA-256", "content": summary.manifest.digest.removeprefix("sha256:")}
                ],
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        )
    weights = ROOT / "service/demo/assets/hallutracer-demo/model.safetensors"
    found.append(
        {
            "type": "machine-learning-model",
            "bom-ref": "model:hallutracer-demo",
            "name": "hallutracer-demo",
            "description": "the demo model; its training data: service/demo/assets/ATTRIBUTION.md",
            "hashes": [
                {"alg": "SHA-256", "content": hashlib.sha256(weights.read_bytes()).hexdigest()}
            ],
            "licenses": [{"license": {"id": "Apache-2.0"}}],
        }
    )
    return found


def licences(document: dict[str, Any]) -> str:
    """docs/licences.md: every component with the licence that it declares."""
    rows = []
    for component in document["components"]:
        declared = [
            entry.get("expression")
            or entry["license"].get("id")
            or entry["license"].get("name", "").split(" :: ")[-1]
            for entry in component.get("licenses", [])
        ]
        shown = (
            "; ".join(dict.fromkeys(" ".join(text.split())[:60] for text in declared if text))
            or "not declared"
        )
        rows.append(f"| {component['name']} | {component.get('version', '')} | {shown} |")
    return HEAD + "\n".join(sorted(rows, key=str.lower)) + "\n"


HEAD = """\
# Licences

HalluTracer is Apache-2.0. This is what a service runs on, with the licences that the packages declare, on Linux with
torch's CPU build; `make sbom` writes this page and a CycloneDX document. The extras (vLLM, PostgreSQL, notebooks) are
not in it, nor are the CUDA libraries that torch's CUDA build brings (NVIDIA's own licence).

| component | version | licence |
| --- | --- | --- |
"""


def main() -> None:
    """Read, prune, write."""
    source, target = map(Path, sys.argv[1:])
    document = pruned(json.loads(source.read_text(encoding="utf-8")))
    target.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (ROOT / "docs" / "licences.md").write_text(licences(document), encoding="utf-8")
    print(f"{target}: {len(document['components'])} components")


if __name__ == "__main__":
    main()
