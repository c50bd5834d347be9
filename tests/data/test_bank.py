"""The questions that come with the package, and training that is given nothing but a model."""

from __future__ import annotations

import json
import lzma
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from hallutracer_research.data.bank import OTHER_NAMES, main, packed
from service.data.bank import ATTRIBUTION, SPLITS, bank_file, bank_rows
from service.errors import TrainingError
from service.library.training import bundle_name, completed, with_questions
from service.prompts import render
from service.trainer.options import TrainOptions
from tests.command_line import hallutracer
from tests.fitting.planted import PlantedEngine, Quiet
from tests.kit.rows import Rows, read_lines
from tests.kit.tables import cells

SOURCES = ("opentriviaqa", "nq-open", "facts")


def test_the_halves_are_whole_rows_that_share_no_group_and_no_question() -> None:
    train, held_out = map(bank_rows, SPLITS)
    assert (len(train), len(held_out)) == (9593, 1800)
    for rows in (train, held_out):
        assert len({row["id"] for row in rows}) == len(rows)
        assert {row["kind"].partition("/")[0] for row in rows} == set(SOURCES)
        for row in rows:
            assert row["answers"]
            assert all(map(str.strip, (row["prompt"], *row["answers"])))
    assert {row["group"] for row in train}.isdisjoint(row["group"] for row in held_out)
    prompts = ({row["prompt"].lower() for row in rows} for rows in (train, held_out))
    assert set.isdisjoint(*prompts)
    for row in train:
        assert row["kind"] != "facts/capital" or row["answers"][0] in row["statement"]


def test_a_fact_is_accepted_by_its_other_names() -> None:
    rows = [row for split in SPLITS for row in bank_rows(split) if row["kind"][:6] == "facts/"]
    assert any(row["answers"] == ["Türkiye", "Turkey"] for row in rows)
    first = {row["answers"][0] for row in rows}
    for name, others in OTHER_NAMES.items():
        accepted = [row["answers"] for row in rows if row["answers"][0] == name]
        assert all(set(others) <= set(answers) for answers in accepted)
        assert accepted or name in ("Cape Verde", "Eswatini", "Timor-Leste", "Vatican City")
    # None of them is the name of another thing; two are the same.
    shared = first & {other for others in OTHER_NAMES.values() for other in others}
    assert shared == {"Romanian", "British pound"}


def test_each_beginning_is_a_sample_of_the_whole() -> None:
    whole, beginning = bank_rows("train"), bank_rows("train")[:1000]
    assert beginning == whole[:1000]
    sources = [row["kind"].partition("/")[0] for row in whole]
    for source in SOURCES:
        share = sources[:1000].count(source) / 1000
        assert share == pytest.approx(sources.count(source) / 9593, abs=0.05)


def test_the_files_are_small_and_name_their_sources_and_licences() -> None:
    assert sum(bank_file(split).stat().st_size for split in SPLITS) < 1_500_000
    text = ATTRIBUTION.read_text(encoding="utf-8")
    assert all(f"`{source}/*`" in text for source in SOURCES)
    assert all(
        licence in text for licence in ("CC BY-SA 4.0", "CC BY-SA 3.0", "ODbL 1.0", "CC BY 4.0")
    )


def test_packing_the_rows_again_gives_the_same_rows(tmp_path: Path) -> None:
    rows = bank_rows("held-out")
    lines = lzma.decompress(packed([*reversed(rows)])).decode().splitlines()
    assert [json.loads(line) for line in lines] == rows
    overlapping = tmp_path / "rows.jsonl"
    overlapping.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(ValueError, match="1 groups are in both files"):
        main([str(overlapping), str(overlapping)])


NAMES = cells(
    """
    Qwen/Qwen2.5-0.5B-Instruct | qwen2.5-0.5b-instruct
    ./models/My Model (v2)/ | my-model-v2
    /data/gemma-3-270m-it-Q8_0.GGUF | gemma-3-270m-it-q8_0
    demo | my-demo
    owner/smollm2 | my-smollm2
    owner/..x..y | x.y
    owner/模型 | bundle
    """
)


@pytest.mark.parametrize(("model", "name"), [*NAMES, ("owner/" + "a" * 90, "a" * 64)])
def test_a_bundle_is_named_after_its_model(model: str, name: str) -> None:
    assert bundle_name(model) == name


class Asked(NamedTuple):
    """What a run asks: its options, the rows of both files, and what was printed."""

    options: TrainOptions
    train: Rows
    held_out: Rows
    printed: list[str]


def asked(folder: Path, questions: int, max_tokens: int = 6000) -> Asked:
    options, console = TrainOptions(run_dir=folder, questions=questions), Quiet()
    engine = PlantedEngine(max_tokens=max_tokens)
    options = with_questions(completed(options, "owner/tiny"), engine, console, time.monotonic())
    assert options.test is not None
    return Asked(options, read_lines(options.file), read_lines(options.test), console.lines)


def test_a_model_alone_is_asked_the_bank_and_its_answers_are_judged(tmp_path: Path) -> None:
    run = asked(tmp_path / "run", 400)
    options = run.options
    assert (options.name, options.answers, options.answer_tokens) == ("tiny", "generate", 24)
    assert (run.train, run.printed) == (bank_rows("train")[:400], [])
    assert run.held_out == bank_rows("held-out")[: 400 * 1800 // 9593]
    again, more = (asked(tmp_path / "run", count).options for count in (400, 500))
    assert (again.data, again.test) == (options.data, options.test)
    assert more.data != options.data


def test_questions_of_the_bank_that_are_too_long_for_the_model_are_left_out(tmp_path: Path) -> None:
    """One of one's own is refused by its line."""
    engine, rows = PlantedEngine(max_tokens=6000), bank_rows("train")[:400]
    lengths = [len(render(engine, row["prompt"], None, "text")) for row in rows]
    longest, limit = max(lengths), max(lengths) + 24 - 1
    expected = [row for row, length in zip(rows, lengths, strict=True) if length < longest]
    assert 0 < len(rows) - len(expected) < 5
    run = asked(tmp_path / "run", 400, limit)
    assert run.train == expected
    assert run.printed == [
        f"left out: {400 - len(run.train)} of the package's 400 questions, which with an answer are"
        f" longer than the model's {limit} tokens"
    ]


def test_rows_of_ones_own_stay_as_they_are() -> None:
    own = TrainOptions(data=("mine.jsonl",))
    assert completed(own, "owner/tiny") == TrainOptions(data=("mine.jsonl",), name="tiny")
    with pytest.raises(TrainingError, match="come with the package"):
        completed(TrainOptions(data=("mine.jsonl",), questions=50), None)
    with pytest.raises(TrainingError, match="that have the labels"):
        completed(TrainOptions(labels="given"), None)


def test_the_command_prints_the_questions_and_counts_them_by_kind() -> None:
    done = hallutracer("data", "bank", "--held-out")
    assert [json.loads(line) for line in done.stdout.splitlines()] == bank_rows("held-out")
    assert "1,800 questions (" in done.stderr
    assert "ATTRIBUTION.md" in done.stderr
