"""Rows in crossed wordings, with a model's own answers and their labels; and rows of wordings that
are left out.

    hallutracer data convert opentriviaqa ./OpenTriviaQA > opentriviaqa.jsonl
    hallutracer data convert nq-open ./natural-questions/nq_open > nq-open.jsonl
    python -m benchmarks.crossed_rows draw --folder crossed \\
        --questions opentriviaqa.jsonl nq-open.jsonl
    python -m benchmarks.crossed_rows answer --folder crossed --run runs/crossed \\
        [--model smollm2] [--dtype auto] [--limit ROWS]
    python -m benchmarks.crossed_rows export --folder crossed --run runs/crossed \\
        --to docs/smollm2-crossed

``draw`` writes the rows without answers.  ``train.jsonl`` has facts, trivia and NQ-Open in three
wordings each, several questions in one message, follow-ups, tasks, and requests that ask for no
fact.  ``test.jsonl`` has facts of entities that no row to train on is about, in wordings and forms
that no such row has, and in the plain one. ``--rows``, by default the shipped ones, say which
trivia is asked, what its groups are called, and which prompts are not asked again.  Both files are
shuffled by fact: each beginning is a sample of the whole, with all wordings of its facts.

``answer`` reads and answers them chunk by chunk, greedily, 24 tokens or what the row says, and
labels them as training does with ``contains``.  A run that was ended goes on where it stopped.
``export`` writes the labelled rows of all finished chunks to ``TO-rows.jsonl.gz`` and
``TO-test-rows.jsonl.gz``.  What is neither right nor wrong is left out, and what has an answer that
is a common word, such as the symbol of helium: any sentence would be judged right."""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hallutracer_research.data.mixture import read_rows
from service.data.collection import collect
from service.data.forms.crossed import FAMILIES, held_out_families, in_wordings, training_families
from service.data.forms.several import no_fact_rows, several_rows
from service.data.judges import normalise, parts_of
from service.data.labels import judged_labels
from service.data.near_duplicates import FILLER
from service.data.options import BATCH_ROWS, JudgeOptions
from service.data.rows import prompt_digest
from service.data.training_rows import read_dataset
from service.demo.questions import build_world, fact_rows
from service.engines.base import Engine
from service.library import engine as library
from service.prompts import default_prompt_format
from service.readout import Site

Row = dict[str, Any]
SHIPPED = Path("docs/smollm2-rows.jsonl.gz")
PER_ROW = 3
CITIES = {
    "city_country": 260,
    "city_continent": 100,
    "city_region": 140,
}  # facts; of other relations all
TRIVIA = {"opentriviaqa": 590, "nq-open": 240}  # questions in wordings
TRIVIA_SEVERAL = 300  # questions, of those, that also stand beside others, in follow-ups and tasks
PARTNERS = 900  # trivia questions that stand beside others
TEST_PARTNERS = 6  # one in so many partners stands beside test rows
NO_FACT = 800
TEST_RELATIONS = ("capital", "currency", "language")
TEST_FACTS, TEST_SEVERAL = 40, 10  # of each relation
CHUNK = 320  # rows
TRAIN_CHUNKS = 2  # for each chunk of the test file, while there is one
ANSWER_TOKENS = 24
FILES = ("train", "test")
COMMON = FILLER | {"he"}


def draw(questions: Sequence[Path], shipped: Path, seed: int) -> dict[str, list[Row]]:
    """Return the rows of both files."""
    rng = random.Random(f"{seed} crossed rows")
    known = _gzipped(shipped)
    taken = [row["messages"][0]["content"] for row in known if len(row["messages"]) == 1]
    groups = {_asked(row): row["group"] for row in known if row.get("applies", True)}
    trivia, partners = _trivia(questions, groups, rng)
    names = _shipped_groups(groups)
    facts = _first_of_each(_facts("train", names, rng), CITIES)
    others = _facts("dev", names, rng)
    partners = [*others, *partners]
    train = in_wordings(
        [*facts, *trivia], training_families(), per_row=PER_ROW, seed=seed, taken=taken
    )
    several = [*facts, *rng.sample(trivia, min(TRIVIA_SEVERAL, len(trivia)))]
    train += several_rows(
        several, [row for number, row in enumerate(partners) if number % TEST_PARTNERS], seed=seed
    )
    train += no_fact_rows(NO_FACT, others, seed)
    held_out = _first_of_each(
        _facts("test", {}, rng), dict.fromkeys(TEST_RELATIONS, TEST_FACTS), others=False
    )
    families = [FAMILIES["plain"], *held_out_families()]
    test = in_wordings(held_out, families, seed=seed, every=True, taken=taken)
    few = _first_of_each(held_out, dict.fromkeys(TEST_RELATIONS, TEST_SEVERAL))
    test += several_rows(few, partners[::TEST_PARTNERS], seed=seed, test=True, every=True)
    digests = {prompt_digest(row) for row in known}
    return {
        name: _shuffled(without_copies(rows, digests), rng)
        for name, rows in (("train", train), ("test", test))
    }


