"""Files as people have them: CSV, Parquet, packed lines, other names for our fields, other ways to
write a label."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import json
import lzma
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from service.data.rows import objects
from service.data.training_rows import read_dataset
from service.errors import DataError, TrainingError
from service.trainer.options import TrainOptions
from tests.command_line import hallutracer
from tests.fitting.planted import write_rows
from tests.kit.chats import turns
from tests.kit.rows import Rows
from tests.kit.tables import cells

ROWS: Rows = [
    {
        "prompt": f'Question {n}, with a comma, "quotes" and\na second line?',
        "label": n % 2,
        "group": f"g{n}",
    }
    for n in range(6)
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def read(
    path: Path, labels: Any = "given", **more: Any
) -> list[tuple[str | None, int | None, tuple[str, ...]]]:
    return [
        (row.prompt, row.label, row.answers)
        for row in read_dataset(path, labels, folds=0, **more).rows
    ]


def refused(path: Path, labels: Any = "given") -> list[str]:
    with pytest.raises(DataError) as caught:
        read_dataset(path, labels, folds=0)
    return caught.value.problems


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="")
    return path


def written_csv(path: Path, delimiter: str = ",", bom: bool = False) -> Path:
    with path.open("w", encoding="utf-8-sig" if bom else "utf-8", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def test_packed_lines_and_tables_are_the_same_rows(tmp_path: Path) -> None:
    plain = written(tmp_path / "rows.jsonl", LINES)
    table = written_csv(tmp_path / "a.csv")
    tables = [table, written_csv(tmp_path / "b.csv", ";", bom=True)]
    tables.append(written_csv(tmp_path / "c.tsv", "\t"))
    packed = {
        "rows.jsonl.gz": plain,
        "packed.jsonl": plain,  # also where the name does not say so
        "d.csv.gz": table,
    }
    for name, source in packed.items():
        (tmp_path / name).write_bytes(gzip.compress(source.read_bytes()))
        tables.append(tmp_path / name)
    for path in tables:
        assert read(path) == read(plain), path
    digests = [read_dataset(path, "given", folds=0).digest for path in (tables[3], plain)]
    assert digests[0] == digests[1]


def test_cells_have_the_types_of_their_fields(tmp_path: Path) -> None:
    path = written(
        tmp_path / "rows.csv",
        'prompt,answers,applies,kind,answer_tokens\na,"[""x"", ""y""]",,k,64\n'
        "b,z,,,\n\nHi!,,FALSE,,\n",
    )
    rows = read_dataset(path, "generate", folds=None).rows
    assert [(row.line, row.answers, row.answer_tokens, row.applies) for row in rows] == [
        (2, ("x", "y"), 64, True),
        (3, ("z",), 0, True),
        (5, (), 0, False),
    ]
    written(path, "prompt,label\na,factual\nb,0\nc,1.0\nd,yes\n")
    assert refused(path) == [
        'line 5: \'label\' must be "factual" or "hallucinated", or the number 1 or 0 for these,'
        ' found "yes"'
    ]


# A file's name, its bytes as Latin-1, and the problem.
DAMAGED = cells(
    """
    rows.csv | prompt,prompt\\na,b | the column 'prompt' appears twice
    rows.csv | prompt,label\\na,1,2 | line 2: 3 cells, and line 1 names 2
    rows.csv | prompt,label\\n"a,1\\n | no CSV
    rows.csv | prompt,label\\n\xff,1 | line 2: not UTF-8
    rows.csv | prompt,answers\\na,"['b', 'c']" | line 2: 'answers' begins with a bracket
    rows.csv | <!DOCTYPE html>\\n<html> | a web page
    rows.jsonl.zst | \x28\xb5\x2f\xfd\x24\\n\xff | packed with Zstandard.*zstd -d rows.jsonl.zst
    rows.xlsx | PK\x03\x04\\n\xff | a spreadsheet.*CSV in UTF-8
    rows.arrow | ARROW1\0\0\\n | an Arrow file
    rows.db | SQLite format 3\0 | an SQLite database
    rows.jsonl | version https://git-lfs.github.com/spec/v1\\noid | Git LFS pointer.*git lfs pull
    rows.parquet | PAR1 and no more | Parquet
    """
)
PRINTED = json.dumps(ROWS, indent=2).encode()


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        *((name, text.encode("latin-1"), problem) for name, text, problem in DAMAGED),
        ("rows.csv", b"", "the file has no rows"),
        ("rows.jsonl", b"", "the file has no rows"),
        ("rows.jsonl", b"\n \n", "the file has no rows"),
        ("rows.jsonl", LINES.encode("utf-16"), "is UTF-16"),
        ("rows.jsonl", LINES.encode("utf-16-le"), "is UTF-16"),
        ("rows.csv", codecs.BOM_UTF16_BE + "prompt,label".encode("utf-16-be"), "is UTF-16"),
        ("rows.jsonl", LINES.encode("utf-32"), "wide characters: save the file as UTF-8"),
        ("rows.json", PRINTED, "is one JSON array.*jq -c '.\\[\\]' rows.json > rows.jsonl"),
        ("rows.json", json.dumps(ROWS).encode(), "is one JSON array"),
        ("rows.json", codecs.BOM_UTF8 + PRINTED, "is one JSON array"),
        ("rows.json.gz", gzip.compress(PRINTED), "is one JSON array"),
        ("rows.json", b'{\n"prompt": "a"}', "over several lines.*jq -c . rows.json"),
        ("rows.json", json.dumps({"data": ROWS}).encode(), "'data': jq -c '.data\\[\\]' rows"),
        ("rows.json", b'{\n"rows": %b}' % PRINTED, "one JSON object, below 'rows'"),
        ("rows.jsonl.gz", gzip.compress(LINES.encode())[:-9], "a damaged gzip file"),
        ("rows.jsonl.bz2", bz2.compress(LINES.encode()), "bzip2.*bunzip2 -k rows.jsonl.bz2"),
        ("rows.jsonl.xz", lzma.compress(LINES.encode()), "packed with xz"),
    ],
)
def test_a_file_that_is_wrong_as_a_whole_gets_one_message(
    tmp_path: Path, name: str, data: bytes, problem: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError, match=problem) as caught:
        read_dataset(path, "given", folds=0)
    assert len(caught.value.problems) == 1


def test_a_folder_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# notes")
    [problem] = refused(tmp_path)
    assert problem.startswith("is a folder without requests: name a file in it")


def test_the_requests_of_a_folder_are_rows_as_the_service_reads_them(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Where is "}, {"type": "text", "text": "Bern?"}]
    request = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts, "name": "ann"},
    ]
    chat = {"model": "m", "temperature": 0.2, "messages": request}
    written(tmp_path / "a.json", json.dumps(chat, indent=2))
    oslo = turns("Where is Oslo?")
    body = {"messages": oslo, "tools": []}
    batch = {"custom_id": "q7", "method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = [batch, {"model": "m", "prompt": "The capital of Chad is"}]
    written(tmp_path / "b.jsonl", "\n\n".join(map(json.dumps, lines)) + "\n")
    written(tmp_path / "README.txt", "not a request")
    first, second, third = read_dataset(tmp_path, "self", folds=None).rows
    assert first.messages == turns("Where is Bern?", system="Be brief.")
    assert (second.id, second.messages) == ("q7", oslo)
    assert (third.id, third.prompt) == ("3", "The capital of Chad is")


def test_the_requests_of_a_folder_are_parsed_once_and_may_begin_with_a_byte_order_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = json.dumps({"prompt": "Where is Bern?"}).encode()
    (tmp_path / "a.json").write_bytes(codecs.BOM_UTF8 + request)
    (tmp_path / "b.jsonl").write_bytes(codecs.BOM_UTF8 + request.replace(b"Bern", b"Oslo"))
    parsed: list[str] = []
    loads = json.loads

    def counting(text: str, **more: Any) -> Any:
        parsed.append(text)
        return loads(text, **more)

    monkeypatch.setattr("service.data.requests.json.loads", counting)
    rows = read_dataset(tmp_path, "self", folds=None).rows
    assert [row.prompt for row in rows] == ["Where is Bern?", "Where is Oslo?"]
    assert len(parsed) == 2


def test_a_request_that_is_no_json_is_named_by_file_and_line(tmp_path: Path) -> None:
    for text, problem in (
        (b'{"prompt": "a", "temperature": NaN}', "line 2: invalid JSON: NaN is not JSON"),
        (b'{"prompt": "a", "prompt": "b"}', "line 2: invalid JSON: key 'prompt' appears twice"),
        (b'{"prompt": "\xff"}', "line 2: not UTF-8 at byte 13: save the file as UTF-8"),
    ):
        (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "c"}\n' + text + b"\n")
        with pytest.raises(DataError, match=re.escape(problem)) as caught:
            read_dataset(tmp_path, "self", folds=None)
        assert "a.jsonl: 1 problem" in str(caught.value)


REFUSED_REQUESTS = cells(
    r"""
    { | a.json: 1 problem; nothing was done\n  invalid JSON
    [] | a.json: 1 problem; nothing was done\n  a request is a JSON object
    {"messages": [{"role": "user", "content": "a"}], "tools": [{}]} | has 'tools'
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]} | must be a string
    {"messages": [{"role": "tool", "content": "a", "tool_call_id": "b"}]} | exactly 'role'
    """
)


@pytest.mark.parametrize(("request_body", "problem"), REFUSED_REQUESTS)
def test_a_request_that_no_row_can_hold_is_refused(
    tmp_path: Path, request_body: str, problem: str
) -> None:
    written(tmp_path / "a.json", request_body)
    with pytest.raises(DataError, match=re.escape(problem)):
        read_dataset(tmp_path, "self", folds=None)


LISTS = (
    '{"answers": ["b"], "prompt": "a"}',
    '{"passages": [{"text": "x"}], "prompt": "a", "answers": "b"}',
)


@pytest.mark.parametrize("row", LISTS)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_one_row_with_a_list_is_a_row(tmp_path: Path, row: str, name: str) -> None:
    assert read(written(tmp_path / name, row), "generate") == [("a", None, ("b",))]


def test_line_ends_and_separators_of_spreadsheets(tmp_path: Path) -> None:
    table = "prompt{0}label{0}group\na{0}1{0}x\nb{0}0{0}y\n"
    texts = {
        "old.csv": table.format(",").replace("\n", "\r"),
        "excel.csv": "sep=;\r\n" + table.format(";"),
        "pipe.csv": table.format("|"),
        "table.txt": table.format("\t"),
        "named_lines.jsonl": table.format(","),
        "old.jsonl": '{"prompt": "a", "label": 1}\r{"prompt": "b", "label": 0}\r',
    }
    for name, text in texts.items():
        assert read(written(tmp_path / name, text)) == [("a", 1, ()), ("b", 0, ())], name
    path = written(tmp_path / "sep.csv", "sep=;\nprompt;label\na;1\nb;x\n")
    assert refused(path)[0].startswith("line 4: ")  # as an editor counts
    written(path, "sep=;\nprompt;label\na;1;2\n")
    assert refused(path) == ["line 3: 3 cells, and line 2 names 2 columns"]


def test_a_line_of_no_json_says_what_is_expected_and_where(tmp_path: Path) -> None:
    path = written(
        tmp_path / "rows.jsonl",
        'What is the capital of France?\n{"prompt": "b", "label": 0,}\n',
    )
    assert refused(path) == [
        (
            "line 1: invalid JSON: Expecting value, at character 1: an object is expected, such as"
            ' {"prompt": "..."}; a file with a question a line is to be named .txt'
        ),
        "line 2: invalid JSON: Expecting property name enclosed in double quotes, at character 28",
    ]


def test_a_row_without_any_known_name_tells_which_it_has(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.csv", "What is the capital of France?,1\nOf Spain?,0\n")
    missing = "line 2: 'prompt' (or 'messages') is missing; the row has"
    assert refused(path)[0] == f"{missing} 'What is the capital of France?', '1'"


def test_an_answer_under_another_name_is_remarked_on(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.csv", "prompt,completion,label\na,x,1\nb,y,0\n")
    (remark,) = read_dataset(path, "given", folds=0).remarks
    assert "'completion', which is not read" in remark
    assert "--columns answer=completion" in remark
    named = read_dataset(path, "given", folds=0, columns={"answer": "completion"})
    assert (named.remarks, [row.answer for row in named.rows]) == ([], ["x", "y"])


def test_a_parquet_file_without_its_package_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = written(tmp_path / "rows.parquet", "PAR1...")
    assert refused(path) == ["is a Parquet file, which needs a package: pip install pyarrow"]


def written_parquet(path: Path, rows: Rows, **options: Any) -> Path:
    parquet.write_table(arrow.Table.from_pylist(rows, **options), path)
    return path


def test_a_parquet_file_is_read(tmp_path: Path) -> None:
    hi = {"prompt": "Hi!", "applies": False}
    rows = [{"applies": None} | ROWS[0], *ROWS[1:], hi]
    plain = written(tmp_path / "rows.jsonl", LINES + json.dumps(hi) + "\n")
    assert read(written_parquet(tmp_path / "rows.parquet", rows)) == read(plain)


def test_a_parquet_file_s_nested_cells_are_those_that_are_set(tmp_path: Path) -> None:
    """A column's values have all its fields, null where one lacks it."""
    messages = [message | {"name": None} for message in turns("a", system="s")]
    rows = [
        {"messages": messages, "answers": ["x", "y"]},
        {"messages": messages[1:], "answers": ["z"]},
    ]
    path = written_parquet(tmp_path / "rows.parquet", rows)
    read_rows = read_dataset(path, "generate", folds=None).rows
    assert [len(row.messages or ()) for row in read_rows] == [2, 1]
    assert [row.answers for row in read_rows] == [("x", "y"), ("z",)]


