"""``hallutracer evaluate`` as a user runs it, on the demo model: the suite, a new rival, a killed
run, wrong input."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from transformers import BertConfig, BertModel

from hallutracer_research.evaluating import source
from hallutracer_research.evaluation import splits
from hallutracer_research.evaluation.methods import METHODS, Method
from hallutracer_research.evaluation.methods.base import Fold
from hallutracer_research.evaluation.options import method_names
from hallutracer_research.evaluation.page import Verdict
from hallutracer_research.paper.tables import PUBLISHED
from service.demo.questions import questions
from service.errors import TrainingError
from tests.command_line import hallutracer
from tests.engines import tiny
from tests.kit.rows import only, without
from tests.kit.tables import cells, lines
from tests.research.data.samples import write_lines

ROOT = Path(__file__).parents[3]
TITLE = "HalluTracer (depth mean)"
QUICK = dict(
    line.split()
    for line in lines(
        """
        --limit 160
        --seeds 1
        --folds 3
        --inner-folds 2
        --c 0.3
        --jobs 1
        --threads 1
        """
    )
)
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


def by_method(rows: list[dict[str, Any]], of_set: str | None = None) -> dict[str, dict[str, Any]]:
    """Rows of a table, of one set or of the only one, by the method's title."""
    return {row["method"]: row for row in rows if of_set in (None, row["set"])}


def files(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in out.rglob("*.npz")}


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    return str(write_lines(path, rows))


