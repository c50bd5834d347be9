"""Declares the records inside a manifest: guarantee, uncertainty, recalibration, context and
answer.

They are frozen dataclasses.  A trainer fills them and changes them with ``dataclasses.replace``.
When a manifest is read or sealed (``manifest.read_record``), pydantic checks the fields strictly,
and then ``check`` those that must go together."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict

from probes_store.errors import BadValue
from probes_store.syntax import NAME, NAMES

Floats = NDArray[np.floating]
DType = Literal["float32", "bfloat16", "float16"]
Labels = Literal["given", "generate"]
TrainingLabels = Literal["given", "generate", "self"]
MAX_INT = 2**53  # larger integers lose digits in some JSON readers


def _with_a_point(value: object) -> object:
    """Refuse 1 for 1.0, so that reading and writing again gives the same bytes."""
    if type(value) is not float:
        raise ValueError("a number with a decimal point")
    return value


def passing(test: Callable[[Any], object], expected: str) -> AfterValidator:
    """Return a check that a value passes the test; ``expected`` describes that in messages."""

    def check(value: Any) -> Any:
        if not test(value):
            raise ValueError(expected)
        return value

    return AfterValidator(check)


def distinct(values: Collection[object]) -> bool:
    """Return whether there are values, and none twice."""
    return 0 < len(values) == len(set(values))


# JSON can spell half a surrogate pair, but UTF-8 cannot.
Text = Annotated[str, Strict(), passing(re.compile("[^\ud800-\udfff]*").fullmatch, "characters")]
Filled = Annotated[Text, Field(min_length=1)]
Name = Annotated[Text, passing(NAME.fullmatch, NAMES)]
Int = Annotated[int, Strict(), Field(ge=-MAX_INT, le=MAX_INT)]
Natural = Annotated[Int, Field(ge=0)]
Positive = Annotated[Int, Field(ge=1)]
AtLeast2 = Annotated[Int, Field(ge=2)]
Real = Annotated[float, BeforeValidator(_with_a_point)]
NotNegative = Annotated[Real, Field(ge=0)]
AboveZero = Annotated[Real, Field(gt=0)]
Share = Annotated[Real, Field(ge=0, le=1)]
Between = Annotated[Real, Field(gt=0, lt=1)]  # strictly between 0 and 1
Names = Annotated[tuple[Filled, ...], passing(distinct, "one or more, each once")]
TemplateArgument = str | int | float | bool


MOST_ARGUMENTS, MOST_CHARACTERS = 16, 256  # of a chat template; characters of a text argument
_ARGUMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
# names that transformers passes to a template itself, or reads as its own options
_TAKEN = frozenset(
    (
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "processor_kwargs",
        "self",
    )
)


def template_arguments(arguments: object) -> dict[str, TemplateArgument]:
    """Check arguments of a chat template besides messages and tools, such as {"enable_thinking":
    False}; return them.

    Raises ValueError unless they are an object of names with texts, numbers, true or false."""
    if not isinstance(arguments, Mapping) or len(arguments) > MOST_ARGUMENTS:
        most = f"at most {MOST_ARGUMENTS} arguments of the chat template"
        raise ValueError(f"a JSON object of {most}")
    for name, value in arguments.items():
        if not isinstance(name, str) or not _ARGUMENT.fullmatch(name) or name in _TAKEN:
            shown = str(name)[:64]
            raise ValueError(f"{shown!r} is no name that a chat template's own argument has")
        if isinstance(value, bool | int | float):
            fine = abs(value) <= MAX_INT  # false for NaN
        else:
            fine = isinstance(value, str) and len(value) <= MOST_CHARACTERS and value.isprintable()
        if not fine:
            raise ValueError(
                f"the argument {name!r} must be true, false, a number or a text of at most"
                f" {MOST_CHARACTERS} printable characters"
            )
    return dict(arguments)


class Record:
    """The base of all records: it refuses unknown fields, NaN and infinities."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    def check(self) -> None:
        """Raise BadValue, MissingField, UnknownField or WrongShape if fields do not go together."""

    def require(self, fine: bool, field: str, expected: str) -> None:
        """Raise BadValue about a field unless ``fine``."""
        if not fine:
            raise BadValue(field=field, expected=expected, found=ascii(attrgetter(field)(self)))


@dataclass(frozen=True)
class Decoding(Record):
    """How answers were decoded."""

    temperature: NotNegative  # 0 is greedy
    top_p: Annotated[AboveZero, Field(le=1)]  # 1 leaves no token out

    def __str__(self) -> str:
        """Return it in words, such as ``sampled at temperature 0.7``."""
        if self.temperature == 0:
            return "greedy"
        return f"sampled at temperature {self.temperature:g}" + (
            f", top_p {self.top_p:g}" if self.top_p < 1 else ""
        )

    def same(self, decoding: Decoding) -> bool:
        """Return whether both give answers of the same distribution; ``top_p`` does not change
        greedy answers."""
        return self.temperature == decoding.temperature and (
            self.temperature == 0 or self.top_p == decoding.top_p
        )


GREEDY = Decoding(0.0, 1.0)


