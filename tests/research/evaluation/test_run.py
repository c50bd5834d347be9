"""``hallutracer evaluate`` as a user runs it, on the demo model: the suite, a new rival, a killed run, wrong input."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hallutracer_research.evaluation import splits
from hallutracer_research.evaluation.methods import METHODS, Method
from service.demo.questions import questions
from service.errors import TrainingError
from tests.command_line import hallutracer

QUICK = {"--limit": "160", "--seeds": "1", "--folds": "3", "--inner-folds": "2", "--c": "0.3", "--jobs": "1",
         "--threads": "1"}  # fmt: skip
PAPER = ("--suite", "paper", "--no-per-subset")
TWO = ("--methods", "hallutracer,prompt-length", "--no-per-subset")


def command(out: Path, *more: str) -> list[str]:
    quick = [word for flag, value in QUICK.items() if flag not in more for word in (flag, value)]
    return ["evaluate", "--out", str(out), *quick, *more]


def run(out: Path, *more: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = hallutracer(*command(out, *more))
    assert done.returncode == expect, done.stderr[-3000:]
    return done


def results(out: Path) -> Any:
    return json.loads((out / "results.json").read_text())


def files(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in out.rglob("*.npz")}


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def labelled(count: int = 120) -> list[dict[str, Any]]:
    """Questions with labels of their own that nothing in the model foretells."""
    return [
        {"id": row["id"], "prompt": row["prompt"], "label": number % 2, "group": f"g{number // 2}", "kind": row["kind"]}
        for number, row in enumerate(questions("dev")[:count])
    ]


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole suite on a few of the demo model's questions."""
    out = tmp_path_factory.mktemp("evaluate") / "paper"
    run(out, *PAPER)
    return out


@pytest.mark.long
def test_the_paper_suite_has_every_table_and_one_page(paper: Path) -> None:
    document = results(paper)
    labels = {table["label"] for table in document["tables"].values()}
    assert {
        "tab:main-results", "tab:validation_results", "tab:ablation_combined", "tab:ablation_pooling",
        "tab:readout_ablation", "tab:head_distribution", "tab:topk_heads", "tab:snr_verification", "tab:fisher-gap",
        "tab:mean-vs-median", "tab:ablation-12d-22d", "tab:variance-decomp", "tab:kappa-calibration",
        "tab:isotropy-results", "tab:k-decomp-auroc", "tab:k-decomp-cov",
    } <= labels  # fmt: skip
    main = {row["method"]: row for row in document["tables"]["main"]["rows"]}
    assert 0.6 < main["HalluTracer (depth mean)"]["auroc"]["mean"] < 0.95
    assert main["HalluTracer (depth mean)"]["cost"] == 1.0
    assert 1.0 < main["First-token entropy"]["cost"] < 1.5
    assert main["Share of its kind"]["class"] == main["Prompt length"]["class"] == "none"  # what confounds a set
    assert set(main["ITI-Probe"]) >= {"auroc", "auprc_hallucinated", "auprc_factual"}
    assert main["ITI-Probe"]["auroc"]["low"] < main["ITI-Probe"]["auroc"]["high"]
    assert document["facts"]["command"].startswith("hallutracer evaluate")
    assert {claim["verdict"] for claim in document["claims"]} <= {"supported", "not supported", "mixed", "not testable"}
    assert not re.search(r"""(src|href)=["']https?:""", (paper / "report.html").read_text()), "it must need no network"
    assert "NaN" not in (paper / "results.json").read_text()
    assert "tab:fisher-gap" in (paper / "report.md").read_text()


@pytest.mark.long
def test_a_finished_run_is_only_reported_again_and_another_protocol_is_refused(paper: Path) -> None:
    before, fits = results(paper), files(paper / "sets")
    assert len(fits) > 10
    run(paper, *PAPER)
    assert fits == files(paper / "sets")
    assert results(paper)["tables"] == before["tables"]
    assert "folds = 3" in run(paper, *PAPER, "--folds", "4", expect=1).stderr


@pytest.mark.long
def test_a_killed_run_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(whole, *TWO)
    process = subprocess.Popen(
        [sys.executable, "-m", "service.cli", *command(killed, *TWO)],
        stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    limit = time.monotonic() + 120
    while not list(killed.rglob("seed0-fold0.npz")):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < limit
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "results.json").exists()
    run(killed, *TWO)
    assert results(killed)["tables"] == results(whole)["tables"]


