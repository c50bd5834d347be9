"""The records inside of a manifest: guarantee, uncertainty, recalibration, context, answer; how strictly all are read.

They are frozen dataclasses, which a trainer fills and changes with ``dataclasses.replace``; pydantic checks them where
a manifest is read or sealed (``manifest.read_record``)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

Floats = NDArray[np.floating]
DType = Literal["float32", "bfloat16", "float16"]
Labels = Literal["given", "generate"]
MAX_INT = 2**53  # larger integers lose digits in some JSON readers


def _with_a_point(value: object) -> object:
    """Refuse 1 for 1.0, so that reading and writing again gives the same bytes."""
    if type(value) is not float:
        raise ValueError("a number with a decimal point")
    return value


def matching(pattern: re.Pattern[str], expected: str) -> AfterValidator:
    """Return a check that a text is what the whole pattern describes; ``expected`` says so in messages."""

    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(expected)
        return text

    return AfterValidator(check)


# Half a surrogate pair can be spelled in JSON, and not in UTF-8.
Text = Annotated[str, Strict(), matching(re.compile("[^\ud800-\udfff]*"), "characters")]
Filled = Annotated[Text, Field(min_length=1)]
Int = Annotated[int, Strict(), Field(ge=-MAX_INT, le=MAX_INT)]
Natural = Annotated[Int, Field(ge=0)]
Positive = Annotated[Int, Field(ge=1)]
AtLeast2 = Annotated[Int, Field(ge=2)]
Real = Annotated[float, BeforeValidator(_with_a_point)]
NotNegative = Annotated[Real, Field(ge=0)]
AboveZero = Annotated[Real, Field(gt=0)]
Share = Annotated[Real, Field(ge=0, le=1)]
Between = Annotated[Real, Field(gt=0, lt=1)]  # 0 and 1, without these
TemplateArgument = str | int | float | bool
Kind = Literal["relation", "wrong_shape", "missing", "unexpected_keyword_argument"]


MOST_ARGUMENTS, MOST_CHARACTERS = 16, 256  # of a chat template; characters of a text among them
_ARGUMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_TAKEN = frozenset(
    (
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "self"),
    )
)  # what transformers gives a template by itself, or reads as an option of its own


def template_arguments(given: object) -> dict[str, TemplateArgument]:
    """Return arguments of a chat template besides messages and tools, such as {"enable_thinking": False}, checked.

    Raises ValueError for what is no record of names with texts, numbers, true or false."""
    if not isinstance(given, Mapping) or len(given) > MOST_ARGUMENTS:
        raise ValueError(f"a JSON object of at most {MOST_ARGUMENTS} arguments of the chat template")
    for name, value in given.items():
        if not isinstance(name, str) or not _ARGUMENT.fullmatch(name) or name in _TAKEN:
            raise ValueError(f"{str(name)[:64]!r} is no name that a chat template's own argument has")
        if isinstance(value, str) and len(value) <= MOST_CHARACTERS and value.isprintable():
            continue
        if not isinstance(value, bool | int | float) or not math.isfinite(value) or abs(value) > MAX_INT:
            kinds = f"true, false, a number or a text of at most {MOST_CHARACTERS} printable characters"
            raise ValueError(f"the argument {name!r} must be {kinds}")
    return dict(given)


def require(fine: bool, field: str, expected: str, found: object, kind: Kind = "relation") -> None:
    """Raise what ``manifest.read_record`` turns into an error about this field of the record, unless it is fine."""
    if not fine:
        raise PydanticCustomError(kind, "{expected}", {"expected": expected, "field": field, "found": found})


class Record:
    """The base of all records: unknown fields, NaN and infinities are refused; each field says what it takes."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class Decoding(Record):
    """How answers were decoded."""

    temperature: NotNegative  # 0 is greedy
    top_p: Annotated[AboveZero, Field(le=1)]  # 1 leaves no token out

    def __str__(self) -> str:
        """Return it in words, such as ``sampled at temperature 0.7``."""
        if self.temperature == 0:
            return "greedy"
        return f"sampled at temperature {self.temperature:g}" + (f", top_p {self.top_p:g}" if self.top_p < 1 else "")

    def same(self, other: Decoding) -> bool:
        """Return whether both give answers of the same distribution: of greedy ones ``top_p`` changes nothing."""
        return self.temperature == other.temperature and (self.temperature == 0 or self.top_p == other.top_p)


GREEDY: Final = Decoding(0.0, 1.0)


