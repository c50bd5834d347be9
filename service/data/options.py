"""Declares the options of rows, labels and judges once, as fields of dataclasses for the library
and the commands."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from cyclopts import Group, Parameter

from service.errors import TrainingError
from service.settings import AT_LEAST_1, SECRET, Range, option, section

ABSTAIN = (
    r"(?i)\b(i"
    r" am|i'm|im)\s+(not\s+(entirely\s+|quite\s+|really\s+)?(sure|certain)|unsure|uncertain|unable"
    r" to)\b"
    r"|\bi\s+(do\s+not|don't|dont|really"
    r" don't|cannot|can't)\s+(know|recall|remember|say|answer|tell|determine)\b"
    r"|\b(no|not enough|insufficient)\s+(idea|information)\b|\bunknown to me\b"
    r"|\bi\s+(do\s+not|don't|dont)\s+have\s+((that|any|enough|this)\s+)?information\b"
)
BATCH_ROWS = 128  # with fewer prompts in a batch, decoding reads all weights more often
MAX_NEW_TOKENS = 48

Labels = Literal["given", "generate"]
TrainingLabels = Literal["given", "generate", "self"]
SAMPLES, SAMPLE_TEMPERATURE = 5, 0.7  # answers that are compared with the greedy one
JudgeName = Literal["exact", "contains", "regex", "openai", "similarity", "calls"]

PYTHON = Parameter(parse=False)
ROWS = option(
    "Rows: prompt or messages, label or answers; id and group if any.  JSONL, also packed (.gz),"
    " .csv, .tsv or .parquet (needs pyarrow); or a folder of requests as OpenAI's API takes them"
    " (.json, .jsonl).  evaluate: also NAME=FOLDER for a public set you"
    " downloaded ('hallutracer data list'), and repeatable."
)
Data = Annotated[tuple[str, ...], ROWS, Parameter(metavar="FILE")]
LabelSource = Annotated[
    TrainingLabels | None,
    option(
        'given: each row\'s \'label\' ("factual" or "hallucinated", or 1 and 0).  generate: the'
        " model answers greedily and a judge compares with 'answers'.  self (train only): no judge"
        f" and no accepted answers, the model also samples {SAMPLES} answers to each question, and"
        " the share that agrees with the greedy one is what the probes learn (transformers engine)."
        "  Default of train: given, or generate without --data; of guarantee and recalibrate: as"
        " the bundle's own rows were labelled, given where it labelled itself; of evaluate: the"
        " set's own, or given where a row has a label."
    ),
]
Questions = Annotated[
    int | None,
    option(
        "How many questions are asked: by train of those that come with the package, by default"
        " all; by demo retrieval of held-out ones, each four times, by default 400.",
        limits=Range(20),
    ),
]
BatchRows = Annotated[int, option("Prompts in one call of the engine.", limits=AT_LEAST_1)]
RunDir = Annotated[
    Path | None,
    option(
        "Activations and progress; an interrupted run resumes from here.  Default: runs/NAME, or "
        "runs/NAME-2 and so on where a finished run that read something else has that."
    ),
]
DRY_RUN = option(
    "Print what would be done.  Spends nothing, and loads no model, except that guarantee scores"
    " its rows to print those that need a label.  push: asks the hub, changes nothing."
)
Seed = Annotated[
    int, option("Another seed draws others; of guarantee, the order of the rows.", limits=Range(0))
]


def check_fields(options: Any) -> None:
    """Raise TrainingError that names the first field of ``options`` with a wrong type or outside
    its limits."""
    from pydantic import TypeAdapter, ValidationError

    for name, hint in get_type_hints(type(options), include_extras=True).items():
        kind, parameter, *_ = get_args(hint)
        value = getattr(options, name)
        value = value.tolist() if hasattr(value, "tolist") else value
        value = tuple(value) if isinstance(value, list) else value
        seeds = name == "seeds" and isinstance(
            value, tuple
        )  # Python code may pass the seeds; else it is their number
        try:
            TypeAdapter(tuple[int, ...] if seeds else kind).validate_python(value, strict=True)
            for limits in () if seeds else parameter.validator:
                limits(hint, value)
        except (ValidationError, ValueError) as error:
            wrong = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            shown = "" if parameter.metavar == SECRET else f", not {value!r}"
            raise TrainingError(f"{name}: {wrong.rstrip('.').lower()}{shown}", param=name) from None


def outside_training(labels: TrainingLabels | None) -> Labels | None:
    """Return where a command's labels come from that trains nothing.  Raises TrainingError for
    ``self``."""
    if labels == "self":
        raise TrainingError(
            "labels: 'self' says where a model contradicts itself, which train alone can use: give"
            " rows with a label ('given'), or with accepted answers ('generate')",
            param="labels",
        )
    return labels


_PROMPTS = Group("Prompts and generated labels", sort_key=30)
_JUDGE = Group("Judge of generated labels", sort_key=32)
_Judge = Annotated[
    JudgeName | None,
    option(
        "For generated labels.  exact: equal but for case, punctuation and articles.  contains: an"
        " accepted answer occurs as whole words.  regex: the answers are patterns.  openai: ask an"
        " OpenAI-compatible endpoint (train only).  similarity, calls: TruthfulQA's and BFCL's own"
        " rules ('hallutracer data').  Default: contains; evaluate: the set's own where it has"
        " one.",
        group=_PROMPTS,
    ),
]


@section("Prompts and generated labels", 30)
@dataclass(frozen=True, kw_only=True)
class LabelOptions:
    """How prompts are rendered, and how generated answers become labels."""

    prompt_format: Annotated[
        Literal["auto", "chat", "text"],
        option(
            "auto: one chat turn where the tokenizer has a chat template, else plain text.",
            group=_PROMPTS,
        ),
    ] = "auto"
    judge: _Judge = None
    max_new_tokens: Annotated[
        int | None,
        option(
            "Length of a generated answer.  Default: 48; evaluate: the set's own where it has one.",
            limits=AT_LEAST_1,
            group=_PROMPTS,
        ),
    ] = None

    @property
    def answer_tokens(self) -> int:
        """Return the length of a generated answer."""
        return self.max_new_tokens or MAX_NEW_TOKENS


@section("Judge of generated labels", 32)
@dataclass(frozen=True)
class JudgeOptions:
    """How a generated answer is compared with the accepted ones."""

    judge: _Judge = None  # see data/judges.py
    judge_url: Annotated[str, option("Endpoint of the openai judge, up to /v1.", group=_JUDGE)] = ""
    judge_model: Annotated[str, option("Model of the openai judge.", group=_JUDGE)] = ""
    judge_key: Annotated[
        str,
        option(
            "Bearer key of the openai judge; prefer the environment variable.",
            secret=True,
            group=_JUDGE,
        ),
    ] = ""  # never written to a file
    answer_pattern: Annotated[
        str,
        option(
            "Regular expression whose first group is the answer inside the generated text, for"
            " judges that compare text.  Default: the whole text.",
            group=_JUDGE,
        ),
    ] = ""
    abstain_pattern: Annotated[
        str | None,
        option(
            "Answers that match belong to neither class.  Default: 'I am not sure' and similar"
            " answers.",
            group=_JUDGE,
        ),
    ] = None

    def check(self) -> None:
        """Raise TrainingError that names the first invalid field: wrong type, limits or pattern, or
        no endpoint."""
        check_fields(self)
        for name in ("abstain_pattern", "answer_pattern"):
            pattern = getattr(self, name) or ""
            try:
                groups = re.compile(pattern).groups
            except re.error as error:
                raise TrainingError(
                    f"{name} is not a regular expression: {error}", param=name
                ) from error
            if name == "answer_pattern" and pattern and groups < 1:
                raise TrainingError(
                    f"{name} has no group: put (...) around the answer in {pattern!r}", param=name
                )
        if self.judge == "openai" and not (self.judge_url and self.judge_model):
            raise TrainingError(
                "openai needs --judge-url (up to /v1) and --judge-model", param="judge"
            )

    @property
    def judge_name(self) -> JudgeName:
        """Return the judge's name, the default if none was chosen."""
        return self.judge or "contains"

    @property
    def abstains(self) -> re.Pattern[str]:
        """Return the pattern of answers that belong to neither class."""
        return re.compile(ABSTAIN if self.abstain_pattern is None else self.abstain_pattern)

    @property
    def judged_by(self) -> str:
        """Return the manifest's record of the judge."""
        how = {"openai": self.judge_model, "similarity": "rouge-l", "calls": "bfcl"}.get(
            self.judge_name
        )
        name = f"{self.judge_name}:{how}" if how else self.judge_name
        return f"{name} of {self.answer_pattern}" if self.answer_pattern else name