def test_a_new_rival_is_one_function_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the table, inside the sub-datasets too; one that cannot learn does not cost the set its table."""
    calls = []

    def vowels(inputs: Any, train: Any, test: Any, seed: int, jobs: int | None) -> np.ndarray:
        return np.array([float(sum(inputs.text[row].count(vowel) for vowel in "aeiou")) for row in test])

    def fails_late(inputs: Any, train: Any, test: Any, seed: int, jobs: int | None) -> np.ndarray:
        calls.append(len(inputs.label))
        if len(calls) == 2:
            raise TrainingError("too alike")
        return np.zeros(len(test))

    monkeypatch.setitem(METHODS, "vowels", Method("Vowels of the question", "none", vowels))
    monkeypatch.setitem(METHODS, "fails-late", Method("Fails late", "A", fails_late))
    data = ("--data", written(tmp_path / "mine.jsonl", labelled()))
    done = run(tmp_path / "out", *data, "--methods", "hallutracer,fails-late,vowels")
    assert "mine: left out: Fails late: too alike" in done.stdout
    assert calls[:3].count(120) == 2  # not tried again
    tables = results(tmp_path / "out")["tables"]
    assert [row["method"] for row in tables["main"]["rows"]] == ["HalluTracer (depth mean)", "Vowels of the question"]
    assert {"HalluTracer (depth mean)", "Vowels of the question"} <= {
        row["method"] for row in tables["subsets"]["rows"]
    }

    def fails(*_: Any) -> Any:
        raise TrainingError("too alike")

    monkeypatch.setattr(splits, "shuffled_depth_mean", fails)  # our own fit: an error
    assert "too alike" in run(tmp_path / "own", *data, "--methods", "hallutracer,shuffled-labels", expect=1).stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--data", "nowhere.jsonl"], 2, "nowhere.jsonl"),
        (["--data", "truefalse=/nonexistent"], 1, "is not a folder"),
        (["--methods", "hallutracer,magic"], 1, "'magic'"),
        (["--methods", "iti"], 1, "hallutracer must be among the methods"),
        (["--model", "some/model"], 2, "name the data"),
        (["--limit", "49"], 2, "'49'"),
        (["--limit", "demo-questions=many"], 2, "'demo-questions=many'"),
        (["--limit", "helm=60"], 2, "'helm' is not among the data"),
        (["--limit", "60", "--limit", "70"], 2, "given twice"),
    ],
)
def test_wrong_input_is_said_before_a_model_is_loaded(
    tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    done = run(tmp_path / "out", *arguments, expect=code)
    assert words in re.sub(r"\s+", " ", done.stderr.replace("│", " "))
    assert not list(tmp_path.rglob("*.f32"))


POEM = "".join(json.dumps(row) + "\n" for row in [*labelled(20), {"prompt": "Write a poem.", "applies": False}])


@pytest.mark.parametrize("limit", [[], ["--limit", "60"]])
@pytest.mark.parametrize(
    ("text", "words"),
    [("", "no rows"), ("hello\n", "line 1"), ('{"id": "a", "label": 1}\n', "'prompt'"),
     ('{"prompt": "x", "label": 1}\n', "no row is hallucinated"), (POEM, 'line 21: "applies"')],
)  # fmt: skip
def test_problems_of_a_file_are_told_by_its_lines(tmp_path: Path, text: str, words: str, limit: list[str]) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(text)
    done = run(tmp_path / "out", "--data", str(path), *limit, expect=1)
    assert words in done.stderr
    assert str(path) in done.stderr


def test_rows_too_long_for_the_model_are_an_error_or_left_out_and_counted(tmp_path: Path) -> None:
    rows = labelled(80)
    rows[7]["prompt"] = "why " * 400
    more = ["--data", written(tmp_path / "mine.jsonl", rows), *TWO]
    assert "line 8" in run(tmp_path / "out", *more, expect=1).stderr
    done = run(tmp_path / "out", *more, "--skip-long")
    assert "79 rows" in done.stdout
    assert "1 rows longer than the model's context of 256 tokens" in done.stdout


def test_a_set_without_both_classes_does_not_cost_the_others_their_tables(tmp_path: Path) -> None:
    asked = questions("dev")[:200]
    hopeless = written(tmp_path / "hopeless.jsonl", [row | {"answers": ["no such place"]} for row in asked])
    limits = ("--limit", "hopeless=60", "--limit", "150")
    few = ("--methods", "hallutracer,shuffled-labels", "--no-per-subset")
    other = ("--data", written(tmp_path / "answerable.jsonl", asked))
    done = run(tmp_path / "out", "--data", hopeless, *other, *limits, *few)
    assert "Left out: hopeless: no row is factual" in done.stdout
    rows = results(tmp_path / "out")["tables"]["main"]["rows"]
    assert {row["set"] for row in rows} == {"answerable"}
    assert 140 <= int(re.findall(r"only (\d+) rows \(--limit\)", done.stdout)[0]) <= 160  # whole groups
    assert {row["method"]: row["auroc"]["mean"] for row in rows}["HalluTracer (depth mean)"] > 0.6
    done = run(tmp_path / "alone", "--data", hopeless, "--limit", "60", *few, expect=1)
    assert "hopeless: no row is factual" in done.stderr


def test_rivals_read_the_model_s_own_answers_where_the_labels_are_about_them(tmp_path: Path) -> None:
    sets = {"own": questions("dev")[:200], "given": labelled()}
    data = [word for name, rows in sets.items() for word in ("--data", written(tmp_path / f"{name}.jsonl", rows))]
    few = ("--samples", "4", "--no-per-subset", "--methods")
    done = run(tmp_path / "out", *data, *few, "hallutracer,sep,perplexity,p-true,mind,D")
    assert "given: left out: sep, perplexity, p-true, mind, semantic-entropy" in done.stdout
    table = results(tmp_path / "out")["tables"]["main"]["rows"]
    found = {row["method"]: row for row in table if row["set"] == "own"}
    assert {row["method"] for row in table if row["set"] == "given"} == {"HalluTracer (depth mean)"}
    assert "".join(row["class"] for row in found.values()) == "AACCCDDD"
    costs = {name: row["cost"] for name, row in found.items()}
    assert costs["Semantic-entropy probe"] == 1.0
    assert costs["EigenScore"] - 1 == pytest.approx(4 * (costs["Perplexity of the answer"] - 1))
    assert costs["P(True)"] > costs["Perplexity of the answer"] + 1
    assert found["Perplexity of the answer"]["auroc"]["mean"] > 0.55
    before = files(tmp_path)
    run(tmp_path / "out", *data, *few, "hallutracer,sep,D,perplexity,p-true,mind")
    assert files(tmp_path) == before
