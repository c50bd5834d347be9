"""``hallutracer evaluate`` as a user runs it, on the demo model: the whole suite, a killed run, wrong input."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from service.errors import TrainingError
from tests.command_line import hallutracer

QUICK = {"--limit": "160", "--seeds": "1", "--folds": "3", "--inner-folds": "2", "--c": "0.3", "--jobs": "1",
         "--threads": "1"}  # fmt: skip


def command(out: Path, *more: str) -> list[str]:
    quick = [word for flag, value in QUICK.items() if flag not in more for word in (flag, value)]
    return ["evaluate", "--out", str(out), *quick, *more]


def run(out: Path, *more: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = hallutracer(*command(out, *more))
    assert done.returncode == expect, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole suite on a few of the demo model's questions."""
    out = tmp_path_factory.mktemp("evaluate") / "paper"
    run(out, "--suite", "paper", "--no-per-subset")
    return out


def results(out: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((out / "results.json").read_text())
    return found


def test_rows_that_ask_for_no_fact_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"q{n}", "label": n % 2} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "Write a poem.", "applies": False}]))
    done = run(tmp_path / "out", "--data", str(path), "--model", "demo", expect=1)
    assert 'line 21: "applies" is false' in done.stderr


@pytest.mark.long
def test_the_paper_suite_has_every_table_and_one_page(paper: Path) -> None:
    document = json.loads((paper / "results.json").read_text())
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
    assert main["Share of its kind"]["class"] == "none"
    assert set(main["ITI-Probe"]) >= {"auroc", "auprc_hallucinated", "auprc_factual"}
    assert document["facts"]["command"].startswith("hallutracer evaluate")
    assert {claim["verdict"] for claim in document["claims"]} <= {
        "supported", "not supported", "mixed", "not testable"
    }  # fmt: skip
    page = (paper / "report.html").read_text()
    assert not re.search(r"""(src|href)=["']https?:""", page), "the page must need no network"
    assert "NaN" not in (paper / "results.json").read_text()
    assert "tab:fisher-gap" in (paper / "report.md").read_text()


@pytest.mark.long
def test_a_finished_run_is_only_reported_again(paper: Path) -> None:
    before = results(paper)
    fits = {path: path.stat().st_mtime_ns for path in (paper / "sets").rglob("*.npz")}
    assert len(fits) > 10
    run(paper, "--suite", "paper", "--no-per-subset")
    assert fits == {path: path.stat().st_mtime_ns for path in (paper / "sets").rglob("*.npz")}
    assert results(paper)["tables"] == before["tables"]


@pytest.mark.long
def test_a_killed_run_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    methods = ["--methods", "hallutracer,prompt-length", "--no-per-subset", "--limit", "160"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(whole, *methods)
    process = subprocess.Popen(
        [sys.executable, "-m", "service.cli", *command(killed, *methods)],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    limit = time.monotonic() + 120
    while not list(killed.rglob("seed0-fold0.npz")):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < limit
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "results.json").exists()
    run(killed, *methods)
    assert results(killed)["tables"] == results(whole)["tables"]


@pytest.mark.long
def test_another_protocol_in_the_same_folder_is_refused(paper: Path) -> None:
    done = run(paper, "--suite", "paper", "--no-per-subset", "--folds", "4", expect=1)
    assert "was begun with folds = 3, this run has 4" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--data", "nowhere.jsonl"], 2, "neither a JSONL file nor NAME=FOLDER"),
        (["--data", "truefalse=/nonexistent"], 1, "is not a folder"),
        (["--methods", "hallutracer,magic"], 1, "no method 'magic'"),
        (["--methods", "iti"], 1, "hallutracer must be among the methods"),
        (["--model", "some/model"], 2, "name the data to evaluate this model on"),
        (["--limit", "49"], 2, "'49' is not ROWS or NAME=ROWS with at least 50 rows"),
        (["--limit", "demo-questions=many"], 2, "'demo-questions=many' is not ROWS or NAME=ROWS"),
        (["--limit", "helm=60"], 2, "'helm' is not among the data: demo-questions"),
        (["--limit", "60", "--limit", "70"], 2, "ROWS is given twice"),
    ],
)
def test_wrong_input_is_said_before_a_model_is_loaded(
    tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    done = run(tmp_path / "out", *arguments, expect=code)
    assert words in re.sub(r"\s+", " ", done.stderr.replace("│", " "))
    assert not list(tmp_path.rglob("*.f32"))


@pytest.mark.parametrize("limit", [[], ["--limit", "60"]])
@pytest.mark.parametrize(
    ("text", "words"),
    [("", "the file has no rows"), ("hello\n", "line 1"), ('{"id": "a", "label": 1}\n', "'prompt'"),
     ('{"prompt": "x", "label": 1}\n', "no row is hallucinated"),
     ('{"id": "a", "prompt": "x", "label": 1}\n', "no row is hallucinated")],
)  # fmt: skip
def test_problems_of_a_file_are_told_by_its_lines(tmp_path: Path, text: str, words: str, limit: list[str]) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(text)
    done = run(tmp_path / "out", "--data", str(path), *limit, expect=1)
    assert words in done.stderr
    assert str(path) in done.stderr


def test_rows_too_long_for_the_model_are_an_error_or_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"id": str(n), "prompt": f"Is {n} odd?", "label": n % 2, "group": f"g{n // 4}"} for n in range(80)]
    rows[7]["prompt"] = "why " * 400
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ["--data", str(path), "--methods", "hallutracer,prompt-length", "--no-per-subset"]
    done = run(tmp_path / "out", *more, expect=1)
    assert "line 8" in done.stderr
    done = run(tmp_path / "out", *more, "--skip-long")
    assert "79 rows" in done.stdout
    assert "1 rows longer than the model's context of 256 tokens left out" in done.stdout


