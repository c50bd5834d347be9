"""What the pages say about the code is what the code says; the site builds and leads everywhere;
the notebooks run."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import schemathesis
from packaging.requirements import Requirement

from hallutracer_research.demo.build import METHODS
from service.access.keys import KeyTable, parse_keys
from service.engines.vllm.launch import TESTED
from service.errors import HalluTracerError
from service.policies.policy import read_policies
from tests.kit.pages import PAGES, RECORDS, ROOT, blocks
from tests.kit.site import build
from tests.parity import models, versions
from tests.serve_process import inherited

# Errors that no HTTP answer carries: of the command line, of loading (served as not_ready), and of
# a client that left.
NOT_ANSWERED = {
    "client_closed_request",
    "unknown_family",
    "model_load_error",
    "training_error",
    "bad_data",
    "run_mismatch",
    "no_direction",
    "no_threshold",
}
ASSETS = "service/demo/assets"
LINK = re.compile(r"\[([^]]+)\]\(([^)]+)\)")
STABLE = str(ROOT / "docs" / "stable_names.py")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_readme_is_one_page_and_its_first_screen_one_screen() -> None:
    """To the end of the table that says when to use what."""
    lines = text_of("README.md").splitlines()
    assert len(lines) <= 150
    assert (
        max(number for number, line in enumerate(lines) if line.startswith("| [LettuceDetect]"))
        < 45
    )


def test_the_recipe_is_for_the_vllm_that_the_plugin_reads() -> None:
    oldest, newest = TESTED
    assert f"FROM vllm/vllm-openai:v{newest}\n" in text_of("docs/vllm.md")
    assert f"Each version is tested: {oldest} to {newest}." in text_of("docs/vllm-plugin.md")
    assert f"vLLM {oldest} to {newest}." in text_of("README.md")
    for name in ("cpu", "cuda"):  # what is pinned is what most tests run
        assert re.search(
            rf"^vllm(-cpu)?=={versions.INSTALLED} ",
            text_of(f"requirements-vllm-{name}.txt"),
            re.MULTILINE,
        )


def errors(root: type[HalluTracerError]) -> Iterator[type[HalluTracerError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == "service.errors":
            yield from errors(child)


def test_the_table_of_errors_is_the_codes() -> None:
    answered = {error.code: error.status for error in errors(HalluTracerError)}
    answered |= {"invalid_json": 400, "method_not_allowed": 405}
    section = text_of("docs/api.md").partition("## Errors")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d{3}) \| (.*?) \|", section, re.MULTILINE)
    documented = {
        code: int(status) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)
    }
    assert documented == {
        code: status for code, status in answered.items() if code not in NOT_ANSWERED
    }


def toml_of(page: str) -> list[str]:
    return [block.text for block in blocks(ROOT / "docs" / page) if block.language == "toml"]


def test_the_files_of_policies_and_of_keys_are_read(tmp_path: Path) -> None:
    policies, keys = toml_of("serving.md"), toml_of("security.md")
    (path := tmp_path / "policies.toml").write_text("".join(policies))
    assert read_policies(path).named["support"].threshold == 0.4
    [key] = parse_keys(keys[0], "security.md", {"gate", "block"})
    assert (key.name, len(policies), len(keys)) == ("search-team", 1, 1)
    assert set(KeyTable.model_fields) == set(re.findall(r"^(\w+) =", keys[0], re.MULTILINE))


def rows_of(text: str) -> dict[str, str]:
    """The lines of its tables by what is in their first cell."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def row_of(title: str, *values: Any) -> str:
    return " | ".join([f"| {title}", *(f"{v['mean']:.3f} ± {v['std']:.3f}" for v in values)]) + " |"


def test_the_demo_models_table_is_the_report() -> None:
    table = json.loads(text_of(f"{ASSETS}/report.json"))["table"]
    card = text_of(f"{ASSETS}/hallutracer-demo/README.md")
    parts = card.split("\n### Entities that no refusal document mentions\n")
    every, never = map(rows_of, parts)
    page = rows_of(text_of("docs/results.md").partition("\n## Demo model\n")[2])
    assert len(set(page) & set(METHODS.values())) == 5
    columns = ["auroc", "auprc", "auroc_within_kind", "auroc_within_kind_x_template"]
    shown = ["auroc", "auroc_within_kind", "ece", "no_refusal_auroc"]
    for name, title in METHODS.items():
        row = table[name]
        assert every[title] == row_of(title, *(row[key] for key in [*columns, "ece"]))
        assert title not in page or page[title] == row_of(title, *(row[key] for key in shown))
        assert never[title] == row_of(title, *(row[f"no_refusal_{key}"] for key in columns))


def test_the_table_of_model_families_is_what_the_engines_read_and_the_tests_compare() -> None:
    assert "\n\n" + "\n".join(models.table()) + "\n\n" in text_of("docs/vllm-plugin.md")