CLOSED = 0.0  # a threshold that answers nothing, since no risk is below it


@dataclass(frozen=True)
class TestedThreshold(Record):
    """A threshold, and the test on calibration rows that it passed.

    Each group counts by a random answered question.  The confidence is 1 - delta."""

    delta: Between  # of this threshold alone, if several were tested on the same rows
    threshold: Share  # risks below it are answered; 0: none qualified, and nothing is answered
    groups: Natural  # n: groups with an answered row
    hallucinated: Natural  # X: hallucinated ones of their first answered rows in the seeded order
    p_value: Share  # P(Bin(n, alpha) <= X); 1 if nothing is answered
    answered: Share  # share of the rows
    rows: Natural  # scored rows, without those whose answer got no label

    between: ClassVar[str]  # the field with the count between ``groups`` and ``rows``

    def check(self) -> None:
        """Check counts and p-value."""
        fine = self.hallucinated <= self.groups <= getattr(self, self.between) <= self.rows
        self.require(fine, "hallucinated", f"hallucinated <= groups <= {self.between} <= rows")
        if self.threshold == CLOSED:
            self.require(self.groups == 0, "groups", "0 at threshold 0")
        else:
            fine = self.p_value <= self.delta
            self.require(fine, "p_value", f"at most delta, {self.delta}")


@dataclass(frozen=True)
class Guarantee(TestedThreshold):
    """The guarantee that at most a share alpha of the answered question groups has a hallucinated
    answer.

    The threshold is the manifest's.  If the guarantee has strata, threshold, groups, hallucinated
    and p_value are those of the strictest stratum, which also decides for prompts of an unknown
    stratum.  The time is the manifest's ``created``."""

    alpha: Between
    risk_control_threshold: Share | None  # a second promise of older bundles; None since
    all_groups: Natural  # groups of the rows
    data_digest: Filled  # digest of the calibration file
    labels: Labels
    judge: Text | None  # the judge of generated answers
    dtype: DType  # dtype of the engine that read the calibration rows
    seed: Natural  # seed of the order of the rows
    statement: Filled  # for which requests it holds, and what voids it

    between = "all_groups"

    @property
    def closed(self) -> bool:
        """Whether no threshold qualified, or with strata, whether in one of them none did."""
        return self.threshold == CLOSED


@dataclass(frozen=True)
class GuaranteeStratum(TestedThreshold):
    """The guarantee for the questions with, or without, a passage beside them, which were tested
    separately.

    It covers only these questions; ``answered`` and ``rows`` count those of this stratum."""

    # Text to answer from stands beside the question, by the form of the message.
    passage: Annotated[bool, Strict()]
    labelled: Natural  # rows with a label: their risk is below the loosest threshold of the test

    between = "labelled"


@dataclass(frozen=True)
class RefitInterval(Record):
    """The interval of a risk over refits on other training rows.

    The half-width, sqrt(base + by_log_odds (z - centre)^2 + by_distance distance^2), is in log
    odds, around z = weight . signals + intercept."""

    level: Between  # share of the refits inside
    fits: AtLeast2  # number of fits whose spread gave it
    centre: Real
    base: NotNegative
    by_log_odds: NotNegative
    by_distance: NotNegative

    def half_width(self, log_odds: float, distance: float) -> float:
        """Return the half-width in log odds."""
        return math.sqrt(
            self.base
            + self.by_log_odds * (log_odds - self.centre) ** 2
            + self.by_distance * distance**2
        )


OUTSIDE = 1.0  # the distance from which on a prompt lies outside


@dataclass(frozen=True)
class Uncertainty(Record):
    """How much a risk depends on the training rows, and which prompts are unlike all training
    prompts.

    It belongs to the tensors ``reference_mean`` and ``reference_whitening`` of probes.safetensors.
    The distance of logits L is |whitening (L - mean)|, a Mahalanobis distance in units of its own
    cutoff, ``OUTSIDE``."""

    outside_share: Between  # expected share of new prompts like the training rows that lie outside
    outside_rows: Positive  # rows whose out-of-fold distances gave the cutoff
    interval: (
        RefitInterval | None
    )  # None if the run had no refits: no nested evaluation, or one seed
    statement: Filled  # the meaning of both


Method = Literal["prior_shift", "intercept", "platt", "beta", "isotonic"]
EDGE = 1e-12  # risks are kept this far from 0 and 1, whose log odds are infinite


