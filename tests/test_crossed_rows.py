"""The script that makes rows in crossed wordings: what it draws, and that a run resumes and is
exported."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import crossed_rows
from benchmarks.crossed_rows import ANSWER_TOKENS, answer, chunks, draw, export
from service.data.judges import parts
from service.data.rows import prompt_digest
from service.demo.questions import build_world

Row = dict[str, Any]


def write(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def gzipped(path: Path) -> list[Row]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Row]]:
    folder = tmp_path_factory.mktemp("drawn")
    paths = [folder / "opentriviaqa.jsonl", folder / "nq-open.jsonl"]
    for path in paths:
        write(
            path,
            [
                {
                    "id": f"{path.stem}-{number}",
                    "prompt": f"Who built the tower of {path.stem}{number}?",
                    "answers": ["A"],
                    "group": f"question/{path.stem} {number}",
                    "kind": "world",
                }
                for number in range(90)
            ],
        )
    known: list[Row] = [
        {
            "id": f"{path.stem}/{path.stem}-{number}+lone",
            "group": f"joined {path.stem} {number}",
            "kind": "x",
            "messages": [
                {"role": "user", "content": f"Who built the tower of {path.stem}{number}?"}
            ],
        }
        for path in paths
        for number in range(30)
    ]
    known.append(
        {
            "id": "facts/capital:Italy:what+lone",
            "group": "joined italy",
            "kind": "facts/capital",
            "messages": [{"role": "user", "content": "What is the capital of Italy?"}],
        }
    )
    shipped = folder / "rows.jsonl.gz"
    shipped.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in known).encode()))
    return draw(paths, shipped, 0) | {"known": known}


def test_training_rows_have_nothing_of_the_test_rows(drawn: dict[str, list[Row]]) -> None:
    train, test = drawn["train"], drawn["test"]
    split = {fact.group: fact.split for fact in build_world().facts}
    assert {split[row["group"]] for row in test} == {"test"}
    own = {split.get(row["group"]) for row in train if row["kind"].startswith("facts/")}
    assert own <= {"train", None}  # None: a group that a shipped row joined with another
    assert not {row["group"] for row in train} & {row["group"] for row in test}
    forms = {row["form"] for row in train} & {row["form"] for row in test}
    assert {name for name in forms if name.startswith("wording_")} == {"wording_plain"}
    digests = [prompt_digest(row) for row in (*drawn["known"], *train)]
    assert len(set(digests)) == len(digests)


def test_a_prompt_is_kept_once_and_loses_what_only_its_making_needs() -> None:
    asked = [{"role": "user", "content": "Where?"}]
    row = {
        "id": "a",
        "messages": asked,
        "relation": "capital",
        "statement": "It is there.",
        "subject": "x",
    }
    other = row | {"messages": [{"role": "user", "content": "When?"}]}
    kept = [{"id": "a", "messages": asked, "subject": "x"}]
    assert [*crossed_rows.without_copies([row, row, other], {prompt_digest(other)})] == kept


def test_test_rows_ask_each_fact_in_all_held_out_wordings(drawn: dict[str, list[Row]]) -> None:
    asked: dict[str, set[str]] = {}
    for row in drawn["test"]:
        if row["form"].startswith("wording_"):
            asked.setdefault(row["id"].rpartition("+")[0], set()).add(row["form"])
    assert len(asked) == 120
    assert all(len(forms) == 9 for forms in asked.values())


def test_groups_are_those_of_the_shipped_rows(drawn: dict[str, list[Row]]) -> None:
    trivia = [row for row in drawn["train"] if row["kind"] == "opentriviaqa/world"]
    assert trivia
    assert all(row["group"].startswith("joined ") for row in trivia)


def test_wordings_of_a_fact_stand_together_and_kinds_are_mixed(drawn: dict[str, list[Row]]) -> None:
    names = [row["id"].rpartition("+")[0] or row["id"] for row in drawn["train"]]
    changes = sum(name != before for before, name in zip(names, names[1:], strict=False))
    assert changes == len(set(names)) - 1
    first = {row["kind"] for row in drawn["train"][:600]}
    assert len(first) >= 12


@pytest.mark.parametrize(
    ("answers", "common"),
    [
        (["He"], True),
        (["Be", "Beryllium"], True),
        (["Fe"], False),
        ([parts(["Paris"], ["In"])], True),
        ([parts(["Paris"], ["Euro"])], False),
    ],
)
def test_an_answer_that_any_sentence_holds_is_told(answers: list[str], common: bool) -> None:
    assert crossed_rows.in_any_sentence({"answers": answers}) is common


ASKED: list[Row] = [
    {
        "id": f"facts/capital:L{number}+wording_plain",
        "group": f"g{number}",
        "kind": "facts/capital",
        "form": "wording_plain",
        "messages": [{"role": "user", "content": f"What is the capital of Land{number}?"}],
        "answers": ["x"],
    }
    | ({"answer_tokens": 3} if number == 5 else {})
    for number in range(9)
] + [
    {
        "id": "task/a/1",
        "group": "t",
        "kind": "task/a",
        "form": "task",
        "applies": False,
        "messages": [{"role": "user", "content": "Hello there!"}],
    }
]


def test_a_run_resumes_chunk_by_chunk_and_exports_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(crossed_rows, "CHUNK", 5)
    folder, run, to = tmp_path / "rows", tmp_path / "run", tmp_path / "demo-crossed"
    folder.mkdir()
    common = ASKED[1] | {"id": "facts/symbol:helium+wording_plain", "answers": ["He"]}
    write(folder / "train.jsonl", [*ASKED[:1], common, *ASKED[2:]])
    write(folder / "test.jsonl", [row | {"id": f"test {row['id']}"} for row in ASKED[:3]])
    assert [(name, len(rows)) for name, rows in chunks(folder)] == [
        ("train-000", 5),
        ("train-001", 5),
        ("test-000", 3),
    ]
    answer(folder, run, "demo", limit=6)
    assert [path.name for path in run.glob("*.labels.jsonl")] == ["train-000.labels.jsonl"]
    before = (run / "train-000.labels.jsonl").read_bytes()
    export(folder, run, to)
    prefix = gzipped(tmp_path / "demo-crossed-rows.jsonl.gz")
    names = {row["id"]: row for row in ASKED}
    assert {row["id"] for row in prefix} <= {*names} - {"facts/capital:L1+wording_plain"}
    answer(folder, run, "demo", limit=None)
    assert (run / "train-000.labels.jsonl").read_bytes() == before
    monkeypatch.setattr(crossed_rows.library, "load_engine", None)
    answer(folder, run, "demo", limit=None)  # all is done: no model is loaded
    export(folder, run, to)
    rows = gzipped(tmp_path / "demo-crossed-rows.jsonl.gz")
    assert rows[: len(prefix)] == prefix
    assert rows[-1] == ASKED[-1]  # it asks for no fact, so that it has neither answer nor label
    for row in rows[:-1]:
        assert row["label"] == 0
        assert row["answer"]
        assert row["messages"] == names[row["id"]]["messages"]
    assert {
        row["id"].partition(" ")[0] for row in gzipped(tmp_path / "demo-crossed-test-rows.jsonl.gz")
    } <= {"test"}
    lengths = {path.name for path in run.iterdir() if path.is_dir()}
    assert lengths == {
        f"train-000-{ANSWER_TOKENS}",
        f"train-001-{ANSWER_TOKENS}",
        "train-001-3",
        f"test-000-{ANSWER_TOKENS}",
    }
    assert "3 of 3 chunks" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["smollm2", "qwen2.5-coder-1.5b"])
def test_the_rows_of_a_model_are_one_training_file(model: str) -> None:
    files = sorted(Path("docs").glob(f"{model}*-rows.jsonl.gz"))
    assert len(files) == 3
    names = [row["id"] for file in files for row in gzipped(file)]
    assert len(names) == len(set(names))