def test_a_set_without_both_classes_does_not_cost_the_others_their_tables(tmp_path: Path) -> None:
    from service.demo.questions import questions

    asked = questions("dev")[:200]
    paths = {name: tmp_path / f"{name}.jsonl" for name in ("answerable", "hopeless")}
    for name, path in paths.items():
        answers = {"answers": ["no such place"]} if name == "hopeless" else {}
        path.write_text("".join(json.dumps(row | answers) + "\n" for row in asked))
    data = {name: ["--data", str(path)] for name, path in paths.items()}
    limits = ["--limit", "hopeless=60", "--limit", "150"]
    few = ["--methods", "hallutracer,shuffled-labels", "--no-per-subset"]
    done = run(tmp_path / "out", *data["hopeless"], *data["answerable"], *limits, *few)
    assert "Left out: hopeless: no row is factual" in done.stdout
    main = results(tmp_path / "out")["tables"]["main"]  # type: ignore[index]
    assert {row["set"] for row in main["rows"]} == {"answerable"}
    drawn = int(re.findall(r"only (\d+) rows \(--limit\)", done.stdout)[0])
    assert 140 <= drawn <= 160  # whole groups
    aurocs = {row["method"]: row["auroc"]["mean"] for row in main["rows"]}
    assert aurocs["HalluTracer (depth mean)"] > 0.6
    done = run(tmp_path / "alone", *data["hopeless"], "--limit", "60", *few, expect=1)
    assert "hopeless: no row is factual" in done.stderr


def test_a_rival_that_cannot_learn_does_not_cost_the_set_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hallutracer_research.evaluation import run as module
    from service.demo.questions import questions

    rows = [
        {"id": row["id"], "prompt": row["prompt"], "label": number % 2, "group": f"g{number // 2}"}
        for number, row in enumerate(questions("dev")[:120])
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fit, calls = module.fit_method, []

    def fails_late(method: str, *arguments: Any) -> Any:
        calls.append(method)
        if method == "prompt-length" and calls.count(method) == 2:
            raise TrainingError("too alike")
        return fit(method, *arguments)

    monkeypatch.setattr(module, "fit_method", fails_late)
    chosen = ["--data", str(tmp_path / "mine.jsonl"), "--methods", "hallutracer,prompt-length,first-token-entropy"]
    done = run(tmp_path / "out", *chosen)
    assert "mine: left out: Prompt length: too alike" in done.stdout
    assert calls.count("prompt-length") == 2  # not tried again
    main = results(tmp_path / "out")["tables"]["main"]  # type: ignore[index]
    assert [row["method"] for row in main["rows"]] == ["HalluTracer (depth mean)", "First-token entropy"]
    monkeypatch.setattr(module.splits, "shuffled_depth_mean", lambda *_: fails_late("prompt-length"))
    calls[:] = ["prompt-length"]
    failed = run(tmp_path / "own", *chosen[:3], "hallutracer,shuffled-labels", expect=1)
    assert "too alike" in failed.stderr  # our own fit: an error


def test_rows_of_a_file_with_given_labels(tmp_path: Path) -> None:
    from service.demo.questions import questions

    rows = [
        {"id": row["id"], "prompt": row["prompt"], "label": number % 2, "group": f"g{number // 2}", "kind": row["kind"]}
        for number, row in enumerate(questions("dev")[:120])
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(tmp_path / "out", "--data", str(path), "--methods", "hallutracer,first-token-entropy")
    assert "First-token entropy" in done.stdout
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert "subsets" in document["tables"] or "sub-datasets" in json.dumps(document)


def test_rivals_read_the_model_s_own_answers_where_the_labels_are_about_them(tmp_path: Path) -> None:
    from service.demo.questions import questions

    asked = questions("dev")[:200]
    statements = [{"id": row["id"], "prompt": row["prompt"], "label": number % 2, "group": f"g{number // 2}"}
                  for number, row in enumerate(asked[:120])]  # fmt: skip
    for name, rows in (("own", asked), ("given", statements)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--data", str(tmp_path / "own.jsonl"), "--data", str(tmp_path / "given.jsonl"), "--no-per-subset"]
    done = run(tmp_path / "out", *data, "--methods", "hallutracer,sep,perplexity,p-true,mind,D", "--samples", "4")
    assert "given: left out: sep, perplexity, p-true, mind, semantic-entropy" in done.stdout
    table = results(tmp_path / "out")["tables"]["main"]["rows"]  # type: ignore[index]
    found = {row["method"]: row for row in table if row["set"] == "own"}
    assert {row["method"] for row in table if row["set"] == "given"} == {"HalluTracer (depth mean)"}
    assert "".join(row["class"] for row in found.values()) == "AACCCDDD"
    costs = {name: row["cost"] for name, row in found.items()}
    assert costs["Semantic-entropy probe"] == 1.0
    assert costs["EigenScore"] - 1 == pytest.approx(4 * (costs["Perplexity of the answer"] - 1))
    assert costs["P(True)"] > costs["Perplexity of the answer"] + 1
    assert found["Perplexity of the answer"]["auroc"]["mean"] > 0.55
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npz")}
    run(tmp_path / "out", *data, "--methods", "hallutracer,sep,D,perplexity,p-true,mind", "--samples", "4")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npz")} == before