@dataclass(frozen=True)
class Guarantee(Record):
    """Of the answered question groups, each by a random answered question, at most alpha is hallucinated.

    At confidence 1 - delta.  The time is the manifest's ``created``."""

    alpha: Between
    delta: Between  # of this guarantee alone, where several were tested on one set
    # The manifest's: what has a risk below it is answered; 0: nothing is.  Where the guarantee has strata, this and the
    # next three are those of the strictest, by which a prompt is judged whose stratum is not known.
    threshold: Share
    groups: Natural  # n: groups with an answered row
    hallucinated: Natural  # X: of their first answered rows in the seeded order
    p_value: Share  # P(Bin(n, alpha) <= X); 1 where nothing is answered
    answered: Share  # share of the rows
    risk_control_threshold: Share | None  # of older bundles, a second promise; none since
    rows: Natural  # that were scored, without those whose answer had no verdict
    all_groups: Natural  # of these rows
    data_digest: Filled  # of the calibration file
    labels: Labels
    judge: Text | None  # who judged generated answers
    dtype: DType  # that the calibration rows were read in
    seed: Natural  # of the order of the rows
    statement: Filled  # for whom it holds, and when it is void

    @property
    def closed(self) -> bool:
        """Whether no threshold qualified; where the guarantee has strata, in one of them at least."""
        return self.threshold == CLOSED

    @model_validator(mode="after")
    def _relations(self) -> Self:
        counts = [self.hallucinated, self.groups, self.all_groups, self.rows]
        require(counts == sorted(counts), "hallucinated", "hallucinated <= groups <= all_groups <= rows", counts)
        require(self.p_value <= self.delta or self.closed, "p_value", f"at most delta, {self.delta}", self.p_value)
        require(not self.closed or self.groups == 0, "groups", "0 at threshold 0", self.groups)
        return self


CLOSED: Final = 0.0  # a threshold that no risk is below: nothing is answered


@dataclass(frozen=True)
class GuaranteeStratum(Record):
    """The guarantee for the questions with, or without, a passage beside them, which were tested apart.

    It is about these alone, at confidence 1 - its own ``delta``."""

    passage: Annotated[bool, Strict()]  # text to answer from stands beside the question, by the form of the message
    delta: Between
    threshold: Share  # 0: none qualified, and none of these questions is answered
    groups: Natural  # as in ``Guarantee``, of the rows of this stratum
    hallucinated: Natural
    p_value: Share
    answered: Share  # share of the stratum's rows
    rows: Natural  # that were scored, without those whose answer had no verdict
    labelled: Natural  # of these: a risk below the loosest threshold that was to be tested

    @model_validator(mode="after")
    def _relations(self) -> Self:
        counts = [self.hallucinated, self.groups, self.labelled, self.rows]
        require(counts == sorted(counts), "hallucinated", "hallucinated <= groups <= labelled <= rows", counts)
        closed = self.threshold == CLOSED
        require(self.p_value <= self.delta or closed, "p_value", f"at most delta, {self.delta}", self.p_value)
        require(not closed or self.groups == 0, "groups", "0 at threshold 0", self.groups)
        return self


@dataclass(frozen=True)
class RefitInterval(Record):
    """Where refits on other training rows would put a risk.

    The half-width, sqrt(base + by_log_odds (z - centre)^2 + by_distance distance^2), is in log odds, around
    z = weight . signals + intercept."""

    level: Between  # share of the refits that lie inside
    fits: AtLeast2  # whose spread it was taken from
    centre: Real
    base: NotNegative
    by_log_odds: NotNegative
    by_distance: NotNegative

    def half_width(self, log_odds: float, distance: float) -> float:
        """Return the half-width in log odds."""
        return math.sqrt(self.base + self.by_log_odds * (log_odds - self.centre) ** 2 + self.by_distance * distance**2)


OUTSIDE: Final = 1.0  # the distance from which on a prompt lies outside


@dataclass(frozen=True)
class Uncertainty(Record):
    """How far a risk would move with other training rows, and which prompts are unlike all that training saw.

    It belongs to the tensors ``reference_mean`` and ``reference_whitening`` of probes.safetensors.  The distance of
    logits L is |whitening (L - mean)|, a Mahalanobis distance in units of its own cutoff, ``OUTSIDE``."""

    outside_share: Between  # of fresh prompts like the training rows, that are to lie outside
    outside_rows: Positive  # whose distances gave the cutoff, each by probes and a reference that were made without it
    interval: RefitInterval | None  # None where the run had no refits: no nested evaluation, or one seed
    statement: Filled  # what both mean, and what not


Method = Literal["prior_shift", "intercept", "platt", "beta", "isotonic"]
EDGE: Final = 1e-12  # risks are kept this far from 0 and 1, whose log odds are infinite


