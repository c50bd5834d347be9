"""The site's configuration.  `make docs` builds it into build/docs/ from Markdown pages of the whole checkout."""

from __future__ import annotations

from typing import Any

project = "HalluTracer"
copyright = "HalluTracer contributors, Apache-2.0"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "README"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "docs/*.md",
    "clients/python/README.md",
    "deploy/README.md",
    "deploy/sidecar/README.md",
    "probes_store/FORMAT.md",
    "service/demo/assets/ATTRIBUTION.md",
    "service/demo/assets/hallutracer-demo/README.md",
    "benchmarks/LOG.md",
]
exclude_patterns = [".*", "build", "runs", "probes", "evaluation"]

myst_heading_anchors = 4
# Pages such as a generated report leave out a heading level; browsers do not mind.
suppress_warnings = ["myst.header"]

smartquotes = False  # -- stays two hyphens

html_theme = "furo"
html_title = "HalluTracer"
html_copy_source = False
html_show_sphinx = False
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "redirect.html"}
html_theme_options = {"navigation_with_keys": True}

# GitHub shows README.md as it is, so the navigation is not written there.
NAVIGATION = {
    "Start": {"Install": "docs/install", "Where to put it": "docs/choosing"},
    "Use": {
        "Serving": "docs/serving",
        "Keys and the audit log": "docs/access",
        "When HalluTracer is away": "docs/away",
        "Rollout": "docs/rollout",
        "Drift": "docs/drift",
        "Traces": "docs/tracing",
        "Feedback": "docs/feedback",
        "Gateways": "docs/gateways",
        "Playground": "docs/playground",
        "Python": "docs/python",
        "Python client": "docs/client",
        "Clients of OpenAI's API": "docs/clients",
        "hallutracer-client": "clients/python/README",
        "vLLM": "docs/vllm",
        "Deployment": "deploy/README",
        "Capacity": "docs/capacity",
        "A guard beside a RAG app": "deploy/sidecar/README",
        "Runbooks": "docs/runbooks",
        "Upgrading": "docs/upgrading",
        "Threat model": "docs/threat_model",
    },
    "Train and evaluate": {
        "Training": "docs/training",
        "Bundles on the hub": "docs/publishing",
        "Stores by URL, signatures": "docs/bundle_trust",
        "Evaluation": "docs/evaluation",
        "SmolLM2": "docs/smollm2",
        "Demo model": "docs/demo-model",
        "SmolLM2's report": "docs/smollm2-report",
        "The demo model's card": "service/demo/assets/hallutracer-demo/README",
    },
    "Reference": {"Command line": "docs/cli", "Bundle format": "probes_store/FORMAT"},
    "Project": {
        "Architecture": "docs/architecture",
        "Contributing": "docs/contributing",
        "Benchmarks": "docs/benchmarks",
        "Benchmark log": "benchmarks/LOG",
        "Dependencies": "docs/dependencies",
        "Licences": "docs/licences",
        "Changelog": "CHANGELOG",
        "Sources of the demo's facts": "service/demo/assets/ATTRIBUTION",
    },
}


def add_navigation(app: Any, docname: str, source: list[str]) -> None:
    """Append the hidden tables of contents to the first page."""
    if docname != root_doc:
        return
    for caption, pages in NAVIGATION.items():
        entries = "\n".join(f"{title} </{page}>" for title, page in pages.items())
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def setup(app: Any) -> None:
    """Register the hook."""
    app.connect("source-read", add_navigation)
