"""Every command of the documentation runs as it stands, or says why it is not run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.data.near_duplicates import content_of
from service.engines.places import PACKAGED, cache_folder
from tests.kit.pages import PAGES, ROOT, RUNNABLE, SPELLINGS, Block, blocks
from tests.serve_process import PATHS, inherited, serve

ALL = {page: blocks(page) for page in PAGES}
ADDRESS = "http://127.0.0.1:8765"  # of the service in the pages; the tests take a free port
PRINTED = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)
NOT_FOLLOWED = {"id", "created"}  # fields of an answer that differ each time


def pages_that(wanted: Any, *, once: bool = False) -> list[Any]:
    """The README's commands run before every commit, those of the other pages in the long run.

    ``once``: without pages that have long blocks, too: the long run runs those whole."""
    return [
        pytest.param(
            page,
            id=str(page.relative_to(ROOT)),
            marks=() if page.parent == ROOT else pytest.mark.long,
        )
        for page, page_blocks in ALL.items()
        if any(map(wanted, page_blocks))
        and not (once and page.parent != ROOT and any(map(is_long, page_blocks)))
    ]


def is_long(block: Block) -> bool:
    return block.runs and block.long


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(HALLUTRACER_STORE=str(tmp_path_factory.mktemp("store"))) as process:
        yield process.url


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One that observes, as one that is started without options does."""
    own = {"HALLUTRACER_MODEL": "smollm2", "HALLUTRACER_POLICY": "observe"}
    with serve(HALLUTRACER_STORE=str(tmp_path_factory.mktemp("store")), **own) as process:
        yield process.url