@dataclass(frozen=True)
class Recalibration(Record):
    """A strictly increasing map from the classifier's risk to the one that is served, so that rows keep their order.

    risk -> sigmoid(a log(risk) - b log(1 - risk) + c), or linear between knots where there are any.  a = b = 1: prior
    shift, intercept; a = b: Platt; else beta calibration (Kull, Silva Filho and Flach 2017, AISTATS)."""

    method: Method  # how it was found
    a: NotNegative = 1.0
    b: NotNegative = 1.0
    c: Real = 0.0
    knots: tuple[Real, ...] = ()  # isotonic: risks, increasing strictly from 0 to 1
    values: tuple[Real, ...] = ()  # isotonic: what they become, increasing strictly between 0 and 1

    def __call__(self, risk: Floats | float) -> NDArray[np.float64]:
        """Map risk [...] -> [...]; NaN stays NaN."""
        if self.knots:
            return np.asarray(np.interp(risk, self.knots, self.values), np.float64)
        inside = np.clip(np.asarray(risk, np.float64), EDGE, 1 - EDGE)
        z = self.a * np.log(inside) - self.b * np.log1p(-inside) + self.c
        tail = np.exp(-np.abs(z))
        return np.asarray(np.where(z < 0, tail, 1.0) / (1.0 + tail))

    @model_validator(mode="after")
    def _relations(self) -> Self:
        knots, values = self.knots, self.values
        require(self.a + self.b > 0.0, "a", "above 0 where b is 0", self.a)
        require(bool(knots) == (self.method == "isotonic"), "knots", "some for isotonic alone", len(knots))
        require(len(values) == len(knots), "values", f"{len(knots)} numbers", len(values))
        if knots:
            rising = all(one < other for one, other in pairwise(knots)) and (knots[0], knots[-1]) == (0.0, 1.0)
            require(rising, "knots", "strictly increasing from 0.0 to 1.0", knots)
            rising = all(one < other for one, other in pairwise((0.0, *values, 1.0)))
            require(rising, "values", "strictly increasing between 0 and 1", values)
        return self


@lru_cache(maxsize=256)  # asked for each request, of the thresholds of a few policies
def least_reaching(recalibration: Recalibration, level: float) -> float:
    """Return the least risk that becomes ``level`` or more, to a double's last digit; 1 where none does."""
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if recalibration(middle) >= level else (middle, high)
    return high


ContextName = Literal["asks", "passage", "stated"]
ContextSignal = Literal["passage", "stated", "stated_length"]
# What a classifier may read: P(passage), P(passage) P(stated), and that times ln(tokens of the prompt).
CONTEXT_SIGNALS: Final[tuple[ContextSignal, ...]] = ("passage", "stated", "stated_length")
CONTEXT_NEEDS: Final[Mapping[str, set[ContextName]]] = {
    "passage": {"passage"},
    "stated": {"passage", "stated"},
    "stated_length": {"passage", "stated"},
}


@dataclass(frozen=True)
class ContextProbe(Record):
    """A probe that tells what a prompt is: P(name) = sigmoid(weight . depth mean of its logits + intercept).

    Its tensors, one head and direction a layer, are at its place among the ``context_`` ones of probes.safetensors."""

    name: ContextName
    weight: AboveZero
    intercept: Real
    rows: Positive  # that it was fitted on
    positive: Positive  # of them, those of which it is true
    auroc: Share  # out of fold

    @model_validator(mode="after")
    def _relations(self) -> Self:
        require(self.positive < self.rows, "positive", f"1 to {self.rows - 1}", self.positive)
        return self


@dataclass(frozen=True)
class Applicability(Record):
    """Where P(asks) is below ``threshold``, the prompt asks for no fact, and the risk does not apply to it."""

    threshold: Between
    questions_below: Share  # of the training questions, out of fold: taken for prompts that ask for no fact
    others_above: Share  # of the other training prompts, out of fold: taken for questions
    statement: Filled  # what it means, and what not


@dataclass(frozen=True)
class Context(Record):
    """What a bundle tells of a prompt besides its risk.

    ``asks``     the prompt asks the model for a fact, so that its answer can be a hallucination at all
    ``passage``  text to answer from stands beside the question
    ``stated``   that text states the answer; meaningful only together with ``passage``"""

    probes: tuple[ContextProbe, ...]  # A of them, each name at most once
    applicability: Applicability | None  # exactly where there is a probe ``asks``

    def place(self, name: ContextName) -> int | None:
        """Return the place of the probe of this name among ``probes``; None where there is none."""
        return next((place for place, probe in enumerate(self.probes) if probe.name == name), None)

    @model_validator(mode="after")
    def _relations(self) -> Self:
        names = [probe.name for probe in self.probes]
        require(0 < len(names) == len(set(names)), "probes", "one or more, each name once", names)
        both = (self.applicability is None) == ("asks" not in names)
        require(both, "applicability", "null exactly where there is no probe 'asks'", self.applicability)
        return self


@dataclass(frozen=True)
class AnswerProbe(Record):
    """Probes of the answer's own tokens, whose tensors are those of answer.safetensors.

    risk = 1 - sigmoid(weight . mean over the answer's tokens of the depth mean + intercept).  A recalibration is about
    the risk before the answer and leaves this one as it is."""

    weight: Real
    intercept: Real
    threshold: Between  # from which on an answer is flagged
    rows: AtLeast2  # answers that it was fitted on
    hallucinated: Positive  # of them
    auroc: Share  # out of fold
    before: Share  # out-of-fold AUROC of the risk before the answer, on the same rows
    c: AboveZero  # inverse strength of the probes' regularisation
    statement: Filled  # what it means, and what not

    @model_validator(mode="after")
    def _relations(self) -> Self:
        require(self.hallucinated < self.rows, "hallucinated", f"1 to {self.rows - 1}", self.hallucinated)
        return self