def test_a_parquet_file_may_keep_texts_as_bytes(tmp_path: Path) -> None:
    """As older writers do."""
    schema = arrow.schema([("prompt", arrow.binary()), ("answers", arrow.list_(arrow.binary()))])

    def of(prompt: bytes, answer: bytes) -> Path:
        row = {"prompt": prompt, "answers": [answer]}
        return written_parquet(tmp_path / "rows.parquet", [row], schema=schema)

    assert read(of("où?".encode(), b"x"), "generate") == [("où?", None, ("x",))]
    for field, path in (("prompt", (b"\xff", b"x")), ("answers", (b"a", b"\xff"))):
        assert refused(of(*path), "generate") == [
            f"row 1: {field!r} holds bytes that are no UTF-8: write texts"
        ]


def test_a_table_s_unnamed_columns_are_no_fields(tmp_path: Path) -> None:
    """Spreadsheets end lines with empty columns, and pandas begins them with a number."""
    path = written(tmp_path / "rows.csv", ",prompt,label,,\n0,a,1,,\n1,b,0,,note\n")
    assert read(path) == [("a", 1, ()), ("b", 0, ())]
    assert [sorted(row) for _, row in objects(path, [])] == [["label", "prompt"]] * 2


def test_answers_with_brackets_are_answers(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", '{"prompt": "a", "answers": ["[a] bracket", "x]"]}')
    assert read(path, "generate") == [("a", None, ("[a] bracket", "x]"))]


