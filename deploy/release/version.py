"""The version of a release: which one it is, and how to set another everywhere.

    python deploy/release/version.py            print it
    python deploy/release/version.py 1.0.0      write it into every file that names it

``service/__init__.py`` has it.  The client and the research package are built from folders of their
own; Helm, Docker and compose read no Python.  They name it again, and a test compares them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "service/__init__.py"
# A file -> what stands before the version there.
PLACES = {
    SOURCE: '^__version__ = "',
    "clients/python/hallutracer_client/version.py": '^VERSION = "',
    "research/pyproject.toml": '^version = "|^    "hallutracer==',
    "deploy/helm/hallutracer/Chart.yaml": "^version: |^appVersion: ",
    "docs/openapi.json": '^    "version": "',
    "Dockerfile": "hallutracer:|ARG VERSION=",
    **dict.fromkeys(
        ("docker-compose.yml", "deploy/README.md", "deploy/sidecar/sidecar.yaml"), "hallutracer:"
    ),
}
NUMBER = r"\d+\.\d+\.\d+"  # the form that Python, Helm and Docker read alike


def versions(name: str) -> list[str]:
    """Every version that a file of ``PLACES`` names."""
    return re.findall(
        f"(?:{PLACES[name]})({NUMBER})", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE
    )


def set_version(version: str) -> None:
    """Write ``version`` into every file of ``PLACES``.  Raises SystemExit where it is no X.Y.Z."""
    if not re.fullmatch(NUMBER, version):
        raise SystemExit(f"{version!r} is not a version; give it as X.Y.Z, for example 1.0.0")
    for name, before in PLACES.items():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        changed = re.sub(f"({before}){NUMBER}", rf"\g<1>{version}", text, flags=re.MULTILINE)
        path.write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        set_version(sys.argv[1])
    print(*versions(SOURCE))
