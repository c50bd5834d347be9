"""What the pages say about the code is what the code says."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from hallutracer_research.demo.report import METHODS
from service.access.keys import KeyTable, parse_keys
from service.engines.families import FAMILIES
from service.errors import HalluTracerError
from service.policies.policy import read_policies
from tests.docs.pages import PAGES, ROOT, blocks

# Errors that no HTTP answer carries: of the command line, of loading (served as not_ready), and of a client that left.
NOT_ANSWERED = {
    "client_closed_request", "unknown_family", "model_load_error", "training_error", "bad_data", "run_mismatch",
    "no_direction", "no_threshold",
}  # fmt: skip


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_readme_is_one_page() -> None:
    assert len(text_of("README.md").splitlines()) <= 150


def test_the_first_screen_is_one_screen() -> None:
    """To the end of the table that says when to use what."""
    lines = text_of("README.md").splitlines()
    assert max(place for place, line in enumerate(lines) if line.startswith("| [LettuceDetect]")) < 45


def test_the_recipe_is_for_the_vllm_that_the_plugin_reads() -> None:
    extras = tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]
    pinned = next(iter(Requirement(extras["vllm"][0]).specifier)).version
    assert f"FROM vllm/vllm-openai:v{pinned}\n" in text_of("docs/vllm.md")


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
    documented = {code: int(status) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    assert documented == {code: status for code, status in answered.items() if code not in NOT_ANSWERED}


def test_the_policies_file_is_read(tmp_path: Path) -> None:
    (example,) = [block for block in blocks(ROOT / "docs" / "serving.md") if block.language == "toml"]
    path = tmp_path / "policies.toml"
    path.write_text(example.text)
    assert read_policies(path).named["support"].threshold == 0.4


def test_the_keys_file_is_read() -> None:
    (example,) = [block for block in blocks(ROOT / "docs" / "security.md") if block.language == "toml"]
    [key] = parse_keys(example.text, "access.md", {"gate", "block"})
    assert key.name == "search-team"
    assert set(KeyTable.model_fields) == set(re.findall(r"^(\w+) =", example.text, re.MULTILINE))


def cells(value: Any) -> str:
    return f"{value['mean']:.3f} ± {value['std']:.3f}"


def test_the_demo_models_table_is_the_report() -> None:
    table = json.loads(text_of("service/demo/assets/report.json"))["table"]
    every, never = (
        {line.split(" | ")[0].removeprefix("| "): line for line in part.splitlines() if line.startswith("| ")}
        for part in text_of("docs/results.md").split("no refusal document mentions")
    )
    for name, title in METHODS.items():
        row = table[name]
        columns = ["auroc", "auprc", "auroc_within_kind", "auroc_within_kind_x_template"]
        assert every[title] == "| " + " | ".join([title, *(cells(row[key]) for key in [*columns, "ece"])]) + " |"
        assert never[title] == "| " + " | ".join([title, *(cells(row[f"no_refusal_{key}"]) for key in columns)]) + " |"


def test_the_model_families_are_all_named() -> None:
    section = text_of("docs/contributing.md").partition("### Model families")[2].partition("\n### ")[0]
    for family in FAMILIES:
        name = re.split(r"[ ,]", family.name)[0]
        assert name.split("-")[0] in section, family.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    for path in re.findall(
        r"`((?:service|probes_store|tests|deploy|docs|clients|research|benchmarks)/[\w./-]*[\w/])`", page.read_text()
    ):
        assert (ROOT / path).exists(), f"{page.name}: {path}"


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


def test_the_picture_of_the_layers_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "structure.py"))
    assert script["draw"]() == text_of("docs/structure.svg"), "run: python docs/structure.py"


def test_the_command_line_reference_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "cli_reference.py"))
    assert script["document"]() == text_of("docs/cli.md"), "run: python docs/cli_reference.py"


def test_the_clients_page_names_every_script_and_the_pinned_versions() -> None:
    text = text_of("docs/apps.md")
    for script in (ROOT / "clients" / "quickstarts").glob("*.py"):
        assert f"`{script.name}`" in text
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", text_of("clients/requirements.txt"), re.MULTILINE))
    tested = re.findall(r"(?!and)\b([a-z-]+) (\d[\d.]*\d)", text.partition("## Tested with")[2].partition("\n## ")[0])
    wanted = re.findall(r"^([a-z-]+)", text_of("clients/requirements.in"), re.MULTILINE)
    assert {name for name, _ in tested} == set(wanted) - {"pytest"}
    for name, version in tested:
        assert pins[name] == version
    newest = re.search(r"^openai==(\S+)$", text_of("constraints.txt"), re.MULTILINE)
    assert newest
    assert f" and {newest[1]}" in text
    extras = tomllib.loads(text_of("clients/python/pyproject.toml"))["project"]["optional-dependencies"]
    for (requirement,) in extras.values():
        assert Requirement(requirement).specifier.contains(pins[Requirement(requirement).name])