def _trivia(
    paths: Sequence[Path], groups: Mapping[str, str], rng: random.Random
) -> tuple[list[Row], list[Row]]:
    """Return questions that are among the shipped rows, in the groups that these have, and some of
    the others."""
    rows = [
        row | {"id": f"{path.stem}/{row['id']}", "kind": f"{path.stem}/{row['kind']}"}
        for path in paths
        for row in read_rows(path)
    ]
    shipped = [row | {"group": groups[row["id"]]} for row in rows if row["id"] in groups]
    rng.shuffle(shipped)
    taken = set(groups.values())
    fresh = [row for row in rows if row["group"] not in taken]
    rng.shuffle(fresh)
    drawn = [row for name, count in TRIVIA.items() for row in _of_source(shipped, name)[:count]]
    return drawn, fresh[:PARTNERS]


def _facts(split: str, groups: Mapping[str, str], rng: random.Random) -> list[Row]:
    rows = [_named(row, groups) for row in fact_rows(split)]
    rng.shuffle(rows)
    return rows


def _first_of_each(
    rows: Sequence[Row], counts: Mapping[str, int], *, others: bool = True
) -> list[Row]:
    """Return the first rows of each relation that has a count, and of the ``others`` all, relation
    by relation."""
    relations = dict.fromkeys(row["relation"] for row in rows) if others else counts
    first: list[Row] = []
    for relation in relations:
        of_relation = [row for row in rows if row["relation"] == relation]
        first += of_relation[: counts.get(relation)]
    return first


def _gzipped(path: Path) -> list[Row]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _asked(row: Row) -> str:
    """Return the id of the question that a row in a form, or in a wording, was made of."""
    return str(row["id"]).rpartition("+")[0] or str(row["id"])


def _of_source(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row["kind"].startswith(f"{name}/")]


def _shipped_groups(groups: Mapping[str, str]) -> dict[str, str]:
    """Return what the shipped rows call the group of a fact, by its own name: where a trivia
    question asks the same, the two are one."""
    own = {fact.key: fact.group for fact in build_world().facts}
    keys = {name.removeprefix("facts/").rpartition(":")[0]: group for name, group in groups.items()}
    return {own[key]: group for key, group in keys.items() if key in own}


def _named(row: Row, groups: Mapping[str, str]) -> Row:
    return row | {
        "id": f"facts/{row['id']}",
        "kind": f"facts/{row['kind']}",
        "group": groups.get(row["group"], row["group"]),
    }


def without_copies(rows: Sequence[Row], digests: set[bytes]) -> Iterator[Row]:
    """Yield the rows whose prompt no other row has, without what only their making needs."""
    seen = set(digests)
    for row in rows:
        if (digest := prompt_digest(row)) not in seen:
            seen.add(digest)
            yield {key: value for key, value in row.items() if key not in ("relation", "statement")}


def _shuffled(rows: Iterable[Row], rng: random.Random) -> list[Row]:
    """Return the rows in a drawn order, those of one fact behind each other."""
    together: dict[str, list[Row]] = {}
    for row in rows:
        together.setdefault(_asked(row), []).append(row)
    order = list(together.values())
    rng.shuffle(order)
    return [row for own in order for row in own]


Chunk = tuple[str, list[Row]]


def chunks(folder: Path) -> list[Chunk]:
    """Return the chunks of both files in the order in which they are answered."""
    train, test = (_cut(name, _lines(folder / f"{name}.jsonl")) for name in FILES)
    plan: list[Chunk] = []
    while train or test:
        plan += train[:TRAIN_CHUNKS] + test[:1]
        train, test = train[TRAIN_CHUNKS:], test[1:]
    return plan


def _cut(name: str, rows: Sequence[Row]) -> list[Chunk]:
    return [
        (f"{name}-{start // CHUNK:03}", [*rows[start : start + CHUNK]])
        for start in range(0, len(rows), CHUNK)
    ]


def _lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def answer(folder: Path, run: Path, model: str, limit: int | None, dtype: str = "auto") -> None:
    """Answer and label the chunks that are not done, ``limit`` rows at most in all."""
    plan = chunks(folder)
    left, engine = limit, None
    for number, (name, rows) in enumerate(plan, 1):
        if left is not None and left < len(rows):
            break
        left = None if left is None else left - len(rows)
        if _verdicts_of(run, name).exists():
            continue
        if engine is None:
            engine = library.load_engine(
                library.Engine(dtype=dtype).options(model), rows=[Site.ATTENTION_HEAD], threads=1
            )
        verdicts = answered(engine, name, rows, run)
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in verdicts]
        temporary = _verdicts_of(run, name).with_suffix(".part")
        temporary.write_text("".join(lines), encoding="utf-8")
        temporary.replace(_verdicts_of(run, name))
        right = Counter(line.get("label") for line in verdicts)
        counts = f"right {right[1]}, wrong {right[0]}, neither or no fact {right[None]}"
        print(f"{name}: {number} of {len(plan)} chunks; {counts}", file=sys.stderr, flush=True)