@dataclass(frozen=True)
class Recalibration(Record):
    """A strictly increasing map from the classifier's risk to the served risk; rows keep their
    order.

    risk -> sigmoid(a log(risk) - b log(1 - risk) + c), or linear between knots where there are
    any.  a = b = 1: prior shift, intercept; of bundles that an older release recalibrated also a =
    b: Platt; else beta calibration (Kull, Silva Filho and Flach 2017, AISTATS)."""

    method: Method  # how it was fitted
    a: NotNegative = 1.0
    b: NotNegative = 1.0
    c: Real = 0.0
    knots: tuple[Real, ...] = ()  # isotonic: risks, increasing strictly from 0 to 1
    values: tuple[Real, ...] = ()  # isotonic: the mapped risks, increasing strictly between 0 and 1

    def __call__(self, risk: Floats | float) -> NDArray[np.float64]:
        """Map risk [...] -> [...]; NaN stays NaN."""
        if self.knots:
            return np.asarray(np.interp(risk, self.knots, self.values), np.float64)
        inside = np.clip(np.asarray(risk, np.float64), EDGE, 1 - EDGE)
        z = self.a * np.log(inside) - self.b * np.log1p(-inside) + self.c
        tail = np.exp(-np.abs(z))
        return np.asarray(np.where(z < 0, tail, 1.0) / (1.0 + tail))

    def check(self) -> None:
        """Check that the map increases strictly."""
        knots = self.knots
        values = self.values
        self.require(self.a + self.b > 0.0, "a", "above 0 where b is 0")
        isotonic = self.method == "isotonic"
        self.require(bool(knots) == isotonic, "knots", "some for isotonic alone")
        self.require(len(values) == len(knots), "values", f"{len(knots)} numbers")
        if knots:
            whole = knots[0] == 0.0 and knots[-1] == 1.0 and _increase(knots)
            self.require(whole, "knots", "strictly increasing from 0.0 to 1.0")
            inside = _increase((0.0, *values, 1.0))
            self.require(inside, "values", "strictly increasing between 0 and 1")


def _increase(numbers: Sequence[float]) -> bool:
    return all(left < right for left, right in pairwise(numbers))


@lru_cache(maxsize=256)  # called for each request, with the thresholds of a few policies
def least_reaching(recalibration: Recalibration, level: float) -> float:
    """Return the least risk that maps to ``level`` or more, to a double's last digit; 1 if none
    does."""
    low = 0.0
    high = 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if recalibration(middle) >= level else (middle, high)
    return high


ContextName = Literal["asks", "passage", "stated"]
ContextSignal = Literal["passage", "stated", "stated_length"]
# The context signals of a classifier: P(passage), P(passage) P(stated), and the latter times
# ln(tokens of the prompt).
CONTEXT_SIGNALS: Final[tuple[ContextSignal, ...]] = ("passage", "stated", "stated_length")
CONTEXT_NEEDS: Final[Mapping[str, set[ContextName]]] = {
    "passage": {"passage"},
    "stated": {"passage", "stated"},
    "stated_length": {"passage", "stated"},
}


@dataclass(frozen=True)
class ContextProbe(Record):
    """A probe for a property of the prompt: P(name) = sigmoid(weight . depth mean of its logits +
    intercept).

    Its tensors have its position in the ``context_`` tensors of probes.safetensors."""

    name: ContextName
    weight: AboveZero
    intercept: Real
    rows: Positive  # rows that it was fitted on
    positive: Positive  # rows with the property
    auroc: Share  # out of fold

    def check(self) -> None:
        """Check that there are rows with the property and without it."""
        self.require(self.positive < self.rows, "positive", f"1 to {self.rows - 1}")


@dataclass(frozen=True)
class Applicability(Record):
    """The rule that a prompt with P(asks) below ``threshold`` asks for no fact, so the risk does
    not apply to it."""

    threshold: Between
    questions_below: Share  # share of the training questions below the threshold, out of fold
    others_above: Share  # share of the other training prompts above it, out of fold
    statement: Filled  # the meaning of it


@dataclass(frozen=True)
class Context(Record):
    """The context probes of a bundle.

    ``asks``     the prompt asks the model for a fact, so its answer can be a hallucination
    ``passage``  text to answer from stands beside the question
    ``stated``   that text states the answer; meaningful only together with ``passage``"""

    probes: tuple[ContextProbe, ...]  # A of them, each name at most once
    applicability: Applicability | None  # set exactly if there is a probe ``asks``

    def position(self, name: ContextName) -> int | None:
        """Return the position of the probe of this name in ``probes``; None if there is none."""
        return next(
            (position for position, probe in enumerate(self.probes) if probe.name == name), None
        )

    def check(self) -> None:
        """Check the names, and that the rule is there if its probe is."""
        names = [probe.name for probe in self.probes]
        self.require(distinct(names), "probes", "one or more, each name once")
        both = (self.applicability is None) == ("asks" not in names)
        self.require(both, "applicability", "null exactly where there is no probe 'asks'")


@dataclass(frozen=True)
class AnswerProbe(Record):
    """The probes of the answer's own tokens, with the tensors of answer.safetensors.

    risk = 1 - sigmoid(weight . mean over the answer's tokens of the depth mean + intercept).  A
    recalibration changes the risk before the answer, but not this one."""

    weight: Real
    intercept: Real
    threshold: Between  # risk from which on an answer is flagged
    rows: AtLeast2  # answers that it was fitted on
    hallucinated: Positive  # hallucinated ones of these
    auroc: Share  # out of fold
    before: Share  # out-of-fold AUROC of the risk before the answer, on the same rows
    c: AboveZero  # inverse strength of the probes' regularisation
    statement: Filled  # the meaning of it

    def check(self) -> None:
        """Check that there are answers of both classes."""
        self.require(self.hallucinated < self.rows, "hallucinated", f"1 to {self.rows - 1}")