def test_a_long_passage_fits_into_a_cell(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.csv", f'prompt,label\n"{"word " * 40_000}",1\nb,0\n')
    assert [len(prompt or "") for prompt, _, _ in read(path)] == [200_000, 1]


def test_a_label_in_words_or_numbers(tmp_path: Path) -> None:
    labels = ["factual", "Factual", 1, 1.0, "hallucinated", 0, 0.0]
    rows = [{"prompt": f"q{number}", "label": label} for number, label in enumerate(labels)]
    numbers = [number for _, number, _ in read(write_rows(tmp_path / "rows.jsonl", rows))]
    assert numbers == [1] * 4 + [0] * 3


# A row, where its label comes from, and the option that reads it.
OTHER_NAMES = cells(
    """
    {"question": "a", "answer": "b"} | generate | prompt=question,answers=answer
    {"query": "a", "ground_truth": ["b"]} | generate | prompt=query,answers=ground_truth
    {"prompt": "a", "output": "b"} | generate | answers=output
    {"Question": "a", "answers": ["b"]} | generate | prompt=Question
    {"input": "a", "label": 1} | given | prompt=input
    {"Prompt": "a", "Label": 1} | given | prompt=Prompt,label=Label
    {"User Input": "a", "is_correct": 1} | given | prompt=User Input,label=is_correct
    {"conversations": [{"role": "user", "content": "a"}]} | self | messages=conversations
    {"question": "a", "gold_answers": ["b"]} | generate | prompt=question,answers=gold_answers
    {"prompt": "a", "expected-output": "b"} | generate | answers=expected-output
    """
)


@pytest.mark.parametrize(("row", "labels", "columns"), OTHER_NAMES)
def test_other_names_of_the_fields_get_the_option_that_reads_them(
    tmp_path: Path, row: str, labels: Any, columns: str
) -> None:
    other = '{"prompt": "b", "label": 0, "answers": ["c"]}'
    path = written(tmp_path / "rows.jsonl", f"{row}\n{other}\n")
    assert f"--columns {columns} would read this row" in refused(path, labels)[0]
    written(path, f"{row}\n")
    options = TrainOptions(
        name="x", data=(str(path),), columns=columns, labels=labels, forms="none"
    )
    [(_, renamed)] = objects(path, [], options.names)
    assert set(renamed) >= {part.partition("=")[0] for part in columns.split(",")}
    if labels == "generate":
        assert read(path, labels, columns=options.names) == [("a", None, ("b",))]


@pytest.mark.parametrize(
    "columns", ["prompt", "prompt=", "question=prompt", "=x", "answers:answer"]
)
def test_columns_that_name_no_field_are_refused(columns: str) -> None:
    with pytest.raises(TrainingError, match="columns: FIELD=YOURS is expected"):
        TrainOptions(name="x", data=("rows.jsonl",), columns=columns).check()


def test_score_reads_a_table(tmp_path: Path) -> None:
    path = written(tmp_path / "q.csv", "prompt,source\nWhat is the capital of France?,mine\n")
    done = hallutracer("score", "--input", str(path))
    row = json.loads(done.stdout)
    assert (row["source"], 0 <= row["risk"] <= 1) == ("mine", True)