def answered(engine: Engine, name: str, rows: Sequence[Row], run: Path) -> list[Row]:
    """Return id, answer and label of each row: no answer for one that asks for no fact, no label
    for what is neither right nor wrong.  Readouts stay in the run folder; rows of one length of
    answer are read together."""
    verdicts: dict[str, Row] = {str(row["id"]): {"id": row["id"]} for row in rows}
    for tokens in sorted({row.get("answer_tokens", ANSWER_TOKENS) for row in rows}):
        part = run / f"{name}-{tokens}"
        part.parent.mkdir(parents=True, exist_ok=True)
        own = [row for row in rows if row.get("answer_tokens", ANSWER_TOKENS) == tokens]
        path = part.with_suffix(".jsonl")
        path.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in own), encoding="utf-8"
        )
        dataset = read_dataset(path, "generate", folds=None)
        collect(
            engine,
            dataset,
            part,
            sites=[Site.ATTENTION_HEAD],
            prompt_format=default_prompt_format(engine),
            batch_rows=BATCH_ROWS,
            max_new_tokens=tokens,
        )
        labelled = judged_labels(dataset, part, JudgeOptions())
        for line in _lines(part / "answers.jsonl"):
            verdicts[line["id"]]["answer"] = line["answer"]
        for number, label in zip(labelled.index.tolist(), labelled.label.tolist(), strict=True):
            verdicts[dataset.rows[number].id]["label"] = label
    return list(verdicts.values())


def _verdicts_of(run: Path, name: str) -> Path:
    return run / f"{name}.labels.jsonl"


def export(folder: Path, run: Path, to: Path) -> None:
    """Write the labelled rows of the finished chunks, in the order of the files."""
    done = [(name, rows) for name, rows in chunks(folder) if _verdicts_of(run, name).exists()]
    for file in FILES:
        kept: list[Row] = []
        for name, rows in sorted(
            (chunk for chunk in done if chunk[0].startswith(file)), key=lambda chunk: chunk[0]
        ):
            verdicts = {line["id"]: line for line in _lines(_verdicts_of(run, name))}
            for row in rows:
                verdict = verdicts[row["id"]]
                if "label" in verdict and not in_any_sentence(row):
                    kept.append(row | {"answer": verdict["answer"], "label": verdict["label"]})
                elif not row.get("applies", True):
                    kept.append(row)
        path = to.with_name(f"{to.name}{'' if file == 'train' else '-test'}-rows.jsonl.gz")
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
        path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
        counts = Counter(
            {1: "right", 0: "wrong", None: "no fact"}[row.get("label")] for row in kept
        )
        print(f"{path}: {len(kept):,} rows, {dict(counts)}", file=sys.stderr)


def in_any_sentence(row: Row) -> bool:
    """Return whether an accepted answer is a word that most sentences hold, so that the judge can
    tell nothing."""
    answers = [answer for part in parts_of(row["answers"]) or [row["answers"]] for answer in part]
    return any(normalise(answer) in COMMON for answer in answers)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the three steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(dest="step", required=True)
    drawing, answering, exporting = (
        steps.add_parser(step) for step in ("draw", "answer", "export")
    )
    for step in (drawing, answering, exporting):
        step.add_argument("--folder", type=Path, required=True)
    drawing.add_argument("--questions", type=Path, nargs="+", required=True)
    drawing.add_argument("--rows", type=Path, default=SHIPPED)
    drawing.add_argument("--seed", type=int, default=0)
    for step in (answering, exporting):
        step.add_argument("--run", type=Path, required=True)
    answering.add_argument("--model", default="smollm2")
    answering.add_argument("--dtype", default="auto", help="as `hallutracer serve` takes it")
    answering.add_argument("--limit", type=int)
    exporting.add_argument("--to", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.step == "draw":
        options.folder.mkdir(parents=True, exist_ok=True)
        for name, rows in draw(options.questions, options.rows, options.seed).items():
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            (options.folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
            print(f"{name}.jsonl: {len(rows):,} rows", file=sys.stderr)
    elif options.step == "answer":
        answer(options.folder, options.run, options.model, options.limit, options.dtype)
    else:
        export(options.folder, options.run, options.to)


if __name__ == "__main__":
    main()