def test_named_files_exist() -> None:
    named = (
        r"`((?:service|probes_store|tests|deploy|docs|clients|research|benchmarks)/[\w./-]*[\w/])`"
    )
    paths = [(page.name, path) for page in PAGES for path in re.findall(named, page.read_text())]
    assert [(page, path) for page, path in paths if not (ROOT / path).exists()] == []


def test_the_dependencies_all_have_a_reason() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    extras = [name for group in project["optional-dependencies"].values() for name in group]
    table = text_of("docs/contributing.md").partition("\n## Dependencies")[2]
    for wanted in [*project["dependencies"], *extras]:
        name = re.match(r"[\w-]+", wanted)
        assert name
        if name[0].startswith("types-") or name[0] in ("scipy-stubs", "hallutracer"):
            continue  # "type stubs"
        assert re.search(rf"\b{name[0]}\b", table), name[0]


@pytest.mark.parametrize(
    ("script", "function", "file"),
    [
        ("structure.py", "draw", "structure.svg"),
        ("how_it_works.py", "draw", "how_it_works.svg"),
        ("cli_reference.py", "document", "cli.md"),
        ("models.py", "page", "models.md"),
        ("openapi.py", "document", "openapi.json"),
    ],
)
def test_what_is_generated_is_up_to_date(script: str, function: str, file: str) -> None:
    generated = runpy.run_path(str(ROOT / "docs" / script))[function]()
    assert generated == text_of(f"docs/{file}"), f"run: python docs/{script}"


def test_no_name_is_gone_that_is_promised_to_stay() -> None:
    listed = set(text_of("docs/stable_names.txt").splitlines())
    names = runpy.run_path(STABLE)["names"]()
    assert sorted(listed - names) == [], (
        "this breaks what docs/stability.md promises: keep them, or make a major release"
    )
    assert sorted(names - listed) == [], "run: python docs/stable_names.py"


def test_the_http_api_is_described_as_openapi_has_it() -> None:
    document = json.loads(text_of("docs/openapi.json"))
    schemathesis.openapi.from_dict(document).validate()
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert all(operation["responses"] and operation["summary"] for operation in operations)
    wanted = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert wanted == set(document["components"]["schemas"])


def test_the_clients_page_names_every_script_and_the_pinned_versions() -> None:
    text = text_of("docs/apps.md")
    for script in (ROOT / "clients" / "quickstarts").glob("*.py"):
        assert f"`{script.name}`" in text
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", text_of("clients/requirements.txt"), re.MULTILINE))
    tested = re.findall(
        r"(?!and)\b([a-z-]+) (\d[\d.]*\d)",
        text.partition("## Tested with")[2].partition("\n## ")[0],
    )
    wanted = re.findall(r"^([a-z-]+)", text_of("clients/requirements.in"), re.MULTILINE)
    assert {name for name, _ in tested} == set(wanted) - {"pytest"}
    for name, version in tested:
        assert pins[name] == version
    ours = dict(re.findall(r"^([\w-]+)==(\S+)$", text_of("constraints.txt"), re.MULTILINE))
    assert f" and {ours['openai']}" in text
    extras = tomllib.loads(text_of("clients/python/pyproject.toml"))["project"][
        "optional-dependencies"
    ]
    for requirement in (Requirement(line) for (line,) in extras.values()):
        assert requirement.specifier.contains(
            (ours if requirement.name == "mcp" else pins)[requirement.name]
        )


# --- the site ---


def test_every_page_is_there_and_in_the_navigation(site: Path) -> None:
    front = (site / "README.html").read_text(encoding="utf-8")
    for page in set(PAGES) - set(RECORDS):
        name = page.relative_to(ROOT).with_suffix(".html")
        assert (site / name).is_file(), name
        assert name.name == "README.html" and name.parent == Path() or f'href="{name}"' in front, (
            name
        )
    assert "README.html" in (site / "index.html").read_text(encoding="utf-8")


