"""The site's configuration.  `make docs` builds it into build/docs/ from Markdown pages of the
whole checkout."""

from __future__ import annotations

from pathlib import Path
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
    "deploy/README.md",
    "deploy/platforms/README.md",
    "deploy/sidecar/README.md",
    "probes_store/FORMAT.md",
    "probes_store/FIELDS.md",
]
# Records, not pages: a generated report and a list of licences.
exclude_patterns = [
    ".*",
    "build",
    "runs",
    "probes",
    "evaluation",
    "docs/*-report.md",
    "docs/licences.md",
]

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
html_theme_options = {"navigation_with_keys": False}  # arrow keys scroll wide code blocks

# GitHub shows README.md as it is, so the navigation is not written there.  The README's shelf has
# the same pages without the reports, to which pages lead; a test compares them.
REPORTS = "Reports"
NAVIGATION = {
    "Start": {
        "Install": "docs/install",
        "Glossary": "docs/glossary",
    },
    "Build an application": {
        "RAG in an hour": "docs/rag",
        "From your app": "docs/apps",
        "A threshold in ten minutes": "docs/threshold",
        "Python": "docs/python",
    },
    "Run a vLLM fleet": {
        "vLLM and gateways": "docs/vllm",
        "Training": "docs/training",
        "No labels": "docs/no-labels",
        "Deployment": "deploy/README",
        "Rollout, upgrading": "docs/rollout",
    },
    "Keep it running": {
        "Serving": "docs/serving",
        "Troubleshooting": "docs/troubleshooting",
        "Runbooks": "docs/runbooks",
        "Replicas, outages": "docs/replicas",
        "Security": "docs/security",
    },
    "Do research": {
        "Training data": "docs/training-data",
        "Evaluation": "docs/evaluation",
        "Results": "docs/results",
        "Guarantees": "docs/guarantees",
    },
    "Look something up": {
        "API": "docs/api",
        "Command line": "docs/cli",
        "Answers": "docs/answers",
        "vLLM reference": "docs/vllm-plugin",
        "Other front ends": "deploy/platforms/README",
        "RAG sidecar": "deploy/sidecar/README",
        "Models and bundles": "docs/models",
        "Drift": "docs/drift",
        "Feedback": "docs/feedback",
        "Traces": "docs/traces",
        "Threat model": "docs/threat-model",
        "Bundle format": "probes_store/FORMAT",
        "its fields": "probes_store/FIELDS",
        "Stability": "docs/stability",
        "Contributing": "docs/contributing",
        "Changelog": "CHANGELOG",
    },
    REPORTS: {
        "Benchmarks": "docs/benchmarks",
    },
}


def add_navigation(app: Any, docname: str, source: list[str]) -> None:
    """Append the hidden tables of contents to the first page."""
    if docname != root_doc:
        return
    for caption, pages in NAVIGATION.items():
        entries = "\n".join(f"{title} </{page}>" for title, page in pages.items())
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


# What the theme and docutils leave out for readers without a mouse or a screen; each replacement is
# found once only.
ACCESSIBLE = {
    'role="heading">': 'role="heading" aria-level="2">',
    # wide ones scroll sideways, which a keyboard can only where the focus is
    "<pre>": '<pre tabindex="0">',
    '<div class="table-wrapper': '<div tabindex="0" class="table-wrapper',
    '<th class="head"><p></p></th>': '<td class="head"></td>',
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="Pages">',
    '<aside class="toc-drawer">': '<aside class="toc-drawer" aria-label="On this page">',
}


def make_accessible(app: Any, exception: Exception | None) -> None:
    """Complete the pages that were written."""
    for page in Path(app.outdir).rglob("*.html") if exception is None else ():
        text = page.read_text(encoding="utf-8")
        for short, whole in ACCESSIBLE.items():
            text = text.replace(short, whole)
        page.write_text(text, encoding="utf-8")


def setup(app: Any) -> None:
    """Register the hooks."""
    app.connect("source-read", add_navigation)
    app.connect("build-finished", make_accessible)