class Sandbox:
    """A folder that looks like a checkout, where one page's blocks run one after the other."""

    def __init__(self, folder: Path, request: pytest.FixtureRequest) -> None:
        self.folder, self.request = folder, request
        work = folder / "work"
        work.mkdir()
        folders = (
            "benchmarks",
            "clients",
            "deploy",
            "docs",
            "probes_store",
            "research",
            "service",
            "tests",
        )
        for entry in (*folders, "pyproject.toml", "constraints.txt"):
            (work / entry).symlink_to(ROOT / entry)
        programs = folder / "bin"
        programs.mkdir()
        for name, arguments in (("hallutracer", "-m service.cli"), ("python", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
            (programs / name).chmod(0o755)
        self.environment = inherited() | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": PATHS,
            "HOME": str(folder),
            "HALLUTRACER_THREADS": "1",
            "HALLUTRACER_CACHE": str(cache_folder()),
        }

    def run(self, block: Block) -> str:
        """What the block prints.  Fails the test where a command fails."""
        text = block.text
        if ADDRESS in text:
            text = text.replace(ADDRESS, self.request.getfixturevalue(block.model))
        if block.language == "python":
            output = self._output(block, [sys.executable, "-c", text])
            check_printed(text, output, block.place)
            return output
        if block.language == "console":
            return "".join(self._session(block, text))
        # A command that fails ends the block; `... | head` may close the pipe early.
        return self._output(block, ["bash", "-eu", "-c", text])

    def _session(self, block: Block, text: str) -> Iterator[str]:
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            printed = self._output(block, ["bash", "-eu", "-c", command])
            assert lines_of(printed) == lines_of(expected), f"{block.place}: {command}"
            yield printed

    def _output(self, block: Block, command: list[str]) -> str:
        environment = self.environment | {"HALLUTRACER_MODEL": block.model} | block.variables
        done = subprocess.run(
            command,
            cwd=self.folder / "work",
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == 0, f"{block.place}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout


def check_printed(code: str, output: str, where: str) -> None:
    """Fail where a comment behind a ``print`` of a page is not what it prints, in the order of the
    page."""
    lines = iter(lines_of(output))
    for shown in PRINTED.findall(code):
        assert shown in lines, (
            f"{where}: {shown!r} is not printed, or not there: {lines_of(output)}"
        )


def lines_of(text: str) -> list[str]:
    """The lines without trailing spaces."""
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def same(shown: Any, real: Any, where: str) -> None:
    """``real`` has what the page shows; numbers are rounded there."""
    if isinstance(shown, dict):
        assert shown.keys() == real.keys(), where
        for key in shown.keys() - NOT_FOLLOWED:
            same(shown[key], real[key], f"{where}.{key}")
    elif isinstance(shown, list):
        assert len(shown) == len(real), where
        for number, (left, right) in enumerate(zip(shown, real, strict=True)):
            same(left, right, f"{where}[{number}]")
    elif isinstance(shown, float):
        assert real == pytest.approx(shown, abs=6e-4), where
    else:
        assert shown == real, where


def run_page(sandbox: Sandbox, page: Path, *, long: bool = False, model: str = "demo") -> int:
    """Run a page's blocks on a model, or without the long ones; how many commands ran."""
    printed, ran = "", 0
    for block in ALL[page]:
        if block.answers and printed:
            same(json.loads(block.text), json.loads(printed), block.place)
        printed = ""
        if block.runs and block.model == model and (long or not block.long):
            printed = sandbox.run(block)
            ran += 1
    return ran


@pytest.mark.skipif(
    not PACKAGED["smollm2"].is_installed, reason=f"needs {PACKAGED['smollm2'].install}"
)
@pytest.mark.parametrize("page", pages_that(lambda block: block.runs and block.model == "smollm2"))
def test_the_commands_on_smollm2_run(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    assert run_page(Sandbox(tmp_path, request), page, model="smollm2") > 0


def is_plain(sample: dict[str, Any]) -> bool:
    """Return whether an answer that is judged right claims nothing but an accepted answer, in its
    first sentence.

    A judge finds the accepted answer among other words, some of which a reader may know to be
    false."""
    claimed = content_of(re.split(r"(?<=[.!?])\s", sample["answer"].strip())[0])[0]
    asked = content_of(sample["prompt"])[0]
    return sample["verdict"] != "right" or any(
        claimed <= asked | content_of(answer)[0] for answer in sample["accepted"]
    )


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        ("The capital of Peru is Lima.", True),
        ("Lima. It is the seat of Peru.", True),
        ("It's Lima", True),
        ("Lima is a small island in the capital of Peru.", False),
        ("It is Cusco. No, Lima.", False),
    ],
)
def test_a_right_answer_that_claims_more_is_not_plain(answer: str, plain: bool) -> None:
    asked = {"prompt": "What is the capital of Peru?", "accepted": ["Lima"], "answer": answer}
    assert is_plain(asked | {"verdict": "right"}) is plain
    assert is_plain(asked | {"verdict": "wrong"})


def rows_of(page: str) -> list[tuple[str, str, str, str]]:
    """Risk, question, answer and verdict of each line of the README's lists."""
    return re.findall(r"^\| (0\.\d\d) \| (.*?) \| (.*?) \| (.*?) \|$", page, re.MULTILINE)


def right_among(samples: list[dict[str, Any]]) -> int:
    return sum(sample["verdict"] == "right" for sample in samples)


@pytest.mark.long
@pytest.mark.skipif(
    not PACKAGED["smollm2"].is_installed, reason=f"needs {PACKAGED['smollm2'].install}"
)
def test_the_readmes_table_is_every_other_question_by_risk(smollm2: str) -> None:
    """A rule that leaves nothing to choose, of the questions that ``is_plain`` leaves."""
    with httpx.Client(base_url=smollm2, timeout=120) as client:
        answers = [
            client.get(f"/v1/bundles/smollm2/sample/{number}").json() for number in range(24)
        ]
    ranked = sorted(answers, key=lambda answer: float(answer["risk"]))
    page = (ROOT / "README.md").read_text()
    lower, higher = right_among(ranked[:12]), right_among(ranked[12:])
    others = higher or "none"
    assert (
        f"Of SmolLM2's 24 answers, {lower} of the 12 with the lower risks are right,"
        f" {others} of the others;" in page
    )
    plain = [sample for sample in ranked if is_plain(sample)]
    assert f"every second of {len(plain)} is shown" in page
    wanted = plain[::2]
    table = rows_of(page)[: len(wanted)]  # below it: tests/docs/test_first_screen.py
    assert len(table) == len(wanted)
    for (risk, question, answer, verdict), real in zip(table, wanted, strict=True):
        assert (risk, question) == (f"{real['risk']:.2f}", real["prompt"])
        assert str(real["answer"]).startswith(answer.removesuffix(" .."))
        surprising = (real["verdict"] == "right") is real["flagged"]
        assert verdict.replace("*", "").partition(":")[0] == real["verdict"]
        assert verdict.startswith("**") is surprising


@pytest.mark.parametrize(
    "page",
    pages_that(lambda block: block.runs and block.model == "demo" and not block.long, once=True),
)
def test_the_commands_of_a_page_run(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    assert run_page(Sandbox(tmp_path, request), page) > 0


@pytest.mark.long
@pytest.mark.parametrize("page", pages_that(is_long))
def test_the_long_commands_of_a_page_run(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    assert run_page(Sandbox(tmp_path, request), page, long=True) > 0


def test_a_block_runs_or_says_why_not() -> None:
    for block in (block for page_blocks in ALL.values() for block in page_blocks):
        assert block.language not in SPELLINGS, (
            f"{block.place}: write one of {', '.join(sorted(RUNNABLE))}"
        )
        if block.language in RUNNABLE and not block.runs:
            assert len((block.reason or "").split()) >= 3, f"{block.place}: the reason is missing"
            for path in re.findall(r"\btests/[\w/.-]*[\w/]", block.reason or ""):
                assert (ROOT / path).exists(), f"{block.place}: {path}"


def test_what_a_page_shows_of_the_service_is_of_the_model_that_make_run_serves() -> None:
    for page_blocks in ALL.values():
        for block, after in zip_longest(page_blocks, page_blocks[1:]):
            shows = bool(PRINTED.search(block.text)) or (after is not None and after.answers)
            if block.runs and shows and ADDRESS in block.text:
                assert block.model == "smollm2", f"{block.place}: mark it 'run: on smollm2'"


def test_a_comment_behind_a_print_is_what_it_prints() -> None:
    code = "print(f(x))  # 0.5 (or so)\nif x:\n    print(1)\n    print([2])  # [2]\n"
    check_printed(code, "0.5 (or so)\n1\n[2]\n", "here")
    for output in ("0.6 (or so)\n1\n[2]\n", "[2]\n0.5 (or so)\n", ""):
        with pytest.raises(AssertionError, match=r"here: '.*' is not printed"):
            check_printed(code, output, "here")


def test_an_unknown_mark_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- run: slowly -->\n```sh\ntrue\n```\n")
    with pytest.raises(ValueError, match="unknown mark"):
        blocks(page)
    page.write_text(
        "<!-- run: long, with A=1 B=x -->\n```sh\n```\n\n<!-- run: on smollm2 -->\n```sh\n```\n"
    )
    marks = [(block.long, block.variables, block.model, block.runs) for block in blocks(page)]
    assert marks == [(True, {"A": "1", "B": "x"}, "demo", True), (False, {}, "smollm2", True)]
