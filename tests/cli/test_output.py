"""hallutracer try on the demo model, here and through a service; and what commands draw for people,
cards too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from probes_store.bundle import BundleDraft, load_bundle
from probes_store.store import SHIPPED, Store
from service.cli.output import (
    QuestionResult,
    TryReport,
    draw_report,
    draw_sorted,
    plot_lines,
    print_card,
    print_table,
)
from service.demo.questions import questions
from service.engines.scheduler import Scheduled
from service.judging.evaluation import Tenth
from service.library.detector import risk_of
from service.progress import size_text
from service.scoring import Scorer
from service.serving.judgement import JudgedPrompt
from service.trainer.cards import card_of
from tests.command_line import ended, hallutracer, one_line_says
from tests.fitting.planted import write_rows
from tests.kit.forks import Forked
from tests.matching import SMALL_TALK, contextual_bundle
from tests.scripted_engine import ScriptedEngine
from tests.serve_process import ServeProcess


def drawn(draw: Callable[..., object], *arguments: Any, width: int = 100, **options: Any) -> str:
    """What is drawn on a console of this width."""
    draw(*arguments, Console(file=(file := StringIO()), width=width, **options))
    return file.getvalue()


def tried(*questions: QuestionResult, tenths: Sequence[Tenth] = (), **fields: Any) -> TryReport:
    return TryReport("probe:1", "model", 0.5, questions, tuple(tenths), **fields)


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    return dict(json.loads(ended(hallutracer("try", "--json"), 0)))


def check_verdict(result: dict[str, Any]) -> None:
    """It is right where an accepted answer is in the text."""
    text = result["answer"].lower()
    right = any(word.lower() in text for word in result["accepted"])
    assert (result["verdict"] == "right") is right


def test_the_demo_model_is_right_more_often_where_the_risk_is_low(here: dict[str, Any]) -> None:
    risks = [result["risk"] for result in here["seen"]]
    assert (len(risks), risks) == (24, sorted(risks))
    for result in here["seen"]:
        assert result["flagged"] is (result["risk"] >= here["threshold"])
        check_verdict(result)
    for half, results in (("lower_half", here["seen"][:12]), ("upper_half", here["seen"][12:])):
        right = sum(result["verdict"] == "right" for result in results)
        assert here[half] == {"questions": 12, "right": right}
    assert here["lower_half"]["right"] > here["upper_half"]["right"]
    right = [tenth["right"] for tenth in here["tenths"]]
    assert len(right) == 10
    assert right == sorted(right, reverse=True)


def test_a_service_tells_the_same(here: dict[str, Any]) -> None:
    with ServeProcess(HALLUTRACER_POLICY="observe") as service:
        assert isinstance(service.process, Forked), "tests' services import everything anew"
        there = json.loads(ended(hallutracer("try", "--url", service.url, "--json"), 0))
        with ServeProcess(HALLUTRACER_POLICY="gate") as gate:
            withheld = json.loads(hallutracer("try", "--url", gate.url, "--json").stdout)
        ended(hallutracer("try", "--url", service.url, "--bundle", "absent"), 1, "absent")
    for mine, its in zip(here["seen"], there["seen"], strict=True):
        assert mine["risk"] == pytest.approx(its["risk"], abs=1e-4)
        assert mine | {"risk": 0} == its | {"risk": 0}
    assert here | {"seen": 0} == there | {"seen": 0}
    for mine, its in zip(here["seen"], withheld["seen"], strict=True):
        assert its["risk"] == pytest.approx(mine["risk"], abs=1e-4)
        shown = {"answer": None, "verdict": None} if its["answer"] is None else {}
        assert its | {"risk": 0} == mine | {"risk": 0} | shown
        assert (its["answer"] is None) or not mine["flagged"]
    assert {result["answer"] is None for result in withheld["seen"]} == {True, False}


FRANCE = QuestionResult("Capital of\nFrance?", "It is Paris.", ("Paris",), 0.1, False, "right")


def test_the_table_is_sorted_and_has_the_gates_line() -> None:
    palau = ("Capital of Palau?", "It is [red]Koror.", ("Ngerulmud", "Melekeok"))
    seen = [
        FRANCE,
        QuestionResult(*palau, 0.7, True, "wrong"),
        QuestionResult(
            "Capital of Chad?", "I do not know.", ("N'Djamena",), 0.9, True, "abstained"
        ),
    ]
    tenths = [Tenth(number / 10, (number + 1) / 10, 1 - number / 10) for number in range(10)]
    lines = drawn(draw_sorted, tried(*seen, tenths=tenths)).splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["risk", "0.10", "a", "0.70", "0.90"]
    assert "a gate withholds 0.50 and more:" in lines[2]
    assert "Capital of France?" in lines[1]
    assert "It is [red]Koror." in lines[3]  # the model's words are no markup
    assert lines[1].rstrip().endswith("\u2713")
    assert lines[3].rstrip().endswith("\u2717 Ngerulmud")
    bars = [line.count("\u2588") for line in lines if "\u2588" in line]
    assert bars == [40, 36, 32, 28, 24, 20, 16, 12, 8, 4]
    halves = "right in 1 of the 2 with the lower risks, in none of the 1 with the higher."
    assert lines[-1].endswith(halves)
    assert max(map(len, lines[:-1])) <= 100


def test_the_sentence_that_says_whether_a_bundle_pays_comes_first() -> None:
    sentence = "Use it for these kinds: [bold]\x1b[2J, capitals."
    report = tried(FRANCE, recommendation=sentence)
    lines = drawn(draw_sorted, report, width=80).splitlines()
    assert lines[:2] == ["Use it for these kinds: [bold][2J, capitals.", ""]
    assert lines[2].split()[:2] == ["risk", "question"]
    assert report.document()["recommendation"] == sentence


@pytest.mark.parametrize(
    ("results", "sentence"),
    [
        (
            {("right", False): 3, ("right", True): 1, ("wrong", False): 2, ("wrong", True): 4},
            "Without a gate 6 of 10 answers are wrong.  A gate at 0.50 gives 5, 2 of them wrong,"
            " and withholds 1 of the 4 right ones.",
        ),
        (
            {("right", False): 1, ("abstained", True): 1},
            "Without a gate none of 1 answers are wrong.  A gate at 0.50 gives 1, none of them"
            " wrong, and withholds none of the 1 right ones.",
        ),
    ],
)
def test_own_questions_end_with_a_line_before_and_after(
    results: dict[tuple[str, bool], int], sentence: str
) -> None:
    seen = [
        QuestionResult("Who?", "She.", ("She",), 0.9 if flagged else 0.1, flagged, verdict)
        for (verdict, flagged), count in results.items()
        for _ in range(count)
    ]
    *_, above, last = drawn(draw_sorted, tried(*seen, file="mine.jsonl")).splitlines()
    assert last == sentence
    assert f"model, asked {len(seen)} questions of mine.jsonl: right in" in above


def test_own_questions_are_asked_and_judged(tmp_path: Path) -> None:
    rows = questions("test")[:60:3]
    file = write_rows(tmp_path / "mine.jsonl", rows)
    done = hallutracer("try", "--model", "demo", "--ask", str(file), "--json")
    report = json.loads(ended(done, 0))
    assert (report["file"], len(report["seen"])) == (str(file), len(rows))
    assert {result["prompt"] for result in report["seen"]} == {row["prompt"] for row in rows}
    for result in report["seen"]:
        check_verdict(result)
    file.write_text('{"messages": [{"role": "user", "content": "Who?"}], "answers": ["She"]}\n')
    done = hallutracer("try", "--model", "demo", "--ask", str(file))
    ended(done, 1, "line 1: give a 'prompt'")
    one_line_says(f"try --ask {file} --url http://127.0.0.1:9", 2, "leave out --url")


LONG = "Can you say what the chemical symbol of the element with the atomic number 17 is, please?"


def test_questions_are_cut_for_a_terminal_and_whole_for_a_pipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = tried(QuestionResult(LONG, "word " * 40, ("Cl",), 0.1, False, "right"))
    assert LONG not in drawn(draw_sorted, report, width=80, force_terminal=True)
    draw_sorted(report)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("0.10"))
    assert LONG in row
    assert ("word " * 40).strip() in row
    assert row.rstrip().endswith("\u2713")


ROWS: list[dict[str, Any]] = [
    {
        "name": "a-bundle-with-a-long-name:12",
        "lists": ["depth_mean", "stated_length", "passage"],
        "digest": "0123456789ab",
    },
    {"name": "short:1", "lists": [], "digest": None},
]


@pytest.mark.parametrize("width", [10, 40, 60, 80, 200])
def test_a_table_breaks_no_cell_however_narrow_the_terminal_is(width: int) -> None:
    lines = drawn(print_table, ROWS, ["name", "lists", "digest"], width=width).splitlines()
    for cell in (
        "a-bundle-with-a-long-name:12",
        "depth_mean, stated_length, passage",
        "0123456789ab",
    ):
        assert any(cell in line for line in lines), cell
    assert all(
        line.startswith(("name", "a-bundle", "short", " ")) for line in lines if line.strip()
    )
    if width >= 80:
        assert max(map(len, lines)) <= width
    assert sum("name " in line for line in lines) == (1 if width >= 80 else 2)


def test_a_pipe_gets_a_line_for_each_bundle_however_narrow() -> None:
    listed = hallutracer("bundle", "list", COLUMNS="20").stdout.splitlines()
    of_store = json.loads(hallutracer("bundle", "list", "--json").stdout)
    assert len(listed) == 1 + len(of_store)
    for line, row in zip(listed[1:], of_store, strict=True):
        words = (
            row["bundle"],
            row["model"],
            row["readout"],
            row["digest"][7:19],
            ", ".join(row["signals"]),
        )
        assert [word for word in words if word not in line] == []


def test_what_a_service_withholds_is_said_to_be_unknown() -> None:
    seen = (
        FRANCE,
        QuestionResult("Capital of Palau?", None, ("Ngerulmud",), 0.7, True, None),
        # Ended under way.
        QuestionResult("Capital of Chad?", "It is", ("N'Djamena",), 0.9, True, None),
    )
    lines = drawn(draw_sorted, tried(*seen), width=200).splitlines()
    assert "(withheld)" in lines[3]
    assert "Ngerulmud" in lines[3]
    assert "withholds 2 of the answers: whether they would be right is not known." in lines[-1]


@pytest.mark.parametrize(
    ("verdicts", "message"),
    [
        (
            [None, None],
            (
                "was not fitted on: no answer was given.  The service's policy withholds 2 of the"
                " answers: "
            ),
        ),
        (
            ["wrong", None],
            "was not fitted on: right in none of the 1 that were answered.  The service's policy ",
        ),
        (
            ["wrong", "abstained"],
            "right in none of the 1 with the lower risks, in none of the 1 with the higher.",
        ),
    ],
)
def test_what_is_none_is_told_in_words(verdicts: list[Any], message: str) -> None:
    texts = [None if verdict is None else "It is" for verdict in verdicts]
    seen = [
        QuestionResult("Capital?", text, ("Oslo",), 0.1 * number, False, verdict)
        for number, (text, verdict) in enumerate(zip(texts, verdicts, strict=True))
    ]
    assert message in drawn(draw_sorted, tried(*seen), width=200).splitlines()[-1]


def test_errors_name_the_cause(tmp_path: Path) -> None:
    bundle = load_bundle(SHIPPED / "demo" / "1")
    older = {key: value for key, value in bundle.evaluation().items() if key != "sample"}
    Store(tmp_path).publish(
        BundleDraft(bundle.manifest, bundle.probes, bundle.golden, older, "card")
    )
    away = "--url http://127.0.0.1:9"
    for arguments, status, word in (
        (f"--bundle demo --store {tmp_path}", 1, "demo:1 carries no questions to try"),
        (away, 1, "did not answer"),
        ("--url nowhere", 1, "did not answer"),
        ("--show 0", 2, "--show"),
        (f"{away} --bundle a --bundle b", 2, "--bundle"),
    ):
        one_line_says(f"try {arguments}", status, word)


def test_the_plot_fits_and_has_the_highest_logit_on_top() -> None:
    for layers, width in ((1, 40), (8, 80), (28, 40), (80, 200), (126, 80)):
        rng = np.random.default_rng(layers)
        lines = [
            line.plain
            for line in plot_lines(rng.normal(size=layers), rng.normal(size=(2, layers)), width)
        ]
        body = [line for line in lines if "│" in line]
        assert all(len(line) <= width for line in body)
        assert min(layers, (width - 10) // 5) <= sum(line.count("●") for line in body) <= layers
    trajectory = np.array([0.0, 3.0, -3.0])
    body = [
        line.plain for line in plot_lines(trajectory, np.zeros((2, 3)), 80) if "│" in line.plain
    ]
    assert "3.00" in body[0]
    assert "●" in body[0]
    assert "●" in body[-1]
    assert plot_lines(np.zeros(4), np.zeros((2, 4)), 80)  # a flat one


@pytest.mark.parametrize(("applies_from", "applies"), [(0.999999, False), (1e-6, True)])
def test_a_prompt_that_asks_for_no_fact_is_told(
    tmp_path: Path, applies_from: float, applies: bool
) -> None:
    script = ScriptedEngine()
    bundle = contextual_bundle(script, tmp_path, applies_from=applies_from)
    [report] = Scorer(Scheduled(script), bundle).score([[256, 65]], standings=[SMALL_TALK])
    text = drawn(draw_report, bundle, report)
    words = f"asks for no fact (P(asks) {report.context.asks or 0.0:.2f}): the risk does not apply"
    assert (words in text) is (applies is False)
    assert risk_of("A", JudgedPrompt(0, report)).applies is applies


# a model card


@pytest.mark.parametrize("width", [80, 120])
def test_every_figure_is_there_and_fits(width: int) -> None:
    bundle = Store(SHIPPED).load("smollm2")
    options: dict[str, Any] = {"width": width, "force_terminal": True, "highlight": False}
    text = drawn(print_card, bundle.card(), bundle.path, **options)
    text = re.sub(r"\x1b(\[[\d;]*m|]8;[^\\]*\x1b\\\\)", "", text)
    tables = [line for line in bundle.card().splitlines() if line.startswith("|")]
    figures = set(
        re.findall(r"\d\.\d{3} (?:\+/- \d\.\d{3}|\[\d\.\d{3}, \d\.\d{3}\])", "\n".join(tables))
    )
    assert len(figures) > 30
    assert [figure for figure in figures if figure not in text] == []
    lines = [line for line in text.splitlines() if "/plots/" not in line]
    assert max(map(len, lines)) <= width
    assert "…" not in text
    assert "depth mean, unit norm" in text
    assert "library_name" not in text  # for the hub
    assert str(bundle.path / "plots" / "roc.png") in text


def test_a_pipe_gets_the_file_and_a_terminal_the_layout() -> None:
    assert (
        hallutracer("bundle", "show", "smollm2").stdout
        == card_of(Store(SHIPPED).load("smollm2")) + "\n"
    )
    printed = hallutracer("bundle", "show", "smollm2", FORCE_COLOR="1", COLUMNS="80").stdout
    assert [word for word in ("library_name", "| --- |") if word in printed] == []
    assert str(Path("plots", "roc.png")) in printed


def test_a_strangers_card_moves_no_cursor() -> None:
    card = "# A\x1b[2J\n\n| a |\n| --- |\n| b\x9b2J\x07 |\n"
    text = drawn(print_card, card, Path("x"), width=80, no_color=True)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    assert "A[2J" in text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (200, "200 bytes"),
        (1000, "1.0 KiB"),
        (5e6, "4.8 MiB"),
        (3e8, "0.3 GiB"),
        (7.5e9, "7.0 GiB"),
    ],
)
def test_a_size_is_told_in_a_unit_in_which_it_is_not_nothing(size: float, text: str) -> None:
    assert size_text(size) == text