def labelled(count: int = 120) -> list[dict[str, Any]]:
    """Questions with labels of their own that nothing in the model foretells."""
    return [
        row | {"label": number % 2, "group": f"g{number // 2}"}
        for number, row in enumerate(only(questions("dev")[:count], "id", "prompt", "kind"))
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
    assert {*PUBLISHED} <= labels
    main = by_method(document["tables"]["main"]["rows"])
    assert 0.6 < main[TITLE]["auroc"]["mean"] < 0.95
    assert main[TITLE]["cost"] == 1.0
    assert 1.0 < main["First-token entropy"]["cost"] < 1.5
    assert (
        main["Share of its kind"]["class"] == main["Prompt length"]["class"] == "none"
    )  # what confounds a set
    assert set(main["ITI-Probe"]) >= {"auroc", "auprc_hallucinated", "auprc_factual"}
    assert main["ITI-Probe"]["auroc"]["low"] < main["ITI-Probe"]["auroc"]["high"]
    assert document["facts"]["command"].startswith("hallutracer evaluate")
    assert {claim["verdict"] for claim in document["claims"]} <= {*get_args(Verdict)}
    assert not re.search(r"""(src|href)=["']https?:""", (paper / "report.html").read_text()), (
        "it must need no network"
    )
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
    run(killed, *TWO)
    assert results(killed)["tables"] == results(whole)["tables"]


SECOND = ("other-model", "text-embedding")
OF_CLASS_D = [name for name, method in METHODS.items() if method.cost == "D"]
DEMO = "hallutracer-demo"
NEW = {"Vowels of the question", "Fails late"}
BEHIND = ",".join(name for name, method in METHODS.items() if method.reads == "behind-answer")
# of the model's own answers
READ = f"sep,content-entropy,content-and-depth-mean,{BEHIND},perplexity,p-true,mind,D"
MORE = "kind-and-depth-mean,last-8-depth-mean,scaffold-depth-mean,pca-heads,scaffold-entropy"
SMALL = (
    "--methods",
    f"hallutracer,{MORE},{READ},fails-late,vowels",
    "--samples",
    "2",
    "--skip-long",
)


def encoder(folder: Path) -> str:
    """A sentence encoder of random weights."""
    shape = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(**shape, intermediate_size=32)).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """One run on three sets, with two new rivals: questions that the model answers, some of which
    it gets all wrong (by answers that nobody gives), and rows with labels of their own, two kinds,
    one of them too long."""
    folder, calls = tmp_path_factory.mktemp("small"), list[int]()

    def vowels(fold: Fold) -> np.ndarray:
        texts = [fold.inputs.text[row] for row in fold.test]
        return np.array([float(len(re.findall("[aeiou]", text))) for text in texts])

    def fails_late(fold: Fold) -> np.ndarray:
        calls.append(len(fold.inputs.label))
        if len(calls) == 2:
            raise TrainingError("too alike")
        return np.zeros(len(fold.test))

    own = without(questions("dev")[:160], "kind")
    given = [row | {"kind": "ab"[number // 40]} for number, row in enumerate(labelled(80))]
    given[7]["prompt"] = "why " * 400
    sets = {
        "own": own,
        "given": given,
        "hopeless": [row | {"answers": ["no such place"]} for row in own],
    }
    data = {
        name: ("--data", written(folder / f"{name}.jsonl", rows)) for name, rows in sets.items()
    }
    limits = ("--limit", "own=140", "--limit", "hopeless=50", "--limit", "90")
    whole = (*(word for one in data.values() for word in one), *limits)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(METHODS, "vowels", Method("Vowels of the question", "none", vowels))
        patched.setitem(METHODS, "fails-late", Method("Fails late", "A", fails_late))
        models = ("--other-model", "demo", "--embedder", encoder(folder / "encoder"))
        done = run(folder / "out", *whole, *SMALL, *models)
        tables = results(folder / "out")["tables"]
        yield SimpleNamespace(
            out=folder / "out",
            data=data,
            whole=whole,
            calls=calls[:],
            stdout=done.stdout,
            tables=tables,
            found={name: by_method(tables["main"]["rows"], name) for name in sets},
        )


@pytest.mark.long
def test_a_set_without_both_classes_does_not_cost_the_others_their_tables(
    small: SimpleNamespace,
) -> None:
    assert "Left out: hopeless: no row is factual" in small.stdout
    assert small.found["given"]
    assert not small.found["hopeless"]
    assert (
        130 <= int(re.findall(r"only (\d+) rows \(--limit\)", small.stdout)[0]) <= 140
    )  # whole groups
    assert small.found["own"][TITLE]["auroc"]["mean"] > 0.6
    few = ("--limit", "50", *TWO)
    assert (
        "hopeless: no row is factual"
        in run(small.out.parent / "no", *small.data["hopeless"], *few, expect=1).stderr
    )


@pytest.mark.long
def test_a_new_rival_is_one_function_and_one_line(small: SimpleNamespace) -> None:
    """It is in the table, inside the sub-datasets too; one that cannot learn does not cost the set
    its table."""
    assert "own: left out: Fails late: too alike" in small.stdout
    assert small.calls.count(small.calls[0]) == 2  # not tried again
    assert NEW & set(small.found["own"]) == {"Vowels of the question"}
    rivals = {row["method"] for row in small.tables["subsets"]["rows"]}
    assert set(small.found["given"]) == rivals | {
        METHODS["kind-and-depth-mean"].title
    }  # one sub-dataset is one kind
    assert rivals >= {
        TITLE,
        *NEW,
        *(METHODS[name].title for name in ("pca-heads", *SECOND)),
    }


@pytest.mark.long
def test_rivals_read_the_model_s_own_answers_where_the_labels_are_about_them(
    small: SimpleNamespace,
) -> None:
    said = re.search(r"given: left out: (.+): the labels are the set's own", small.stdout)
    assert set(said[1].split(", ")) == {*READ.removesuffix("D").strip(",").split(","), *OF_CLASS_D}
    found = small.found["own"]
    assert (
        " ".join(row["class"] for row in found.values())
        == f"A A A A A other other B {'C ' * 18}D D D none"
    )
    costs = {name: row["cost"] for name, row in found.items()}
    assert costs["Semantic-entropy probe"] == 1.0
    assert costs["EigenScore"] - 1 == pytest.approx(2 * (costs["Perplexity of the answer"] - 1))
    assert costs["P(True)"] > costs["Perplexity of the answer"] + 1
    assert found["Perplexity of the answer"]["auroc"]["mean"] > 0.55


@pytest.mark.long
def test_another_model_and_an_encoder_are_read_on_the_same_rows(small: SimpleNamespace) -> None:
    assert (
        "own: left out: Share of its kind and depth mean: the rows name fewer than two kinds"
        in small.stdout
    )
    for name in ("own", "given"):
        found = small.found[name]
        ours, other = found[TITLE], found[METHODS["other-model"].title]
        assert other["auroc"]["mean"] == pytest.approx(
            ours["auroc"]["mean"], abs=0.01
        )  # here it is the same one
        assert other["cost"] == 1.0
        assert 0 <= found[METHODS["text-embedding"].title]["auroc"]["mean"] <= 1
        behind = found[METHODS["scaffold-depth-mean"].title]
        assert 1.0 < behind["cost"] < 2.0
        assert behind["auroc"]["mean"] != ours["auroc"]["mean"]
        assert ("within" in ours) is (name == "given")
    ahead = {(row["set"], row["over"]): row for row in small.tables["ahead"]["rows"]}
    same = ahead["own", METHODS["other-model"].title]["gain"]
    assert same["low"] <= 0 <= same["high"]
    gains = {row["set"] for row in small.tables["ahead"]["rows"] if "within" in row}
    assert gains == {"given"}
    ours = by_method(small.tables["decisions"]["rows"], "own")[TITLE]
    assert 0 < ours["e_aurc"]["mean"] < 0.5
    caught = [ours[f"caught_at_{share}"]["mean"] for share in (5, 10, 20)]
    assert caught == sorted(caught)
    assert caught[-1] <= 1


@pytest.mark.long
def test_finished_runs_are_shown_side_by_side(small: SimpleNamespace) -> None:
    out = small.out.parent / "two"
    done = run(out, *small.data["own"], "--limit", "140", *TWO, "--beside", str(small.out))
    models, scale = (results(out)["tables"][name]["rows"] for name in ("models", "scale"))
    here, there = models
    assert (here["set"], here["model"], there["model"]) == ("own", DEMO, f"{DEMO} (out)")
    for key in ("rows", "right", "auroc", "e_aurc", "caught_at_10", "calibration", "weights"):
        assert here[key] == there[key] or key == "weights", key
        assert here[key] is not None
    assert here["milliseconds"] > 0
    rows = by_method(scale)
    assert {TITLE, "Prompt length", "P(True)"} <= set(rows)
    assert rows["Prompt length"][f"auroc {DEMO}"] is not None
    assert rows["P(True)"].get(f"auroc {DEMO}") is None
    assert rows["P(True)"][f"auroc {DEMO} (out)"]["low"] > 0
    assert "Model by model" in (out / "report.md").read_text()
    assert "Every method, model by model" not in done.stdout


@pytest.mark.long
def test_rows_too_long_for_the_model_are_an_error_or_left_out_and_counted(
    small: SimpleNamespace,
) -> None:
    assert "79 rows" in small.stdout
    assert "1 rows longer than the model's context of 256 tokens" in small.stdout
    assert "line 8" in run(small.out.parent / "long", *small.data["given"], *TWO, expect=1).stderr


@pytest.mark.long
def test_an_own_fit_that_fails_is_an_error_and_what_is_kept_is_not_computed_again(
    small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise TrainingError("too alike")

    before = files(small.out)
    monkeypatch.setattr(splits, "shuffled_depth_mean", fails)
    more = (
        "--methods",
        "hallutracer,vowels,sep,D,perplexity,p-true,mind,shuffled-labels",
        *SMALL[2:],
    )
    assert "too alike" in run(small.out, *small.whole, *more, expect=1).stderr
    assert files(small.out) == before


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    cells(
        """
        --data nowhere.jsonl | 2 | nowhere.jsonl
        --data truefalse=/nonexistent | 1 | is not a folder
        --methods hallutracer,magic | 1 | 'magic'
        --methods iti | 1 | hallutracer must be among the methods
        --methods hallutracer,other-model | 1 | other-model needs another model
        --methods hallutracer,text-embedding | 1 | text-embedding needs another model
        --model some/model | 2 | name the data
        --limit 49 | 2 | '49'
        --beside nowhere | 1 | holds no finished evaluation
        --limit demo-questions=many | 2 | 'demo-questions=many'
        --limit helm=60 | 2 | 'helm' is not among the data
        --limit 60 --limit 70 | 2 | given twice
        """
    ),
)
def test_wrong_input_is_said_before_a_model_is_loaded(
    tmp_path: Path, arguments: str, code: str, words: str
) -> None:
    done = run(tmp_path / "out", *arguments.split(), expect=int(code))
    assert words in re.sub(r"\s+", " ", done.stderr.replace("│", " "))
    assert not list(tmp_path.rglob("*.f32"))


def test_rows_with_labels_may_be_answered_anew_and_those_that_ask_for_no_fact_are_left_out(
    tmp_path: Path,
) -> None:
    rows = [row | {"label": number % 2} for number, row in enumerate(questions("dev")[:120])]
    data = written(tmp_path / "mine.jsonl", [*rows, {"prompt": "Write a poem.", "applies": False}])
    common = ("--data", data, *TWO, "--limit", "1000")
    for name, more in (("given", ()), ("generated", ("--labels", "generate"))):
        printed = run(tmp_path / name, *common, *more).stdout
        assert "1 rows that ask for no fact left out" in printed
    about = [
        results(tmp_path / name)["tables"]["sets"]["rows"][0] for name in ("given", "generated")
    ]
    assert (about[0]["right"], about[0]["rows"]) == (0.5, 120)
    assert about[1]["right"] != 0.5


@pytest.mark.parametrize("limit", [[], ["--limit", "60"]])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no rows"),
        ("hello\n", "line 1"),
        ('{"id": "a", "label": 1}\n', "'prompt'"),
        ('{"prompt": "x", "label": 1}\n', "no row is hallucinated"),
    ],
)
def test_problems_of_a_file_are_told_by_its_lines(
    tmp_path: Path, text: str, words: str, limit: list[str]
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(text)
    done = run(tmp_path / "out", "--data", str(path), *limit, expect=1)
    assert words in done.stderr
    assert str(path) in done.stderr


@pytest.mark.parametrize(
    "file", sorted((ROOT / "research" / "tables").glob("*.toml")), ids=lambda file: file.stem
)
def test_a_table_s_file_names_options_methods_and_sets_that_there_are(
    tmp_path: Path, file: Path
) -> None:
    table = tomllib.loads(file.read_text())["evaluate"]
    assert set(method_names(table["methods"])) <= set(METHODS)
    for text in table["data"]:
        name, equals, folder = text.partition("=")
        (tmp_path / (folder or name)).write_text("{}\n")
        assert source(text if equals else str(tmp_path / name)).known == (name if equals else None)
    shown = hallutracer("evaluate", "--config", str(file), "--print-config")
    assert shown.returncode == 0, shown.stderr
    for key in table:
        assert f"# evaluate.{key} in {file}" in shown.stdout, key
