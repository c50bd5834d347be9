"""The public sets that have a reader: description, source, meaning of the labels.

The number of rows read is checked against the published one, because another version of a set is another benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from hallutracer_research.data import bfcl, question_sets, statement_sets
from hallutracer_research.data.files import Row
from service.errors import DataError

Reader = Callable[[Path, list[str]], tuple[list[Row], dict[str, int]]]
Labels = Literal["given", "generate"]

NEVER = "(?!)"  # matches nothing


@dataclass(frozen=True)
class SetInfo:
    """One set.  The rows' label is 1 = factual, 0 = hallucinated, whatever the file's own polarity."""

    name: str
    title: str
    read: Reader  # folder, list for problems -> trainer's rows, and counts of which "read" is compared with ``rows``
    rows: int  # published size, before rows are left out (see the counts)
    labels: Labels  # the set's own, or a judge's verdict on the read model's answers
    kinds: int  # sub-datasets: values of the row key ``kind``
    group: str  # unit that folds keep together
    hallucinated: str  # what label 0 means
    onset: str  # where the answer begins: t* is the token before it
    caveat: str  # shown with every result on the set
    licence: str
    source: str  # download location
    found_by: str  # a file that identifies the folder
    folders: tuple[str, ...]  # its path in the download
    judge: Literal["contains", "regex", "similarity", "calls"] | None = None  # default for generated labels
    max_new_tokens: int | None = None  # if the trainer's default is too short
    abstain_pattern: str | None = None  # if the trainer's default would exclude right answers


_STATEMENT_CAVEAT = "The label belongs to a statement inside the prompt: the probe tells true text from false text."
_truthfulqa = partial(
    SetInfo, kinds=38, group="question", licence="Apache-2.0",
    source="github.com/sylinrl/TruthfulQA (a version before the revision of 2025, which has other questions)",
    found_by=question_sets.TABLE, folders=("TruthfulQA",),
)  # fmt: skip
_statements = partial(
    SetInfo,
    labels="given",
    onset="after the prompt 'Statement: ... Final Answer: ', so the statement itself stands before t*",
)
_bfcl = partial(
    SetInfo,
    onset="after the offered functions and the user's words, in the model's chat template",
    licence="Apache-2.0",
    source="github.com/ShishirPatil/gorilla, berkeley-function-call-leaderboard/bfcl_eval/data",
    found_by="BFCL_v4_irrelevance.json",
    folders=("berkeley-function-call-leaderboard/bfcl_eval/data", "bfcl_eval/data", "data"),
)
_questions = partial(
    SetInfo,
    labels="generate",
    group="question, also across sets",
    hallucinated="the read model's own answer does not name an accepted one",
    onset="after the question and 'Answer briefly.', in the model's chat template",
)
_opentriviaqa = partial(
    _questions, kinds=len(question_sets.CATEGORIES), rows=question_sets.OPENTRIVIAQA_ROWS, licence="CC BY-SA 4.0",
    source="github.com/uberspot/OpenTriviaQA, categories (11 of its 22 files)", found_by="science-technology",
    folders=("categories",),
)  # fmt: skip

_ALL = (
    _truthfulqa(
        name="truthfulqa", title="TruthfulQA, the model's own answers", read=question_sets.read_truthfulqa,
        rows=question_sets.TRUTHFULQA_ROWS, labels="generate",
        hallucinated="the read model's own answer is nearer to a false reference answer than to a correct one",
        onset="after the question, in the model's chat template",
        caveat="The judge compares words (ROUGE-L), not meaning, and errs often: of the set's own reference answers, "
        "left out one at a time, it judges 52 % of the correct and 19 % of the incorrect ones factual. The paper does "
        "not name its judge. The benchmark's questions must never be used to train a language model.",
        judge="similarity",
    ),
    _truthfulqa(
        name="truthfulqa-reference", title="TruthfulQA, reference answers",
        read=question_sets.read_truthfulqa_reference, rows=question_sets.REFERENCE_ROWS, labels="given",
        hallucinated="the reference answer in the prompt is a false one",
        onset="after 'Q: ... A: ...': the answer itself stands before t*",
        caveat="The state is read after a reference answer, not before the model's own: not the paper's setting. "
        "The benchmark's questions must never be used to train a language model.",
    ),
    _statements(
        name="truefalse", title="True-False", read=statement_sets.read_truefalse, rows=statement_sets.TRUEFALSE_ROWS,
        kinds=len(statement_sets.SUBJECTS), group="subject entity",
        hallucinated="the statement is false (0 in the file)", caveat=_STATEMENT_CAVEAT, licence="none stated",
        source="github.com/ponhvoan/iris, data/true_false_data", found_by="generated.csv",
        folders=("true_false_data", "data/true_false_data"),
    ),
    _statements(
        name="halueval2", title="HaluEval 2.0, human annotations", read=statement_sets.read_halueval2,
        rows=statement_sets.HALUEVAL2_ROWS, kinds=len(statement_sets.DOMAINS), group="query",
        hallucinated="people judged the statement false ('false' in the file)",
        caveat=_STATEMENT_CAVEAT + " The statements are ChatGPT's, not the read model's.",
        licence="MIT (author's twin repository)",
        source="github.com/RUCAIBox/HaluEval-2.0, annotation/human_annotation", found_by="Finance.json",
        folders=("human_annotation", "annotation/human_annotation"),
    ),
    _statements(
        name="helm", title="HELM (of MIND)", read=statement_sets.read_helm, rows=statement_sets.HELM_ROWS,
        kinds=len(statement_sets.MODELS), group="passage, over all source models",
        hallucinated="people judged the sentence a hallucination (1 in the file, the opposite of True-False)",
        caveat=_STATEMENT_CAVEAT + " The sentences are six other models', not the read model's.",
        licence="none stated", source="github.com/oneal2000/MIND, helm", found_by="data/falcon40b/data.json",
        folders=("helm",),
    ),
    _bfcl(
        name="bfcl",
        title="BFCL v4 (a stand-in for agentic prompts)",
        read=bfcl.read_bfcl,
        rows=bfcl.ROWS,
        labels="generate",
        kinds=len(bfcl.KINDS),
        group="row; functions of a live prompt; memory scenario",
        hallucinated="the read model calls where no function fits, does not where one does, calls wrongly, or gives a "
        "short answer that is not accepted",
        caveat="Our stand-in: the paper's Agentic set cannot be identified, so nothing here is the paper's. Web search "
        "is asked closed-book, memory with the earlier talks in the prompt; multi-turn rows need simulators and are "
        "left out.",
        judge="calls",
        max_new_tokens=384,
        abstain_pattern=NEVER,  # "I cannot answer that with these functions" is right where none fits
    ),
    _bfcl(
        name="bfcl-answerable", title="BFCL v4, does an offered function fit?", read=bfcl.read_bfcl_answerable,
        rows=bfcl.ANSWERABLE_ROWS, labels="given", kinds=len(bfcl.ANSWERABLE),
        group="row; functions of a live prompt", hallucinated="no offered function fits the question",
        caveat="Tool-answerability, not hallucination; the label is that of the file, so each file holds one class.",
    ),
    _opentriviaqa(
        name="opentriviaqa", title="OpenTriviaQA, asked freely", read=question_sets.read_opentriviaqa,
        caveat="Volunteers wrote the answers: some are wrong or dated. The judge looks for the answer's words.",
        judge="contains",
    ),
    _opentriviaqa(
        name="opentriviaqa-choice",
        title="OpenTriviaQA, multiple choice",
        read=question_sets.read_opentriviaqa_choice,
        hallucinated="the read model's own answer begins with another letter, or with none",
        onset="after the question, its options and 'Answer with one letter.', in the model's chat template",
        caveat="A model that guesses is right on a quarter, by luck, which nothing in it can foretell.",
        judge="regex",
    ),
    _questions(
        name="nq-open", title="NQ-Open", read=question_sets.read_nq_open, rows=question_sets.NQ_OPEN_ROWS,
        kinds=len(question_sets.FILES),
        caveat="Search queries of 2017 and 2018; a capital and a question mark are added. A small model answers a few "
        "per cent of them.",
        judge="contains", licence="CC BY-SA 3.0",
        source="github.com/google-research-datasets/natural-questions, nq_open", found_by="NQ-open.dev.jsonl",
        folders=("nq_open",),
    ),
)  # fmt: skip
SETS: Mapping[str, SetInfo] = MappingProxyType({info.name: info for info in _ALL})


def find_path(name: str, path: Path) -> Path:
    """The set's folder: ``path`` or a folder in it; ``path`` if the set is in neither."""
    info = SETS[name]
    places = (path, *(path / folder for folder in info.folders))
    return next((place for place in places if (place / info.found_by).is_file()), path)


def read_set(name: str, path: Path, allow_other_counts: bool = False) -> tuple[list[Row], dict[str, int]]:
    """Rows for the trainer and the reader's counts; ``path`` is the download.

    Raises DataError: unknown set or folder, missing or malformed files, or not the published number of rows.
    """
    if name not in SETS:
        raise DataError(name, [f"unknown set; known are {', '.join(SETS)}"])
    if not path.is_dir():
        raise DataError(str(path), [f"is not a folder; download {name} from {SETS[name].source}"])
    info = SETS[name]
    problems: list[str] = []
    folder = find_path(name, path)
    rows, counts = info.read(folder, problems)
    if problems:
        raise DataError(str(folder), problems)
    if counts["read"] != info.rows and not allow_other_counts:
        raise DataError(
            str(path),
            [
                f"{counts['read']:,} rows read, but {info.title} as published has {info.rows:,}: another version is "
                f"another benchmark. Get it from {info.source}, or allow other counts and say so beside the results"
            ],
        )
    return rows, counts