def test_each_page_says_whom_it_is_for_and_what_to_read_around_it() -> None:
    for page in sorted(set(PAGES) - set(RECORDS) - {ROOT / "README.md"}):
        first = re.search(r"^# .*\n\n(.*)\n", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert first, page
        assert re.fullmatch(r"\*For .*\.\*", first[1]), f"{page.name}: {first[1]}"


def test_the_readmes_shelf_is_the_sites_navigation() -> None:
    """Reports are on the site alone, which needs them in its navigation."""
    conf = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    shelves = {name: pages for name, pages in conf["NAVIGATION"].items() if name != conf["REPORTS"]}
    start, *tracks = shelves.values()
    shelf = text_of("README.md").partition("\n## Where to read on\n")[2]
    above, *rows = re.split(r"^\| (?=\*\*|look)", shelf, flags=re.MULTILINE)

    def links(text: str) -> dict[str, str]:
        return {title: path.removesuffix(".md") for title, path in LINK.findall(text)}

    assert links(above) == start
    assert [links(row.splitlines()[0]) for row in rows] == tracks
    assert all(len(track) <= 5 for track in tracks[:-1])  # what a first-time reader reads


def test_it_needs_no_network_and_its_links_are_well_formed(site: Path) -> None:
    assert (site / "searchindex.js").is_file()
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(
            r'<(?:script|img|iframe)[^>]*\bsrc="([^"]+)"|<link[^>]*\bhref="([^"]+)"', text
        )
        assert [
            url for pair in loaded for url in pair if url.startswith(("http:", "https:", "//"))
        ] == [], page
        for image in re.findall(r'<img[^>]*\bsrc="([^"]+)"', text):
            assert (page.parent / image).is_file(), f"{page}: {image}"
        for parts in map(urlsplit, re.findall(r'<a[^>]*\bhref="([^"#][^"]*)"', text)):
            assert parts.scheme in ("", "https", "http", "mailto"), f"{page}: {parts}"
            assert not parts.scheme or re.fullmatch(r"[\w-]+(\.[\w-]+)+(:\d+)?", parts.netloc), (
                f"{page}: {parts}"
            )
    for style in site.rglob("*.css"):
        assert not re.search(
            r"url\(['\"]?(https?:)?//|@import\s+['\"]?http", style.read_text(encoding="utf-8")
        ), style


def test_a_broken_link_fails_the_build(site: Path, tmp_path: Path) -> None:
    (docs := tmp_path / "source" / "docs").mkdir(parents=True)
    broken = "[gone](docs/away.md), [gone](docs/serving.md#away), ![gone](docs/away.png)"
    (docs.parent / "README.md").write_text(
        f"# Front\n\n[fine](docs/serving.md#errors)\n\n{broken}\n"
    )
    (docs / "serving.md").write_text("# Serving\n\n## Errors\n")
    done = build(docs.parent, tmp_path)
    assert (done.returncode != 0, done.stderr.count("away") >= 3, "#errors" in done.stderr) == (
        True,
        True,
        False,
    )


# --- the notebooks ---

NOTEBOOK_FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(NOTEBOOK_FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One kernel for all of them, emptied in between: most of a notebook's time goes into importing
    torch."""
    for name in ("nbformat", "nbclient", "pandas"):
        pytest.importorskip(name, reason="pip install 'hallutracer[test]'")
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = sys.executable
    home = str(tmp_path_factory.mktemp("home"))
    paths = {"HOME": home, "IPYTHONDIR": home, "JUPYTER_CONFIG_DIR": home, "PYTHONPATH": str(ROOT)}
    manager.start_kernel(env=inherited() | paths | {"TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"})
    yield manager
    manager.shutdown_kernel(now=True)


def executed(path: Path, folder: Path, kernel: Any) -> Any:
    """The notebook after all of its cells ran in ``folder``."""
    import nbclient
    import nbformat

    book = nbformat.read(path, as_version=4)
    for name in NOTEBOOK_FOLDER.glob("*.jsonl"):
        shutil.copy(name, folder)
    start = nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {folder}")
    ran = nbformat.from_dict({**book, "cells": [start, *book.cells]})
    nbclient.NotebookClient(
        ran, km=kernel, timeout=300, resources={"metadata": {"path": str(folder)}}
    ).execute()
    ran["cells"] = ran["cells"][1:]
    return ran


def shown(book: Any) -> list[tuple[str, ...]]:
    """What each cell shows: kinds of output, and the text of those that are not pictures."""
    outputs = []
    for cell in book.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            kinds = tuple(sorted(data)) or (output["output_type"],)
            outputs.append(
                kinds
                if "image/png" in data
                else (*kinds, str(data.get("text/plain", output.get("text"))))
            )
    return outputs


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            notebook, id=notebook.stem, marks=[pytest.mark.long] * notebook.stem.startswith("train")
        )
        for notebook in NOTEBOOKS
    ],
)
def test_a_notebook_runs_and_shows_what_is_committed(
    path: Path, tmp_path: Path, kernel: Any
) -> None:
    import nbformat

    committed = nbformat.read(path, as_version=4)
    ran = executed(path, tmp_path, kernel)
    assert all(cell.execution_count for cell in committed.cells if cell.cell_type == "code"), (
        "execute and commit it"
    )
    assert not [
        output
        for cell in ran.cells
        for output in cell.get("outputs", ())
        if output.output_type == "stream"
    ]
    assert {notebook.stem for notebook in NOTEBOOKS} == {"score-and-look", "train-on-your-rows"}
    assert [kinds[:-1] for kinds in shown(ran)] == [kinds[:-1] for kinds in shown(committed)]
    assert any("image/png" in kinds for kinds in shown(ran))
    if os.environ.get("HALLUTRACER_WRITE_NOTEBOOKS"):
        nbformat.write(ran, path)
